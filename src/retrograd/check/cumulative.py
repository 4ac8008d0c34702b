"""Cumulative sums that a gradient may be: how far off a correct implementation is that adds it up from other gradients.

Whoever decays a state by exp(g) may take the gradient of g as the sum of q dq - k dk over all later steps, and its
error is that of what cancels there, however small the gradient is. Nothing says so in a reference that goes step by
step; that both are equal shows in its float64 results, at each step of each element.
"""

from __future__ import annotations

from itertools import combinations, product

import torch

from retrograd.check import tolerance
from retrograd.check.oracle import Truth
from retrograd.check.outputs import as_real
from retrograd.check.reference import Reference

# Numbers that an identity must hold for, for each term that it has: fewer would fit by chance.
_NUMBERS_PER_TERM = 8


def attainable(reference: Reference, truth: Truth, name: str) -> torch.Tensor | None:
    """How far a gradient may be off that is added up from inputs and outputs times their gradients; None if none is.

    float64, the shape of the gradient. An identity that float64 does not keep to its last digits is none.
    """
    grad = truth.want[name]
    assert grad is not None
    terms = _terms(reference, truth, name)
    if not bool(grad.isfinite().all()):
        return None
    units = tolerance.units(reference.case.dtype, reference.spec.compute)
    for dim, backward in product((d for d in range(grad.ndim) if grad.shape[d] > 1), (True, False)):
        steps = _steps(grad, dim, backward=backward).flatten()
        for count in range(1, min(len(terms), grad.numel() // _NUMBERS_PER_TERM) + 1):
            bounds = list[torch.Tensor]()
            for chosen in combinations(terms, count):
                factors = _factors([each for each, _ in chosen], steps)
                if factors is not None:
                    scaled = [(f * each, f * error) for (each, error), f in zip(chosen, factors, strict=True)]
                    bounds.append(_bound(grad, dim, scaled, *units))
            if bounds:  # with fewest terms; an implementation may add up those of any of them
                return torch.stack(bounds).amax(0)
    return None


def _factors(terms: list[torch.Tensor], steps: torch.Tensor) -> torch.Tensor | None:
    """What the terms are to be multiplied by, so that their sums are these steps; None if there are no such numbers."""
    added = torch.stack([each.sum(-1).flatten() for each in terms], -1)
    factors = torch.linalg.lstsq(added, steps[:, None], driver="gelsd").solution[:, 0]
    left, size = (torch.linalg.vector_norm(t) for t in (added @ factors - steps, added * factors))
    return factors if bool(factors.any()) and bool(left <= tolerance.ZERO * size) else None


def _bound(
    grad: torch.Tensor, dim: int, scaled: list[tuple[torch.Tensor, torch.Tensor]], unit: float, accumulate: float
) -> torch.Tensor:
    """The attainable error of a gradient that adds up these terms, beside each of which stands its own error."""
    squares, inherited = (torch.stack([t.square().sum(-1) for t in ts]).sum(0) for ts in zip(*scaled, strict=True))
    count = grad.shape[dim] * sum(each.shape[-1] for each, _ in scaled)
    return tolerance.of_a_sum(unit, accumulate, grad, squares, inherited, dim, count)


def _terms(reference: Reference, truth: Truth, name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tensors times their gradients, and the attainable errors of these, in the dimensions of a gradient and one more.

    Only of tensors that begin with the gradient's dimensions.
    """
    shape = truth.tol[name].shape
    outs = [label for label, t in truth.want.items() if t is not None and not label.startswith("grad ")]
    factors = {f"grad {label}": value for label, value in reference.inputs().items()}
    factors |= dict(zip(outs, reference.grad_outs(), strict=False))
    terms = list[tuple[torch.Tensor, torch.Tensor]]()
    for label, other in truth.want.items():
        if other is None or label == name or label not in factors or other.shape[: len(shape)] != shape:
            continue
        factor = as_real(factors[label]).double()
        if factor.shape == other.shape and bool((factor * other).isfinite().all()):
            each, error = ((factor * t)[..., None].flatten(len(shape)) for t in (other, truth.tol[label]))
            terms.append((each, error))
    return terms


def _steps(t: torch.Tensor, dim: int, *, backward: bool) -> torch.Tensor:
    """What each place adds to a cumulative sum that begins at the end, or at the beginning."""
    nothing = torch.zeros_like(t.narrow(dim, 0, 1))
    return -t.diff(dim=dim, append=nothing) if backward else t.diff(dim=dim, prepend=nothing)
