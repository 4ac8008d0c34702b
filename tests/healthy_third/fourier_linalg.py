"""Layers of Fourier transforms and linear algebra, right: complex tensors, guards, other factorisations."""

from __future__ import annotations

import math
from typing import Any

import torch
from entries import Entries, function
from torch import Tensor

from retrograd.check.spec import tensor

RIGHT = Entries()
add = RIGHT.healthy


def complex_of(pairs: Tensor) -> Tensor:
    """Pairs as complex numbers, wherever they begin in memory."""
    return torch.view_as_complex(pairs.clone(memory_format=torch.contiguous_format))


def circular(x: Tensor, kernel: Tensor) -> Tensor:
    n = x.shape[-1]
    where = (torch.arange(n)[:, None] - torch.arange(n)) % n
    return x @ kernel[:, where].mT


def circular_by_fft(x: Tensor, kernel: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(kernel)[:, None], n=x.shape[-1])


add("convolution_by_fft", circular_by_fft, circular, dict(x=tensor("C", "B", "N"), kernel=tensor("C", "N")),
    sizes=dict(C=(1, 3), B=(1, 3), N=(1, 48)))  # fmt: skip


def low_pass(x: Tensor, weight: Tensor) -> Tensor:
    modes = torch.fft.rfft(x)[..., : len(weight)]
    return torch.fft.irfft(modes * complex_of(weight)[: modes.shape[-1]], n=x.shape[-1])


def low_pass_by_sums(x: Tensor, weight: Tensor) -> Tensor:
    n = x.shape[-1]
    count = min(n // 2 + 1, len(weight))
    angle = torch.arange(n, dtype=x.dtype)[:, None] * torch.arange(count, dtype=x.dtype) * (2 * math.pi / n)
    re, im = x @ torch.cos(angle), -x @ torch.sin(angle)
    a, b = weight[:count].unbind(-1)
    re, im = re * a - im * b, re * b + im * a
    alone = (torch.arange(count) == 0) | (2 * torch.arange(count) == n)
    share = torch.where(alone, 1.0, 2.0).to(x.dtype) / n
    return (re * share) @ torch.cos(angle).mT - (im * share * ~alone) @ torch.sin(angle).mT


add("spectral_filter", low_pass, low_pass_by_sums, dict(x=tensor("M", "N"), weight=tensor(3, 2)),
    sizes=dict(M=(1, 6), N=(1, 32)))  # fmt: skip


def dft(x: Tensor) -> Tensor:
    n = x.shape[-1]
    angle = torch.arange(n, dtype=x.dtype)[:, None] * torch.arange(n // 2 + 1, dtype=x.dtype) * (2 * math.pi / n)
    return torch.complex(x @ torch.cos(angle), -x @ torch.sin(angle))


add("complex_output", torch.fft.rfft, dft, dict(x=tensor("M", "N")), sizes=dict(M=(1, 6), N=(1, 32)))


def complex_rows(seed: int, dtype: torch.dtype, sizes: dict[str, int]) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    kind = torch.complex128 if dtype == torch.float64 else torch.complex64
    return {name: torch.randn(sizes["M"], sizes["N"], dtype=kind, generator=gen) for name in ("x", "y")}


def inner(x: Tensor, y: Tensor) -> Tensor:
    return (x.conj() * y).sum(-1)


def inner_backward(dz: Tensor, z: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return dz.conj()[:, None] * y, dz[:, None] * x


add("complex_inner_product", function(inner, inner_backward), inner, complex_rows, sizes=dict(M=(1, 4), N=(1, 12)))


def phase_guarded(x: Tensor) -> Tensor:
    """The angle by atan2 of a point that is moved where it is the origin, so that its gradient there is zero."""
    re, im = x.unbind(-1)
    origin = (re == 0) & (im == 0)
    return torch.where(origin, 0, torch.atan2(torch.where(origin, 1, im) * 1, torch.where(origin, 1, re)))


add("phase_with_guard", phase_guarded, lambda x: torch.angle(complex_of(x)),
    dict(x=tensor("M", "N", 2)), sizes=dict(M=(1, 6), N=(1, 12)))  # fmt: skip

MATRIX = tensor("B", "N", "N")
LINALG = dict(B=(1, 3), N=(1, 8))


def definite(x: Tensor) -> Tensor:
    return x @ x.mT + x.shape[-1] * torch.eye(x.shape[-1], dtype=x.dtype)


# NaN raises, which linalg.solve does not: promised for finite values alone.
add("solve_by_cholesky", lambda x, b: torch.cholesky_solve(b, torch.linalg.cholesky(definite(x))),
    lambda x, b: torch.linalg.solve(definite(x), b), dict(x=MATRIX, b=tensor("B", "N", 2)), extremes=(),
    sizes=LINALG)  # fmt: skip

add("eigenvalues_by_singular_values", lambda x: torch.linalg.svdvals(x).flip(-1).square() + x.shape[-1],
    lambda x: torch.linalg.eigvalsh(definite(x)), dict(x=MATRIX), sizes=LINALG)  # fmt: skip


def ridge(x: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.solve(x.mT @ x + torch.eye(x.shape[-1], dtype=x.dtype), x.mT @ b)


def ridge_by_kernel(x: Tensor, b: Tensor) -> Tensor:
    """Regular whatever the rank of x: rows or columns may repeat or be zero."""
    return x.mT @ torch.linalg.solve(x @ x.mT + torch.eye(x.shape[-2], dtype=x.dtype), b)


add("ridge_by_kernel", ridge_by_kernel, ridge, dict(x=tensor("M", "N"), b=tensor("M", 2)),
    sizes=dict(M=(1, 12), N=(1, 12)))  # fmt: skip


def unit_lower(x: Tensor) -> Tensor:
    return (x / x.shape[-1]).tril(-1) + torch.eye(x.shape[-1], dtype=x.dtype)


def substituted(x: Tensor, b: Tensor) -> Tensor:
    lower, rows = unit_lower(x), []
    for i in range(x.shape[-1]):
        known: Any = sum(lower[:, i, j, None] * rows[j] for j in range(i))
        rows.append(b[:, i] - known)
    return torch.stack(rows, 1)


add("substitution", substituted, lambda x, b: torch.linalg.solve_triangular(unit_lower(x), b, upper=False),
    dict(x=MATRIX, b=tensor("B", "N", 2)), sizes=LINALG)  # fmt: skip

HEALTHY = RIGHT.ops
