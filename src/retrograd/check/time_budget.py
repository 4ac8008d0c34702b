"""Time budget of a verification: what runs first under it, and the account of what it left out."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from retrograd.check.schema import BUDGET_ENDED, Case, StageResult
from retrograd.check.stages import CaseOutcome
from retrograd.core.wording import count
from retrograd.errors import UsageError


@dataclass
class StageProgress:
    """How far a stage is in a dtype: its cases, how many of them were run, and what came of these: faults by case."""

    cases: list[Case] = field(default_factory=list)
    position: int = 0
    outcome: CaseOutcome = field(default_factory=lambda: CaseOutcome(power=0.0, power_text=""))
    tried: dict[Case, frozenset[tuple[str, ...]]] = field(default_factory=dict)
    powers: list[float] = field(default_factory=list)
    blocked: str = ""  # why the other cases mean nothing

    def end(self, blocked: str = "") -> None:
        """Leave the other cases out, for another reason than time."""
        self.cases, self.blocked = self.cases[: self.position], blocked


@dataclass(frozen=True)
class Portion:
    """What runs before anything else does: of each stage, in these dtypes, the first case or all."""

    dtypes: tuple[str, ...]
    first: bool = False


class TimeBudget:
    """What is run of every stage in every dtype until the time is up; a case that has begun is finished.

    Args:
        seconds: from now; None is for ever, and then every stage runs as a whole.

    Raises:
        UsageError: the time is not positive.
    """

    def __init__(self, seconds: float | None) -> None:
        if seconds is not None and seconds <= 0:
            raise UsageError(f"`budget` is {seconds:g} s, expected a time above 0")
        self.seconds = seconds
        self._end = math.inf if seconds is None else time.monotonic() + seconds

    def over(self) -> bool:
        """Whether no case may begin any more."""
        return time.monotonic() >= self._end

    def portions(self, dtypes: tuple[str, ...]) -> Iterator[Portion]:
        """The first case of each stage, which is the ordinary one, in one dtype, in the others, and then the rest."""
        if self.seconds is not None:
            yield from (Portion(dtypes[:1], first=True), Portion(dtypes[1:], first=True))
        yield Portion(dtypes)

    def account(self, result: StageResult, progress: Mapping[str, StageProgress | None]) -> StageResult:
        """The result with what the budget left out of it; undecided where a dtype has run no case.

        Args:
            result: of the cases that were run.
            progress: by dtype; None where nothing was begun.
        """
        if self.seconds is None:
            return result
        lost = [d for d, p in progress.items() if p is None or (p.cases and not p.position)]
        if lost:
            where = "" if len(lost) == len(progress) else f"{', '.join(lost)}: "
            reason = "; ".join(filter(None, [result.reason, f"{where}{BUDGET_ENDED}"]))
            result = replace(result, status="failed" if result.findings else "undecided", reason=reason)
        begun = [p for p in progress.values() if p is not None]
        every = sum(len(p.cases) for p in begun)
        cut = every - sum(p.position for p in begun)
        note = f"the budget left out {cut} of {count(every, 'case')}"
        return replace(result, left_out=cut, notes=(*result.notes, *[note] * bool(cut)))
