"""Backward of wide rows: G programs take one slice each of the same row and exchange their partial sums.

Programs stay, to keep their sums for the vectors, and are resident together (a cooperative launch). They meet in a
buffer of 8-byte words, one per row and slice, filled with -1 before the launch: a word carries two float32 sums, so the
values are their own flag and no fence is needed. Words are added in the order of slices: the same bits every time.

A row is looked at twice. AHEAD rows before its turn its sums are published, from memory; at its turn it comes from L2
and the neighbours' words have long been there: nothing waits, and nothing of a row is held in between. What is written
is to leave L2 before what is to be read again (`evict_first`): 3 % for RMSNorm at 131072 columns, else 1 %.

Where there are thread block clusters `ops/norm/cuda` reads most such rows once; what is left are three tensors to read,
rows that do not fall into whole pieces, and older GPUs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from retrograd.ops.norm.triton.arithmetic import load_columns, sum_both, widen
from retrograd.ops.norm.triton.backward import load_weight, store_both


@triton.jit(do_not_specialize=["M"])
def norm_bwd_kernel_slices(
    grad_out_ptr,  # [M, N]
    s_ptr,  # [M, N]
    weight_ptr,  # [N] or None
    mean_ptr,  # [M] float32, or None for RMSNorm
    rstd_ptr,  # [M] float32
    grad_s_ptr,  # [M, N] or None
    grad_x_ptr,  # [M, N] contiguous, or None
    grad_residual_ptr,  # likewise
    weight_parts_ptr,  # [P, N] float32, or None
    bias_parts_ptr,  # likewise
    words_ptr,  # [M, G] int64, all -1
    grad_out_stride,
    s_stride,
    grad_s_stride,
    M,
    N,
    slice_n,
    UNIT: tl.constexpr,
    weight_offset: tl.constexpr,
    G: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Program p of P * G takes slice p % G of the row tiles p // G, + P, ...; BLOCK_N >= slice_n, equal if EVEN."""
    # One row a tile: two need 168 registers and more. Written for tiles all the same: as vectors of columns the same
    # steps compile to code that is 3 to 4 % slower (H200).
    BLOCK_M: tl.constexpr = 1
    N = N * UNIT
    piece = tl.program_id(0) % G
    group = tl.program_id(0) // G
    step = tl.num_programs(0) // G * BLOCK_M
    per_column = tl.div_rn(1.0, N * 1.0)  # a division in the loop is 25 instructions
    local = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    cols = piece * slice_n + local
    col_mask = (local < BLOCK_N) if EVEN else (local < slice_n) & (cols < N)
    # The words of a tile's rows, one behind the other: asked for together they cost one latency.
    slices = tl.arange(0, BLOCK_M * BLOCK_G) % BLOCK_G  # [BLOCK_M * BLOCK_G]
    slice_rows = tl.arange(0, BLOCK_M * BLOCK_G) // BLOCK_G
    word_cols = words_ptr + tl.minimum(slices, G - 1)
    weight = load_weight(weight_ptr, cols, col_mask, weight_offset)  # [BLOCK_N] float32
    if weight_parts_ptr is not None:
        weight_sum = tl.zeros([BLOCK_N], dtype=tl.float32)
    if bias_parts_ptr is not None:
        bias_sum = tl.zeros([BLOCK_N], dtype=tl.float32)

    for early in tl.range(0, AHEAD):
        rows_next = group * BLOCK_M + early * step + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        s_next, g_next, mean_next, rstd_next = load_rows(
            s_ptr, grad_out_ptr, mean_ptr, rstd_ptr, rows_next, s_stride, grad_out_stride, cols, col_mask, M, UNIT, EVEN
        )
        word = words_ptr + rows_next * G + piece
        publish_projections(word, s_next, g_next, weight, mean_next, rstd_next, rows_next < M, weight_ptr, mean_ptr)
    seen = tl.full([BLOCK_M * BLOCK_G], -1, dtype=tl.int64)
    for row in tl.range(group * BLOCK_M, M, step, num_stages=STAGES):
        # The next tile's words are asked for a tile before they are used: 0.7 us of latency and more under load.
        seen_next = peek(word_cols + tl.minimum(row + step + slice_rows, M - 1).to(tl.int64) * G)
        rows_next = row + AHEAD * step + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        s_next, g_next, mean_next, rstd_next = load_rows(
            s_ptr, grad_out_ptr, mean_ptr, rstd_ptr, rows_next, s_stride, grad_out_stride, cols, col_mask, M, UNIT, EVEN
        )
        rows32 = row + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        s_now, g_now, mean_now, rstd_now = load_rows(
            s_ptr, grad_out_ptr, mean_ptr, rstd_ptr, rows32, s_stride, grad_out_stride, cols, col_mask, M, UNIT, EVEN
        )
        rows = rows32.to(tl.int64)
        if grad_s_ptr is not None:
            grad_s_rows = grad_s_ptr + (rows * grad_s_stride * UNIT)[:, None]
            grad_s = load_columns(grad_s_rows + cols[None, :], col_mask[None, :], EVEN, "")
        word = words_ptr + rows_next * G + piece
        publish_projections(word, s_next, g_next, weight, mean_next, rstd_next, rows_next < M, weight_ptr, mean_ptr)

        words = word_cols + tl.minimum(row + slice_rows, M - 1).to(tl.int64) * G
        first, second = collect(seen, words, slices < G)  # [BLOCK_M * BLOCK_G] twice
        projection = tl.zeros([BLOCK_M], dtype=tl.float32)
        shift = tl.zeros([BLOCK_M], dtype=tl.float32)
        for i in tl.static_range(BLOCK_M):
            here = (slice_rows == i) & (slices < G)
            this = tl.arange(0, BLOCK_M) == i
            projection = tl.where(this, tl.sum(tl.where(here, first, 0.0), axis=0) * per_column, projection)
            if mean_ptr is not None:
                shift = tl.where(this, tl.sum(tl.where(here, second, 0.0), axis=0) * per_column, shift)
        g = widen(g_now, True)
        h = centre(s_now, mean_now, mean_ptr) * rstd_now[:, None]
        if bias_parts_ptr is not None:
            bias_sum += tl.sum(g, axis=0)
        if weight_parts_ptr is not None:
            weight_sum += tl.sum(g * h, axis=0)
        if weight_ptr is not None:
            g = g * weight[None, :]
        ds = (g - h * projection[:, None]) * rstd_now[:, None]
        if mean_ptr is not None:
            ds -= (shift * rstd_now)[:, None]
        if grad_s_ptr is not None:
            ds += widen(grad_s, True)
        out = rows[:, None] * N + cols[None, :]
        store_both(grad_x_ptr, grad_residual_ptr, out, ds, col_mask[None, :], EVEN, "evict_first")
        seen = seen_next

    if weight_parts_ptr is not None:
        tl.store(weight_parts_ptr + group.to(tl.int64) * N + cols, weight_sum, mask=col_mask)
    if bias_parts_ptr is not None:
        tl.store(bias_parts_ptr + group.to(tl.int64) * N + cols, bias_sum, mask=col_mask)


