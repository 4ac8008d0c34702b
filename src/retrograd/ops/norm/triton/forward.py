"""Forward kernels of the norms: a tile of whole rows per program, or rows walked in column blocks.

Rows too wide for one program on a GPU that can hold all programs at once are in `slices.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M"])
def norm_fwd_kernel(
    x_ptr,  # [M * H, N]
    residual_ptr,  # [M * H, N] or None
    weight_ptr,  # [H, N] or None
    bias_ptr,  # [H, N] or None
    y_ptr,  # [M * H, N] contiguous
    s_ptr,  # [M * H, N] contiguous, or None
    mean_ptr,  # [M * H] float32, or None
    rstd_ptr,  # [M * H] float32, or None
    x_stride,
    residual_stride,
    M,
    N,
    H,
    eps,
    UNIT: tl.constexpr,
    weight_offset: tl.constexpr,
    CENTERED: tl.constexpr,
    S_DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (t, h) normalises rows [t * BLOCK_M, + BLOCK_M) of head h whole: BLOCK_N >= N."""
    N = N * UNIT
    head = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    cols = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    row_mask = rows < M
    col_mask = cols < N
    mask = row_mask[:, None] & col_mask[None, :]
    all_rows = rows.to(tl.int64) * H + head  # [BLOCK_M]
    out_offsets = all_rows[:, None] * N + cols[None, :]

    s = tl.load(x_ptr + all_rows[:, None] * x_stride * UNIT + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        offsets = all_rows[:, None] * residual_stride * UNIT + cols[None, :]
        s += tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    # The backward sees s as stored, so the forward has to normalise the stored value.
    s_stored = s.to(S_DTYPE)
    s = s_stored.to(tl.float32)
    if s_ptr is not None:
        tl.store(s_ptr + out_offsets, s_stored, mask=mask)

    if CENTERED:
        mean = over(tl.sum(s, axis=1), N, S_DTYPE)  # [BLOCK_M]
        s = tl.where(mask, s - mean[:, None], 0.0)
        if mean_ptr is not None:
            tl.store(mean_ptr + all_rows, mean, mask=row_mask)
    # Rows beyond M are zeros: with eps=0 they would divide by zero.
    rstd = reciprocal_root(tl.where(row_mask, over(tl.sum(s * s, axis=1), N, S_DTYPE) + eps, 1.0))  # [BLOCK_M]
    if rstd_ptr is not None:
        tl.store(rstd_ptr + all_rows, rstd, mask=row_mask)
    # Loaded this late, the vectors do not take registers (16384 columns: 64 instead of 84) from a second program.
    weight, bias = load_affine(weight_ptr, bias_ptr, head * N + cols, col_mask, weight_offset)
    y = s * rstd[:, None]
    if weight_ptr is not None:
        y = y * weight[None, :]
    if bias_ptr is not None:
        y = y + bias[None, :]
    tl.store(y_ptr + out_offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def norm_fwd_kernel_looped(
    x_ptr,  # [M * H, N]
    residual_ptr,  # [M * H, N] or None
    weight_ptr,  # [H, N] or None
    bias_ptr,  # [H, N] or None
    y_ptr,  # [M * H, N] contiguous
    s_ptr,  # [M * H, N] contiguous, or None
    mean_ptr,  # [M * H] float32, or None
    rstd_ptr,  # [M * H] float32, or None
    x_stride,
    residual_stride,
    M,
    N,
    H,
    eps,
    UNIT: tl.constexpr,
    weight_offset: tl.constexpr,
    CENTERED: tl.constexpr,
    S_DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (t, h) walks the columns of rows [BLOCK_M] for the mean, for the variance and for y."""
    N = N * UNIT
    head = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    row_mask = rows < M
    all_rows = rows.to(tl.int64) * H + head  # [BLOCK_M]
    x_rows = x_ptr + all_rows[:, None] * x_stride * UNIT
    residual_rows = x_rows if residual_ptr is None else residual_ptr + all_rows[:, None] * residual_stride * UNIT
    HAS_RESIDUAL: tl.constexpr = residual_ptr is not None

    mean = tl.zeros([BLOCK_M], dtype=tl.float32)
    if CENTERED:
        total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for start in range(0, N, BLOCK_N):
            cols = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
            mask = row_mask[:, None] & (cols < N)[None, :]
            total += load_s(x_rows, residual_rows, cols[None, :], mask, HAS_RESIDUAL, S_DTYPE).to(tl.float32)
        mean = over(tl.sum(total, axis=1), N, S_DTYPE)
        if mean_ptr is not None:
            tl.store(mean_ptr + all_rows, mean, mask=row_mask)
    squares = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        mask = row_mask[:, None] & (cols < N)[None, :]
        s = load_s(x_rows, residual_rows, cols[None, :], mask, HAS_RESIDUAL, S_DTYPE).to(tl.float32)
        if CENTERED:
            s = tl.where(mask, s - mean[:, None], 0.0)
        squares += s * s
    # Rows beyond M are zeros: with eps=0 they would divide by zero.
    rstd = reciprocal_root(tl.where(row_mask, over(tl.sum(squares, axis=1), N, S_DTYPE) + eps, 1.0))  # [BLOCK_M]
    if rstd_ptr is not None:
        tl.store(rstd_ptr + all_rows, rstd, mask=row_mask)

    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        col_mask = cols < N
        mask = row_mask[:, None] & col_mask[None, :]
        out_offsets = all_rows[:, None] * N + cols[None, :]
        s_stored = load_s(x_rows, residual_rows, cols[None, :], mask, HAS_RESIDUAL, S_DTYPE)
        if s_ptr is not None:
            tl.store(s_ptr + out_offsets, s_stored, mask=mask)
        weight, bias = load_affine(weight_ptr, bias_ptr, head * N + cols, col_mask, weight_offset)
        y = (s_stored.to(tl.float32) - mean[:, None]) * rstd[:, None]
        if weight_ptr is not None:
            y = y * weight[None, :]
        if bias_ptr is not None:
            y = y + bias[None, :]
        tl.store(y_ptr + out_offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_s(x_rows, residual_rows, offsets, mask, HAS_RESIDUAL: tl.constexpr, S_DTYPE: tl.constexpr):
    """x + residual at `offsets` of the rows, rounded to S_DTYPE."""
    s = tl.load(x_rows + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        s += tl.load(residual_rows + offsets, mask=mask, other=0.0).to(tl.float32)
    return s.to(S_DTYPE)


@triton.jit
def load_affine(weight_ptr, bias_ptr, offsets, mask, weight_offset: tl.constexpr):
    """(weight + weight_offset, bias) in float32; zeros for what is None."""
    weight = tl.zeros(offsets.shape, dtype=tl.float32)
    bias = tl.zeros(offsets.shape, dtype=tl.float32)
    if weight_ptr is not None:
        weight = widen_weight(tl.load(weight_ptr + offsets, mask=mask, other=0.0), weight_offset)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    return weight, bias


@triton.jit
def reciprocal_root(value):
    """1 / sqrt(value), both rounded: rsqrt is approximate on NVIDIA and flushes subnormal values to 0."""
    return tl.div_rn(1.0, tl.sqrt_rn(value))


@triton.jit
def over(total, count, S_DTYPE: tl.constexpr):
    """total / count, correctly rounded where s is float32: a plain division is off by up to 2 ulp on NVIDIA."""
    if tl.float32 == S_DTYPE:
        return tl.div_rn(total, count * 1.0)
    else:
        return total / count


@triton.jit
def widen_weight(stored, weight_offset: tl.constexpr):
    """stored + weight_offset in float32."""
    weight = stored.to(tl.float32)
    if weight_offset != 0.0:
        weight += weight_offset
    return weight
