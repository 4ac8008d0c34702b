"""Errors of sums and products: what adding up in any order leaves, and factors of fewer bits."""

from __future__ import annotations

import math
from typing import Any

import torch

from retrograd.check import contractions
from retrograd.check.operators import FACTORS, about
from retrograd.compat.torch_dispatch import UnwrappedMode, resolved

_ATEN = torch.ops.aten
_TF32_BITS = -1 << 13  # of a float32, those that tensor cores read


class Tf32Factors(UnwrappedMode):
    """A run whose products of float32 matrices read 11 bits of each factor, as tensor cores do.

    With `elementwise` so do all products of two tensors, of a formula that multiplies no matrices. Of another formula
    the sums that are products of matrices by elements add up terms of 11 bits.
    """

    def __init__(self, *, elementwise: bool) -> None:
        super().__init__()
        self._factors = {name: first for name, (_, first) in FACTORS.items()} | {"convolution": 0}
        self._factors |= {"mul": 0} if elementwise else {}
        self._sums = not elementwise

    @resolved
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = about(func).name, kwargs or {}
        if self._sums and contractions.contracts(name, args, kwargs):
            return func(_cut_to_tf32(args[0]), *args[1:], **kwargs)
        first = self._factors.get(name)
        if name == "convolution_backward":  # two convolutions, whose factors are among grad_out, input and weight
            args = (*map(_cut_to_tf32, args[:3]), *args[3:])
        if first is not None and all(isinstance(t, torch.Tensor) for t in args[first : first + 2]):
            args = (*args[:first], *map(_cut_to_tf32, args[first : first + 2]), *args[first + 2 :])
        out = func(*args, **kwargs)
        if self._sums:
            contractions.note(func, args, out)
        return out


def _cut_to_tf32(t: torch.Tensor) -> torch.Tensor:
    return (t.view(torch.int32) & _TF32_BITS).view(torch.float32) if t.dtype == torch.float32 else t


def _sum_error(out: torch.Tensor, x: torch.Tensor, dim: Any, keepdim: bool) -> torch.Tensor:
    """Spread, in units of rounding, of adding the terms one by one in any order.

    n roundings of partial sums S_k: sqrt(sum S_k^2), whose expectation over orders is
    sqrt(n S^2 / 3 + n sum(t^2) / 6) (Higham & Mary 2019 give the same sqrt(n) growth).
    """
    if not x.ndim:  # PyTorch lets a number be added up along dimension 0
        return torch.zeros_like(out)
    dims = list(range(x.ndim)) if dim is None or dim == [] else ([dim] if isinstance(dim, int) else list(dim))
    n = math.prod(x.shape[d] for d in dims) if dims else 1
    squares = square(x).sum(dims, keepdim).add_(square(out), alpha=2) if dims else 3 * square(x)
    return squares.mul_(max(n - 1, 0) / 6).sqrt_()


def square(t: torch.Tensor) -> torch.Tensor:
    """The squares of sizes."""
    return t.abs().square_() if t.is_complex() else t.square()


def _squares_of_terms(name: str, args: tuple[Any, ...]) -> torch.Tensor:
    """The sum of the squares of what a product of matrices adds up, an element each."""
    kind, first = FACTORS[name]
    return getattr(_ATEN, kind)(square(args[first]), square(args[first + 1]))


def reduction_error(name: str, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Spread, in units of rounding, of what an operator adds up; None where it adds nothing up."""
    if name in ("sum", "mean"):
        x = args[0]
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        keep = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
        n = x.numel() / max(out.numel(), 1)
        scaled = out * n if name == "mean" else out
        error = _sum_error(scaled, x, dim, keep)
        return error / max(n, 1) if name == "mean" else error
    if name in ("mm", "bmm"):
        n = args[0].shape[-1]
        squares = _squares_of_terms(name, args)
        return (max(n - 1, 0) * (square(out) / 3 + squares / 6)).sqrt()
    if name.startswith("_fft_"):  # errors of a transform are of the size of all of it, and grow with its depth
        return math.sqrt(math.log2(max(out.numel(), 2))) * square(out).mean().sqrt().expand(out.shape)
    if name in ("cumsum", "addmm", "baddbmm", "convolution", "index_add", "scatter_add", "embedding_dense_backward"):
        widest = max((a.shape[-1] for a in args if isinstance(a, torch.Tensor) and a.ndim), default=1)
        return math.sqrt(widest / 3) * (out.abs() + square(out).mean().sqrt())
    return None


def product_error(name: str, out: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Spread, in units of rounding, of a product of matrices whose elements are rounded: root of the sum of squares.

    Both factors of each of the n terms are, so sqrt(2) of the terms' size.
    """
    if name in FACTORS:
        return (2 * _squares_of_terms(name, args)).sqrt()
    if name in contractions.SUMS:  # of a mean the terms are as much smaller as their number
        terms = _ATEN.sum.dim_IntList(square(args[0]), *args[1:3], **{k: v for k, v in kwargs.items() if k != "dtype"})
        return (2 * terms).sqrt() * (out.numel() / args[0].numel() if name == "mean" else 1.0)
    if name == "mul":
        return math.sqrt(2) * out  # noise has no sign
    return math.sqrt(2) * square(out).mean().sqrt().expand(out.shape)
