"""Two sums over rows, to look at with `retrograd codegen`: `atomic` adds as the programs come, `ordered` in order.

retrograd codegen examples/column_sum.py:atomic
retrograd codegen examples/column_sum.py:ordered --against examples/column_sum.py:atomic
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.autotune([triton.Config({"ROWS": 16}, num_warps=4), triton.Config({"ROWS": 64}, num_warps=8)], key=["M", "N"])
@triton.jit
def sum_atomic_kernel(x_ptr, sum_ptr, M, N, ROWS: tl.constexpr, COLS: tl.constexpr):
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    total = tl.zeros([COLS], tl.float32)
    for step in range(ROWS):
        row = (tl.program_id(0) * ROWS + step).to(tl.int64)
        inside = (row < M) & (cols < N)
        total += tl.load(x_ptr + row * N + cols, mask=inside, other=0.0).to(tl.float32)
    tl.atomic_add(sum_ptr + cols, total, mask=cols < N)


@triton.jit
def sum_parts_kernel(x_ptr, parts_ptr, M, N, ROWS: tl.constexpr, COLS: tl.constexpr):
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    total = tl.zeros([COLS], tl.float32)
    for step in range(ROWS):
        row = (tl.program_id(0) * ROWS + step).to(tl.int64)
        inside = (row < M) & (cols < N)
        total += tl.load(x_ptr + row * N + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(parts_ptr + tl.program_id(0).to(tl.int64) * N + cols, total, mask=cols < N)


@triton.jit
def add_parts_kernel(parts_ptr, sum_ptr, P, N, COLS: tl.constexpr):
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros([COLS], tl.float32)
    for part in range(P):
        total += tl.load(parts_ptr + part.to(tl.int64) * N + cols, mask=cols < N, other=0.0)
    tl.store(sum_ptr + cols, total, mask=cols < N)


def atomic() -> torch.Tensor:
    """Launch on inputs of its own; under `retrograd codegen` nothing is executed, and no GPU is needed."""
    x = torch.empty(4096, 2048, dtype=torch.bfloat16, device="cuda")
    total = torch.zeros(2048, device="cuda")
    sum_atomic_kernel[lambda meta: (triton.cdiv(4096, meta["ROWS"]), 2)](x, total, 4096, 2048, COLS=1024)
    return total


def ordered() -> torch.Tensor:
    """The same sum in a fixed order: parts first, then the parts."""
    x = torch.empty(4096, 2048, dtype=torch.bfloat16, device="cuda")
    parts = torch.empty(64, 2048, device="cuda")
    total = torch.empty(2048, device="cuda")
    sum_parts_kernel[(64, 2)](x, parts, 4096, 2048, ROWS=64, COLS=1024)
    add_parts_kernel[(2,)](parts, total, 64, 2048, COLS=1024)
    return total
