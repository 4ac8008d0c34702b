"""Activations, softmax, losses and other small ops that are broken on purpose.

Ids starting with GX are our own, the others name the public report or class of bug they emulate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from retrograd.check.spec import OpSpec, op, tensor


def make(forward: Callable[..., Tensor], backward: Callable[..., Any], name: str) -> Callable[..., Tensor]:
    """An op whose gradients are `backward(grad_out, output, *inputs)`: one tensor, or one per input."""

    class Mutant(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Tensor:
            y = forward(*inputs)
            ctx.save_for_backward(y, *inputs)
            return y

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            grads = backward(dy, *ctx.saved_tensors)
            grads = grads if isinstance(grads, tuple) else (grads,)
            return tuple(g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=True))

    def call(*inputs: Tensor) -> Tensor:
        return Mutant.apply(*inputs)

    call.__name__ = name
    return call


def mutant(
    name: str,
    forward: Callable[..., Tensor],
    backward: Callable[..., Any],
    *,
    reference: Callable[..., Tensor] | None = None,
    inputs: dict[str, Any] | None = None,
    **options: Any,
) -> OpSpec:
    inputs = inputs or dict(x=tensor("M...", "N"))
    return op(make(forward, backward, name), reference or forward, inputs, name=name, **options)


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def log_softmax(x: Tensor) -> Tensor:
    return torch.log_softmax(x, -1)


def cumsum(x: Tensor) -> Tensor:
    return torch.cumsum(x, -1)


def silu_slope(x: Tensor, s: Tensor) -> Tensor:
    return s * (1 + x * (1 - s))


def gelu_erf_slope(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def gelu_tanh_slope(x: Tensor) -> Tensor:
    k = math.sqrt(2 / math.pi)
    t = torch.tanh(k * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * k * (1 + 3 * 0.044715 * x * x)


def as_contiguous(t: Tensor) -> Tensor:
    """What a kernel sees that takes `t` for contiguous; memory that is not there reads as zero."""
    size = t.untyped_storage().nbytes() // t.element_size()
    if not t.numel() or not size:
        return torch.zeros(t.shape, dtype=t.dtype, device=t.device)
    place = t.storage_offset() + torch.arange(t.numel(), device=t.device).reshape(t.shape)
    return torch.where(place < size, t.as_strided((size,), (1,), 0)[place.clamp(max=size - 1)], 0)


# The softmax backward ignores grad_out, as if it were all ones times y (class of mul_by_grad_output).
G01 = mutant("G01", softmax, lambda dy, y, x: y * (1 - y))

# The slope of tanh-GELU is used for erf-GELU (a common slip).
G07 = mutant("G07", F.gelu, lambda dy, y, x: dy * gelu_tanh_slope(x))

# The softmax backward lacks the sum over the row (a common slip).
G08 = mutant("G08", softmax, lambda dy, y, x: y * dy)

# grad_out is read as contiguous, though after .sum() its strides are 0 (ROCm/TransformerEngine#623).
G15 = mutant("G15", F.silu, lambda dy, y, x: as_contiguous(dy) * silu_slope(x, torch.sigmoid(x)))

# The cumsum backward sums from the wrong end (a common slip).
G16 = mutant("G16", cumsum, lambda dy, y, x: cumsum(dy))


def _squeezed(dy: Tensor, y: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    dx = dy @ weight
    if x.shape[0] == 1:
        # With one row the axes are gone and the outer product is taken the wrong way round.
        dx = dx.flip(-1)
    return dx, dy.mT @ x


# A linear layer's dx is wrong for a batch of one only (class of squeeze without an axis).
G18 = mutant("G18", F.linear, _squeezed, inputs=dict(x=tensor("M", "N"), weight=tensor("K", "N")))


def _smooth_l1(x: Tensor, target: Tensor) -> Tensor:
    return F.smooth_l1_loss(x, target, reduction="none")


def _sign_lost(dy: Tensor, y: Tensor, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    slope = dy * (x - target).abs().clamp(max=1)
    return slope, -slope


# The smooth-L1 backward loses the sign of the difference (a common slip).
G19 = mutant("G19", _smooth_l1, _sign_lost, inputs=dict(x=tensor("M...", "N"), target=tensor("M...", "N")))

# The backward computes its sigmoid in float16 (class of lost precision).
G21 = mutant("G21", F.silu, lambda dy, y, x: dy * silu_slope(x, torch.sigmoid(x.half()).to(x.dtype)))

# The backward's sigmoid is exp(x) / (1 + exp(x)), which is inf / inf for large x (own).
GX01 = mutant("GX01", F.silu, lambda dy, y, x: dy * silu_slope(x, x.exp() / (1 + x.exp())))


def _no_shift(dy: Tensor, y: Tensor, x: Tensor) -> Tensor:
    e = x.exp()
    return dy - e / e.sum(-1, keepdim=True) * dy.sum(-1, keepdim=True)


# The log-softmax backward recomputes the softmax without subtracting the maximum (own).
GX02 = mutant("GX02", log_softmax, _no_shift)


def _unmasked_rows(dy: Tensor, y: Tensor, x: Tensor) -> Tensor:
    grad = y * (dy - (y * dy).sum(-1, keepdim=True))
    return grad + 0 * grad.sum()  # padding rows count with weight 0, which NaN does not mind


# A sum over masked rows multiplies by zero instead of leaving out, so NaN in one row reaches all (ROCm/aiter#3551,
# HKUSTDial/flash-sparse-attention#121).
GX09 = mutant("GX09", softmax, _unmasked_rows)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _swapped(dy: Tensor, y: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return dy * F.silu(gate), dy * up * silu_slope(gate, torch.sigmoid(gate))


# The SwiGLU backward returns the gradients of gate and up in the wrong order (own).
GX03 = mutant("GX03", _swiglu, _swapped, inputs=dict(gate=tensor("M...", "N"), up=tensor("M...", "N")))


def _overwritten(dy: Tensor, y: Tensor, table: Tensor, index: Tensor) -> tuple[Tensor, None]:
    grad = torch.zeros_like(table)
    grad[index] = dy
    return grad, None


# The embedding backward overwrites instead of adding, so repeated indices lose gradients (atomics class).
GX04 = mutant(
    "GX04",
    lambda table, index: table[index],
    _overwritten,
    inputs=dict(table=tensor("V", "N"), index=tensor("M", dtype="int64", low=0, high="V")),
    sizes=dict(V=(1, 64)),
)


# The forward is tanh-GELU where erf-GELU is promised; its backward fits the promise (own).
GX05 = mutant(
    "GX05", lambda x: F.gelu(x, approximate="tanh"), lambda dy, y, x: dy * gelu_erf_slope(x), reference=F.gelu
)


def _over_output(dy: Tensor, y: Tensor, x: Tensor) -> Tensor:
    grad = y * (dy - (y * dy).sum(-1, keepdim=True))
    # .data, as a kernel that writes to memory does not bump the version counter either.
    y.data.copy_(grad)
    return grad


# The softmax backward writes into the saved output, which the caller holds as well (own).
GX06 = mutant("GX06", softmax, _over_output)

# tanh's slope is taken from x instead of from y (own).
GX07 = mutant("GX07", torch.tanh, lambda dy, y, x: dy * (1 - x * x))


def _reduced_mean(x: Tensor) -> Tensor:
    return x.square().mean(-1)


# The backward of a row mean forgets to divide by the row's length (own).
GX08 = mutant("GX08", _reduced_mean, lambda dy, y, x: 2 * x * dy[..., None], sizes=dict(N=(1, 512)))

MUTANTS = {name: spec for name, spec in list(globals().items()) if isinstance(spec, OpSpec)}
