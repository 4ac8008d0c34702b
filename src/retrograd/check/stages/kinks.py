"""kinks: at points without a derivative the gradient lies between the one-sided ones, and how often tests meet them.

The points are found by halving segments towards the larger change of the reference's gradient; a few elements at a time
are put there, to the rounding of the dtype.
"""

from __future__ import annotations

import math

import torch

from retrograd.check import kinks, tolerance
from retrograd.check.stages._base import Outcome, Stage
from retrograd.check.workbench import Workbench
from retrograd.record import Case

_ID = "kinks"
_SHORT = 1 / 32  # of the size of values: segments that hold one kink at most, to count how dense they are
_MANY = 1_000_000


def check(bench: Workbench, case: Case) -> Outcome:
    """One run with elements at kinks; of those the gradient must lie in the hull, all others must be right."""
    out = Outcome(power=None, power_text="")
    (name, _), *_ = case.values
    plain = case.but(values=())
    if not bench.truth(plain).switches:
        return out
    moved = bench.inputs(case)[name] != bench.inputs(plain)[name]
    if not bool(moved.any()):
        return out
    hull = bench.hull(case)
    label = f"grad {name}"
    mask = moved & hull.at.get(label, torch.zeros_like(moved))
    if not bool(mask.any()):
        return out
    trial, truth, before = bench.run(case), bench.truth(case), bench.truth(plain)
    for key, got in trial.tensors.items():
        want = truth.want.get(key)
        if got is None or want is None:
            continue
        tol = truth.tol[key]
        if key in hull.at:
            near = 64 * tolerance.UNIT[case.dtype] * torch.maximum(hull.low[key].abs(), hull.high[key].abs())
            tol = torch.where(hull.at[key], before.tol[key] + near, tol)
            off = torch.where(hull.at[key], hull.outside(key, got), (got.detach().double() - want).abs())
        else:
            off = (got.detach().double() - want).abs()
        ratio = (off / tol).nan_to_num(math.inf)
        if not bool((ratio > 1).any()):
            continue
        index = tuple(int(i) for i in torch.unravel_index(ratio.argmax(), ratio.shape)) if ratio.ndim else ()
        what = f"{key}{list(index)} is {float(got[index]):.6g} where `{name}` is at a kink of the forward"
        if key in hull.at and bool(hull.at[key][index]):
            what += f": right is what lies between {float(hull.low[key][index]):.6g} and "
            what += f"{float(hull.high[key][index]):.6g}, the one-sided derivatives"
        else:
            what += f" elsewhere, expected {float(want[index]):.6g}"
        out.findings.append(
            bench.finding(_ID, "beyond-kink", what, case, tensor=key, index=index, got=float(got[index]),
                          want=float(want[index]), excess=float(ratio.max()), wrong=int((ratio > 1).sum()),
                          total=ratio.numel())
        )  # fmt: skip
    out.power_text = f"any value outside of the one-sided derivatives, at {int(mask.sum())} places"
    if bench.level != "quick" and not out.findings:
        out.notes.append(_odds(bench, case, plain, name, mask))
    return out


def _odds(bench: Workbench, case: Case, plain: Case, name: str, mask: torch.Tensor) -> str:
    """How often a test at a fixed tolerance, its inputs drawn as here, meets a kink where op and float64 disagree."""
    index = tuple(int(i) for i in mask.nonzero()[0])
    where = f"{name}{list(index)} = {float(bench.inputs(case)[name][index]):.6g}"
    said = f"kinks in {int(mask.sum())} places of `{name}` tried, such as {where}"
    found = kinks.search(bench, plain, name, _SHORT)
    if found is None:
        return said
    density = float(found.mask.double().mean()) / _SHORT
    wide = kinks.width(bench, case, name, mask)
    if not density or not wide:
        return f"{said}; the op is on the same side as float64 all around, so no test flakes at them"
    here, many = (100 * -math.expm1(-n * density * wide) for n in (mask.numel(), _MANY))
    return (
        f"{said}; within {wide:.1e} of the size of values rounding decides the side, so a test at a fixed tolerance "
        f"fails by chance in {here:.2g} % of its runs with this shape ({mask.numel()} elements), "
        f"in {many:.2g} % with a million elements"
    )


def cases(bench: Workbench) -> list[Case]:
    """Each differentiable input in turn, in the first dtype: kinks are of the formula."""
    if bench.dtype != bench.spec.dtypes[0]:
        return []
    names = bench.differentiable(bench.inputs(bench.base))
    return [bench.base.but(values=((name, "kink"),)) for name in names]


STAGE = Stage(
    _ID, "between the one-sided derivatives at kinks", 72, cases, check,
    needs_reference=True, after=("oracle", "contract"),
)  # fmt: skip
