"""Linear algebra, geometry, transport, fixed points, sampling and signals, right."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from entries import Entries, function, gradients
from references import numerics as ref
from torch import Tensor

from retrograd.check.spec import tensor

RIGHT = Entries()
add = RIGHT.healthy


class Solved(torch.autograd.Function):
    """Keeps the factors: the backward solves with their transpose."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, right: Tensor) -> Tensor:
        eye = torch.eye(len(matrix), dtype=matrix.dtype)
        lu, pivots = torch.linalg.lu_factor(matrix + 6 * eye)
        y = torch.linalg.lu_solve(lu, pivots, right)
        ctx.save_for_backward(lu, pivots, y)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        lu, pivots, y = ctx.saved_tensors
        d_right = torch.linalg.lu_solve(lu, pivots, dy, adjoint=True)
        return -d_right @ y.mT, d_right


add("solved_from_factors", lambda *a: Solved.apply(*a), ref.solved, ref.SOLVED, sizes=ref.SOLVED_SIZES,
    dtypes=["float32", "float64"])  # fmt: skip


def orthogonalised(x: Tensor) -> Tensor:
    """Always on the smaller side, the cubic step by the Gram matrix."""
    y = x / (x.square().sum() + 1e-3).sqrt()
    tall = x.shape[0] > x.shape[1]
    for _ in range(3):
        gram = y.mT @ y if tall else y @ y.mT
        step = 1.5 * torch.eye(len(gram), dtype=x.dtype) - 0.5 * gram
        y = y @ step if tall else step @ y
    return y


add("newton_schulz_by_gram", orthogonalised, ref.orthogonalised, dict(x=tensor("M", "N")),
    sizes=dict(M=(1, 8), N=(1, 8)), algorithm_error=4)  # fmt: skip


def rodrigues(w: Tensor) -> Tensor:
    """Series in the square of the angle where it is small, both branches finite everywhere."""
    x, y, z = w.unbind(-1)
    o = torch.zeros_like(x)
    k = torch.stack([o, -z, y, z, o, -x, -y, x, o], -1).unflatten(-1, (3, 3))
    square = w.square().sum(-1)[..., None, None]
    small = square < 0.25
    angle = torch.where(small, 1, square).sqrt()
    a = torch.where(small, 1 - square / 6 * (1 - square / 20 * (1 - square / 42 * (1 - square / 72))),
                    torch.sin(angle) / angle)  # fmt: skip
    b = torch.where(small, 0.5 - square / 24 * (1 - square / 30 * (1 - square / 56 * (1 - square / 90))),
                    2 * torch.sin(angle / 2).square() / angle.square())  # fmt: skip
    return torch.eye(3, dtype=w.dtype) + a * k + b * k @ k


add("rotation_by_rodrigues", rodrigues, ref.rotation, dict(w=tensor("M", 3)), sizes=dict(M=(1, 6)),
    algorithm_error=8, extremes=())  # fmt: skip


def composited_backward(dy: Tensor, y: Tensor, alpha: Tensor, colour: Tensor) -> tuple[Tensor, Tensor]:
    """What comes from behind a sample, from the last: no division."""
    light = F.pad((1 - alpha).cumprod(1), (1, 0), value=1.0)[:, :-1]
    d = (colour * dy[:, None]).sum(-1)
    behind, d_alpha = torch.zeros_like(d[:, 0]), torch.zeros_like(alpha)
    for s in reversed(range(alpha.shape[1])):
        d_alpha[:, s] = light[:, s] * (d[:, s] - behind)
        behind = alpha[:, s] * d[:, s] + (1 - alpha[:, s]) * behind
    return d_alpha, (light * alpha)[..., None] * dy[:, None]


add("composited_from_behind", function(ref.composited, composited_backward), ref.composited, ref.RAYS,
    sizes=ref.RAY_SIZES)  # fmt: skip


def splat_backward(dy: Tensor, y: Tensor, place: Tensor, centre: Tensor, conic: Tensor) -> Any:
    """Sums over places as one product with the monomials of all offsets."""
    dx, d_y = (place[:, None] - centre).unbind(-1)
    a, b, c = conic.unbind(-1)
    terms = torch.stack([dx, d_y, dx * dx, dx * d_y, d_y * d_y])
    sx, sy, sxx, sxy, syy = torch.einsum("pg,kpg->kg", dy * y, terms)
    xy = 0.3 * torch.tanh(b)
    to_centre = torch.stack([F.softplus(a) * sx + xy * sy, F.softplus(c) * sy + xy * sx], -1)
    slope = torch.stack([-0.5 * sxx * torch.sigmoid(a), -0.3 * sxy * (1 - torch.tanh(b) ** 2),
                         -0.5 * syy * torch.sigmoid(c)], -1)  # fmt: skip
    return None, to_centre, slope


