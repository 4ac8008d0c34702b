"""Constraints on the values of inputs: how such values are drawn, and what of a gradient they let count.

An input that is symmetric, or sums to 1, never moves across what it keeps to, and a gradient may hold anything there.
So gradients are compared along it: projected onto the directions in which allowed values lie.
"""

from __future__ import annotations

from typing import Any

import torch

from retrograd.check.input_specs import MATRICES, TensorSpec
from retrograd.check.spec import OpSpec
from retrograd.errors import SpecError

# Whose values lie in a plane: a direction that is projected onto it stays in it however far one goes.
_PLANES = ("symmetric", "positive_definite", "triangular", "lower_triangular", "upper_triangular", "simplex")
# Stages that move values, or need what lies beside them.
_MOVES = {
    "adjoint": "differences of the forward move values off it",
    "kinks": "values are moved to kinks, off it",
    "higher_order": "second derivatives across it mean nothing",
}


def constrained(spec: OpSpec) -> dict[str, str]:
    """The constraint of each input that keeps to one, by name; "its callable" for those that a callable draws."""
    return {
        name: rule.values if isinstance(rule.values, str) else "its callable"
        for name, rule in spec.tensors.items()
        if rule.values is not None
    }


def refusal(stage: str, spec: OpSpec) -> str:
    """Why a stage cannot ask an op whose inputs keep to something; "" if it can."""
    if stage not in _MOVES:
        return ""
    floating = {n: c for n, c in constrained(spec).items() if spec.tensors[n].differentiable}
    if stage == "higher_order":  # what is sorted or unique stays so nearby, in any direction
        floating = {n: c for n, c in floating.items() if c in (*MATRICES, "simplex", "unit_norm")}
    if stage == "adjoint":
        floating = {n: c for n, c in floating.items() if c not in _PLANES}
    if not floating:
        return ""
    kept = ", ".join(f"`{name}` ({constraint})" for name, constraint in floating.items())
    return f"the values of {kept} keep to a constraint: {_MOVES[stage]}"


def project(spec: OpSpec, name: str, grad: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """What counts of the gradient of an input: all of it, unless its values keep to a constraint."""
    kind = spec.tensors[name].values if name in spec.tensors else None
    if not isinstance(kind, str) or grad.shape != value.shape or not grad.numel():
        return grad
    return _along(kind, grad.double(), value.detach().double()).to(grad.dtype)


def _along(kind: str, g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if kind in ("symmetric", "positive_definite"):
        return (g + g.mT) / 2
    if kind in ("triangular", "lower_triangular"):
        return g.tril()
    if kind == "upper_triangular":
        return g.triu()
    if kind == "orthogonal":
        if x.shape[-2] < x.shape[-1]:
            return _along(kind, g.mT, x.mT).mT
        inner = x.mT @ g
        return g - x @ (inner + inner.mT) / 2
    if kind == "simplex":
        return g - g.mean(-1, keepdim=True)
    if kind == "unit_norm":
        return g - x * (x * g).sum(-1, keepdim=True) / x.square().sum(-1, keepdim=True)
    return g


def draw(
    name: str, rule: TensorSpec, numbers: torch.Tensor, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Values that keep to the constraint of a description.

    Args:
        name: of the input, for errors.
        rule: with `values`.
        numbers: float64 values as they would be without it.
        dtype: what is returned.
        generator: for further draws.

    Raises:
        SpecError: the callable returned another shape or dtype, or raised.
    """
    if callable(rule.values):
        return _called(name, rule.values, tuple(numbers.shape), dtype, generator)
    kind = str(rule.values)
    if dtype.is_complex:
        raise SpecError(f"`values` of {name!r} is {kind!r}, which is of real numbers; draw complex ones by a callable")
    return (_matrices(kind, numbers) if kind in MATRICES else _rows(kind, numbers, generator)).to(dtype)


def _called(name: str, fn: Any, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    try:
        value = fn(generator, shape, dtype)
    except Exception as error:
        raise SpecError(f"`values` of {name!r} raised {type(error).__name__}: {error} for shape {shape}") from error
    if not isinstance(value, torch.Tensor) or (tuple(value.shape), value.dtype) != (shape, dtype):
        kind = f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise SpecError(f"`values` of {name!r} returned {kind}, expected a tensor of shape {shape} and dtype {dtype}")
    return value.detach()


def _matrices(kind: str, a: torch.Tensor) -> torch.Tensor:
    n = max(a.shape[-1], 1)
    if kind == "symmetric":
        return (a + a.mT) / 2
    if kind == "orthogonal":
        wide = a.shape[-2] < a.shape[-1]
        q = torch.linalg.qr(a.mT if wide else a).Q
        return q.mT if wide else q
    if kind == "positive_definite":  # eigenvalues from 1/2 on, so that nothing is near singular
        product = a @ a.mT / n
        return (product + product.mT) / 2 + torch.eye(n if a.shape[-1] else 0, dtype=a.dtype) / 2
    lower = a.tril(-1) / n**0.5 + torch.diag_embed(a.diagonal(dim1=-2, dim2=-1).abs() + 0.5)
    return lower.mT if kind == "upper_triangular" else lower


def _rows(kind: str, a: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    n = max(a.shape[-1], 1)
    if kind == "sorted":
        return a.sort(-1).values
    if kind == "simplex":
        return a.softmax(-1)
    if kind == "unit_norm":
        return a / a.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    places = torch.rand(a.shape, generator=generator, dtype=torch.float64).argsort(-1)
    if kind == "permutation":
        return places.to(a.dtype)
    # Whole numbers times a power of two: what no dtype rounds to its neighbour.
    return (places - n // 2).to(a.dtype) * 2.0 ** (2 - n.bit_length())
