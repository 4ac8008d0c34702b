"""Points where a function has no derivative: finding them, and the interval that every right gradient lies in there.

At a kink any value between the one-sided derivatives is right (Clarke's generalised gradient), and which one an
implementation returns may hang on the rounding of one coordinate. The interval is sampled: results of the float64
reference at points a few roundings away, in antithetic random directions, so that both sides of every kink are seen.

Where a gradient does not show the place (floor, round, the places of a sort: it is the same on either side, and the
result jumps), or no point beside the case may be asked for, decisions do: what comparisons, roundings to whole numbers
and selections inside the reference decide, and whether they decide otherwise nearby or under random rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from retrograd.check import tolerance
from retrograd.check.rounding import Float64
from retrograd.check.schema import Case
from retrograd.check.seeds import derive
from retrograd.check.spec import TensorSpec

if TYPE_CHECKING:
    from retrograd.check.op_runner import Workbench
    from retrograd.check.oracle import Results

Decisions = list[tuple[str, torch.Tensor]]  # operators and what they decided

_DIRECTIONS = 8  # antithetic pairs; a tie of k is missed by all with chance (1 - 1/k)^16
_WIDER = 64  # a smooth change grows with the distance, a jump does not
_HALVINGS, _LOOK = 44, 12  # from the size of a value down to float64's own digits; when to look whether it is worth it
_MOST = 8  # elements put at kinks at once: more of them in one sum would need more directions


def around(value: torch.Tensor) -> torch.Tensor:
    """The size of the values around each element, float64: of its row where there are rows."""
    value = value.double()
    whole = value.square().mean().sqrt()
    rows = value.square().mean(-1, keepdim=True).sqrt() if value.ndim > 1 else whole
    size = torch.maximum(rows, 1e-3 * whole).expand_as(value)
    return torch.where(size > 0, size, 1.0)


def reach(bench: Workbench, name: str, value: torch.Tensor) -> torch.Tensor:
    """How far from a kink rounding may still decide the side: some units of the largest number around.

    Of the whole tensor where values have a range or come from a callable: coordinates are shifted and scaled together.
    """
    rule = (bench.spec.tensor_specs or {}).get(name)
    free = isinstance(rule, TensorSpec) and rule.high is None and value.ndim > 1
    size = value.double().abs()
    largest = size.amax(-1, keepdim=True).expand_as(size) if free else size.amax().expand_as(size)
    return tolerance.KINK * tolerance.UNIT[bench.dtype] * torch.where(largest > 0, largest, 1.0)


@dataclass(frozen=True)
class Hull:
    """Lowest and highest result near a case, by label; `at` says which elements are at a kink, or a jump."""

    low: dict[str, torch.Tensor]
    high: dict[str, torch.Tensor]
    at: dict[str, torch.Tensor]

    def outside(self, label: str, got: torch.Tensor) -> torch.Tensor:
        """How far each element is outside of its interval; 0 inside."""
        value = got.detach().double()
        return torch.maximum(self.low[label] - value, value - self.high[label]).clamp_min(0.0)


Sides = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]


def _widen(results: Results, low: dict[str, torch.Tensor], high: dict[str, torch.Tensor]) -> None:
    for label, t in results.items():
        if t is not None:
            t = t.detach()
            low[label] = torch.minimum(low.get(label, t), t)
            high[label] = torch.maximum(high.get(label, t), t)


def _beside(bench: Workbench, case: Case, times: float) -> Sides:
    """Lowest and highest results at points around the case."""
    low: dict[str, torch.Tensor] = {}
    high: dict[str, torch.Tensor] = {}
    inputs = bench.inputs(case)
    names = bench.differentiable(inputs)
    for pair in range(_DIRECTIONS):
        generator = torch.Generator().manual_seed(derive(bench.seed, "hull", pair))
        shift = {}
        for name in names:
            value = inputs[name]
            signs = torch.rand(value.shape, generator=generator, dtype=torch.float64).to(value.device) - 0.5
            step = torch.maximum(reach(bench, name, value), 2 * _declared(bench, case, inputs, name)) * times
            shift[name] = (signs + 0.5 * signs.sign()) * step
        for sign in (1.0, -1.0):
            moved = {k: sign * v for k, v in shift.items()}
            _widen(bench.reference_run(case, torch.float64, Float64(), shift=moved), low, high)
    return low, high


def _rounded(bench: Workbench, case: Case, times: float) -> Sides:
    """Lowest and highest results where no point beside the case may be asked for: of randomly rounded runs at it."""
    low: dict[str, torch.Tensor] = {}
    high: dict[str, torch.Tensor] = {}
    for k in range(2 * _DIRECTIONS):
        _widen(bench.reference_run(case, torch.float64, _rounding(bench, k, times)), low, high)
    return low, high


def _rounding(bench: Workbench, number: int, times: float = 1.0, *, inputs: bool = False) -> Float64:
    unit, accumulate = (times * tolerance.KINK * u for u in tolerance.units(bench.dtype, bench.spec.compute))
    seed = derive(bench.seed, "flips", number)
    return Float64(unit, accumulate, seed, bench.device, inputs=inputs, record=True)


def _forward_only(*_: object) -> Results:
    return {}


def _decisions(bench: Workbench, case: Case, mode: Float64, shift: dict[str, torch.Tensor] | None = None) -> Decisions:
    bench.reference_run(case, torch.float64, mode, _forward_only, shift=shift)
    return mode.decisions


def flips(bench: Workbench, case: Case) -> dict[str, int]:
    """How many decisions of each operator in the reference fall otherwise in one of 16 randomly rounded runs.

    Inputs are rounded too, unless the reference refuses what comes of it.
    """
    try:
        return _flips(bench, case, inputs=True)
    except Exception:
        return _flips(bench, case, inputs=False)


def _flips(bench: Workbench, case: Case, *, inputs: bool) -> dict[str, int]:
    plain = _decisions(bench, case, Float64(record=True))
    flipped = [torch.zeros_like(made, dtype=torch.bool) for _, made in plain]
    for k in range(2 * _DIRECTIONS):
        now = _decisions(bench, case, _rounding(bench, k, inputs=inputs))
        if [(name, made.shape) for name, made in now] != [(name, made.shape) for name, made in plain]:
            continue  # another path altogether: nothing to compare one by one
        for mask, (_, made), (_, before) in zip(flipped, now, plain, strict=True):
            mask |= (made != before) & ~(made.isnan() & before.isnan())
    counts: dict[str, int] = {}
    for (name, _), mask in zip(plain, flipped, strict=True):
        counts[name] = counts.get(name, 0) + int(mask.sum())
    return {name: count for name, count in counts.items() if count}


def _declared(bench: Workbench, case: Case, inputs: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The distance to the kink that the op declares, where it is within reach; else 0."""
    value = inputs[name]
    if bench.spec.kinks is None:
        return torch.zeros_like(value, dtype=torch.float64)
    with torch.no_grad():
        distance = bench.spec.kinks(*inputs.values(), **dict(case.params)).get(name)
    if distance is None:
        return torch.zeros_like(value, dtype=torch.float64)
    distance = distance.double().abs()
    return torch.where(distance <= 2 * reach(bench, name, value), distance, 0.0)


