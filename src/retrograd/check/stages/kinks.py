"""kinks: at points without a derivative the gradient lies between the one-sided ones, and how often tests meet them.

The points are found by halving segments towards the larger change of the reference's gradient, or of what it decides; a
few elements at a time are put there, to the rounding of the dtype.
"""

from __future__ import annotations

import math
from functools import cache, partial

import torch

from retrograd.check import extreme_values, kink_search, kinks, tolerance
from retrograd.check.op_runner import OpRunner
from retrograd.check.oracle import Truth
from retrograd.check.own_mistakes import may_refuse
from retrograd.check.reference import NotApplicable
from retrograd.check.rounding import Float64
from retrograd.check.schema import Case, Finding
from retrograd.check.stages._base import CaseOutcome, Stage, StageContext
from retrograd.check.tensor_comparison import TensorComparison, first_index

_SHORT = 1 / 32  # of the size of values: segments that hold one kink at most, to count how dense they are
_MANY = 1_000_000
# Elements of all inputs, beyond which level quick does not look: halving alone is 50 runs of the reference.
_LARGE = 2**21


def check(context: StageContext, case: Case) -> CaseOutcome:
    """One run with elements at kinks; of those the gradient must lie in the interval, all others must be right."""
    out = CaseOutcome(power=None, power_text="")
    plain = case.but(values=())
    names = [name for name, _ in case.values] or _names(context, plain)
    if not context.oracle.truth(plain).switches:
        return out
    inputs = context.runner.inputs(plain)
    elements = sum(inputs[name].numel() for name in context.runner.differentiable(plain))
    if context.level == "quick" and elements > _LARGE:
        out.notes.append(f"no kinks are looked for among {elements} elements: take smaller inputs, or level full")
        return out
    for name in names:
        try:
            _at_kinks_of(context, case.but(values=((name, extreme_values.KINK),)), plain, name, out)
        except NotApplicable as error:
            out.notes.append(f"kinks in `{name}` are not judged at {plain.text() or 'the given inputs'}: {error}")
    return out


def _at_kinks_of(context: StageContext, case: Case, plain: Case, name: str, out: CaseOutcome) -> None:
    moved = context.runner.inputs(case)[name] != context.runner.inputs(plain)[name]
    if not bool(moved.any()):
        return
    interval = context.oracle.interval(case)
    mask = moved & interval.at.get(f"grad {name}", torch.zeros_like(moved))
    bends = bool(mask.any())
    if not bends:  # its own gradient is the same on either side, and something may jump
        mask = moved
    if not bends and not kinks.flips(context.runner.reference(case)):
        return
    run, truth, before = context.runner.run(case), context.oracle.truth(case), context.oracle.truth(plain)
    widest = cache(partial(_widest, context, case, name, moved))  # up to 640 runs, for all tensors that are out
    for key, got in run.tensors.items():
        want = truth.want.get(key)
        if got is None or want is None:
            continue
        tol = _allowed(case, key, truth, before, interval)
        ratio = _ratio(key, got, want, tol, interval)
        if bool((ratio > 1).any()):
            sure = (context.oracle.truth(c, tolerance.CONFIRM_RUNS) for c in (case, plain))
            ratio = _ratio(key, got, want, _allowed(case, key, *sure, widest()), widest())
        if bool((ratio > 1).any()):
            worst = TensorComparison(ratio, got, want, float(ratio.max()))
            if not context.judge.another_algorithm(case, key, worst.worst):
                out.findings.append(_finding(case, key, worst, widest()))
        elif key.startswith("grad "):
            sure = torch.where(interval.at[key], tol, before.floor[key]) if key in interval.at else before.floor[key]
            out.findings += context.judge.sums(case, key, got, want, sure)
    out.power_text = f"any value outside of the one-sided derivatives, at {int(mask.sum())} places"
    if context.level != "quick" and not out.findings:
        out.notes.append(
            _odds(context.runner, case, plain, name, mask) if bends else _decisions(context.runner, case, name, mask)
        )


def _widest(context: StageContext, case: Case, name: str, moved: torch.Tensor) -> kinks.KinkInterval:
    """The interval in which kinks that meet may each be on another side."""
    interval = context.oracle.interval(case)
    with may_refuse():  # points beside the case
        interval = context.oracle.interval(case, apart=True)
        return kinks.with_corners(context.runner.reference(case), name, moved, interval)
    return interval


def _allowed(case: Case, key: str, truth: Truth, before: Truth, interval: kinks.KinkInterval) -> torch.Tensor:
    """The attainable error; at kinks that of the case before, where the truth's own spread holds both sides."""
    if key not in interval.at:
        return truth.tol[key]
    beside = tolerance.BESIDE * tolerance.UNIT[case.dtype]
    beside = beside * torch.maximum(interval.low[key].abs(), interval.high[key].abs())
    return torch.where(interval.at[key], before.tol[key] + beside + interval.drift[key], truth.tol[key])