@triton.jit
def load_rows(
    s_ptr,
    grad_out_ptr,
    mean_ptr,
    rstd_ptr,
    rows,
    s_stride,
    grad_out_stride,
    cols,
    col_mask,
    M,
    UNIT: tl.constexpr,
    EVEN: tl.constexpr,
):
    """(s, grad_out, mean, rstd) of rows [BLOCK_M], of the last for later ones; rstd for mean where there is no mean."""
    rows64 = tl.minimum(rows, M - 1).to(tl.int64)
    s = load_columns(s_ptr + (rows64 * s_stride * UNIT)[:, None] + cols[None, :], col_mask[None, :], EVEN, "")
    g = load_columns(
        grad_out_ptr + (rows64 * grad_out_stride * UNIT)[:, None] + cols[None, :], col_mask[None, :], EVEN, ""
    )
    rstd = tl.load(rstd_ptr + rows64)  # [BLOCK_M]
    mean = rstd
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + rows64)  # [BLOCK_M]
    return s, g, mean, rstd


@triton.jit
def publish_projections(word_ptrs, s_stored, g_stored, weight, mean, rstd, exists, weight_ptr, mean_ptr):
    """Publish a slice's sums of grad_out * weight * xhat and, for LayerNorm, of grad_out * weight."""
    g = widen(g_stored, True)
    if weight_ptr is not None:
        g = g * weight[None, :]
    s = centre(s_stored, mean, mean_ptr)
    if mean_ptr is None:
        first = tl.sum(g * s, axis=1) * rstd
        publish(word_ptrs, first, first, exists)
    else:
        first, second = sum_both(g * s, g, 1, True)
        publish(word_ptrs, first * rstd, second, exists)


@triton.jit
def centre(s_stored, mean, mean_ptr):
    """s - mean in float32; s where there is no mean."""
    s = widen(s_stored, True)
    if mean_ptr is not None:
        s = s - mean[:, None]
    return s


@triton.jit
def publish(word_ptrs, first, second, exists):
    """Put two float32 into one word; a NaN in the lower half becomes the one that is not all ones."""
    low = tl.where(first == first, first, float("nan")).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    high = second.to(tl.int32, bitcast=True).to(tl.int64)
    tl.atomic_xchg(word_ptrs, (high << 32) | low, mask=exists, sem="relaxed")


@triton.jit
def peek(word_ptrs):
    """The words [G] as they are now; nobody waits before the result is used."""
    return tl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.b64 $0, [$1];",
        "=l,l",
        [word_ptrs.to(tl.int64)],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )


@triton.jit
def collect(seen, word_ptrs, exists):
    """Wait until every word [G] is there, seen being what `peek` saw; the two float32 of each, zeros beyond G."""
    words = tl.inline_asm_elementwise(
        """
        {
            .reg .pred %there;
            mov.b64 $0, $2;
            again:
            setp.ne.s64 %there, $0, -1;
            @%there bra done;
            ld.relaxed.gpu.global.b64 $0, [$1];
            bra again;
            done:
        }
        """,
        "=&l,l,l",
        [word_ptrs.to(tl.int64), seen],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )
    first = (words & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    second = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(exists, first, 0.0), tl.where(exists, second, 0.0)