def hull(bench: Workbench, case: Case) -> Hull:
    """The interval of right results at a case, from 32 runs of the reference; kept by the workbench.

    Where the reference refuses the points beside the case they are randomly rounded runs at it, if those decide
    anything otherwise.
    """
    try:
        (low, high), (far_low, far_high) = _beside(bench, case, 1.0), _beside(bench, case, _WIDER)
    except Exception:
        if not flips(bench, case):
            return Hull({}, {}, {})
        (low, high), (far_low, far_high) = _rounded(bench, case, 1.0), _rounded(bench, case, _WIDER)
    at = {}
    for label, lowest in low.items():
        width, wider = high[label] - lowest, far_high[label] - far_low[label]
        size = torch.maximum(high[label].abs(), lowest.abs())
        at[label] = (width > wider / 8) & (width > tolerance.JUMP * size)
        if lowest.ndim and lowest.numel():
            # A tie of many: too few directions to let each of them win, so the row has one interval.
            crowded = at[label].sum(-1, keepdim=True) > _DIRECTIONS
            low[label] = torch.where(crowded, lowest.amin(-1, keepdim=True), lowest)
            high[label] = torch.where(crowded, high[label].amax(-1, keepdim=True), high[label])
            at[label] = at[label] | crowded
    return Hull(low, high, at)


@dataclass(frozen=True)
class Found:
    """Kinks met along one segment per element: where, at which elements, and how far apart the sides' derivatives are.

    `apart` is their difference as a share of their sizes: 1 where they have opposite signs or one is 0.
    """

    place: torch.Tensor
    mask: torch.Tensor
    apart: torch.Tensor


def search(bench: Workbench, case: Case, name: str, length: float, share: float = 1.0) -> Found | None:
    """Halve a segment around each element of an input, always towards the larger change of its own gradient.

    If that finds nothing, towards the larger change of what the reference decides about the element. All elements at
    once: what is found for one while others move is checked again by `place`. `length` is relative to the size of the
    values around; only a `share` of the elements moves, so that each crosses others that stand still. None if the
    reference refuses the points.
    """
    found = _search(bench, case, name, length, share, _slopes)
    return found if found is None or bool(found.mask.any()) else _search(bench, case, name, length, share, _decided)


# What a search follows: called with a bench, a case, an input's name and a shift of it, gives a number an element.
Trail = Callable[["Workbench", Case, str, torch.Tensor], torch.Tensor]


def _slopes(bench: Workbench, case: Case, name: str, shift: torch.Tensor) -> torch.Tensor:
    grad = bench.reference_run(case, torch.float64, Float64(), shift={name: shift})[f"grad {name}"]
    return torch.zeros_like(shift) if grad is None else grad.detach()


