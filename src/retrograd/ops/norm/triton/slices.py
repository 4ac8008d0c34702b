"""Backward of wide rows: G programs take one slice each of the same row and exchange their partial sums.

Programs stay, to keep their sums for the vectors, and are resident together (a cooperative launch). They meet in a
buffer of 8-byte words, one per row and slice, filled with -1 before the launch: a word carries two float32 sums, so the
values are their own flag and no fence is needed. Words are added in the order of slices: the same bits every time.

A row is looked at twice. AHEAD rows before its turn its sums are published, from memory; at its turn it comes from L2
and the neighbours' words have long been there: nothing waits, and nothing of a row is held in between.
"""

from __future__ import annotations

import triton
import triton.language as tl

from retrograd.ops.norm.triton.arithmetic import plus, sum_both, widen, widen_here
from retrograd.ops.norm.triton.backward import store_both


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

    # Rows are tensors [1] and tiles [1, BLOCK_N]: the compiler prefetches one-element tensors, scalars it does not, and
    # its code for tiles is 1 to 4 % faster than for vectors (H200, LayerNorm).
    one = tl.arange(0, 1)  # [1]
    for early in tl.range(group, tl.minimum(group + AHEAD * groups, M), groups):
        s, g, mean, rstd = load_rows(
            s_ptr, grad_out_ptr, mean_ptr, rstd_ptr, early + one, s_stride, grad_out_stride, cols, col_mask, M, UNIT
        )
        publish_projections(
            words_ptr + (early + one) * G + piece, s, g, weight, mean, rstd, early + one < M,
            weight_ptr, mean_ptr, weight_offset,
        )  # fmt: skip
    seen = tl.full([BLOCK_G], -1, dtype=tl.int64)
    for row in tl.range(group, M, groups, num_stages=STAGES):
        # The next row's words are asked for a row before they are used: 0.7 us of latency, more under load.
        seen_next = peek(word_cols + tl.minimum(row + groups, M - 1).to(tl.int64) * G)
        later = row + AHEAD * groups + one
        s_later, g_later, mean_later, rstd_later = load_rows(
            s_ptr, grad_out_ptr, mean_ptr, rstd_ptr, later, s_stride, grad_out_stride, cols, col_mask, M, UNIT
        )
        # Again, from L2, where the first look left it: a row carried in registers until now costs more than this.
        here = row + one
        s, g, mean, rstd = load_rows(
            s_ptr, grad_out_ptr, mean_ptr, rstd_ptr, here, s_stride, grad_out_stride, cols, col_mask, M, UNIT
        )
        offsets = here.to(tl.int64)[:, None]
        mask = (here < M)[:, None] & col_mask[None, :]
        if grad_s_ptr is not None:
            grad_s = tl.load(grad_s_ptr + offsets * grad_s_stride * UNIT + cols[None, :], mask=mask, other=0.0)
        publish_projections(
            words_ptr + later * G + piece, s_later, g_later, weight, mean_later, rstd_later, later < M,
            weight_ptr, mean_ptr, weight_offset,
        )  # fmt: skip

        first, second = collect(seen, word_cols + row.to(tl.int64) * G, slice_exists)  # [BLOCK_G] twice
        g = widen(g, True)
        h = centre(s, mean, mean_ptr) * rstd[:, None]
        if bias_parts_ptr is not None:
            bias_sum += tl.sum(g, axis=0)
        if weight_parts_ptr is not None:
            weight_sum += tl.sum(g * h, axis=0)
        if weight_ptr is not None:
            g = g * plus(widen_here(weight), weight_offset)[None, :]
        ds = g - h * (tl.sum(first, axis=0) * per_column)
        if mean_ptr is not None:
            ds -= tl.sum(second, axis=0) * per_column
        ds *= rstd[:, None]
        if grad_s_ptr is not None:
            ds += widen(grad_s, True)
        store_both(grad_x_ptr, grad_residual_ptr, offsets * N + cols[None, :], ds, mask)
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
):
    """(s, grad_out, mean, rstd) of rows [1], zeros if they do not exist; rstd for mean where there is no mean."""
    exists = rows < M
    mask = exists[:, None] & col_mask[None, :]
    rows64 = rows.to(tl.int64)
    s = tl.load(s_ptr + (rows64 * s_stride * UNIT)[:, None] + cols[None, :], mask=mask, other=0.0)
    g = tl.load(grad_out_ptr + (rows64 * grad_out_stride * UNIT)[:, None] + cols[None, :], mask=mask, other=0.0)
    rstd = tl.load(rstd_ptr + rows64, mask=exists, other=0.0)  # [1]
    mean = rstd
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + rows64, mask=exists, other=0.0)  # [1]
    return s, g, mean, rstd


@triton.jit
def publish_projections(
    word_ptrs, s_stored, g_stored, weight, mean, rstd, exists, weight_ptr, mean_ptr, weight_offset: tl.constexpr
):
    """Publish a slice's sums of grad_out * weight * xhat and, for LayerNorm, of grad_out * weight."""
    g = widen(g_stored, True)
    if weight_ptr is not None:
        g = g * plus(widen_here(weight), weight_offset)[None, :]
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
