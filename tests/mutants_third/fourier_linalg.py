"""Layers of Fourier transforms and linear algebra, broken: one-sided spectra, conjugates, phases, factors, solves."""

from __future__ import annotations

from typing import Any

import torch
from entries import Call, Entries, function, gradients
from torch import Tensor

from retrograd.check.spec import tensor

BROKEN = Entries()
add = BROKEN.broken


def complex_of(pairs: Tensor) -> Tensor:
    """Pairs as complex numbers, wherever they begin in memory."""
    return torch.view_as_complex(pairs.clone(memory_format=torch.contiguous_format))


# --- Z33: a spectral convolution --------------------------------------------------------------------


def spectral(x: Tensor, weight: Tensor) -> Tensor:
    modes = torch.fft.rfft(x)
    kept = min(weight.shape[-2], modes.shape[-1])
    modes = torch.cat([modes[..., :kept] * complex_of(weight[:, :kept]), modes[..., kept:] * 0], -1)
    return torch.fft.irfft(modes, n=x.shape[-1])


def spectral_even(x: Tensor, weight: Tensor) -> Tensor:
    modes = torch.fft.rfft(x)
    kept = min(weight.shape[-2], modes.shape[-1])
    modes = torch.cat([modes[..., :kept] * complex_of(weight[:, :kept]), modes[..., kept:] * 0], -1)
    y = torch.fft.irfft(modes)  # always an even length
    return torch.cat([y, y[..., :1]], -1)[..., : x.shape[-1]]


add("Z33", "the inverse transform is not told the length: odd signals come back one short and padded", "sizes",
    spectral_even, spectral, dict(x=tensor("B", "C", "N"), weight=tensor("C", 3, 2)),
    sizes=dict(B=(1, 3), C=(1, 4), N=(2, 32)), proof=Call(dict(N=7)))  # fmt: skip

# --- Z34, Z35: complex outputs, a missing conjugate ----------------------------------------------------


