"""Ops that read or write outside their tensors, where a neighbour's memory happens to lie.

Ids start with OB; each names the public report or class of bug that it emulates. Memory past a tensor is reached with
`as_strided` inside an allocation that the op was not given: what a kernel does that gets the pointer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from retrograd.check.spec import OpSpec, op, tensor


def beside(t: Tensor, offset: int, count: int) -> Tensor:
    """`count` elements of memory that begin `offset` elements from the first of `t`, as a kernel sees them."""
    size = t.element_size()
    raw = (ctypes.c_char * (count * size)).from_address(t.data_ptr() + offset * size)
    return torch.frombuffer(raw, dtype=t.dtype)


Gradient = Callable[[Tensor, Tensor], Tensor]


def mutant(name: str, gradient: Gradient, **options: Any) -> OpSpec:
    """x * x with the given backward, a function of x and dy."""

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return gradient(x.contiguous(), dy.contiguous()) if x.numel() else 2 * x * dy

    return op(lambda x: Square.apply(x), lambda x: x * x, dict(x=tensor("M...", "N")), name=name, **options)


def right(x: Tensor, dy: Tensor) -> Tensor:
    return 2 * x * dy


def softmax_with_largest(largest: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Softmax over everything but the first dimension's rows; the backward computes it again below `largest`."""

    class Softmax(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return torch.softmax(x, -1)

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            e = torch.exp(x - largest(x.contiguous()))
            p = e / e.sum(-1, keepdim=True)
            return p * (dy - (dy * p).sum(-1, keepdim=True))

    return lambda x: Softmax.apply(x)


def _largest_of_block(x: Tensor) -> Tensor:
    tail = beside(x, x.numel(), 1) if x.numel() else x.new_zeros(1)
    return torch.fmax(x.amax(-1, keepdim=True), tail)


# The block's maximum is taken over its unmasked tail too: right unless the neighbour is larger by 80, and NaN in it is
# no maximum (class of NVlabs/COAT#19 and thunlp/TritonBench#12: loads without a boundary check).
OB01 = op(
    softmax_with_largest(_largest_of_block), lambda x: torch.softmax(x, -1), dict(x=tensor("M", "N")),
    sizes=dict(N=(1, 512)), name="OB01",
)  # fmt: skip


def _times_zero(x: Tensor, dy: Tensor) -> Tensor:
    dx = right(x, dy)
    dx.view(-1)[-1] += beside(x, x.numel(), 1)[0] * 0
    return dx


# What was read past the end is multiplied by 0: right until the neighbour holds a NaN or an Inf
# (triton-lang/triton#10772, vllm-project/vllm#47303).
OB02 = mutant("OB02", _times_zero)


def _writes_past(x: Tensor, dy: Tensor) -> Tensor:
    dx = torch.empty_like(x)
    beside(dx, 0, dx.numel() + 1).copy_(torch.cat([right(x, dy).flatten(), x.new_tensor([7.5])]))
    return dx


# The last store has no mask: one element past dx is written (own; class of NVlabs/COAT#19, "memory corruption"). The
# sizes leave eight bytes behind dx that are nobody's, so that stages without guard bands harm no process.
OB03 = mutant("OB03", _writes_past, sizes=dict(N=[4, 8, 128, 48]))


def _reads_before(x: Tensor, dy: Tensor) -> Tensor:
    dx = right(x, dy)
    dx.view(-1)[0] += beside(dy, -1, 1)[0] * 0
    return dx


# The element before the first is read: an index of -1 (own; class of Deformable-DETR's corners, which lie outside).
OB04 = mutant("OB04", _reads_before)

MUTANTS = {name: spec for name, spec in list(globals().items()) if isinstance(spec, OpSpec)}
