"""Kinks: points where a function has no derivative, found, with the interval that every right gradient lies in there.

At a kink any value between the one-sided derivatives is right (Clarke's generalised gradient), and which one an
implementation returns may hang on the rounding of one coordinate. The interval is sampled: results of the float64
reference at points a few roundings away, in antithetic random directions, so that both sides of every kink are seen.

Where a gradient does not show the place (floor, round, the places of a sort: it is the same on either side, and the
result jumps), or no point beside the case may be asked for, decisions do: what comparisons, roundings to whole numbers
and selections inside the reference decide, and whether they decide otherwise nearby or under random rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from retrograd.check import tolerance
from retrograd.check.inputs import differentiable
from retrograd.check.operators import EXTREMA, JUMPING, about
from retrograd.check.outputs import as_real, like
from retrograd.check.own_mistakes import may_refuse
from retrograd.check.reference import Reference, Results
from retrograd.check.rounded_runs import alone, moved_runs, rounded_at_once
from retrograd.check.rounding import Float64
from retrograd.check.seeds import derive
from retrograd.errors import SpecError

Decisions = list[tuple[str, torch.Tensor]]  # operators and what they decided

_DIRECTIONS = 8  # antithetic pairs; a tie of k is missed by all with chance (1 - 1/k)^16
_MANY = 128  # randomly rounded runs before an alarm


def around(value: torch.Tensor) -> torch.Tensor:
    """The size of the values around each element, float64: of its row where there are rows."""
    value = as_real(value).double()
    overall = value.square().mean().sqrt()
    rows = value.square().mean(-1, keepdim=True).sqrt() if value.ndim > 1 else overall
    size = torch.maximum(rows, 1e-3 * overall).expand_as(value)  # a row of zeros has a thousandth of the tensor's
    return torch.where(size > 0, size, 1.0)


def reach(reference: Reference, name: str, value: torch.Tensor) -> torch.Tensor:
    """How far from a kink rounding may still decide the side: some units of the largest number around.

    Of the whole tensor where values have a range or come from a callable: coordinates are shifted and scaled together.
    """
    rule = reference.spec.tensors.get(name)
    unbounded_rows = rule is not None and rule.high is None and value.ndim > 1
    size = as_real(value).double().abs()
    largest = size.amax(-1, keepdim=True).expand_as(size) if unbounded_rows else size.amax().expand_as(size)
    return tolerance.KINK * tolerance.UNIT[reference.case.dtype] * torch.where(largest > 0, largest, 1.0)


@dataclass(frozen=True)
class KinkInterval:
    """Lowest and highest result near a case, by label.

    Attributes:
        low, high: of results at points around the case.
        at: which elements are at a kink, or a jump.
        drift: how much either side changes by itself over a few times the distance to those points.
    """

    low: dict[str, torch.Tensor]
    high: dict[str, torch.Tensor]
    at: dict[str, torch.Tensor]
    drift: dict[str, torch.Tensor]

    def outside(self, label: str, got: torch.Tensor) -> torch.Tensor:
        """How far each element is outside of its interval; 0 inside."""
        value = got.detach().double()
        return torch.maximum(self.low[label] - value, value - self.high[label]).clamp_min(0.0)


Bounds = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]


def summed(label: str, dim: int) -> str:
    """The name of a gradient's sums over a dimension."""
    return f"{label} summed over dim {dim}"


def sums(results: Results, runs: int = 0) -> dict[str, torch.Tensor]:
    """The sums of each gradient over each of its dimensions; `runs` is 1 where the first is that of several runs.

    Where elements jump and their sum does not, all sides of a kink agree on it, and so does whatever lies between them:
    what equal maxima share is one gradient, however it is shared.
    """
    grads = ((k, t.detach()) for k, t in results.items() if t is not None and k.startswith("grad "))
    return {summed(label, dim): t.sum(dim + runs) for label, t in grads for dim in range(t.ndim - runs)}


def _widen(bounds: Bounds, runs: Results) -> None:
    low, high = bounds
    every: Results = {**runs, **sums(runs, 1)}
    for label, t in every.items():
        if t is not None:
            least, most = torch.aminmax(t.detach(), dim=0)
            low[label] = torch.minimum(low.get(label, least), least)
            high[label] = torch.maximum(high.get(label, most), most)


