"""The backward of few rows, in one kernel: programs that hold rows, and others that add up columns of all of them."""

from __future__ import annotations

import triton
import triton.language as tl

from retrograd.ops.norm.triton.arithmetic import wait_for_kernels_ahead, widen
from retrograd.ops.norm.triton.backward import load_rows, load_weight, put_total, row_gradients, store_both


@triton.jit(do_not_specialize=["M"])
def norm_bwd_kernel_few(
    grad_out_ptr, s_ptr, weight_ptr, mean_ptr, rstd_ptr, grad_s_ptr, grad_x_ptr, grad_residual_ptr,  # norm_bwd_kernel's
    grad_weight_ptr, grad_bias_ptr,  # [H, N] or None
    grad_out_stride, s_stride, grad_s_stride, M, N, H,
    UNIT: tl.constexpr, weight_offset: tl.constexpr, ACCUMULATE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The gradients of few rows: program (p, h) takes row tile p of head h, those behind take a block of columns."""
    if PDL:
        wait_for_kernels_ahead()
    N = N * UNIT
    pid = tl.program_id(0)
    head = tl.program_id(1)
    tiles = tl.cdiv(M, BLOCK_M)
    # Names of one branch must not meet those of the other, where their shapes differ: each is a function.
    if pid < tiles:
        if (grad_x_ptr is not None) or (grad_residual_ptr is not None):
            rows = pid * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
            tile_gradients(
                grad_out_ptr, s_ptr, weight_ptr, mean_ptr, rstd_ptr, grad_s_ptr, grad_x_ptr, grad_residual_ptr,
                grad_out_stride * UNIT, s_stride * UNIT, grad_s_stride * UNIT, rows, M, N, H, head, weight_offset,
                BLOCK_N, PTX,
            )  # fmt: skip
    else:
        column_sums(
            grad_out_ptr, s_ptr, mean_ptr, rstd_ptr, grad_weight_ptr, grad_bias_ptr, grad_out_stride * UNIT,
            s_stride * UNIT, pid - tiles, M, N, H, head, ACCUMULATE, BLOCK_R, BLOCK_C, PTX,
        )  # fmt: skip


@triton.jit
def tile_gradients(
    grad_out_ptr, s_ptr, weight_ptr, mean_ptr, rstd_ptr, grad_s_ptr, grad_x_ptr, grad_residual_ptr, grad_out_stride,
    s_stride, grad_s_stride, rows, M, N, H, head, weight_offset: tl.constexpr, BLOCK_N: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Write the gradients of `rows` [R] of a head."""
    cols = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    weight = load_weight(weight_ptr, head * N + cols, cols < N, weight_offset)
    g, h, rstd, row_offsets, mask = load_rows(
        grad_out_ptr, s_ptr, mean_ptr, rstd_ptr, grad_out_stride, s_stride, rows, cols, M, N, H, head, PTX
    )
    if weight_ptr is not None:
        g = g * weight[None, :]
    ds = row_gradients(g, h, rstd, tl.div_rn(1.0, N * 1.0), mean_ptr is not None, PTX)
    if grad_s_ptr is not None:
        ds += widen(tl.load(grad_s_ptr + row_offsets * grad_s_stride + cols[None, :], mask=mask, other=0.0), PTX)
    store_both(grad_x_ptr, grad_residual_ptr, row_offsets * N + cols[None, :], ds, mask, False, "")


@triton.jit
def column_sums(
    grad_out_ptr, s_ptr, mean_ptr, rstd_ptr, grad_weight_ptr, grad_bias_ptr, grad_out_stride, s_stride, block, M, N, H,
    head, ACCUMULATE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a head's vectors at column block `block`: BLOCK_R rows at a time, in ascending order."""
    cols = block * BLOCK_C + tl.arange(0, BLOCK_C)  # [BLOCK_C]
    weight_sum = tl.zeros([BLOCK_R, BLOCK_C], dtype=tl.float32)
    bias_sum = tl.zeros([BLOCK_R, BLOCK_C], dtype=tl.float32)
    for start in range(0, M, BLOCK_R):
        rows = start + tl.arange(0, BLOCK_R)  # [BLOCK_R]
        g, h, _, _, _ = load_rows(
            grad_out_ptr, s_ptr, mean_ptr, rstd_ptr, grad_out_stride, s_stride, rows, cols, M, N, H, head, PTX
        )
        weight_sum += g * h
        bias_sum += g
    if grad_weight_ptr is not None:
        put_total(grad_weight_ptr + head * N + cols, tl.sum(weight_sum, axis=0), cols < N, ACCUMULATE)
    if grad_bias_ptr is not None:
        put_total(grad_bias_ptr + head * N + cols, tl.sum(bias_sum, axis=0), cols < N, ACCUMULATE)
