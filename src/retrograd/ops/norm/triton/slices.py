"""Kernels for wide rows: G programs hold one slice of the same row each and exchange their partial sums.

Every element is read from memory once. The programs of a row meet in a buffer of 8-byte words, one per row and
slice, filled with -1 before the launch: a word carries two float32 sums, so the values are their own flag and no
fence is needed. Words are added in the order of slices: the same bits every time.

Forward: a program a slice, in the order of rows; other programs on the multiprocessor hide the exchange (about 1 us on
H200). A program waits only for neighbours of its row, which started with it: GPUs start programs in their order.
Backward: programs stay, to keep their sums for the vectors, and are resident together (a cooperative launch); the
word of a later row is published before this row is finished, which hides the exchange.
"""

from __future__ import annotations

import triton
import triton.language as tl

from retrograd.ops.norm.triton.arithmetic import over, plus, reciprocal_root, sum_both, widen, widen_here
from retrograd.ops.norm.triton.backward import store_both


@triton.jit(do_not_specialize=["M"])
def norm_fwd_kernel_slices(
    x_ptr,  # [M, N]
    residual_ptr,  # [M, N] or None
    weight_ptr,  # [N] or None
    bias_ptr,  # [N] or None
    y_ptr,  # [M, N] contiguous
    s_ptr,  # [M, N] contiguous, or None
    mean_ptr,  # [M] float32, or None
    rstd_ptr,  # [M] float32, or None
    words_ptr,  # [M, G] int64, all -1
    x_stride,
    residual_stride,
    M,
    N,
    eps,
    slice_n,
    UNIT: tl.constexpr,
    weight_offset: tl.constexpr,
    CENTERED: tl.constexpr,
    S_DTYPE: tl.constexpr,
    G: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Program p of P * G takes slice p % G of the rows p // G, p // G + P, ...; BLOCK_N >= slice_n, equal if EVEN."""
    N = N * UNIT
    piece = tl.program_id(0) % G
    group = tl.program_id(0) // G
    groups = tl.num_programs(0) // G
    local = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    cols = piece * slice_n + local
    col_mask = (local < BLOCK_N) if EVEN else (local < slice_n) & (cols < N)
    count = tl.minimum(slice_n, N - piece * slice_n)
    weight_stored = local if weight_ptr is None else tl.load(weight_ptr + cols, mask=col_mask, other=0.0)
    bias_stored = local if bias_ptr is None else tl.load(bias_ptr + cols, mask=col_mask, other=0.0)
    slices = tl.arange(0, BLOCK_G)  # [BLOCK_G]
    slice_exists = slices < G
    word_cols = words_ptr + tl.minimum(slices, G - 1)  # [BLOCK_G]
    counts = tl.minimum(slice_n, tl.maximum(N - slices * slice_n, 0)).to(tl.float32)  # [BLOCK_G], 0 beyond G

    for early in tl.range(group, tl.minimum(group + AHEAD * groups, M), groups):
        s_next = load_slice(x_ptr, residual_ptr, early, x_stride, residual_stride, cols, col_mask, True, S_DTYPE, UNIT)
        publish_moments(words_ptr + early * G + piece, s_next, col_mask, count, early < M, CENTERED)
    seen = tl.full([BLOCK_G], -1, dtype=tl.int64)
    for row32 in tl.range(group, M, groups, num_stages=STAGES):
        row = row32.to(tl.int64)
        seen_next = peek(word_cols + tl.minimum(row32 + groups, M - 1).to(tl.int64) * G)
        following = row32 + AHEAD * groups
        exists = following < M
        s_next = load_slice(
            x_ptr, residual_ptr, following, x_stride, residual_stride, cols, col_mask, exists, S_DTYPE, UNIT
        )
        s_now = load_slice(x_ptr, residual_ptr, row, x_stride, residual_stride, cols, col_mask, True, S_DTYPE, UNIT)
        publish_moments(words_ptr + following * G + piece, s_next, col_mask, count, exists, CENTERED)

        first, second = collect(seen, word_cols + row * G, slice_exists)  # [BLOCK_G], [BLOCK_G]
        s = widen(s_now, True)
        if CENTERED:
            mean = over(tl.sum(first, axis=0), N, S_DTYPE)
            off = first / tl.maximum(counts, 1.0) - mean
            square = over(tl.sum(second + counts * (off * off), axis=0), N, S_DTYPE)
            s = s - mean
        else:
            square = over(tl.sum(first, axis=0), N, S_DTYPE)
        rstd = reciprocal_root(square + eps)
        if piece == 0:
            if rstd_ptr is not None:
                tl.store(rstd_ptr + row, rstd)
            if CENTERED and mean_ptr is not None:
                tl.store(mean_ptr + row, mean)
        if s_ptr is not None:
            tl.store(s_ptr + row * N + cols, s_now, mask=col_mask)
        y = s * rstd
        # In 16 bits the vectors take half the registers.
        if weight_ptr is not None:
            y = y * plus(widen_here(weight_stored), weight_offset)
        if bias_ptr is not None:
            y = y + widen_here(bias_stored)
        tl.store(y_ptr + row * N + cols, y.to(y_ptr.dtype.element_ty), mask=col_mask)
        seen = seen_next


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
    """Program p of P * G takes slice p % G of the rows p // G, p // G + P, ...; BLOCK_N >= slice_n, equal if EVEN."""
    N = N * UNIT
    piece = tl.program_id(0) % G
    group = tl.program_id(0) // G
    groups = tl.num_programs(0) // G
    per_column = tl.div_rn(1.0, N * 1.0)  # a division in the loop is 25 instructions
    local = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    cols = piece * slice_n + local
    col_mask = (local < BLOCK_N) if EVEN else (local < slice_n) & (cols < N)
    slices = tl.arange(0, BLOCK_G)  # [BLOCK_G]
    slice_exists = slices < G
    word_cols = words_ptr + tl.minimum(slices, G - 1)  # [BLOCK_G]
    weight = local if weight_ptr is None else tl.load(weight_ptr + cols, mask=col_mask, other=0.0)  # as stored
    if weight_parts_ptr is not None:
        weight_sum = tl.zeros([BLOCK_N], dtype=tl.float32)
    if bias_parts_ptr is not None:
        bias_sum = tl.zeros([BLOCK_N], dtype=tl.float32)

    # One-element tensors: the compiler prefetches those, scalars it does not.
    one = tl.arange(0, 1)  # [1]
    for row in tl.range(group, tl.minimum(group + AHEAD * groups, M), groups):
        s_next, g_next, mean_next, rstd_next = load_row(
            s_ptr, grad_out_ptr, mean_ptr, rstd_ptr, row, one, s_stride, grad_out_stride, cols, col_mask, True, UNIT
        )
        word = words_ptr + row * G + piece
        publish_projections(
            word, s_next, g_next, weight, mean_next, rstd_next, row < M, weight_ptr, mean_ptr, weight_offset
        )
    seen = tl.full([BLOCK_G], -1, dtype=tl.int64)
    for row in tl.range(group, M, groups, num_stages=STAGES):
        # The next row's words are asked for a row before they are used: 0.7 us of latency, more under load.
        seen_next = peek(word_cols + tl.minimum(row + groups, M - 1).to(tl.int64) * G)
        following = row + AHEAD * groups
        exists = following < M
        s_next, g_next, mean_next, rstd_next = load_row(
            s_ptr,
            grad_out_ptr,
            mean_ptr,
            rstd_ptr,
            following,
            one,
            s_stride,
            grad_out_stride,
            cols,
            col_mask,
            exists,
            UNIT,
        )
        s_now, g_now, mean_now, rstd_now = load_row(
            s_ptr, grad_out_ptr, mean_ptr, rstd_ptr, row, one, s_stride, grad_out_stride, cols, col_mask, True, UNIT
        )
        if grad_s_ptr is not None:
            grad_s = tl.load(grad_s_ptr + row.to(tl.int64) * grad_s_stride * UNIT + cols, mask=col_mask, other=0.0)
        word = words_ptr + following * G + piece
        publish_projections(
            word, s_next, g_next, weight, mean_next, rstd_next, exists, weight_ptr, mean_ptr, weight_offset
        )
        first, second_sums = collect(seen, word_cols + row.to(tl.int64) * G, slice_exists)  # [BLOCK_G], [BLOCK_G]
        g = widen(g_now, True)
        h = centre(s_now, mean_now, mean_ptr) * rstd_now
        if bias_parts_ptr is not None:
            bias_sum += g
        if weight_parts_ptr is not None:
            weight_sum += g * h
        if weight_ptr is not None:
            g = g * plus(widen_here(weight), weight_offset)
        ds = g - h * (tl.sum(first, axis=0) * per_column)
        if mean_ptr is not None:
            ds -= tl.sum(second_sums, axis=0) * per_column
        ds *= rstd_now
        if grad_s_ptr is not None:
            ds += widen(grad_s, True)
        store_both(grad_x_ptr, grad_residual_ptr, row.to(tl.int64) * N + cols, ds, col_mask)
        seen = seen_next

    if weight_parts_ptr is not None:
        tl.store(weight_parts_ptr + group.to(tl.int64) * N + cols, weight_sum, mask=col_mask)
    if bias_parts_ptr is not None:
        tl.store(bias_parts_ptr + group.to(tl.int64) * N + cols, bias_sum, mask=col_mask)


@triton.jit
def load_slice(
    x_ptr,
    residual_ptr,
    row,
    x_stride,
    residual_stride,
    cols,
    col_mask,
    exists,
    S_DTYPE: tl.constexpr,
    UNIT: tl.constexpr,
):
    """x + residual of one row at `cols`, rounded to S_DTYPE; zeros if the row does not exist."""
    row64 = row.to(tl.int64)
    mask = col_mask & exists
    s = tl.load(x_ptr + row64 * x_stride * UNIT + cols, mask=mask, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row64 * residual_stride * UNIT + cols, mask=mask, other=0.0)
        return (widen(s, True) + widen(residual, True)).to(S_DTYPE)
    else:
        return s.to(S_DTYPE)


@triton.jit
def publish_moments(word_ptr, s_stored, col_mask, count, exists, CENTERED: tl.constexpr):
    """Publish a slice's sum of squares; if CENTERED its sum and its squares about its own mean."""
    s = widen(s_stored, True)
    if CENTERED:
        first = tl.sum(s, axis=0)
        d = tl.where(col_mask, s - first / count, 0.0)
        publish(word_ptr, first, tl.sum(d * d, axis=0), exists)
    else:
        first = tl.sum(s * s, axis=0)
        publish(word_ptr, first, first, exists)


@triton.jit
def load_row(
    s_ptr,
    grad_out_ptr,
    mean_ptr,
    rstd_ptr,
    row,
    one,
    s_stride,
    grad_out_stride,
    cols,
    col_mask,
    exists,
    UNIT: tl.constexpr,
):
    """(s, grad_out, mean, rstd) of a row, zeros if it does not exist; rstd for mean where there is no mean."""
    row64 = row.to(tl.int64)
    mask = col_mask & exists
    s = tl.load(s_ptr + row64 * s_stride * UNIT + cols, mask=mask, other=0.0)
    g = tl.load(grad_out_ptr + row64 * grad_out_stride * UNIT + cols, mask=mask, other=0.0)
    rstd = tl.load(rstd_ptr + row + one, mask=exists, other=0.0)  # [1]
    mean = rstd
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + row + one, mask=exists, other=0.0)  # [1]
    return s, g, mean, rstd


