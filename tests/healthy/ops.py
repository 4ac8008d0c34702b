"""Ops that are right: a checker that finds anything in them is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from retrograd.check.spec import OpSpec, op, tensor

FLOATS = ("float32", "bfloat16", "float16")
X = tensor("M...", "N")
ROW = tensor("N")
# An empty row has no mean, maximum or probabilities; these ops promise nothing there.
FILLED = dict(N=(1, 512))

HEALTHY: dict[str, OpSpec] = {}


def healthy(name: str, fn: Callable[..., Any], reference: Callable[..., Any], inputs: Any, **options: Any) -> None:
    HEALTHY[name] = op(fn, reference, inputs, name=name, **options)


def itself(name: str, fn: Callable[..., Any], inputs: Any, **options: Any) -> None:
    """An op of PyTorch's own, which in float64 is its own reference."""
    healthy(name, fn, fn, inputs, **options)


def masked(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients that autograd asked for, and None for every other input."""
    padded = (*grads, *[None] * (len(ctx.needs_input_grad) - len(grads)))
    return tuple(g if need else None for g, need in zip(padded, ctx.needs_input_grad, strict=True))


def rows(t: Tensor) -> Tensor:
    return t.reshape(math.prod(t.shape[:-1]), t.shape[-1])


# --- PyTorch's own ops ------------------------------------------------------------


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def layer_norm_formula(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight + bias


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def rms_norm_formula(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


EPS = dict(eps=[1e-6, 1e-2])
AFFINE = dict(x=X, weight=ROW, bias=ROW)
healthy("layer_norm", _layer_norm, layer_norm_formula, AFFINE, params=EPS, sizes=FILLED)
healthy("rms_norm", _rms_norm, rms_norm_formula, dict(x=X, weight=ROW), params=EPS, sizes=FILLED)
itself("softmax", lambda x: torch.softmax(x, -1), dict(x=X), sizes=FILLED, dtypes=FLOATS)
itself("log_softmax", lambda x: torch.log_softmax(x, -1), dict(x=X), sizes=FILLED)
itself("logsumexp", lambda x: torch.logsumexp(x, -1), dict(x=X), sizes=FILLED)
itself("gelu", F.gelu, dict(x=X), params=dict(approximate=["none", "tanh"]))
itself("silu", F.silu, dict(x=X), dtypes=FLOATS)
itself("linear", F.linear, dict(x=X, weight=tensor("K", "N"), bias=tensor("K")))
itself("cumsum", lambda x: torch.cumsum(x, -1), dict(x=X))
itself(
    "conv1d",
    F.conv1d,
    dict(x=tensor("B", "C", "L"), weight=tensor("K", "C", 3)),
    params=dict(padding=[0, 1]),
    sizes=dict(B=(1, 4), C=(1, 8), K=(1, 8), L=(3, 64)),
)
itself(
    "group_norm",
    lambda x, weight, bias: F.group_norm(x, 2, weight, bias),
    dict(x=tensor("B", "C", "L"), weight=tensor("C"), bias=tensor("C")),
    sizes=dict(B=(1, 4), C=[2, 4, 8], L=(2, 64)),
)
itself(
    "attention",
    F.scaled_dot_product_attention,
    {name: tensor("B", "H", length, "D") for name, length in dict(query="Q", key="K", value="K").items()},
    sizes=dict(B=(1, 3), H=(1, 3), Q=(1, 32), K=(1, 32), D=(1, 32)),
)
# The mean over the batch is undefined without a sample.
itself(
    "cross_entropy",
    F.cross_entropy,
    dict(logits=tensor("M", "C"), target=tensor("M", dtype="int64", low=0, high="C")),
    sizes=dict(M=(1, 128), C=(1, 128)),
)
healthy(
    "embedding",
    lambda table, index: F.embedding(index, table),
    lambda table, index: table[index],
    dict(table=tensor("V", "N"), index=tensor("M", dtype="int64", low=0, high="V")),
    sizes=dict(V=(1, 64)),
)
itself(
    "grid_sample",
    lambda image, grid: F.grid_sample(image, grid, padding_mode="zeros", align_corners=False),
    dict(image=tensor("B", "C", "H", "W"), grid=tensor("B", "P", "Q", 2, low=-1.2, high=1.2)),
    sizes=dict(B=(1, 3), C=(1, 4), H=(1, 16), W=(1, 16), P=(1, 8), Q=(1, 8)),
)
itself("smooth_l1", lambda x, y: F.smooth_l1_loss(x, y, reduction="none"), dict(x=X, target=X))
itself(
    "index_add",
    lambda x, source, index: x.index_add(0, index, source),
    dict(x=tensor("V", "N"), source=tensor("M", "N"), index=tensor("M", dtype="int64", low=0, high="V")),
    sizes=dict(V=(1, 64)),
)
itself(
    "max_pool1d",
    lambda x: F.max_pool1d(x, 3, stride=2),
    dict(x=tensor("B", "C", "L")),
    sizes=dict(B=(1, 4), C=(1, 8), L=(3, 64)),
)


# Kinks, where one-sided derivatives differ and each is right.
itself("amax", lambda x: x.amax(-1), dict(x=X), sizes=FILLED)
healthy("relu_from_zero", lambda x: torch.where(x < 0, 0, x), F.relu, dict(x=X))
healthy("absolute", lambda x: torch.where(x < 0, -x, x), torch.abs, dict(x=X))
itself(
    "grid_sample_border",
    lambda image, grid: F.grid_sample(image, grid, padding_mode="border", align_corners=True),
    dict(image=tensor("B", "C", "H", "W"), grid=tensor("B", "P", "Q", 2, low=-1.2, high=1.2)),
    sizes=dict(B=(1, 3), C=(1, 4), H=(2, 16), W=(2, 16), P=(1, 8), Q=(1, 8)),
)


# --- Custom functions ------------------------------------------------------------


def in_order(terms: Tensor) -> Tensor:
    return terms.sum(0)


def in_random_order(terms: Tensor) -> Tensor:
    """A sum over the rows one after another, in an order drawn anew at each call, as float atomics do it."""
    total = torch.zeros_like(terms[:1].sum(0))
    for row in terms[torch.randperm(len(terms), generator=_ORDER)]:
        total = total + row
    return total


# A generator of its own, so that torch.manual_seed does not make the order repeat.
_ORDER = torch.Generator()
_ORDER.seed()


def widened(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize == 2 else dtype


def make_rms_norm(
    add_up: Callable[[Tensor], Tensor] = in_order, inner: Callable[[torch.dtype], torch.dtype] = widened
) -> Callable[..., Tensor]:
    """A right RMSNorm, computed in the dtype that `inner` names and rounded once at the end.

    `add_up` is how dw is summed over the rows.
    """

    class RMSNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
            wide = x.to(inner(x.dtype))
            rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
            ctx.save_for_backward(x, weight, rstd)
            y = wide * rstd
            return (y if weight is None else y * weight.to(wide.dtype)).to(x.dtype)

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            x, weight, rstd = ctx.saved_tensors
            xhat, dy = x.to(rstd.dtype) * rstd, dy.to(rstd.dtype)
            dx = dw = None
            if ctx.needs_input_grad[0]:
                g = dy if weight is None else dy * weight.to(rstd.dtype)
                dx = (rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True))).to(x.dtype)
            if ctx.needs_input_grad[1]:
                dw = add_up(rows(dy * xhat)).to(weight.dtype)
            return masked(ctx, dx, dw)

    def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
        return RMSNorm.apply(x, weight, eps)

    return rms_norm


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        rstd = torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        return (x - mean) * rstd * weight + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        xhat, g = (x - mean) * rstd, dy * weight
        dx = rstd * (g - g.mean(-1, keepdim=True) - xhat * (g * xhat).mean(-1, keepdim=True))
        return masked(ctx, dx, rows(dy * xhat).sum(0), rows(dy).sum(0))


class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return gate * torch.sigmoid(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        s = torch.sigmoid(gate)
        return masked(ctx, dy * up * s * (1 + gate * (1 - s)), dy * gate * s)


class FusedAddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        s = x + residual
        rstd = torch.rsqrt(s.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(s, weight, rstd)
        return s * rstd * weight, s

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, ds: Tensor) -> tuple[Tensor | None, ...]:
        s, weight, rstd = ctx.saved_tensors
        xhat, g = s * rstd, dy * weight
        total = rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True)) + ds
        # Two tensors: a caller may change one of the two gradients in place.
        return masked(ctx, total, total.clone(), rows(dy * xhat).sum(0))


def _fused_formula(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return rms_norm_formula(x + residual, weight, eps), x + residual


def normed(name: str, fn: Callable[..., Tensor], weight: Any = ROW, **options: Any) -> None:
    healthy(name, fn, rms_norm_formula, dict(x=X, weight=weight), params=EPS, **options)


normed("custom_rms_norm", make_rms_norm(), dtypes=("float32", "float16", "bfloat16"), compute="float32")
normed("rms_norm_no_weight", make_rms_norm(), weight=None)
normed("rms_norm_atomics", make_rms_norm(in_random_order), deterministic=False)
normed("rms_norm_atomics_unstated", make_rms_norm(in_random_order))
# Float32 inside even for float64 inputs: whoever takes differences of it in float64 meets float32 noise.
normed("rms_norm_float32_inside", make_rms_norm(inner=lambda dtype: torch.float32))
healthy("custom_layer_norm", lambda *a, eps: LayerNorm.apply(*a, eps), layer_norm_formula, AFFINE, params=EPS)
healthy("swiglu", lambda g, u: SwiGLU.apply(g, u), lambda g, u: F.silu(g) * u, dict(gate=X, up=X))
healthy(
    "fused_add_rms_norm",
    lambda *a, eps: FusedAddRMSNorm.apply(*a, eps),
    _fused_formula,
    dict(x=X, residual=X, weight=ROW),
    params=EPS,
)