def _around_case(reference: Reference, times: float) -> Bounds:
    """Lowest and highest results at points around the case."""
    bounds: Bounds = ({}, {})
    inputs = reference.inputs()
    names = differentiable(reference.spec, inputs)
    shifts = list[dict[str, torch.Tensor]]()
    for pair in range(_DIRECTIONS):
        generator = torch.Generator().manual_seed(derive(reference.seed, "hull", pair))
        shift = {}
        for name in names:
            value = as_real(inputs[name])
            signs = torch.rand(value.shape, generator=generator, dtype=torch.float64).to(value.device) - 0.5
            step = torch.maximum(reach(reference, name, value), 2 * _declared(reference, inputs, name)) * times
            shift[name] = (signs + 0.5 * signs.sign()) * step
            if inputs[name].is_complex():
                shift[name] = torch.view_as_complex(shift[name].contiguous())
        shifts += [{name: sign * move for name, move in shift.items()} for sign in (1.0, -1.0)]
    for runs in moved_runs(reference, shifts):
        _widen(bounds, runs)
    return bounds


def _rounded_at_case(
    reference: Reference, times: float, bounds: Bounds | None = None, runs: int = 2 * _DIRECTIONS
) -> Bounds:
    """Lowest and highest results where no point beside the case may be asked for: of randomly rounded runs at it.

    With `bounds` those are widened, and inputs are rounded too, so that what a tie gives is not among them.
    """
    inputs = bounds is not None
    bounds = bounds or ({}, {})
    units = tolerance.units(reference.case.dtype, reference.spec.compute)
    unit, accumulate = (times * tolerance.KINK * u for u in units)
    seed = derive(reference.seed, "flips", 0)
    if inputs and (batches := rounded_at_once(reference, unit, accumulate, seed, runs)):
        for batch in batches:
            _widen(bounds, batch)
        return bounds
    for k in range(runs):
        _widen(bounds, alone(reference.run(torch.float64, _rounding(reference, k, times, inputs=inputs))))
    return bounds


def _rounding(reference: Reference, number: int, times: float = 1.0, *, inputs: bool = False) -> Float64:
    units = tolerance.units(reference.case.dtype, reference.spec.compute)
    unit, accumulate = (times * tolerance.KINK * u for u in units)
    seed = derive(reference.seed, "flips", number)
    return Float64(unit, accumulate, seed, reference.device, inputs=inputs, record=True)