def _ratio(
    key: str, got: torch.Tensor, want: torch.Tensor, tol: torch.Tensor, interval: kinks.KinkInterval
) -> torch.Tensor:
    """How far each element is off, or outside of its interval, in attainable errors."""
    value = got.detach().double()
    off = (value - want).abs()
    if key in interval.at:
        off = torch.where(interval.at[key], interval.outside(key, got), off)
    off = torch.where((value == want) | (value.isnan() & want.isnan()), 0.0, off)  # at a pole, inf - inf
    return torch.where(off == 0, 0.0, (off / tol).nan_to_num(math.inf))


def _decisions(runner: OpRunner, case: Case, name: str, mask: torch.Tensor) -> str:
    """Which decisions of the reference hang on rounding, where its gradient is the same on either side of them."""
    flipped = ", ".join(f"{operator} {count}" for operator, count in kinks.flips(runner.reference(case)).items())
    return (
        f"{_places(runner, case, name, mask)}; there {flipped} of the reference's decisions fall otherwise under "
        "random rounding: a test at a fixed tolerance fails by chance where its inputs come so near"
    )


def _places(runner: OpRunner, case: Case, name: str, mask: torch.Tensor) -> str:
    index = first_index(mask)
    where = f"{name}{list(index)} = {float(runner.inputs(case)[name][index]):.6g}"
    return f"kinks in {int(mask.sum())} places of `{name}` tried, such as {where}"


def _finding(case: Case, key: str, worst: TensorComparison, interval: kinks.KinkInterval) -> Finding:
    """The finding for a tensor that is out, by its worst element."""
    index = worst.index
    message = f"{key}{list(index)} is {worst.got:.6g} with `{case.values[0][0]}` at kinks of the forward: "
    if key in interval.at and bool(interval.at[key][index]):
        low, high = float(interval.low[key][index]), float(interval.high[key][index])
        sides = "the one-sided derivatives" if key.startswith("grad ") else "the values of both sides"
        message += f"right is what lies between {low:.6g} and {high:.6g}, {sides}"
        return worst.finding("beyond-kink", message, case, key, between=(low, high))
    return worst.finding("beyond-kink", f"{message}expected {worst.want:.6g}", case, key)


def _odds(runner: OpRunner, case: Case, plain: Case, name: str, mask: torch.Tensor) -> str:
    """How often a test at a fixed tolerance, its inputs drawn as here, meets a kink where op and float64 disagree."""
    places = _places(runner, case, name, mask)
    met = kink_search.search(runner.reference(plain), name, _SHORT)
    if met is None:
        return places
    density = float(met.mask.double().mean()) / _SHORT
    wide = None
    with may_refuse():  # beside the kink the op or its reference is not defined
        wide = _width(runner, case, name, mask)
    if wide is None:
        return places
    if not density or not wide:
        return f"{places}; the op is on the same side as float64 all around, so no test flakes at them"
    here, many = (100 * -math.expm1(-n * density * wide) for n in (mask.numel(), _MANY))
    return (
        f"{places}; within {wide:.1e} of the size of values rounding decides the side, so a test at a fixed tolerance "
        f"fails by chance in {here:.2g} % of its runs with this shape ({mask.numel()} elements), "
        f"in {many:.2g} % with a million elements"
    )


def _width(runner: OpRunner, case: Case, name: str, mask: torch.Tensor) -> float:
    """Mean width around the kinks of a case within which the op is on another side than float64, of the size of values.

    0 where the switch is on the input itself, as in relu: then everybody sees the same side.
    """
    value, reference = runner.inputs(case)[name], runner.reference(case)
    step = tolerance.UNIT[case.dtype] * value.double().abs().amax().clamp_min(1e-30)
    total = 0.0
    for units in (-8.0, -4.0, -2.0, -1.0, -0.5, 0.5, 1.0, 2.0, 4.0, 8.0):
        inputs = runner.inputs(case)
        inputs[name] = torch.where(mask, (value.double() + units * step).to(value.dtype), value)
        shift = {name: inputs[name].double() - value.double()}
        want = reference.run(torch.float64, Float64(), shift=shift)[f"grad {name}"]
        got = runner.forward(case, inputs=inputs).backward().grads[f"grad {name}"]
        if got is None or want is None:
            return 0.0
        off = (got.double() - want.detach()).abs() > tolerance.JUMP * want.detach().abs().max()
        total += float(off[mask].double().mean()) * max(abs(units) / 2, 0.5) * float(step)  # the stretch it stands for
    return total / float(kinks.around(value).mean())


def _names(context: StageContext, case: Case) -> list[str]:
    """Names of the inputs whose elements can be put to a kink: real ones."""
    inputs = context.runner.inputs(case)
    return [name for name in context.runner.differentiable(case) if not inputs[name].is_complex()]


def cases(context: StageContext) -> list[Case]:
    """Each differentiable input in turn, in the first dtype: kinks are of the formula."""
    if context.runner.dtype != context.spec.dtypes[0]:
        return []
    names = _names(context, context.base)
    return [context.base.but(values=((name, extreme_values.KINK),)) for name in names]


STAGE = Stage(
    "kinks", "between the one-sided derivatives at kinks", 72, check, cases,
    needs_reference=True, after=("oracle", "contract"), hears=True,
)  # fmt: skip
