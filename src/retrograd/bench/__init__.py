"""Speed of ops, beside torch and other libraries.

An op is a file in `ops`, which says of what `benchmark` has it; `registry` is the table of ops and who offers them.
`selection`, `rows`, `ratios`, `table`, `plot` and `compare` need no torch, so results are shown anywhere; `runner`
checks (`accuracy`) and times (`timing`, `cpu`).
"""

from __future__ import annotations

import os

from retrograd.bench.registry import register as register
from retrograd.bench.rows import BenchResults as BenchResults
from retrograd.bench.rows import load as _load

__all__ = ["BenchResults", "register", "results"]


def results(*files: str | os.PathLike[str]) -> BenchResults:
    """The results in JSON lines that `retrograd bench --out` wrote, to be looked at: `results("norm.jsonl").show()`.

    Raises:
        UsageError: a file cannot be read or holds no results.
    """
    return BenchResults(tuple(_load(files)))
