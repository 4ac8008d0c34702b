"""Refusals that are no finding: by design of the op, or by its reference as well."""

from __future__ import annotations

from retrograd.check import inputs as make
from retrograd.check.own_mistakes import may_refuse
from retrograd.check.reference import OpRaised
from retrograd.check.schema import Case
from retrograd.check.spec import OpSpec
from retrograd.check.stages import StageContext


def refused_by_design(spec: OpSpec, case: Case, error: OpRaised) -> bool:
    """Whether the op says that it refuses the layout of an input of this case, and by such an exception."""
    laid = [layout for name, layout in case.layouts if name != "grad_out" and layout != "contiguous"]
    if spec.layouts is None or not laid:
        return False
    cause, refused = error.__cause__, spec.layouts
    return isinstance(refused, str) or any(isinstance(cause, refused[n]) for n in laid if n in refused)


def refused_alike(context: StageContext, case: Case) -> bool:
    """Whether the reference in the op's own precision refuses the case: a matrix is singular, and not in float64."""
    with may_refuse():
        context.runner.reference(case).run(make.torch_dtype(case.dtype))
        return False
    return True