def _decided(bench: Workbench, case: Case, name: str, shift: torch.Tensor) -> torch.Tensor:
    """Decisions about each element: those that come in the input's shape."""
    total = torch.zeros_like(shift)
    for k, (_, made) in enumerate(_decisions(bench, case, Float64(record=True), {name: shift})):
        if made.shape == shift.shape:
            total = total + made.double().nan_to_num(0.0) / (k + 1)  # so that two that change places do not cancel
    return total


def _search(bench: Workbench, case: Case, name: str, length: float, share: float, trail: Trail) -> Found | None:
    value = bench.inputs(case)[name].double()
    generator = torch.Generator().manual_seed(derive(bench.seed, "movers", name))
    movers = torch.rand(value.shape, generator=generator).to(value.device) < share
    size = around(value) * length * movers
    low, high = value - size / 2, value + size / 2
    rule = (bench.spec.tensor_specs or {}).get(name)
    if isinstance(rule, TensorSpec) and rule.low is not None and isinstance(rule.high, (int, float)):
        low, high = low.clamp(rule.low, rule.high), high.clamp(rule.low, rule.high)

    def slope(at: torch.Tensor) -> torch.Tensor:
        return trail(bench, case, name, at - value)

    try:
        before, after = slope(low), slope(high)
        if bool((before == after).all()):
            return _nowhere(value)
        # A decision has fallen otherwise or has not; of a gradient, what counts is a change of a share of it.
        least = tolerance.JUMP * torch.maximum(before.abs().max(), after.abs().max()) if trail is _slopes else 0.0
        for count in range(_HALVINGS):
            middle = (low + high) / 2
            now = slope(middle)
            left = (now - before).abs() > (after - now).abs()
            low, high = torch.where(left, low, middle), torch.where(left, middle, high)
            before, after = torch.where(left, before, now), torch.where(left, now, after)
            # By now a smooth gradient changes by 2^-12 of what it did, a jump by as much as ever.
            if count == _LOOK and not bool(((after - before).abs() > least).any()):
                return _nowhere(middle)
    except Exception:  # the reference refuses values beyond those that it was described with
        return None
    before, after = slope(low), slope(high)
    change, sizes = (after - before).abs(), before.abs() + after.abs()
    return Found((low + high) / 2, change > least, change / sizes.clamp_min(torch.finfo(sizes.dtype).tiny))


def _nowhere(value: torch.Tensor) -> Found:
    return Found(value, torch.zeros_like(value, dtype=torch.bool), torch.ones_like(value))


def place(bench: Workbench, case: Case, name: str) -> torch.Tensor:
    """The input with up to eight elements moved to kinks that were found, rounded to its dtype; unchanged if none."""
    value = bench.inputs(case)[name]
    share = 1.0 if value.numel() < 2 * _MOST else 0.25
    found = search(bench, case, name, 2.0, share)
    if found is None or not bool(found.mask.any()):
        return value
    places = found.mask.flatten().nonzero().flatten()
    generator = torch.Generator().manual_seed(derive(bench.seed, "kink", name))
    shuffled = places[torch.randperm(len(places), generator=generator).to(places.device)]
    # Between far derivatives almost any value is right, and far ones are what halving finds: so half of the places are
    # those with the nearest.
    near = shuffled[found.apart.flatten()[shuffled].argsort(stable=True)]
    order = dict.fromkeys([*shuffled[: _MOST // 2].tolist(), *near.tolist()])
    chosen = torch.tensor(list(order)[:_MOST], device=places.device)
    place = found.place.flatten()[chosen]
    # Halving ends beside zero, where float64 has numbers without end; zero itself is what a test should meet.
    place = torch.where(place.abs() < tolerance.UNIT[bench.dtype] * around(value).flatten()[chosen], 0.0, place)
    out = value.clone().flatten()
    out[chosen] = place.to(value.dtype)
    return out.view_as(value)


def width(bench: Workbench, case: Case, name: str, mask: torch.Tensor) -> float:
    """Mean width around the kinks of a case within which the op is on another side than float64, of the size of values.

    0 where the switch is on the input itself, as in relu: then everybody sees the same side.
    """
    value = bench.inputs(case)[name]
    step = tolerance.UNIT[bench.dtype] * value.double().abs().amax().clamp_min(1e-30)
    total = 0.0
    for units in (-8.0, -4.0, -2.0, -1.0, -0.5, 0.5, 1.0, 2.0, 4.0, 8.0):
        inputs = bench.inputs(case)
        inputs[name] = torch.where(mask, (value.double() + units * step).to(value.dtype), value)
        shift = {name: inputs[name].double() - value.double()}
        want = bench.reference_run(case, torch.float64, Float64(), shift=shift)[f"grad {name}"]
        got = bench.open(case, inputs=inputs).backward().grads[f"grad {name}"]
        if got is None or want is None:
            return 0.0
        off = (got.double() - want.detach()).abs() > tolerance.JUMP * want.detach().abs().max()
        total += float(off[mask].double().mean()) * max(abs(units) / 2, 0.5) * float(step)  # the stretch it stands for
    return total / float(around(value).mean())