class _OtherExtrema(Float64):
    """A run in which the largest and the least numbers that the formula takes are others, by a quarter to a half."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        chosen = about(func).name in EXTREMA and out.dtype == torch.float64
        return out + (3 + self.noise(out)) / 8 if chosen else out


def cancel(switches: Set[str], reference: Reference) -> bool:
    """Whether all that a formula decides is a largest number that cancels, as a softmax takes off to keep exp in range.

    Nothing else in it decides anything, so it is smooth in that number too: what is the same with another one here is
    the same with any. In its backward autograd looks for the place of the number.
    """
    if not switches or not switches <= EXTREMA | {"eq"}:
        return False
    known, params = reference.batching.cancelling, reference.case.params
    if params not in known:
        known[params], mode = False, Float64()
        with may_refuse():
            here, there = (reference.outputs(m).inexact for m in (mode, _OtherExtrema()))
            alike = all(_same(as_real(t), as_real(there[name])) for name, t in here.items())
            known[params] = alike and mode.switches <= EXTREMA
    return known[params]


def _same(t: torch.Tensor, other: torch.Tensor) -> bool:
    finite = t.isfinite()
    largest = torch.where(finite, t.abs(), 0.0).amax() if t.numel() else 0.0
    apart = torch.where(finite, t - other, 0.0).abs()
    return bool((finite == other.isfinite()).all()) and bool((apart <= 2.0**-40 * largest).all())


def _forward_only(*_: object) -> Results:
    return {}


def decisions(reference: Reference, mode: Float64, shift: dict[str, torch.Tensor] | None = None) -> Decisions:
    """What the operators of the reference decide in a run of its forward in `mode`, which records."""
    reference.run(torch.float64, mode, _forward_only, shift=shift)
    return mode.decisions


def flips(reference: Reference) -> dict[str, int]:
    """How many decisions of each operator in the reference fall otherwise in one of 16 randomly rounded runs.

    Inputs are rounded too, unless the reference refuses what comes of it.
    """
    with may_refuse():
        return _flips(reference, inputs=True)
    return _flips(reference, inputs=False)


def _flips(reference: Reference, *, inputs: bool) -> dict[str, int]:
    plain = decisions(reference, Float64(record=True))
    flipped = [torch.zeros_like(decided, dtype=torch.bool) for _, decided in plain]
    for k in range(2 * _DIRECTIONS):
        rounded = decisions(reference, _rounding(reference, k, inputs=inputs))
        if [(name, decided.shape) for name, decided in rounded] != [(name, decided.shape) for name, decided in plain]:
            continue  # another path altogether: nothing to compare one by one
        for mask, (_, after), (_, before) in zip(flipped, rounded, plain, strict=True):
            mask |= (after != before) & ~(after.isnan() & before.isnan())
    counts: dict[str, int] = {}
    for (name, _), mask in zip(plain, flipped, strict=True):
        counts[name] = counts.get(name, 0) + int(mask.sum())
    return {name: count for name, count in counts.items() if count}


def jumps_between(reference: Reference, name: str, shift: torch.Tensor) -> bool:
    """Whether the reference rounds something to another whole number, or sign, at an input moved by -shift or +shift.

    A difference quotient across such a jump is no derivative. False if the reference refuses those points.
    """
    with may_refuse():
        here, *beside = (
            [decided for operator, decided in decisions(reference, Float64(record=True), moved) if operator in JUMPING]
            for moved in (None, {name: shift}, {name: -shift})
        )
        return any(len(there) != len(here) or any(map(_differ, here, there)) for there in beside)
    return False


def _differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape != b.shape or not torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0))


def _declared(reference: Reference, inputs: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The distance to the kink that the op declares, where it is within reach; else 0."""
    value, spec = inputs[name], reference.spec
    distance = None
    if spec.kinks is not None:
        try:
            with torch.no_grad():
                distance = spec.kinks(*inputs.values(), **dict(reference.case.params)).get(name)
        except Exception as error:
            raise SpecError(f"`kinks` of {spec.name} raised {type(error).__name__}: {error}") from error
    if distance is None:
        return torch.zeros_like(value, dtype=torch.float64)
    distance = distance.double().abs()
    return torch.where(distance <= 2 * reach(reference, name, value), distance, 0.0)


def _bounds(reference: Reference, *, apart: bool) -> tuple[Bounds, Bounds] | None:
    """Bounds near a case and KINK_WIDER times as far, None if the reference decides nothing otherwise there."""
    scales = (1.0, tolerance.KINK_WIDER)
    beside: list[Bounds] = []
    with may_refuse():
        beside = [_around_case(reference, times) for times in scales]
    if not beside and not flips(reference):
        return None
    near, far = beside or (_rounded_at_case(reference, times) for times in scales)
    if apart and beside:
        for bounds, times in zip((near, far), scales, strict=True):
            _rounded_at_case(reference, times, bounds)
    return near, far


def _parts(reference: Reference) -> list[Reference]:
    """The reference with the positive elements of grad_out alone, and with the negative ones."""

    def grad_outs(sign: float) -> list[torch.Tensor]:
        return [like((sign * as_real(g)).clamp_min(0) * sign, g) for g in reference.grad_outs()]

    return [replace(reference, grad_outs=partial(grad_outs, sign)) for sign in (1.0, -1.0)]


def _sum_of_parts(reference: Reference) -> tuple[Bounds, Bounds] | None:
    """Bounds of gradients that add up what outputs send back, each of which may be on a side of its own.

    A gradient is linear in grad_out: those of its positive and of its negative elements have bounds of their own, in
    which one element that moves may win, or lose, everywhere at once.
    """
    plus, minus = (_bounds(part, apart=True) for part in _parts(reference))
    whole = _bounds(reference, apart=True)
    if whole is not None and plus is not None and minus is not None:
        for bounds in zip(whole, plus, minus, strict=True):
            _add_parts(*bounds)
    return whole


