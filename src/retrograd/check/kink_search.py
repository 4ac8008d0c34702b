"""Kinks met by halving: along a segment around each element of an input, and elements moved to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from retrograd.check import tolerance
from retrograd.check.kinks import around, decisions
from retrograd.check.own_mistakes import may_refuse
from retrograd.check.reference import Reference, gradient_of
from retrograd.check.rounded_runs import moved_runs, runs_at_once
from retrograd.check.rounding import Float64
from retrograd.check.seeds import derive

_AT_ONCE = 3  # halvings in one step where runs can be made at once: seven points take less than two runs in turn
_HALVINGS = 8  # from the size of a value, beyond the digits of its dtype: to those places are rounded
_FIRST_LOOK = 8  # halvings from which on it shows whether there is a jump at all
_MOST = 8  # elements put at kinks at once: more of them in one sum would need more directions


@dataclass(frozen=True)
class KinkSearch:
    """Kinks met along one segment per element: where, at which elements, and how far apart the sides' derivatives are.

    `apart` is their difference as a share of their sizes: 1 where they have opposite signs or one is 0.
    """

    place: torch.Tensor
    mask: torch.Tensor
    apart: torch.Tensor


def search(reference: Reference, name: str, length: float, share: float = 1.0) -> KinkSearch | None:
    """Halve a segment around each element of an input, always towards the larger change of its own gradient.

    If that finds nothing, towards the larger change of what the reference decides about the element. All elements at
    once: what is found for one while others move is checked again by `place`. `length` is relative to the size of the
    values around; only a `share` of the elements moves, so that each crosses others that stand still. None if the
    reference refuses the points.
    """
    result = _search(reference, name, length, share, _slopes)
    return result if result is None or bool(result.mask.any()) else _search(reference, name, length, share, _decided)


# What a search follows: called with the reference, an input's name and shifts of it along a first dimension, gives a
# number an element for each.
Trail = Callable[[Reference, str, torch.Tensor], torch.Tensor]


def _slopes(reference: Reference, name: str, shifts: torch.Tensor) -> torch.Tensor:
    runs = moved_runs(reference, [{name: shift} for shift in shifts], gradient_of(name))
    grads = [grad for results in runs if (grad := results[f"grad {name}"]) is not None]
    return torch.cat(grads).detach() if grads else torch.zeros_like(shifts)


def _decided(reference: Reference, name: str, shifts: torch.Tensor) -> torch.Tensor:
    return torch.stack([_decided_at(reference, name, shift) for shift in shifts])


def _decided_at(reference: Reference, name: str, shift: torch.Tensor) -> torch.Tensor:
    """Decisions about each element: those that come in the input's shape."""
    total = torch.zeros_like(shift)
    for k, (_, decided) in enumerate(decisions(reference, Float64(record=True), {name: shift})):
        if decided.shape == shift.shape:
            # Weighted by their order, so that two decisions that change places do not cancel.
            total = total + decided.double().nan_to_num(0.0) / (k + 1)
    return total


def _search(reference: Reference, name: str, length: float, share: float, trail: Trail) -> KinkSearch | None:
    value = reference.inputs()[name].double()
    generator = torch.Generator().manual_seed(derive(reference.seed, "movers", name))
    movers = torch.rand(value.shape, generator=generator).to(value.device) < share
    size = around(value) * length * movers
    low, high = value - size / 2, value + size / 2
    rule = reference.spec.tensors.get(name)
    if rule and rule.range:
        low, high = low.clamp(*rule.range), high.clamp(*rule.range)

    with may_refuse():  # values beyond those that it was described with
        ends = trail(reference, name, torch.stack((low, high)) - value)
        # Known since these runs at the latest: which kinks are met must not depend on the stages before.
        at_once = _AT_ONCE if trail is _slopes and runs_at_once(reference) else 1
        shares = torch.linspace(0, 1, 2**at_once + 1, dtype=low.dtype, device=low.device)
        shares = shares.view(-1, *[1] * low.ndim)
        if bool((ends[0] == ends[1]).all()):
            return _no_kinks(value)
        # A decision has fallen otherwise or has not; of a gradient, what counts is a change of a share of it.
        least = tolerance.JUMP * ends.abs().max() if trail is _slopes else torch.zeros(())
        for count in range(0, _HALVINGS - round(math.log2(tolerance.UNIT[reference.case.dtype])), at_once):
            points = low + (high - low) * shares
            between = trail(reference, name, points[1:-1] - value)
            values = torch.cat((ends[:1], between, ends[1:]))
            part = values.diff(dim=0).abs().argmax(0, keepdim=True)
            low, high = (points.gather(0, part + side)[0] for side in (0, 1))
            ends = torch.cat([values.gather(0, part + side) for side in (0, 1)])
            # By now a smooth gradient changes by 2^-9 of what it did, a jump by as much as ever.
            if count + at_once > _FIRST_LOOK and not bool(((ends[1] - ends[0]).abs() > least).any()):
                return _no_kinks((low + high) / 2)
        before, after = trail(reference, name, torch.stack((low, high)) - value)
        change, sizes = (after - before).abs(), before.abs() + after.abs()
        return KinkSearch((low + high) / 2, change > least, change / sizes.clamp_min(torch.finfo(sizes.dtype).tiny))
    return None


def _no_kinks(value: torch.Tensor) -> KinkSearch:
    return KinkSearch(value, torch.zeros_like(value, dtype=torch.bool), torch.ones_like(value))


def place(reference: Reference, name: str) -> torch.Tensor:
    """The input with up to eight elements moved to kinks that were met, rounded to its dtype; unchanged if none."""
    value = reference.inputs()[name]
    share = 1.0 if value.numel() < 2 * _MOST else 0.25
    met = search(reference, name, 2.0, share)
    if met is None or not bool(met.mask.any()):
        return value
    places = met.mask.flatten().nonzero().flatten()
    generator = torch.Generator().manual_seed(derive(reference.seed, "kink", name))
    shuffled = places[torch.randperm(len(places), generator=generator).to(places.device)]
    # Between far derivatives almost any value is right, and far ones are what halving finds: so half of the places are
    # those with the nearest.
    near = shuffled[met.apart.flatten()[shuffled].argsort(stable=True)]
    order = dict.fromkeys([*shuffled[: _MOST // 2].tolist(), *near.tolist()])
    chosen = torch.tensor(list(order)[:_MOST], device=places.device)
    at = met.place.flatten()[chosen]
    # Halving ends beside zero, where float64 has numbers without end; zero itself is what a test should meet.
    at = torch.where(at.abs() < tolerance.UNIT[reference.case.dtype] * around(value).flatten()[chosen], 0.0, at)
    out = value.clone().flatten()
    out[chosen] = at.to(value.dtype)
    return out.view_as(value)
