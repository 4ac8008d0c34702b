"""Cases of one shape at once: truths of an op where the same inputs hold other numbers, by one run of its reference.

A stage that tries twenty extreme values calls each operator of the reference twenty times for a few numbers, and what
that takes is the calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from retrograd.check import tolerance
from retrograd.check.own_mistakes import may_refuse
from retrograd.check.reference import ExactRun, Reference, Results
from retrograd.check.rounded_runs import cases_at_once
from retrograd.check.rounding import Float64
from retrograd.check.schema import Case
from retrograd.check.seeds import derive


@dataclass
class CasesAtOnce:
    """Cases that differ in what their floats hold, whose references run at once.

    Attributes:
        references: of the cases, with what is known of all.
        exact: what they give in float64, by case.
        runs: how many rounded runs of each are made.
    """

    references: list[Reference]
    exact: dict[Case, ExactRun]
    runs: int

    @classmethod
    def of(cls, references: Sequence[Reference], runs: int) -> CasesAtOnce | None:
        """None where they cannot run at once, or a number on the way of any may overflow: of which is not known."""
        case, spec = references[0].case, references[0].spec
        results, mode = list[Results](), Float64(track=True)
        with may_refuse():  # each says for itself what is wrong with it
            plain, exact = references[0].exact()
            references = [replace(r, matrices=plain.matrices, elements=plain.elements) for r in references]
            results = cases_at_once(references, exact, mode)
        if not results or not mode.peak <= tolerance.largest_safe(case.dtype, spec.compute):
            return None
        plain.peak = mode.peak
        each = [{name: None if t is None else t[0].detach() for name, t in run.items()} for run in results]
        return cls(references, {r.case: (plain, run) for r, run in zip(references, each, strict=True)}, runs)

    @cached_property
    def _rounded(self) -> dict[Case, Results]:
        first = self.references[0]
        unit, accumulate = tolerance.units(first.case.dtype, first.spec.compute)
        mode = first.rounding(unit, accumulate, derive(first.seed, "noise", 0), runs=len(self.references) * self.runs)
        results = list[Results]()
        with may_refuse():
            results = cases_at_once(self.references, self.exact[first.case][1], mode, self.runs)
        return {r.case: runs for r, runs in zip(self.references, results, strict=bool(results))}

    def first_runs(self, case: Case, runs: int) -> Results | None:
        """The first rounded runs of a case, if so many are asked for."""
        return self._rounded.get(case) if runs == self.runs else None
