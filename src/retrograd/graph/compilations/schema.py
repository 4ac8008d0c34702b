"""Record of the compilations that logs of TORCH_TRACE tell of, and of where their ranks part. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from retrograd.core.notebook import Shown
from retrograd.core.schema import Record
from retrograd.graph.schema import Cause

SCHEMA = "retrograd.graph.compilations/1"


@dataclass(frozen=True)
class Compilation:
    """One compilation of one rank.

    `id` is torch's compile id ("0/1": frame 0, its second compilation), `where` the line that was compiled. `reason` is
    the guard that failed, `breaks` where the graph ended too early and why, `failure` the exception that ended it.
    `graphs` are its stages with their sizes, `caches` what torch's caches answered ("fx_graph hit"). `recordings`
    counts recordings of CUDA graphs: one for each graph that runs is usual, more are new recordings. `seconds` is what
    compiling took, None if unknown.
    """

    rank: int
    id: str
    where: str = ""
    function: str = ""
    reason: str = ""
    breaks: tuple[str, ...] = ()
    failure: str = ""
    guards: int = 0
    graphs: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()
    recordings: int = 0
    seconds: float | None = None


@dataclass(frozen=True)
class Compilations(Record, Shown):
    """The compilations of a run, true if its ranks compiled the same; `causes` say where they part, the first first."""

    _noun: ClassVar[str] = "list of compilations"

    logs: tuple[str, ...]
    ranks: tuple[int, ...]
    rows: tuple[Compilation, ...]
    causes: tuple[Cause, ...] = ()
    notes: tuple[str, ...] = ()
    schema: str = SCHEMA

    def __bool__(self) -> bool:
        return not self.causes

    @property
    def exit_code(self) -> int:
        """0, or 1 where ranks part."""
        return 1 if self.causes else 0
