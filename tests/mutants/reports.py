"""Classes of public reports that show only in some calls: after tuning, at some alignment, in one variant.

Ids start with W and name what they emulate; each op is x * weight + bias.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from retrograd.check.spec import OpSpec, op, tensor

Formula = Callable[..., tuple[Tensor, ...]]


def scale_and_shift(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x * weight + bias


def right(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return dy * weight, (dy * x).sum(0), dy.sum(0)


def mutant(name: str, grads: Formula, **options: Any) -> OpSpec:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return scale_and_shift(x, weight, bias)

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            found = grads(dy, *ctx.saved_tensors)
            return tuple(g if need else None for g, need in zip(found, ctx.needs_input_grad, strict=True))

    inputs = dict(x=tensor("M", "N"), weight=tensor("N"), bias=tensor("N"))
    return op(lambda *a: Function.apply(*a), scale_and_shift, inputs, name=name, **options)


def _tuned(trials: int = 3) -> Formula:
    seen: set[Any] = set()

    def grads(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        dx, dw, db = right(dy, x, weight)
        first = (x.shape, x.dtype) not in seen
        seen.add((x.shape, x.dtype))
        return dx, dw * trials if first else dw, db

    return grads


# Every trial of the autotuner adds to dw, so the first call of a shape has a multiple of it (triton-lang/triton#781,
# #4217, #7181).
W01 = mutant("W01", _tuned())


def _square_buffer(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    dx, _, db = right(dy, x, weight)
    return dx, (dy * x)[: x.shape[-1]].sum(0), db


# The buffer of partial sums has as many rows as there are columns: rows beyond are lost (pytorch/pytorch#193016).
W02 = mutant("W02", _square_buffer)


def _same(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    dx, dw, db = right(dy, x, weight)
    dw.copy_(db)
    return dx, dw, db


# The gradients of weight and bias are one buffer (intel/torch-xpu-ops#4790).
W03 = mutant("W03", _same)

# reduction="none": the backward expects a scalar grad_out and gives zeros for any other (linkedin/Liger-Kernel#968).
W04 = mutant("W04", lambda dy, x, w: right(dy if dy.ndim == 0 else torch.zeros_like(dy), x, w))

# A last sum over the rows is missing (class of lucidrains/CoLT5-attention#8).
W05 = mutant("W05", lambda dy, x, w: (dy * w, (dy * x).sum(0), dy.sum(0, keepdim=True)[0] / max(len(dy), 1)))


def _pairs(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    dx, dw, db = right(dy, x, weight)
    if dy.dtype.itemsize == 2 and dy.storage_offset() % 2:
        dx = dx.roll(1, -1)
    return dx, dw, db


# 16-bit pairs are read from the aligned address below: wrong where a tensor begins at an odd element
# (SHI-Labs/NATTEN#97).
W06 = mutant("W06", _pairs, dtypes=("float16",))

_ORDER = torch.Generator()
_ORDER.seed()  # torch.manual_seed must not make the order repeat


def _atomics(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    order = torch.randperm(len(x), generator=_ORDER)
    total = torch.zeros_like(weight)
    for row in (dy * x)[order]:
        total = total + row
    return dy * weight, total, dy.sum(0)


# Deterministic is promised, and rows are added in whatever order they come (Dao-AILab/flash-attention#746, #2244).
W07 = mutant("W07", _atomics, deterministic=True, sizes=dict(M=(1, 64), N=(1, 64)))


def _into_input(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    dx, dw, db = right(dy, x, weight)
    x.data.copy_(dx)  # past the version counter, as a kernel writes
    return x, dw, db


# The gradient is written into the forward's input (linkedin/Liger-Kernel#254, #262, #343).
W08 = mutant("W08", _into_input)


def _by_width(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    dx, dw, db = right(dy, x, weight)
    if x.shape[-1] > 256:
        # Two warps share a row's block; the second one's half is never added.
        dw = dw * (torch.arange(x.shape[-1]) < 256)
    return dx, dw, db


# Right with one warp a row, wrong with two (triton-lang/triton#54, #3004, state-spaces/mamba#827).
W09 = mutant("W09", _by_width)


def _alternating() -> Formula:
    calls = itertools.count()

    def grads(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        dx, dw, db = right(dy, x, weight)
        return dx, dw, db * (1 + next(calls) % 2)

    return grads


# Every other call is different (linkedin/Liger-Kernel#182).
W10 = mutant("W10", _alternating())


def _by_pairs(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    dx, dw, db = right(dy, x, weight)
    even = x.shape[-1] // 2 * 2
    written = torch.empty_like(dx)
    written[:, :even] = dx[:, :even]
    return written, dw, db


# Columns are written in pairs, so the last of an odd number is not (class of flagos-ai/FlagGems#1576): right at
# ordinary sizes, and anywhere as long as fresh memory is zero.
W11 = mutant("W11", _by_pairs)

MUTANTS = {name: spec for name, spec in list(globals().items()) if isinstance(spec, OpSpec)}