def rfft_backward(dy: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return torch.fft.irfft(dy, n=x.shape[-1]) * x.shape[-1]  # counts the inner modes twice


add("Z34", "the adjoint of rfft is taken to be its inverse: inner modes count twice (output is complex)", "every input",
    function(torch.fft.rfft, rfft_backward), torch.fft.rfft, dict(x=tensor("M", "N")), sizes=dict(N=(3, 32)))  # fmt: skip


def modulated(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.view_as_complex(weight)


def modulated_backward(dy: Tensor, y: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    factor = torch.view_as_complex(weight)
    return dy * factor.conj(), torch.view_as_real((dy * x).sum(0))  # x should be conjugated


def as_pairs(fn: Any) -> Any:
    """A complex input and output as pairs of real numbers, since no spec describes a complex tensor."""
    return lambda x, *rest: torch.view_as_real(
        fn(complex_of(x), *[t.clone(memory_format=torch.contiguous_format) for t in rest]).resolve_conj()
    )


add("Z35", "the gradient of a complex weight lacks a conjugate", "every input",
    as_pairs(function(modulated, modulated_backward)), as_pairs(modulated),
    dict(x=tensor("M", "N", 2), weight=tensor("N", 2)), sizes=dict(M=(1, 8), N=(1, 16)))  # fmt: skip

# --- Z36: phase -----------------------------------------------------------------------------------------


def phase(x: Tensor) -> Tensor:
    return torch.angle(complex_of(x))


def phase_backward(dy: Tensor, y: Tensor, x: Tensor) -> Tensor:
    re, im = x.unbind(-1)
    return torch.stack([-im, re], -1) * (dy / (re * re + im * im))[..., None]


add("Z36", "the gradient of the phase is NaN at the origin, where PyTorch has 0", "special values",
    function(phase, phase_backward), phase, dict(x=tensor("M", "N", 2)), sizes=dict(M=(1, 8), N=(1, 16)),
    proof=Call(change=lambda t: dict(x=t["x"] * (torch.arange(t["x"].shape[1]) > 0)[:, None])))  # fmt: skip

# --- Z37: a one-sided spectrum -----------------------------------------------------------------------------


def density(x: Tensor) -> Tensor:
    power = torch.fft.rfft(x).abs().square() / x.shape[-1]
    where = torch.arange(power.shape[-1])
    return torch.where((where > 0) & (2 * where != x.shape[-1]), 2 * power, power)


def density_doubled(x: Tensor) -> Tensor:
    power = torch.fft.rfft(x).abs().square() / x.shape[-1]
    return torch.cat([power[..., :1], 2 * power[..., 1:]], -1)


add("Z37", "the last mode of an even length is doubled like the others", "sizes",
    density_doubled, density, dict(x=tensor("M", "N")), sizes=dict(N=(1, 32)), proof=Call(dict(N=8)))  # fmt: skip

# --- Z38: complex inputs --------------------------------------------------------------------------------------


def correlation(x: Tensor, y: Tensor) -> Tensor:
    return (torch.fft.fft(x) * torch.fft.fft(y).conj()).real.sum(-1)


def correlation_backward(dy: Tensor, out: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    dx, d_other = gradients(correlation, dy, x, y)
    assert dx is not None
    assert d_other is not None
    return dx, d_other.conj()


def complex_rows(seed: int, dtype: torch.dtype, sizes: dict[str, int]) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    kind = torch.complex128 if dtype == torch.float64 else torch.complex64
    return {name: torch.randn(sizes["M"], sizes["N"], dtype=kind, generator=gen) for name in ("x", "y")}


add("Z38", "the gradient of the second complex input has its imaginary part negated", "every input",
    function(correlation, correlation_backward), correlation, complex_rows, sizes=dict(M=(1, 4), N=(1, 12)))  # fmt: skip

# --- Z39 to Z43: factors and solves ---------------------------------------------------------------------------

MATRIX = tensor("B", "N", "N")
LINALG = dict(B=(1, 3), N=(1, 8))


def regular(x: Tensor) -> Tensor:
    """A matrix that is regular and not symmetric."""
    return x + 2 * x.shape[-1] ** 0.5 * torch.eye(x.shape[-1], dtype=x.dtype)


def definite(x: Tensor) -> Tensor:
    return x @ x.mT + x.shape[-1] * torch.eye(x.shape[-1], dtype=x.dtype)


def solve_backward(dy: Tensor, y: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    db = torch.linalg.solve(a, dy)  # the transposed system is meant
    return -db @ y.mT, db


broken_solve = function(torch.linalg.solve, solve_backward)
add("Z39", "the backward solves with A, not with its transpose: right for symmetric ones", "every input",
    lambda a, b: broken_solve(regular(a), b), lambda a, b: torch.linalg.solve(regular(a), b),
    dict(a=MATRIX, b=tensor("B", "N", 2)), sizes=LINALG)  # fmt: skip


def cholesky_backward(dy: Tensor, y: Tensor, a: Tensor) -> Tensor:
    inverse = torch.linalg.inv(y)
    middle = (y.mT @ dy).tril()  # the diagonal should be halved
    full = inverse.mT @ middle @ inverse
    return (full + full.mT) / 2


broken_cholesky = function(torch.linalg.cholesky, cholesky_backward)
add("Z40", "the diagonal of the inner product is not halved", "every input",
    lambda x: broken_cholesky(definite(x)), lambda x: torch.linalg.cholesky(definite(x)), dict(x=MATRIX),
    sizes=LINALG)  # fmt: skip

add("Z41", "the log-determinant through the product of the diagonal, which overflows from about 30 rows on", "sizes",
    lambda x: 2 * torch.linalg.cholesky(definite(x)).diagonal(dim1=-2, dim2=-1).prod(-1).log(),
    lambda x: torch.linalg.slogdet(definite(x))[1], dict(x=MATRIX), sizes=dict(B=1, N=(1, 60)),
    proof=Call(dict(N=60)))  # fmt: skip


def descending(a: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(a).flip(-1)


def descending_backward(dy: Tensor, y: Tensor, a: Tensor) -> Tensor:
    vectors = torch.linalg.eigh(a)[1]
    return vectors @ (dy[..., None] * vectors.mT)  # dy should be flipped back


broken_eigenvalues = function(descending, descending_backward)
add("Z42", "eigenvalues are turned round in the forward alone", "every input",
    lambda x: broken_eigenvalues(x + x.mT), lambda x: descending(x + x.mT), dict(x=MATRIX), sizes=LINALG)  # fmt: skip


def triangular(lower: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(lower, b, upper=False)


def triangular_backward(dy: Tensor, y: Tensor, lower: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    db = torch.linalg.solve_triangular(lower.mT, dy, upper=True)
    return -db @ y.mT, db  # without tril


broken_triangular = function(triangular, triangular_backward)
add("Z43", "the gradient has values above the diagonal, which the forward never reads", "every input",
    lambda a, b: broken_triangular(regular(a), b), lambda a, b: triangular(regular(a).tril(), b),
    dict(a=MATRIX, b=tensor("B", "N", 2)), sizes=LINALG)  # fmt: skip


def nan_for_wide() -> bool:
    x = torch.randn(20, 4, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (grad,) = torch.autograd.grad(BROKEN.ops["Z44"].fn(x).sum(), x)
    return bool(grad.isnan().any())


add("Z44", "the nuclear norm through eigenvalues of the Gram matrix: NaN for more columns than rows", "sizes",
    lambda x: torch.linalg.eigvalsh(x.mT @ x).sqrt().sum(-1),
    lambda x: torch.linalg.svdvals(x).sum(-1), dict(x=tensor("B", "M", "N")),
    sizes=dict(B=(1, 2), M=(4, 8), N=(1, 6)), proof=nan_for_wide)  # fmt: skip

MUTANTS, NOT_SAYABLE = BROKEN.ops, BROKEN.not_sayable
