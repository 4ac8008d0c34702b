"""Speed of ops, beside torch and other libraries.

An op is a file in `ops`, which says of what `benchmark` has it; `registry` is the table of ops and who offers them.
`selection`, `rows`, `ratios`, `table`, `plot` and `compare` need no torch, so results are shown anywhere; `runner`
checks (`accuracy`) and times (`timing`, `cpu`).
"""

from retrograd.bench.registry import register as register

__all__ = ["register"]
