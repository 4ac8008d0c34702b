"""Real Triton kernels that ask the wrong dimension whether it fills its block."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from retrograd.check.spec import OpSpec, op, tensor


@triton.jit
def row_sum_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    if WHOLE:
        x = tl.load(x_ptr + row * N + columns)
    else:
        x = tl.load(x_ptr + row * N + columns, mask=columns < N, other=0.0)
    tl.store(y_ptr + row, tl.sum(x, axis=0))


def row_sum(by_rows: bool) -> Any:
    class RowSum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            x = x.contiguous()
            ctx.columns = x.shape[1]
            y, block = x.new_empty(len(x)), triton.next_power_of_2(x.shape[1])
            whole = (len(x) if by_rows else x.shape[1]) == block  # the bug: as many rows as a block has columns
            if len(x):
                row_sum_kernel[(len(x),)](x, y, x.shape[1], BLOCK=block, WHOLE=whole)
            return y

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
            return dy[:, None].expand(-1, ctx.columns).contiguous()

    return RowSum.apply


def _spec(name: str, by_rows: bool, **sizes: tuple[int, int]) -> OpSpec:
    return op(row_sum(by_rows), lambda x: x.sum(-1), dict(x=tensor("M", "N")), name=name, sizes=dict(sizes))


BL01 = _spec("BL01", True, N=(1, 5000))
BL02 = _spec("BL02", True, M=(1, 40), N=(1, 300))  # no M is as large as the block of the ordinary N
MUTANTS = {"BL01": BL01, "BL02": BL02}
RIGHT = _spec("row_sum", False, N=(1, 5000))