add("splat_by_moments", function(ref.splat, splat_backward), ref.splat, ref.SPLAT, sizes=ref.SPLAT_SIZES)  # fmt: skip


def sinkhorn_scaled(cost: Tensor, steps: int) -> Tensor:
    """Potentials of rows and columns; the plan once, at the end."""
    u, v = cost.new_zeros(len(cost), 1), cost.new_zeros(1, cost.shape[1])
    for _ in range(steps):
        u = -torch.logsumexp(v - cost, 1, keepdim=True)
        v = -torch.logsumexp(u - cost, 0, keepdim=True)
    return torch.exp(u + v - cost)


add("sinkhorn_by_potentials", sinkhorn_scaled, ref.sinkhorn, dict(cost=tensor("N", "N")), sizes=dict(N=(1, 8)),
    params=dict(steps=[1, 5]), algorithm_error=4)  # fmt: skip


class FixedPoint(torch.autograd.Function):
    """Attached once at the point, solved for exactly in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        z = ref.fixed_point(x, weight)
        ctx.save_for_backward(x, weight, z)
        return z

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, z = ctx.saved_tensors
        w = weight / (1 + weight.square().sum()).sqrt() * 0.7
        slope = 1 - z.square()
        system = torch.eye(z.shape[1], dtype=z.dtype) - slope[:, None] * w  # [M, N, N]: I - W diag(slope)
        u = torch.linalg.solve(system, dy[..., None])[..., 0]

        def step(x: Tensor, weight: Tensor) -> Tensor:
            w = weight / (1 + weight.square().sum()).sqrt() * 0.7
            return torch.tanh(z @ w + x)

        return gradients(step, u, x, weight)


add("fixed_point_implicit", lambda *a: FixedPoint.apply(*a), ref.fixed_point, ref.FIXED, sizes=ref.FIXED_SIZES,
    algorithm_error=4, extremes=())  # fmt: skip


def sampled_by_grid(signal: Tensor, place: Tensor) -> Tensor:
    """torch's grid_sample on one row of pixels, borders repeated."""
    length = signal.shape[-1]
    x = place / (length - 1) * 2 - 1
    grid = torch.stack([x, torch.zeros_like(x)], -1)[:, None]
    image = signal[:, None, None]
    return F.grid_sample(image, grid, padding_mode="border", align_corners=True)[:, 0, 0]


# Places go to [-1, 1] and back: a place near a sample may fall to its other side, and a slope is times (L - 1) / 2
# between, which is infinite for samples of a quarter of the largest number.
add("sampled_by_grid", sampled_by_grid, ref.sampled, ref.SAMPLED, sizes=ref.SAMPLED_SIZES, algorithm_error=8,
    accept={"extremes/not-finite/grad place": dict(reason="slopes in units of half a row", level="full")})  # fmt: skip


def filtered_by_fft(x: Tensor, taps: Tensor) -> Tensor:
    n, k = x.shape[-1], len(taps)
    size = n + k - 1
    full = torch.fft.irfft(torch.fft.rfft(x, size) * torch.fft.rfft(taps.flip(0), size), size)
    return full[..., k // 2 : k // 2 + n]


# A transform adds up all of a row: the error of an element is that of its row.
add("filtered_by_transform", filtered_by_fft, ref.filtered, ref.FILTERED, sizes=ref.FILTERED_SIZES,
    algorithm_error=32, extremes=())  # fmt: skip


def three_products(x: Tensor, weight: Tensor) -> Tensor:
    """A complex product by three real ones."""
    a, b, c, d = x.real, x.imag, weight.real, weight.imag
    p, q, r = (a + b) @ c, a @ (d - c), b @ (c + d)
    return torch.complex(p - r, p + q)


def same_product() -> bool:
    x, w = torch.randn(5, 4, dtype=torch.complex64), torch.randn(4, 3, dtype=torch.complex64)
    x.requires_grad_(), w.requires_grad_()
    outs = [op(x, w) for op in (three_products, ref.complex_linear)]
    dy = torch.randn(5, 3, dtype=torch.complex64)
    return all(
        torch.allclose(a, b, atol=1e-5)
        for a, b in zip(*((y, *torch.autograd.grad(y, (x, w), dy)) for y in outs), strict=False)
    )


add("complex_by_three_products", three_products, ref.complex_linear, ref.COMPLEX, sizes=ref.COMPLEX_SIZES,
    dtypes=["complex64"], algorithm_error=8, extremes=(), proof=same_product)  # fmt: skip

HEALTHY = RIGHT.ops
