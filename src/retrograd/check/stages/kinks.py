"""kinks: at points without a derivative the gradient lies between the one-sided ones, and how often tests meet them.

The points are found by halving segments towards the larger change of the reference's gradient, or of what it decides; a
few elements at a time are put there, to the rounding of the dtype.
"""

from __future__ import annotations

import math

import torch

from retrograd.check import extreme_values, kinks, tolerance
from retrograd.check.op_runner import Workbench
from retrograd.check.schema import Case, Finding
from retrograd.check.stages._base import Outcome, Stage

_ID = "kinks"
_SHORT = 1 / 32  # of the size of values: segments that hold one kink at most, to count how dense they are
_MANY = 1_000_000


def check(bench: Workbench, case: Case) -> Outcome:
    """One run with elements at kinks; of those the gradient must lie in the hull, all others must be right."""
    out = Outcome(power=None, power_text="")
    plain = case.but(values=())
    held = [name for name, _ in case.values] or bench.differentiable(bench.inputs(plain))
    if not bench.truth(plain).switches:
        return out
    for name in held:
        _at_kinks_of(bench, case.but(values=((name, extreme_values.KINK),)), plain, name, out)
    return out


def _at_kinks_of(bench: Workbench, case: Case, plain: Case, name: str, out: Outcome) -> None:
    moved = bench.inputs(case)[name] != bench.inputs(plain)[name]
    if not bool(moved.any()):
        return
    hull = bench.hull(case)
    mask = moved & hull.at.get(f"grad {name}", torch.zeros_like(moved))
    bends = bool(mask.any())
    if not bends:  # its own gradient is the same on either side, and something may jump
        mask = moved
    if not bends and not kinks.flips(bench, case):
        return
    trial, truth, before = bench.run(case), bench.truth(case), bench.truth(plain)
    for key, got in trial.tensors.items():
        want = truth.want.get(key)
        if got is None or want is None:
            continue
        off, tol = (got.detach().double() - want).abs(), truth.tol[key]
        if key in hull.at:  # there the truth's own spread holds both sides of the kink, so allows too much
            beside = tolerance.BESIDE * tolerance.UNIT[case.dtype]
            beside = beside * torch.maximum(hull.low[key].abs(), hull.high[key].abs())
            tol = torch.where(hull.at[key], before.tol[key] + beside, tol)
            off = torch.where(hull.at[key], hull.outside(key, got), off)
        ratio = (off / tol).nan_to_num(math.inf)
        if bool((ratio > 1).any()):
            out.findings.append(_finding(bench, case, key, got, want, hull, ratio))
    out.power_text = f"any value outside of the one-sided derivatives, at {int(mask.sum())} places"
    if bench.level != "quick" and not out.findings:
        out.notes.append(_odds(bench, case, plain, name, mask) if bends else _decisions(bench, case, name, mask))


def _decisions(bench: Workbench, case: Case, name: str, mask: torch.Tensor) -> str:
    """Which decisions of the reference hang on rounding, where its gradient is the same on either side of them."""
    flipped = ", ".join(f"{operator} {count}" for operator, count in kinks.flips(bench, case).items())
    return (
        f"{_places(bench, case, name, mask)}; there {flipped} of the reference's decisions fall otherwise under random "
        "rounding: a test at a fixed tolerance fails by chance where its inputs come so near"
    )


def _places(bench: Workbench, case: Case, name: str, mask: torch.Tensor) -> str:
    index = tuple(int(i) for i in mask.nonzero()[0])
    where = f"{name}{list(index)} = {float(bench.inputs(case)[name][index]):.6g}"
    return f"kinks in {int(mask.sum())} places of `{name}` tried, such as {where}"


def _finding(
    bench: Workbench,
    case: Case,
    key: str,
    got: torch.Tensor,
    want: torch.Tensor,
    hull: kinks.Hull,
    ratio: torch.Tensor,
) -> Finding:
    """The finding for a tensor that is out, by its worst element."""
    index = tuple(int(i) for i in torch.unravel_index(ratio.argmax(), ratio.shape)) if ratio.ndim else ()
    what = f"{key}{list(index)} is {float(got[index]):.6g} with `{case.values[0][0]}` at kinks of the forward: "
    if key in hull.at and bool(hull.at[key][index]):
        low, high = float(hull.low[key][index]), float(hull.high[key][index])
        sides = "the one-sided derivatives" if key.startswith("grad ") else "the values of both sides"
        what += f"right is what lies between {low:.6g} and {high:.6g}, {sides}"
    else:
        what += f"expected {float(want[index]):.6g}"
    more = dict(got=float(got[index]), want=float(want[index]), excess=float(ratio.max()))
    wrong = int((ratio > 1).sum())
    return bench.finding(
        _ID, "beyond-kink", what, case, tensor=key, index=index, wrong=wrong, total=ratio.numel(), **more
    )


def _odds(bench: Workbench, case: Case, plain: Case, name: str, mask: torch.Tensor) -> str:
    """How often a test at a fixed tolerance, its inputs drawn as here, meets a kink where op and float64 disagree."""
    said = _places(bench, case, name, mask)
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
    return [bench.base.but(values=((name, extreme_values.KINK),)) for name in names]


STAGE = Stage(
    _ID, "between the one-sided derivatives at kinks", 72, cases, check,
    needs_reference=True, after=("oracle", "contract"),
)  # fmt: skip
