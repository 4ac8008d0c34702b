"""Normalisations, quantisation and embeddings, broken."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from entries import Call, Entries, function, gradients
from references import layers as ref
from references.layers import SIZES, TABLE, TABLE_SIZES
from torch import Tensor

from retrograd.check.spec import tensor

BROKEN = Entries()
add = BROKEN.broken


def weight_norm_backward(dy: Tensor, y: Tensor, v: Tensor, g: Tensor, dim: int | None) -> tuple[Tensor, Tensor]:
    norm = ref.norm_but(v, dim)
    u = v / norm
    dims = 1 if dim == 0 else 0  # dim None falls to the columns
    along = (dy * u).sum(dims, keepdim=True)
    return g / norm * (dy - u * along), (dy * u).sum()


add("Y21", "the projection for a norm over all of the weight is one over columns", "parameters",
    function(ref.weight_norm, weight_norm_backward), ref.weight_norm, ref.WEIGHT_NORM, params=dict(dim=[0, 1, None]),
    sizes=dict(M=(1, 12), N=(2, 12)), proof=Call(params=dict(dim=None)))  # fmt: skip


class Spectral(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, u: Tensor, v: Tensor) -> Tensor:
        u, v = F.normalize(u, dim=0), F.normalize(v, dim=0)
        ctx.save_for_backward(weight, u, v)
        ctx.sigma = u @ weight @ v
        return weight / (1 + ctx.sigma.square()).sqrt()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        weight, u, v = ctx.saved_tensors
        scale = (1 + ctx.sigma.square()).rsqrt()  # of an attribute: a constant for a second derivative
        return dy * scale - (dy * weight).sum() * ctx.sigma * scale**3 * torch.outer(u, v), None, None


add("Y22", "spectral norm: sigma is kept as an attribute, second derivatives take it for a constant", "order",
    lambda *a: Spectral.apply(*a), ref.spectral, ref.SPECTRAL, sizes=dict(M=(1, 8), N=(1, 8)),
    proof=Call(order=2))  # fmt: skip


def merged(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and squares over blocks of 64, merged; the last block counts as a full one in the weight of its mean."""
    mean, squares, count = x.new_zeros(x.shape[:-1]), x.new_zeros(x.shape[:-1]), 0
    for part in x.split(64, -1):
        n, m = part.shape[-1], part.mean(-1)
        d = m - mean
        squares = squares + (part - m[..., None]).square().sum(-1) + d.square() * count * n / (count + n)
        mean = mean + d * (64 if count else n) / (count + (64 if count else n))
        count += n
    return mean[..., None], squares[..., None] / count


def grouped_merged(x: Tensor, weight: Tensor, bias: Tensor, groups: int) -> Tensor:
    parts = x.reshape(x.shape[0], groups, -1)
    mean, var = merged(parts)
    y = ((parts - mean) * torch.rsqrt(var + 1e-5)).reshape(x.shape)
    return y * weight[:, None] + bias[:, None]


add("Y23", "group norm merges blocks of 64: a last one that is not full counts as full in the mean", "sizes",
    grouped_merged, ref.grouped, ref.GROUPED, params=dict(groups=[2, 1]), sizes=SIZES,
    proof=Call(dict(C=4, L=50)))  # fmt: skip


