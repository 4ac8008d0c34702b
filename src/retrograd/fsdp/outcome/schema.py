"""Record of what comparing ranks or runs came to, and its JSON. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from retrograd.core.notebook import Shown
from retrograd.core.schema import Record
from retrograd.fsdp.log_diff import Difference

OUTCOME_SCHEMA = "retrograd.fsdp/1"


@dataclass(frozen=True)
class RankDifference:
    """Where two ranks or runs part: the place, a sentence, both collectives if logs have them, stacks by who."""

    place: str
    text: str
    difference: Difference | None = None
    stacks: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])


@dataclass(frozen=True)
class RankSteps:
    """Steps of a rank: how many, `patterns` as pairs of steps and collectives of each, the hash over all."""

    rank: int
    steps: int
    patterns: tuple[tuple[int, int], ...]
    hash: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankComparison(Record, Shown):
    """What ranks or runs did together.

    `target` is the command or the files; `summary` a sentence. `verdict` is "same"; "differs", with partings, or
    `problems` that ranks had while they ran; "failed": the program did, or nothing was recorded; or "undecided": the
    files have nothing in common. `code` is the exit code of the program.
    """

    _noun: ClassVar[str] = "comparison of ranks"

    target: str
    verdict: Literal["same", "differs", "failed", "undecided"]
    summary: str = ""
    partings: tuple[RankDifference, ...] = ()
    problems: tuple[str, ...] = ()
    ranks: tuple[RankSteps, ...] = ()
    notes: tuple[str, ...] = ()
    code: int = 0
    schema: str = OUTCOME_SCHEMA

    @property
    def exit_code(self) -> int:
        """0 same, 1 differs, 2 failed, 3 undecided."""
        return ("same", "differs", "failed", "undecided").index(self.verdict)
