"""Linear algebra, geometry, transport, fixed points, sampling and signals, broken."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from entries import Call, Entries, function, gradients
from references import numerics as ref
from torch import Tensor

from retrograd.check.spec import tensor

BROKEN = Entries()
add = BROKEN.broken


def solved_low(matrix: Tensor, right: Tensor) -> Tensor:
    return ref.solved(matrix.float(), right.float()).to(matrix.dtype)  # float64 has 24 digits then


add("Y51", "float64 is solved in float32", "dtypes", solved_low, ref.solved, ref.SOLVED, sizes=ref.SOLVED_SIZES,
    dtypes=["float32", "float64"], proof=Call(dtype=torch.float64, bound=1e-10))  # fmt: skip


def orthogonalised_backward(dy: Tensor, y: Tensor, x: Tensor) -> Tensor:
    n = (x.square().sum() + 1e-3).sqrt()

    def steps(z: Tensor) -> Tensor:
        z = z.mT if x.shape[0] > x.shape[1] else z
        for _ in range(3):
            z = 1.5 * z - 0.5 * z @ z.mT @ z
        return z.mT if x.shape[0] > x.shape[1] else z

    (dz,) = gradients(steps, dy, x / n)
    if x.shape[0] > x.shape[1]:
        return dz / n  # the norm is taken for a constant in the branch for tall ones
    return dz / n - x * (dz * x).sum() / n**3


add("Y52", "tall matrices: the norm counts as a constant", "sizes", function(ref.orthogonalised, orthogonalised_backward),
    ref.orthogonalised, dict(x=tensor("M", "N")), sizes=dict(M=(1, 8), N=(1, 8)), algorithm_error=4,
    proof=Call(dict(M=6, N=3)))  # fmt: skip


def rodrigues(w: Tensor) -> Tensor:
    x, y, z = w.unbind(-1)
    o = torch.zeros_like(x)
    k = torch.stack([o, -z, y, z, o, -x, -y, x, o], -1).unflatten(-1, (3, 3))
    angle = w.norm(dim=-1)[..., None, None]
    a = torch.where(angle < 1e-4, 1, torch.sin(angle) / angle)  # 0 / 0 in the branch that is not taken
    b = torch.where(angle < 1e-4, 0.5, (1 - torch.cos(angle)) / angle.square())
    return torch.eye(3, dtype=w.dtype) + a * k + b * k @ k


add("Y53", "Rodrigues' formula: the gradient of no rotation at all is NaN", "special values", rodrigues, ref.rotation,
    dict(w=tensor("M", 3)), sizes=dict(M=(1, 6)), algorithm_error=100, extremes=dict(w="finite"),
    proof=Call(change=lambda t: dict(w=t["w"] * 0)))  # fmt: skip


def composited_backward(dy: Tensor, y: Tensor, alpha: Tensor, colour: Tensor) -> tuple[Tensor, Tensor]:
    light = F.pad((1 - alpha).cumprod(1), (1, 0), value=1.0)[:, :-1]
    weight, d = light * alpha, (colour * dy[:, None]).sum(-1)
    behind = (weight * d).flip(1).cumsum(1).flip(1) - weight * d
    return light * d - behind / (1 - alpha + 1e-10), weight[..., None] * dy[:, None]


add("Y54", "what lies behind is divided by 1 - alpha: 0 for a sample that hides all", "special values",
    function(ref.composited, composited_backward), ref.composited, ref.RAYS, sizes=ref.RAY_SIZES,
    algorithm_error=1000,
    proof=Call(change=lambda t: dict(alpha=t["alpha"].index_fill(1, torch.tensor([1]), 1.0))))  # fmt: skip


def splat_backward(dy: Tensor, y: Tensor, place: Tensor, centre: Tensor, conic: Tensor) -> Any:
    dx, d_y = (place[:, None] - centre).unbind(-1)
    a, b, c = conic.unbind(-1)
    g = dy * y
    xy = 0.3 * torch.tanh(b)
    to_centre = [(g * (F.softplus(a) * dx + xy * d_y)).sum(0), (g * (F.softplus(c) * d_y + 0.5 * xy * dx)).sum(0)]
    slope = torch.stack([-0.5 * (g * dx * dx).sum(0) * torch.sigmoid(a),
                         -0.3 * (g * dx * d_y).sum(0) * (1 - torch.tanh(b) ** 2),
                         -0.5 * (g * d_y * d_y).sum(0) * torch.sigmoid(c)], -1)  # fmt: skip
    return None, torch.stack(to_centre, -1), slope


add("Y55", "the mixed term of a Gaussian is halved in one coordinate", "every input",
    function(ref.splat, splat_backward), ref.splat, ref.SPLAT, sizes=ref.SPLAT_SIZES)  # fmt: skip


def sinkhorn_backward(dy: Tensor, y: Tensor, cost: Tensor, steps: int) -> Tensor:
    """By the implicit function theorem at a plan that is taken to be converged."""
    m, _n = y.shape
    rows, columns = y.sum(1), y.sum(0)
    system = torch.cat([torch.cat([rows.diag(), y], 1), torch.cat([y.mT, columns.diag()], 1)])
    g = dy * y
    u = torch.linalg.pinv(system, hermitian=True) @ torch.cat([g.sum(1), g.sum(0)])
    return -(g - y * (u[:m, None] + u[m:]))


add("Y56", "implicit gradients of a plan that one step has not converged", "parameters",
    function(ref.sinkhorn, sinkhorn_backward), ref.sinkhorn, dict(cost=tensor("N", "N")), sizes=dict(N=(2, 8)),
    params=dict(steps=[200, 1]), algorithm_error=50, extremes=(), proof=Call(params=dict(steps=1)))  # fmt: skip


class FixedPoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        z = ref.fixed_point(x, weight)
        ctx.save_for_backward(x, weight)
        ctx.z = z.detach()
        return z

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        _, weight = ctx.saved_tensors
        z, scale = ctx.z, (1 + weight.square().sum()).sqrt()
        w, slope = weight / scale * 0.7, 1 - z.square()
        u = dy
        for _ in range(100):
            u = dy + (u * slope) @ w.mT
        g = u * slope
        dw = z.mT @ g * 0.7
        return g, dw / scale - weight * (dw * weight).sum() / scale**3


add("Y57", "a fixed point's second derivative: the point is a constant", "order",
    lambda *a: FixedPoint.apply(*a), ref.fixed_point, ref.FIXED, sizes=ref.FIXED_SIZES, proof=Call(order=2))  # fmt: skip


def sampled_unbounded(signal: Tensor, place: Tensor) -> Tensor:
    at = place + (place.clamp(0, signal.shape[-1] - 1) - place).detach()  # a clamp that passes gradients
    low = at.detach().floor().clamp_max(signal.shape[-1] - 2)
    t = at - low
    low = low.long()
    return signal.gather(-1, low) * (1 - t) + signal.gather(-1, low + 1) * t


add("Y58", "places beyond the ends get the slope of the last piece", "some inputs", sampled_unbounded, ref.sampled,
    ref.SAMPLED, sizes=ref.SAMPLED_SIZES)  # fmt: skip


def filtered_backward(dy: Tensor, y: Tensor, x: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
    k = len(taps)
    dx = F.pad(dy, ((k - 1) // 2, k // 2)).unfold(-1, k, 1) @ taps.flip(0)  # the pads are to be exchanged
    return dx, torch.einsum("bl,blk->k", dy, F.pad(x, ((k - 1) // 2, k // 2)).unfold(-1, k, 1))


add("Y59", "the backward of a filter pads as the forward does: right for an odd number of taps", "sizes",
    function(ref.filtered, filtered_backward), ref.filtered, ref.FILTERED, sizes=ref.FILTERED_SIZES,
    proof=Call(dict(K=4)))  # fmt: skip


def complex_backward(dy: Tensor, y: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return dy @ weight.mH, x.mT @ dy  # the second lacks a conjugate


def complex_proof() -> bool:
    x, w = torch.randn(3, 2, dtype=torch.complex64), torch.randn(2, 4, dtype=torch.complex64, requires_grad=True)
    one = torch.autograd.grad(function(ref.complex_linear, complex_backward)(x, w).abs().sum(), w)[0]
    return not torch.allclose(one, torch.autograd.grad((x @ w).abs().sum(), w)[0])


add("Y60", "the gradient of a complex weight lacks the conjugate", "every input",
    function(ref.complex_linear, complex_backward), ref.complex_linear, ref.COMPLEX, sizes=ref.COMPLEX_SIZES,
    dtypes=["complex64"], proof=complex_proof)  # fmt: skip

MUTANTS, NOT_SAYABLE = BROKEN.ops, BROKEN.not_sayable
