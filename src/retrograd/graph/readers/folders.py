"""Folders of dumps: which files are graphs, and under which name each has its counterpart in another run's folder."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from retrograd.errors import GraphError

# What xla_dump_to writes of a module: before and after optimisation and, with xla_dump_hlo_pass_re, after each pass.
_XLA = re.compile(
    r"(?P<number>module_[0-9]+)\.(?P<module>.+?)\.(?:[a-z]+_)?"
    r"(?P<stage>before_optimizations|after_optimizations|[0-9]{4}\..+)\.(?:txt|hlo\.pb)"
)
_JAX = re.compile(r"(?P<number>jax_ir[0-9]+)_(?P<module>.+)_(?P<stage>compile)\.mlir")  # jax_dump_ir_to
_TORCH = re.compile(r"dedicated_log_torch_trace_(?:(?P<module>rank_[0-9]+)_)?(?P<number>\w{8})(?P<stage>)\.log")
_OTHER = re.compile(r"(?P<module>.+)\.(?:hlo|hlo\.txt|fx\.txt|mlir|mlirbc|hlo\.pb|jaxpr)(?P<number>)(?P<stage>)")


def files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Each file with a graph and its name: the module, which of that name it is, the stage.

    Numbers of modules differ from run to run, their order does not. Of the same module as text and in binary the text
    is read.

    Raises:
        GraphError: there is none.
    """
    by_name: dict[tuple[str, str, str], Path] = {}
    for path in sorted(folder.iterdir(), reverse=True):  # .txt before .hlo.pb
        own = path.name.removesuffix(".gz")
        match = next((m for form in (_XLA, _JAX, _TORCH, _OTHER) if (m := form.fullmatch(own))), None)
        if match and path.is_file():
            by_name.setdefault((match["number"], match["module"] or "", match["stage"]), path)
    if not by_name:
        writers = "xla_dump_to, jax_dump_ir_to, TORCH_TRACE or `watch --save`"
        raise GraphError(f"{folder} is a directory without graphs; expected one that {writers} wrote")
    seen: Counter[tuple[str, str]] = Counter()
    for (_, module, stage), path in sorted(by_name.items()):
        seen[module, stage] += 1
        count = seen[module, stage]
        yield " ".join(filter(None, [module, f"({count})" if count > 1 else "", stage])), path