@triton.jit
def publish_projections(
    word_ptr, s_stored, g_stored, weight, mean, rstd, exists, weight_ptr, mean_ptr, weight_offset: tl.constexpr
):
    """Publish a slice's sums of grad_out * weight * xhat and, for LayerNorm, of grad_out * weight."""
    g = widen(g_stored, True)
    if weight_ptr is not None:
        g = g * plus(widen_here(weight), weight_offset)
    s = centre(s_stored, mean, mean_ptr)
    if mean_ptr is None:
        first = tl.sum(g * s, axis=0) * tl.sum(rstd, axis=0)
        publish(word_ptr, first, first, exists)
    else:
        first, second = sum_both(g * s, g, 0, True)
        publish(word_ptr, first * tl.sum(rstd, axis=0), second, exists)


@triton.jit
def centre(s_stored, mean, mean_ptr):
    """s - mean in float32; s where there is no mean."""
    s = widen(s_stored, True)
    if mean_ptr is not None:
        s = s - mean
    return s


@triton.jit
def publish(word_ptr, first, second, exists):
    """Put two float32 into one word; a NaN in the lower half becomes the one that is not all ones."""
    low = tl.where(first == first, first, float("nan")).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    high = second.to(tl.int32, bitcast=True).to(tl.int64)
    tl.atomic_xchg(word_ptr, (high << 32) | low, mask=exists, sem="relaxed")


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
