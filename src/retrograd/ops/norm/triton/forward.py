"""Forward kernels of the norms: a tile of whole rows per program, or rows walked in column blocks.

Still wider rows go to `ops/norm/cuda` where there are thread block clusters; `launch.py` decides.
"""

from __future__ import annotations

import triton
import triton.language as tl

from retrograd.ops.norm.triton.arithmetic import (
    load_columns,
    over,
    plus,
    reciprocal_root,
    store_columns,
    wait_for_kernels_ahead,
    widen,
)


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
    LOADS: tl.constexpr,
    STORES: tl.constexpr,
    EARLY: tl.constexpr,
    WIDTH: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (t, h) normalises rows [t * BLOCK_M, + BLOCK_M) of head h whole: BLOCK_N >= N.

    WIDTH: N, where it is compiled into the kernel, which then knows of most columns that they exist; else 0.

    PDL: launched while the kernel ahead of it ends. It lets nobody start earlier itself (`gdc_launch_dependents`): the
    next one's programs would take places that this one's still need.
    """
    if PDL:
        wait_for_kernels_ahead()
    WHOLE: tl.constexpr = WIDTH == BLOCK_N
    y, mean, rstd, all_rows, offsets, exists = normalized_tile(
        *(x_ptr, residual_ptr, weight_ptr, bias_ptr, s_ptr, x_stride, residual_stride, M, N, H, eps),
        *(UNIT, weight_offset, CENTERED, S_DTYPE, BLOCK_M, BLOCK_N, LOADS, STORES, EARLY, WIDTH, PTX),
    )
    store_columns(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), exists[None, :], WHOLE, STORES, "")
    # Last: on their way to one thread a row they pass a barrier.
    if CENTERED:  # noqa: SIM102
        if mean_ptr is not None:
            tl.store(mean_ptr + all_rows, mean)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + all_rows, rstd)


@triton.jit
def normalized_tile(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    s_ptr,
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
    LOADS: tl.constexpr,
    STORES: tl.constexpr,
    EARLY: tl.constexpr,
    WIDTH: tl.constexpr,
    PTX: tl.constexpr,
):
    """A program's tile of y in float32 [BLOCK_M, BLOCK_N], with s stored; arguments as of `norm_fwd_kernel`.

    Returns y, 0 in columns that do not exist; mean (eps, where nothing is centred) and rstd [BLOCK_M]; the number of
    each row [BLOCK_M], the places of y and s [BLOCK_M, BLOCK_N], whether a column exists [BLOCK_N].
    """
    N = WIDTH if WIDTH else N * UNIT
    WHOLE: tl.constexpr = WIDTH == BLOCK_N
    head = tl.program_id(1)
    # Rows beyond the last are the last one once more: the same values go to the same places.
    rows = tl.minimum(tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), M - 1)  # [BLOCK_M]
    cols = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    exists = cols < N
    all_rows = rows.to(tl.int64) * H + head  # [BLOCK_M]
    offsets = all_rows[:, None] * N + cols[None, :]

    # The backward sees s as stored, so the forward has to normalise the stored value.
    x_rows = x_ptr + all_rows[:, None] * x_stride * UNIT
    residual_rows = x_rows if residual_ptr is None else residual_ptr + all_rows[:, None] * residual_stride * UNIT
    ADDS: tl.constexpr = residual_ptr is not None
    s_stored = load_s(x_rows, residual_rows, cols, exists, WHOLE, ADDS, S_DTYPE, LOADS, LOADS, PTX)
    # Asked for here, the vectors come while the row is added up (256 columns: 78 instead of 69 % of the copy
    # bandwidth); below, they take no registers meanwhile (LayerNorm at 4096 columns, 8 warps: 94 instead of 90 %).
    if EARLY:
        weight, bias = load_affine(weight_ptr, bias_ptr, head * N + cols, exists, WHOLE)
    s = widen(s_stored, PTX)
    if s_ptr is not None:
        store_columns(s_ptr + offsets, s_stored, exists[None, :], WHOLE, STORES, "")

    mean = eps
    if CENTERED:
        mean = over(tl.sum(s, axis=1), N, WHOLE, BLOCK_N, S_DTYPE)  # [BLOCK_M]
        s = s - mean[:, None]
        if not WHOLE:
            s = tl.where(exists[None, :], s, 0.0)
    rstd = reciprocal_root(over(tl.sum(s * s, axis=1), N, WHOLE, BLOCK_N, S_DTYPE) + eps, S_DTYPE, PTX)  # [BLOCK_M]
    if not EARLY:
        weight, bias = load_affine(weight_ptr, bias_ptr, head * N + cols, exists, WHOLE)
    y = s * rstd[:, None]
    if weight_ptr is not None:
        y = y * plus(widen(weight, PTX), weight_offset)[None, :]
    if bias_ptr is not None:
        y = y + widen(bias, PTX)[None, :]
    return y, mean, rstd, all_rows, offsets, exists


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
    EVEN: tl.constexpr,
    UNROLL: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (t, h) walks the columns of rows [BLOCK_M] for the mean, for the variance and for y.

    EVEN: N is a multiple of BLOCK_N. All walks but the first find the row in a cache: with 65536 bytes a row, in the
    one of the multiprocessor (H200).
    """
    if PDL:
        wait_for_kernels_ahead()
    N = N * UNIT
    head = tl.program_id(1)
    # Rows beyond the last are the last one once more: the same values go to the same places.
    rows = tl.minimum(tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), M - 1)  # [BLOCK_M]
    all_rows = rows.to(tl.int64) * H + head  # [BLOCK_M]
    x_rows = x_ptr + all_rows[:, None] * x_stride * UNIT
    residual_rows = x_rows if residual_ptr is None else residual_ptr + all_rows[:, None] * residual_stride * UNIT
    s_rows = x_rows if s_ptr is None else s_ptr + all_rows[:, None] * N
    # Later walks read s where it was stored, with the offsets it was stored with: nobody else's elements.
    ADDS: tl.constexpr = residual_ptr is not None
    ADDS_AGAIN: tl.constexpr = ADDS and s_ptr is None

    local = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    mean = tl.zeros([BLOCK_M], dtype=tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in tl.range(0, N, BLOCK_N, loop_unroll_factor=UNROLL):
        cols = start + local
        exists = cols < N
        s_stored = load_s(x_rows, residual_rows, cols, exists, EVEN, ADDS, S_DTYPE, "evict_last", "evict_first", PTX)
        if s_ptr is not None:
            store_columns(s_rows + cols[None, :], s_stored, exists[None, :], EVEN, "", "")
        s = widen(s_stored, PTX)
        total += s if CENTERED else s * s
    if CENTERED:
        mean = over(tl.sum(total, axis=1), N, False, BLOCK_N, S_DTYPE)
        if mean_ptr is not None:
            tl.store(mean_ptr + all_rows, mean)
        total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for start in tl.range(0, N, BLOCK_N, loop_unroll_factor=UNROLL):
            cols = start + local
            exists = cols < N
            s_stored = load_s(
                s_rows, residual_rows, cols, exists, EVEN, ADDS_AGAIN, S_DTYPE, "evict_last", "evict_first", PTX
            )
            d = widen(s_stored, PTX) - mean[:, None]
            if not EVEN:
                d = tl.where(exists[None, :], d, 0.0)
            total += d * d
    rstd = reciprocal_root(over(tl.sum(total, axis=1), N, False, BLOCK_N, S_DTYPE) + eps, S_DTYPE, PTX)  # [BLOCK_M]
    if rstd_ptr is not None:
        tl.store(rstd_ptr + all_rows, rstd)

    for start in tl.range(0, N, BLOCK_N, loop_unroll_factor=UNROLL):
        cols = start + local
        exists = cols < N
        s_stored = load_s(
            s_rows, residual_rows, cols, exists, EVEN, ADDS_AGAIN, S_DTYPE, "evict_first", "evict_first", PTX
        )
        weight, bias = load_affine(weight_ptr, bias_ptr, head * N + cols, exists, EVEN)
        y = (widen(s_stored, PTX) - mean[:, None]) * rstd[:, None]
        if weight_ptr is not None:
            y = y * plus(widen(weight, PTX), weight_offset)[None, :]
        if bias_ptr is not None:
            y = y + widen(bias, PTX)[None, :]
        out_offsets = all_rows[:, None] * N + cols[None, :]
        store_columns(y_ptr + out_offsets, y.to(y_ptr.dtype.element_ty), exists[None, :], EVEN, "", "")


@triton.jit
def load_s(
    x_rows,
    residual_rows,
    cols,
    exists,
    EVEN: tl.constexpr,
    ADDS: tl.constexpr,
    S_DTYPE: tl.constexpr,
    KEEP_X: tl.constexpr,
    KEEP_RESIDUAL: tl.constexpr,
    PTX: tl.constexpr,
):
    """x + residual, or x alone, in columns `cols` of the rows, rounded to S_DTYPE; KEEP_...: eviction policies."""
    s = load_columns(x_rows + cols[None, :], exists[None, :], EVEN, KEEP_X)
    if ADDS:
        residual = load_columns(residual_rows + cols[None, :], exists[None, :], EVEN, KEEP_RESIDUAL)
        return (widen(s, PTX) + widen(residual, PTX)).to(S_DTYPE)
    else:
        return s.to(S_DTYPE)


@triton.jit
def load_affine(weight_ptr, bias_ptr, offsets, exists, WHOLE: tl.constexpr):
    """(weight, bias) as stored; offsets, unused, for what is None."""
    weight = offsets
    bias = offsets
    mask = None if WHOLE else exists
    other = None if WHOLE else 0.0
    # Not through load_columns: a vector's loads may be narrow, and the gate knows them by their names.
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + offsets, mask=mask, other=other)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + offsets, mask=mask, other=other)
    return weight, bias
