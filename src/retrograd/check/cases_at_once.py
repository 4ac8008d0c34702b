"""Cases of one shape at once: float64 results of a reference where its inputs hold other numbers, by one run of it.

A stage that tries twenty extreme values calls each operator of the reference twenty times for a few numbers, and what
that takes is the calls. Randomly rounded runs are each case's own: the errors of some operators (transforms, cumulative
sums) are of the size of all that they give, and another case may be a million times larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from retrograd.check import tolerance
from retrograd.check.own_mistakes import may_refuse
from retrograd.check.reference import ExactRun, Reference
from retrograd.check.rounded_runs import cases_at_once
from retrograd.check.rounding import Float64
from retrograd.check.schema import Case


def exact_runs(references: Sequence[Reference]) -> dict[Case, ExactRun]:
    """What references give in float64, by case, which differ in what their floats hold.

    {} where they cannot run at once, or a number on the way of any may overflow: of which of them is not known.
    """
    case, spec = references[0].case, references[0].spec
    mode = Float64(track=True)
    with may_refuse():  # each says for itself what is wrong with it
        plain, exact = references[0].exact()
        references = [replace(r, matrices=plain.matrices, elements=plain.elements) for r in references]
        results = cases_at_once(references, exact, mode)
        if mode.peak <= tolerance.largest_safe(case.dtype, spec.compute):
            plain.peak = mode.peak
            return {r.case: (plain, run) for r, run in zip(references, results, strict=True)}
    return {}
