"""Gradient of a scale by three programs that share tiles with a remainder, by plain stores or by atomics."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

import retrograd as rg

PROGRAMS, BLOCK = 3, 16


@triton.jit
def shared_tiles_kernel(x_ptr, dy_ptr, dw_ptr, M, N, items, share, ATOMIC: tl.constexpr, BLOCK: tl.constexpr):
    """Each program has as many blocks of rows, column by column; a column may begin in one and end in the next."""
    item = tl.program_id(0) * share
    last = tl.minimum(item + share, items)
    blocks = tl.cdiv(M, BLOCK)
    while item < last:
        column = item // blocks * BLOCK + tl.arange(0, BLOCK)
        until = tl.minimum((item // blocks + 1) * blocks, last)
        total = tl.zeros([BLOCK], tl.float32)
        while item < until:
            row = item % blocks * BLOCK + tl.arange(0, BLOCK)
            at, mask = row[:, None] * N + column[None, :], (row < M)[:, None] & (column < N)[None, :]
            total += tl.sum(tl.load(x_ptr + at, mask=mask, other=0.0) * tl.load(dy_ptr + at, mask=mask, other=0.0), 0)
            item += 1
        if ATOMIC:
            tl.atomic_add(dw_ptr + column, total, mask=column < N)
        else:
            tl.store(dw_ptr + column, total, mask=column < N)


def scale(atomic: bool) -> Any:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        @once_differentiable
        def backward(ctx, dy):
            x, w = (tensor.contiguous() for tensor in ctx.saved_tensors)
            dy, dw, (M, N) = dy.contiguous(), torch.zeros_like(w), x.shape
            items = triton.cdiv(M, BLOCK) * triton.cdiv(N, BLOCK)
            if items:
                share = triton.cdiv(items, PROGRAMS)
                shared_tiles_kernel[(PROGRAMS,)](x, dy, dw, M, N, items, share, ATOMIC=atomic, BLOCK=BLOCK)
            return dy * w, dw

    inputs = dict(x=rg.tensor("M", "N"), w=rg.tensor("N"))
    return rg.op(lambda x, w: Scale.apply(x, w), lambda x, w: x * w, inputs, double_backward=False)