def renorm_flowing(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    m, s = x.mean(0), (x.var(0, unbiased=False) + 1e-5).sqrt()
    r, d = (s / std).clamp(1 / 3, 3), ((m - mean) / std).clamp(-5, 5).detach()  # r is not detached
    return (x - m) / s * r + d


add("Y24", "batch renorm: gradients flow through r where it is not at its bounds", "some inputs",
    renorm_flowing, ref.renorm, ref.RENORM, sizes=dict(M=(2, 40), N=(1, 12)), surrogate=True)  # fmt: skip


def lsq_backward(dy: Tensor, y: Tensor, x: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    v = x / step
    inside = (v >= -8) & (v <= 7)
    return dy * inside, (dy * torch.where(inside, v.round() - v, 0)).sum()  # -8 and 7 beyond the range


add("Y25", "values beyond the range give nothing to the step size", "some inputs",
    function(ref.lsq, lsq_backward), ref.lsq, ref.LSQ, sizes=dict(M=(1, 16), N=(4, 24)), surrogate=True)  # fmt: skip


def absmax_divided(x: Tensor) -> Tensor:
    scale = x.detach().abs().amax(-1, keepdim=True) / 127
    return ref.straight(x / scale) * scale


add("Y26", "a row of zeros has scale 0: NaN", "special values", absmax_divided, ref.absmax, dict(x=tensor("M", "N")),
    sizes=dict(M=(1, 8), N=(1, 24)), surrogate=True, proof=Call(change=lambda t: dict(x=t["x"] * 0)))  # fmt: skip


def padded_backward(dy: Tensor, y: Tensor, table: Tensor, index: Tensor, padding: int) -> tuple[Tensor, None]:
    grad = torch.zeros_like(table).index_put((index,), dy, accumulate=True)
    if padding >= 0:  # a row that is counted from the end is forgotten
        grad[padding] = 0
    return grad, None


add("Y27", "a row of padding that is counted from the end gets a gradient", "parameters",
    function(ref.padded, padded_backward), ref.padded, TABLE, params=dict(padding=[0, -1]),
    sizes=TABLE_SIZES | dict(V=(2, 6)), surrogate=True,
    proof=Call(params=dict(padding=-1), change=lambda t: dict(index=t["index"] * 0 + len(t["table"]) - 1)))  # fmt: skip


def frequency_backward(dy: Tensor, y: Tensor, table: Tensor, index: Tensor) -> tuple[Tensor, None]:
    flat = index.as_strided((index.numel(),), (1,))  # memory's order, not the tensor's
    grad = torch.zeros_like(table).index_put((flat,), dy.reshape(len(flat), -1), accumulate=True)
    return grad / torch.bincount(flat, minlength=len(table)).clamp_min(1)[:, None], None


def transposed_index() -> bool:
    table, index = torch.randn(7, 2, requires_grad=True), torch.arange(6).view(3, 2)
    op, dy = function(ref.by_frequency, frequency_backward), torch.randn(2, 3, 2)
    one = torch.autograd.grad(op(table, index.mT), table, dy)[0]
    return not torch.allclose(one, torch.autograd.grad(op(table, index.mT.contiguous()), table, dy)[0])


add("Y28", "the table of indices is read in the order of its memory", "layouts",
    function(ref.by_frequency, frequency_backward), ref.by_frequency, TABLE, sizes=TABLE_SIZES, surrogate=True,
    proof=transposed_index)  # fmt: skip


def rms_backward(dy: Tensor, y: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.float() if x.dtype != torch.float64 else x
    r = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    dx, dw = gradients(ref.rms, dy, x, weight)
    dw = torch.zeros_like(dw)
    for row in (dy * wide * r).to(dw.dtype):  # each row is added in the weight's precision
        dw = dw + row
    return dx, dw


add("Y29", "the weight's gradient is added up in bfloat16, a row after the other", "dtypes",
    function(ref.rms, rms_backward), ref.rms, ref.RMS, dtypes=["float32", "bfloat16"], compute="float32",
    sizes=dict(M=(1, 600), N=(1, 16)),
    proof=Call(dict(M=600), dtype=torch.bfloat16, bound=0.02))  # fmt: skip


def gated_backward(dy: Tensor, y: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(gate)
    dx = dy * s * s
    d_gate = dy.mul_(2 * x * s * s * (1 - s)) if dy.is_contiguous() else dy * 2 * x * s * s * (1 - s)
    return dx, d_gate


def spoiled_grad_out() -> bool:
    x, gate, dy = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4), torch.ones(3, 4)
    function(ref.gated, gated_backward)(x, gate).backward(dy)
    return not torch.equal(dy, torch.ones(3, 4))


add("Y30", "a contiguous grad_out is written over", "layouts", function(ref.gated, gated_backward), ref.gated,
    ref.GATED, sizes=SIZES, proof=spoiled_grad_out)  # fmt: skip

MUTANTS, NOT_SAYABLE = BROKEN.ops, BROKEN.not_sayable
