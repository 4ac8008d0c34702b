"""Backward kernels of the norms: a persistent tile kernel, a pair for rows walked in column blocks, the finalizer.

The sums behind grad_weight and grad_bias land in a float32 buffer [P, H * N], one row per program, which
`norm_bwd_kernel_finalize` adds up in a fixed order; or, if ATOMIC, in one row by atomic additions.
Rows too wide for one program on a GPU that can hold all programs at once are in `backward_sliced.py`, few rows in
`backward_few.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from retrograd.ops.norm.triton.arithmetic import plus, store_columns, sum_both, wait_for_kernels_ahead, widen


@triton.jit(do_not_specialize=["M"])
def norm_bwd_kernel(
    grad_out_ptr,  # [M * H, N]
    s_ptr,  # [M * H, N]
    weight_ptr,  # [H, N] or None
    mean_ptr,  # [M * H] float32, or None for RMSNorm
    rstd_ptr,  # [M * H] float32
    grad_s_ptr,  # [M * H, N] or None
    grad_x_ptr,  # [M * H, N] contiguous, or None
    grad_residual_ptr,  # likewise
    weight_parts_ptr,  # [P, H, N] float32 ([1, H, N] if ATOMIC), or None
    bias_parts_ptr,  # likewise
    grad_out_stride,
    s_stride,
    grad_s_stride,
    M,
    N,
    H,
    UNIT: tl.constexpr,
    weight_offset: tl.constexpr,
    ATOMIC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (p, h) of (P, H) takes the row tiles p, p + P, ... of head h: their gradients and its own sums."""
    if PDL:
        wait_for_kernels_ahead()
    N = N * UNIT
    pid = tl.program_id(0)
    head = tl.program_id(1)
    cols = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    col_mask = cols < N
    per_column = tl.div_rn(1.0, N * 1.0)
    NEED_DS: tl.constexpr = (grad_x_ptr is not None) or (grad_residual_ptr is not None)
    if NEED_DS:
        weight = load_weight(weight_ptr, head * N + cols, col_mask, weight_offset)
    if weight_parts_ptr is not None:
        weight_sum = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    if bias_parts_ptr is not None:
        bias_sum = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)

    for tile in tl.range(pid, tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        g, h, rstd, row_offsets, mask = load_rows(
            grad_out_ptr, s_ptr, mean_ptr, rstd_ptr, grad_out_stride * UNIT, s_stride * UNIT, rows, cols, M, N, H, head,
            PTX,
        )  # fmt: skip
        if bias_parts_ptr is not None:
            bias_sum += g
        if weight_parts_ptr is not None:
            weight_sum += g * h
        if NEED_DS:
            if weight_ptr is not None:
                g = g * weight[None, :]
            ds = row_gradients(g, h, rstd, per_column, mean_ptr is not None, PTX)
            if grad_s_ptr is not None:
                offsets = row_offsets * grad_s_stride * UNIT + cols[None, :]
                ds += widen(tl.load(grad_s_ptr + offsets, mask=mask, other=0.0), PTX)
            store_both(grad_x_ptr, grad_residual_ptr, row_offsets * N + cols[None, :], ds, mask, False, "")

    part = (pid.to(tl.int64) * H + head) * N
    if ATOMIC:
        part = head * N
    if weight_parts_ptr is not None:
        put_part(weight_parts_ptr + part + cols, tl.sum(weight_sum, axis=0), col_mask, ATOMIC)
    if bias_parts_ptr is not None:
        put_part(bias_parts_ptr + part + cols, tl.sum(bias_sum, axis=0), col_mask, ATOMIC)


@triton.jit(do_not_specialize=["M"])
def norm_bwd_kernel_dx_looped(
    grad_out_ptr,  # [M * H, N]
    s_ptr,  # [M * H, N]
    weight_ptr,  # [H, N] or None
    mean_ptr,  # [M * H] float32, or None for RMSNorm
    rstd_ptr,  # [M * H] float32
    grad_s_ptr,  # [M * H, N] or None
    grad_x_ptr,  # [M * H, N] contiguous, or None
    grad_residual_ptr,  # likewise
    grad_out_stride,
    s_stride,
    grad_s_stride,
    M,
    N,
    H,
    UNIT: tl.constexpr,
    weight_offset: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Gradients of rows [BLOCK_M] of a head in two walks over the columns: the projections, then the result."""
    if PDL:
        wait_for_kernels_ahead()
    N = N * UNIT
    head = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    row_mask = rows < M
    all_rows = rows.to(tl.int64) * H + head  # [BLOCK_M]
    row_offsets = all_rows[:, None]
    rstd = tl.load(rstd_ptr + all_rows, mask=row_mask, other=0.0)  # [BLOCK_M]
    mean = tl.zeros([BLOCK_M], dtype=tl.float32)
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + all_rows, mask=row_mask, other=0.0)

    products = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    plain = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        col_mask = cols < N
        mask = row_mask[:, None] & col_mask[None, :]
        g = tl.load(grad_out_ptr + row_offsets * grad_out_stride * UNIT + cols[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        s = tl.load(s_ptr + row_offsets * s_stride * UNIT + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            g = g * load_weight(weight_ptr, head * N + cols, col_mask, weight_offset)[None, :]
        products += g * ((s - mean[:, None]) * rstd[:, None])
        if mean_ptr is not None:
            plain += g
    projection = tl.sum(products, axis=1) / N  # [BLOCK_M]
    shift = tl.sum(plain, axis=1) / N  # [BLOCK_M]

    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        col_mask = cols < N
        mask = row_mask[:, None] & col_mask[None, :]
        g = tl.load(grad_out_ptr + row_offsets * grad_out_stride * UNIT + cols[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        s = tl.load(s_ptr + row_offsets * s_stride * UNIT + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            g = g * load_weight(weight_ptr, head * N + cols, col_mask, weight_offset)[None, :]
        ds = g - (s - mean[:, None]) * rstd[:, None] * projection[:, None]
        if mean_ptr is not None:
            ds -= shift[:, None]
        ds *= rstd[:, None]
        if grad_s_ptr is not None:
            ds += tl.load(grad_s_ptr + row_offsets * grad_s_stride * UNIT + cols[None, :], mask=mask, other=0.0).to(
                tl.float32
            )
        store_both(grad_x_ptr, grad_residual_ptr, row_offsets * N + cols[None, :], ds, mask, False, "")


@triton.jit(do_not_specialize=["M"])
def norm_bwd_kernel_dw_columns(
    grad_out_ptr,  # [M * H, N]
    s_ptr,  # [M * H, N]
    mean_ptr,  # [M * H] float32, or None for RMSNorm
    rstd_ptr,  # [M * H] float32
    weight_parts_ptr,  # [P, H, N] float32 ([1, H, N] if ATOMIC), or None
    bias_parts_ptr,  # likewise
    grad_out_stride,
    s_stride,
    M,
    N,
    H,
    UNIT: tl.constexpr,
    ATOMIC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (c, h, p) of (column blocks, H, P) sums column block c of head h over the row tiles p, p + P, ..."""
    if PDL:
        wait_for_kernels_ahead()
    N = N * UNIT
    head = tl.program_id(1)
    group = tl.program_id(2)
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    col_mask = cols < N
    weight_sum = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    bias_sum = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for tile in tl.range(group, tl.cdiv(M, BLOCK_M), tl.num_programs(2)):
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        row_mask = rows < M
        mask = row_mask[:, None] & col_mask[None, :]
        all_rows = rows.to(tl.int64) * H + head  # [BLOCK_M]
        offsets = all_rows[:, None] * grad_out_stride * UNIT + cols[None, :]
        g = tl.load(grad_out_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        bias_sum += g
        if weight_parts_ptr is not None:
            s = tl.load(s_ptr + all_rows[:, None] * s_stride * UNIT + cols[None, :], mask=mask, other=0.0).to(
                tl.float32
            )
            rstd = tl.load(rstd_ptr + all_rows, mask=row_mask, other=0.0)  # [BLOCK_M]
            if mean_ptr is not None:
                s = s - tl.load(mean_ptr + all_rows, mask=row_mask, other=0.0)[:, None]
            weight_sum += g * (s * rstd[:, None])

    part = (group.to(tl.int64) * H + head) * N
    if ATOMIC:
        part = head * N
    if weight_parts_ptr is not None:
        put_part(weight_parts_ptr + part + cols, tl.sum(weight_sum, axis=0), col_mask, ATOMIC)
    if bias_parts_ptr is not None:
        put_part(bias_parts_ptr + part + cols, tl.sum(bias_sum, axis=0), col_mask, ATOMIC)


@triton.jit(do_not_specialize=["P"])
def norm_bwd_kernel_finalize(
    weight_parts_ptr,  # [P, N] float32, or None
    bias_parts_ptr,  # likewise
    grad_weight_ptr,  # [N] or None
    grad_bias_ptr,  # [N] or None
    P,
    N,
    UNIT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add the parts of BLOCK_N columns, BLOCK_P rows at a time in ascending order; cast, or add to what is there.

    Program (c, v) of (column blocks, vectors): the first of two vectors is weight's.
    """
    if PDL:
        wait_for_kernels_ahead()
    N = N * UNIT
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    col_mask = cols < N
    vector = tl.program_id(1)
    # Not `and`: what does not exist is left out when the kernel is compiled.
    if weight_parts_ptr is not None:  # noqa: SIM102
        if vector == 0:
            total = sum_parts(weight_parts_ptr, cols, col_mask, P, N, BLOCK_P, BLOCK_N)
            put_total(grad_weight_ptr + cols, total, col_mask, ACCUMULATE)
    if bias_parts_ptr is not None:  # noqa: SIM102
        if vector == tl.num_programs(1) - 1:
            total = sum_parts(bias_parts_ptr, cols, col_mask, P, N, BLOCK_P, BLOCK_N)
            put_total(grad_bias_ptr + cols, total, col_mask, ACCUMULATE)


@triton.jit
def load_rows(
    grad_out_ptr, s_ptr, mean_ptr, rstd_ptr, grad_out_stride, s_stride, rows, cols, M, N, H, head, PTX: tl.constexpr
):
    """Of `rows` [R] of a head and `cols` [C]: g and h = (s - mean) * rstd [R, C] float32, rstd [R]; index, mask.

    The index [R, 1] counts rows of all heads. Where a row or a column does not exist g is 0, and with it all that is
    summed.
    """
    row_mask = rows < M
    mask = row_mask[:, None] & (cols < N)[None, :]
    all_rows = rows.to(tl.int64) * H + head  # [R]
    row_offsets = all_rows[:, None]
    g = widen(tl.load(grad_out_ptr + row_offsets * grad_out_stride + cols[None, :], mask=mask, other=0.0), PTX)
    s = widen(tl.load(s_ptr + row_offsets * s_stride + cols[None, :], mask=mask, other=0.0), PTX)
    rstd = tl.load(rstd_ptr + all_rows, mask=row_mask, other=0.0)  # [R]
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + all_rows, mask=row_mask, other=0.0)  # [R]
        s = s - mean[:, None]
    return g, s * rstd[:, None], rstd, row_offsets, mask


@triton.jit
def row_gradients(g, h, rstd, per_column, CENTERED: tl.constexpr, PTX: tl.constexpr):
    """The gradients of s [R, C] from g = grad_out * weight, h and rstd; `per_column` is 1 / N."""
    if CENTERED:
        projection, shift = sum_both(g * h, g, 1, PTX)  # [R] twice
        ds = (g - h * (projection * per_column)[:, None]) * rstd[:, None]
        ds -= (shift * per_column * rstd)[:, None]
    else:
        projection = tl.sum(g * h, axis=1)
        ds = (g - h * (projection * per_column)[:, None]) * rstd[:, None]
    return ds


@triton.jit
def sum_parts(parts_ptr, cols, col_mask, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    """The sum [BLOCK_N] of rows 0..P-1 of parts [P, N]."""
    total = tl.zeros([BLOCK_P, BLOCK_N], dtype=tl.float32)
    for start in range(0, P, BLOCK_P):
        parts = start + tl.arange(0, BLOCK_P)  # [BLOCK_P]
        mask = (parts < P)[:, None] & col_mask[None, :]
        total += tl.load(parts_ptr + parts.to(tl.int64)[:, None] * N + cols[None, :], mask=mask, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def put_total(out_ptrs, total, mask, ACCUMULATE: tl.constexpr):
    """Store `total` in the dtype of the output, or add it there."""
    if ACCUMULATE:
        total += tl.load(out_ptrs, mask=mask, other=0.0)
    tl.store(out_ptrs, total.to(out_ptrs.dtype.element_ty), mask=mask)


@triton.jit
def put_part(part_ptrs, part, mask, ATOMIC: tl.constexpr):
    """Store one program's sums, or add them to everyone's."""
    if ATOMIC:
        tl.atomic_add(part_ptrs, part, mask=mask, sem="relaxed")
    else:
        tl.store(part_ptrs, part, mask=mask)


@triton.jit
def store_both(grad_x_ptr, grad_residual_ptr, offsets, ds, exists, WHOLE: tl.constexpr, KEEP: tl.constexpr):
    """Store ds as grad_x and as grad_residual, whichever is not None, each in its dtype. KEEP: the eviction policy."""
    if grad_x_ptr is not None:
        store_columns(grad_x_ptr + offsets, ds.to(grad_x_ptr.dtype.element_ty), exists, WHOLE, "", KEEP)
    if grad_residual_ptr is not None:
        store_columns(grad_residual_ptr + offsets, ds.to(grad_residual_ptr.dtype.element_ty), exists, WHOLE, "", KEEP)


@triton.jit
def load_weight(weight_ptr, offsets, mask, weight_offset: tl.constexpr):
    """weight + weight_offset in float32; zeros, unused, where weight is None."""
    weight = tl.zeros(offsets.shape, dtype=tl.float32)
    if weight_ptr is not None:
        weight = plus(tl.load(weight_ptr + offsets, mask=mask, other=0.0).to(tl.float32), weight_offset)
    return weight
