"""Cumulative sums that a gradient may be: how far off a correct implementation is that adds up what others leave.

Whoever decays a state by exp(g) may take the gradient of g as a sum over all later steps, of what each reads from the
state less what it writes to it, and its error is that of what cancels there, however small the gradient is. Nothing
says so in a reference that goes step by step. It shows in float64: where only the last step is read, what the gradient
of g changes by from step to step is what each step writes, k dk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

import torch

from retrograd.check import tolerance
from retrograd.check.oracle import Truth
from retrograd.check.outputs import as_real
from retrograd.check.reference import Reference, Results

# Numbers that an identity must hold for, for each term that it has: fewer would fit by chance.
_NUMBERS_PER_TERM = 8


@dataclass(frozen=True)
class CumulativeSum:
    """A gradient as a cumulative sum.

    Attributes:
        name: of the gradient.
        dim: along which it is added up.
        forward: whether steps go forward, so that sums begin at the end.
        ways: what is written at each step, as inputs times their gradients times a number, by the gradients' names;
            all ways with as few of them as will do.
    """

    name: str
    dim: int
    forward: bool
    ways: list[dict[str, float]]

    def widened(self, reference: Reference, truth: Truth, tol: dict[str, torch.Tensor]) -> Truth:
        """The truth at a case that allows what cancels in the sum, whichever of the ways is taken.

        `tol` are the attainable errors of what is written; with smaller ones it allows less.
        """
        grad = truth.want[self.name]
        assert grad is not None
        bounds = [truth.floor[self.name]]
        for factors in self.ways:
            inputs = _inputs(reference, grad.ndim, list(factors))
            written, off = (
                {label: f * inputs[label] * _as(values[label], inputs[label]) for label, f in factors.items()}
                for values in (truth.want, tol)
            )
            bounds.append(self._bound(reference, grad, written, off))
        return replace(truth, floor=truth.floor | {self.name: torch.stack(bounds).nan_to_num(0.0).amax(0)})

    def _bound(
        self, reference: Reference, grad: torch.Tensor, written: dict[str, torch.Tensor], off: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """The attainable error of what adds up these terms, which are off by so much, and the rest.

        The rest, what is read, is known by its sum only: it has as many terms and as large errors as what is written.
        A sum that is a number has no NaN among its terms: those beside it are of another sequence of the row.
        """
        squares, inherited = (torch.stack([t.square().sum(-1) for t in ts.values()]).sum(0) for ts in (written, off))
        rest = _steps(grad, self.dim, self.forward) - torch.stack([t.sum(-1) for t in written.values()]).sum(0)
        count = 2 * grad.shape[self.dim] * sum(t.shape[-1] for t in written.values())
        units = tolerance.units(reference.case.dtype, reference.spec.compute)
        all_three = (grad, 2 * squares + rest.square(), 2 * inherited)
        grad, terms, inherited = (t.nan_to_num(0.0, 0.0, 0.0) for t in all_three)
        return tolerance.of_a_sum(*units, grad, terms, inherited, self.dim, count)


def find(reference: Reference, name: str, runs: dict[Any, Results]) -> CumulativeSum | None:
    """The cumulative sum that a gradient is by a reference; None if it is none, to the last digits of float64.

    Args:
        reference: at an ordinary case.
        name: of the gradient.
        runs: of this reference, which are kept here for the next gradient.
    """
    shape = as_real(reference.inputs()[name.removeprefix("grad ")]).shape
    for dim, forward in product((d for d in range(len(shape)) if shape[d] > 1), (True, False)):
        key = shape[: dim + 1], forward
        if key not in runs:
            runs[key] = _at_an_end(reference, *key)
        ways = _written(reference, runs[key], name, shape, dim, forward)
        if ways:
            return CumulativeSum(name, dim, forward, ways)
    return None


def _at_an_end(reference: Reference, alike: torch.Size, forward: bool) -> Results:
    """Results where of outputs that begin with such dimensions only the end of the last of these counts.

    No other output does beside them: final states of several sequences in a row would each begin a sum.
    """

    def last() -> list[torch.Tensor]:
        mask = torch.zeros(alike[-1], device=reference.device)
        mask[-1 if forward else 0] = 1
        gs = reference.grad_outs()
        steps = [g.shape[: len(alike)] == alike for g in gs]
        if not any(steps):
            return gs
        return [
            g * mask.to(g.dtype).view(-1, *[1] * (g.ndim - len(alike))) if each else torch.zeros_like(g)
            for g, each in zip(gs, steps, strict=True)
        ]

    return replace(reference, grad_outs=last).run(torch.float64, reference.exactly())


def _written(
    reference: Reference, results: Results, name: str, shape: torch.Size, dim: int, forward: bool
) -> list[dict[str, float]]:
    """What inputs times their gradients add at each step to a gradient where only the last of the outputs counts."""
    grad = results[name]
    if grad is None or not bool(grad.isfinite().all()):
        return []
    labels = [
        n
        for n, t in results.items()
        if n.startswith("grad ") and n != name and t is not None and t.shape[: len(shape)] == shape
    ]
    terms = {label: (t * _as(results[label], t)).sum(-1) for label, t in _inputs(reference, len(shape), labels).items()}
    added, least = _steps(grad, dim, forward), tolerance.ZERO * torch.linalg.vector_norm(grad)
    # Of several sequences in a row only one reaches the end that counts.
    reached = grad.movedim(dim, 0).reshape(shape[dim], -1).any(1).nonzero()[:, 0]
    if not len(reached):
        return []
    begin, end = int(reached[0]) if forward else 0, shape[dim] if forward else int(reached[-1]) + 1
    for count in (end - begin - 1, end - begin - 2):  # the last step may read before it decays
        if count < 1:
            break
        rows = (dim, begin if forward else end - count, count)
        kept = {label: t.narrow(*rows).flatten() for label, t in terms.items()}
        if ways := _fewest(kept, added.narrow(*rows).flatten(), least):
            return ways
    return []


def _fewest(terms: dict[str, torch.Tensor], total: torch.Tensor, least: torch.Tensor) -> list[dict[str, float]]:
    """All ways to make a total of as few terms as will do, by factors; `least` is what it may be off besides.

    On the CPU: on CUDA `lstsq` has no driver for columns that depend on each other.
    """
    terms, total, least = {label: t.cpu() for label, t in terms.items()}, total.cpu(), least.cpu()
    for count in range(1, min(len(terms), total.numel() // _NUMBERS_PER_TERM) + 1):
        ways = list[dict[str, float]]()
        for labels in combinations(terms, count):
            each = torch.stack([terms[label] for label in labels], -1)
            if not bool(each.isfinite().all()):  # LAPACK refuses them
                continue
            factors = torch.linalg.lstsq(each, total[:, None], driver="gelsd").solution[:, 0]
            left, size = (torch.linalg.vector_norm(t) for t in (each @ factors - total, each * factors))
            if bool(factors.all()) and bool(left <= least + tolerance.ZERO * size):
                ways.append(dict(zip(labels, factors.tolist(), strict=True)))
        if ways:
            return ways
    return []


def _inputs(reference: Reference, ndim: int, grads: list[str]) -> dict[str, torch.Tensor]:
    """Inputs by the names of their gradients, in so many dimensions and one more."""
    inputs = reference.inputs()
    return {label: as_real(inputs[label.removeprefix("grad ")]).double()[..., None].flatten(ndim) for label in grads}


def _as(t: torch.Tensor | None, alike: torch.Tensor) -> torch.Tensor:
    assert t is not None
    return t.reshape(alike.shape)


def _steps(t: torch.Tensor, dim: int, forward: bool) -> torch.Tensor:
    """What each place adds to a cumulative sum that begins at the end, or at the beginning."""
    nothing = torch.zeros_like(t.narrow(dim, 0, 1))
    return -t.diff(dim=dim, append=nothing) if forward else t.diff(dim=dim, prepend=nothing)
