"""Matmuls in Triton whose sum over K is split into as many pieces as the batch leaves programs for, or always into two."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from retrograd.check.spec import OpSpec, op, tensor


@triton.jit
def partial_products(
    x_ptr, w_ptr, out_ptr, M, N, K, x_row, x_col, w_row, w_col, STEP: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    first = tl.program_id(2) * STEP
    total = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(first, first + STEP, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = (k < first + STEP) & (k < K)
        x = tl.load(x_ptr + rows[:, None] * x_row + k * x_col, (rows < M)[:, None] & inside, 0.0)
        w = tl.load(w_ptr + k[:, None] * w_row + cols * w_col, inside[:, None] & (cols < N), 0.0)
        total = tl.dot(x, w, total, input_precision="ieee")
    place = (tl.program_id(2) * M + rows)[:, None] * N + cols
    tl.store(out_ptr + place, total, (rows < M)[:, None] & (cols < N))


def product(x: torch.Tensor, w: torch.Tensor, few: int, many: int) -> torch.Tensor:
    (m, k), n = x.shape, w.shape[1]
    pieces = few if m <= 64 else many
    step = -(-k // pieces)
    parts = torch.empty(pieces, m, n)
    if parts.numel():
        grid = (triton.cdiv(m, 16), triton.cdiv(n, 16), pieces)
        partial_products[grid](x, w, parts, m, n, k, *x.stride(), *w.stride(), step, 16, 16, 16)
    return parts.sum(0)


class Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, few, many):
        ctx.save_for_backward(x, w)
        ctx.pieces = few, many
        return product(x, w, few, many)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        return product(dy, w.T, *ctx.pieces), product(x.T, dy, 1, 1), None, None


def _apply(few: int, many: int, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return Matmul.apply(x, w, few, many)


def _spec(name: str, few: int, many: int) -> OpSpec:
    inputs = dict(x=tensor("M", "K"), w=tensor("K", "N"))
    return op(partial(_apply, few, many), torch.matmul, inputs, sizes=dict(N=40, K=48), batch_invariant=True, name=name)


split, fixed = _spec("split_by_batch", 2, 1), _spec("always_split", 2, 2)