def _add_parts(whole: Bounds, plus: Bounds, minus: Bounds) -> None:
    """Widen bounds by the sums of those for the two parts of grad_out."""
    for wider, bound, a, b in zip((torch.minimum, torch.maximum), whole, plus, minus, strict=True):
        for label in bound.keys() & a.keys() & b.keys():
            if label.startswith("grad "):
                bound[label] = wider(bound[label], a[label] + b[label])


def interval(reference: Reference, terms: dict[str, torch.Tensor], *, apart: bool = False) -> KinkInterval:
    """The interval of right results at a case, from 32 runs of the reference.

    Where the reference refuses the points beside the case they are randomly rounded runs at it, if those decide
    anything otherwise.

    Args:
        reference: at the case.
        terms: the sizes of what adds up to each gradient: what float64 leaves of them is no jump.
        apart: whether kinks that meet in an element may each be on another side, as rounding decides; 192 runs.
    """
    bounds = _sum_of_parts(reference) if apart else _bounds(reference, apart=False)
    if bounds is None:
        return KinkInterval({}, {}, {}, {})
    (low, high), (far_low, far_high) = bounds
    at, drift = {}, {}
    for label, lowest in low.items():
        # At a pole there is no interval: results beside it are as far apart as one likes.
        near, far = (
            torch.maximum(a.abs(), b.abs()) for a, b in ((lowest, high[label]), (far_low[label], far_high[label]))
        )
        bounded = near.isfinite() & (near <= tolerance.POLE * far)
        at[label] = bounded & tolerance.jumps(lowest, high[label], far_high[label] - far_low[label])
        if label in terms:
            at[label] &= high[label] - lowest > tolerance.ZERO * terms[label]
        moved = torch.maximum((lowest - far_low[label]).abs(), (far_high[label] - high[label]).abs())
        moved = moved.nan_to_num(0.0, 0.0, 0.0)
        drift[label] = tolerance.drifts(moved)
        if lowest.ndim and lowest.numel():
            # A tie of many: too few directions to let each of them win, so the row has one interval.
            crowded = at[label].sum(-1, keepdim=True) > _DIRECTIONS
            low[label] = torch.where(crowded, lowest.amin(-1, keepdim=True), lowest)
            high[label] = torch.where(crowded, high[label].amax(-1, keepdim=True), high[label])
            at[label] = at[label] | crowded
    return KinkInterval(low, high, at, drift)


def with_corners(reference: Reference, name: str, moved: torch.Tensor, interval: KinkInterval) -> KinkInterval:
    """The interval where each of the few `moved` elements of an input may be on either side of its kink.

    A gradient that several kinks decide has corners that a few sampled directions miss: these are all 2^k around k
    elements, and more randomly rounded runs for ties that no input decides, as of (x - k) + k with x. At most 640 runs,
    for those who mean to object.
    """
    bounds: Bounds = (dict(interval.low), dict(interval.high))
    step = 2 * reach(reference, name, reference.inputs()[name])
    places = moved.nonzero(as_tuple=True)
    generator = torch.Generator().manual_seed(derive(reference.seed, "corners", name))
    shifts = list[dict[str, torch.Tensor]]()
    for signs in itertools.product((1.0, -1.0), repeat=len(places[0])):
        # Of sizes of their own: two that move alike would still be equal, where it is each other that they tie with.
        sizes = 1 - torch.rand(len(signs), generator=generator, dtype=step.dtype) / 2
        shift = torch.zeros_like(step)
        shift[places] = step[places] * (torch.tensor(signs, dtype=step.dtype) * sizes).to(step.device)
        shifts.append({name: shift})
    for runs in moved_runs(reference, shifts):
        _widen(bounds, runs)
    parts = [_rounded_at_case(part, 1.0, ({}, {}), _MANY) for part in _parts(reference)]
    _add_parts(_rounded_at_case(reference, 1.0, bounds, _MANY), *parts)
    return replace(interval, low=bounds[0], high=bounds[1])
