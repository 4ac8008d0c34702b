"""Forward kernel of deformable attention: a program gathers for a block of queries of one head.

In the fused form it makes the locations and weights that it gathers with in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from retrograd.ops.msda.triton.sampling import level_size, load_points, load_rows, locate, row_mask, rows_of_program


@triton.jit(do_not_specialize=["Q", "S", "size0", "size1", "size2", "size3", "size4", "size5", "size6", "size7"])
def msda_fwd_kernel(
    value_ptr,  # [B, S, H, C]
    shapes_ptr,  # [L, 2] or None
    references_ptr,  # None, in the fused form [B, Q, L, 4] if BOXES, else [B, Q, L, 2]
    locations_ptr,  # [B, Q, H, K, 2], in the fused form offsets
    weights_ptr,  # [B, Q, H, K], in the fused form logits
    out_ptr,  # [B, Q, H, C]
    Q,
    S,
    size0,
    size1,
    size2,
    size3,
    size4,
    size5,
    size6,
    size7,
    H: tl.constexpr,
    C: tl.constexpr,
    POINTS: tl.constexpr,
    LEVELS: tl.constexpr,
    K: tl.constexpr,
    BOXES: tl.constexpr,
    BORDER: tl.constexpr,
    ALIGNED: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program ((b, t), h) computes rows [t * BLOCK_Q, + BLOCK_Q) of image b and head h."""
    sizes = (size0, size1, size2, size3, size4, size5, size6, size7)
    image, head, queries = rows_of_program(Q, H, BLOCK_Q)
    there = queries < Q
    samplers = (image * Q + queries) * H + head  # [BLOCK_Q] int64, rows of out
    cols = tl.arange(0, BLOCK_C)  # [BLOCK_C]
    if references_ptr is not None:
        highest, share = softmax_of(weights_ptr, samplers * K, there, K, BLOCK_K)
    total = tl.zeros([BLOCK_Q, BLOCK_C], dtype=tl.float32)
    start = tl.zeros([], dtype=tl.int64)
    k = 0
    unknown = (Q < 0).to(tl.int32)  # 0; known, the loop is unrolled for AMD and takes all registers
    for level in tl.static_range(LEVELS):
        wide_width, wide_height, end = level_size(shapes_ptr, sizes, start, S, level)
        width, height = wide_width.to(INDEX), wide_height.to(INDEX)
        base = value_ptr + (image * S + start) * (H * C) + head * C
        if references_ptr is not None:
            reference = (image * Q + queries) * LEVELS + level  # [BLOCK_Q]
            if BOXES:
                rx, ry = load_points(references_ptr, 2 * reference, there)
                side_x, side_y = load_points(references_ptr, 2 * reference + 1, there)
                count_x = tl.full([], POINTS[level], dtype=tl.float32)
                count_y = count_x
            else:
                rx, ry = load_points(references_ptr, reference, there)
                side_x, side_y = rx, ry
                count_x, count_y = tl.maximum(width, 1).to(tl.float32), tl.maximum(height, 1).to(tl.float32)
        for _ in tl.range(0, unknown + POINTS[level], loop_unroll_factor=1):
            px, py = load_points(locations_ptr, samplers * K + k, there)
            a = tl.load(weights_ptr + samplers * K + k, mask=there, other=0.0).to(tl.float32)
            if references_ptr is not None:
                px = moved(rx, px, count_x, side_x, BOXES)
                py = moved(ry, py, count_y, side_y, BOXES)
                a = tl.exp(a - highest) * share
            step = width * (H * C)
            total = add_sample(total, a, base, cols, px, py, width, height, step, H, C, BORDER, ALIGNED, INDEX)
            k += 1
        start = end
    out = out_ptr + samplers[:, None] * C + cols[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=row_mask(there, cols, C))


@triton.jit(do_not_specialize=["Q", "S", "size0", "size1", "size2", "size3", "size4", "size5", "size6", "size7"])
def msda_fwd_kernel_few(
    value_ptr,
    shapes_ptr,
    references_ptr,
    locations_ptr,
    weights_ptr,
    out_ptr,
    Q,
    S,
    size0,
    size1,
    size2,
    size3,
    size4,
    size5,
    size6,
    size7,
    H: tl.constexpr,
    C: tl.constexpr,
    POINTS: tl.constexpr,
    LEVELS: tl.constexpr,
    K: tl.constexpr,
    BOXES: tl.constexpr,
    BORDER: tl.constexpr,
    ALIGNED: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """As `msda_fwd_kernel`, for few queries: all points of a row in one tile, so that nobody waits for one of them.

    Of what has a row a point, BLOCK_K rows in turn belong to a query.
    """
    sizes = (size0, size1, size2, size3, size4, size5, size6, size7)
    image, head, queries = rows_of_program(Q, H, BLOCK_Q)
    k = tl.arange(0, BLOCK_Q * BLOCK_K) % BLOCK_K
    query = of_points(queries, BLOCK_Q, BLOCK_K)
    there = (query < Q) & (k < K)
    samplers = (image * Q + query) * H + head
    a = tl.load(weights_ptr + samplers * K + k, mask=there, other=0.0).to(tl.float32)
    px, py = load_points(locations_ptr, samplers * K + k, there)
    cols = tl.arange(0, BLOCK_C)  # [BLOCK_C]
    start = tl.zeros([], dtype=tl.int64)
    width, height = tl.zeros(k.shape, dtype=INDEX), tl.zeros(k.shape, dtype=INDEX)
    origin, count, level_of = query, tl.zeros(k.shape, dtype=tl.float32), k
    first = 0
    for level in tl.static_range(LEVELS):
        wide_width, wide_height, end = level_size(shapes_ptr, sizes, start, S, level)
        here = k >= first  # and below the next level's first, which is looked at next
        width = tl.where(here, wide_width.to(INDEX), width)
        height = tl.where(here, wide_height.to(INDEX), height)
        origin = tl.where(here, image * S + start, origin)
        count = tl.where(here, tl.full([], POINTS[level], dtype=tl.float32), count)
        level_of = tl.where(here, level, level_of)
        first += POINTS[level]
        start = end
    if references_ptr is not None:
        row = (image * Q + queries) * H + head  # [BLOCK_Q]
        highest, share = softmax_of(weights_ptr, row * K, queries < Q, K, BLOCK_K)
        a = tl.exp(a - of_points(highest, BLOCK_Q, BLOCK_K)) * of_points(share, BLOCK_Q, BLOCK_K)
        a = tl.where(there, a, 0.0)
        reference = (image * Q + query) * LEVELS + level_of
        if BOXES:
            rx, ry = load_points(references_ptr, 2 * reference, there)
            side_x, side_y = load_points(references_ptr, 2 * reference + 1, there)
            px, py = moved(rx, px, count, side_x, BOXES), moved(ry, py, count, side_y, BOXES)
        else:
            rx, ry = load_points(references_ptr, reference, there)
            px = moved(rx, px, tl.maximum(width, 1).to(tl.float32), rx, BOXES)
            py = moved(ry, py, tl.maximum(height, 1).to(tl.float32), ry, BOXES)
    base = value_ptr + (origin * (H * C) + head * C)[:, None]
    total = tl.zeros([BLOCK_Q * BLOCK_K, BLOCK_C], dtype=tl.float32)
    step = (width * (H * C))[:, None]
    total = add_sample(total, a, base, cols, px, py, width, height, step, H, C, BORDER, ALIGNED, INDEX)
    total = tl.sum(tl.reshape(total, [BLOCK_Q, BLOCK_K, BLOCK_C]), axis=1)
    samplers = (image * Q + queries) * H + head  # [BLOCK_Q] int64, rows of out
    out = out_ptr + samplers[:, None] * C + cols[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=row_mask(queries < Q, cols, C))


@triton.jit
def of_points(rows, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """[BLOCK_Q * BLOCK_K] of each point what [BLOCK_Q] its row has."""
    return tl.reshape(tl.broadcast_to(rows[:, None], [BLOCK_Q, BLOCK_K]), [BLOCK_Q * BLOCK_K])


@triton.jit
def add_sample(
    total,
    a,
    base,
    cols,
    px,
    py,
    width,
    height,
    step,
    H: tl.constexpr,
    C: tl.constexpr,
    BORDER: tl.constexpr,
    ALIGNED: tl.constexpr,
    INDEX: tl.constexpr,
):
    """total [BLOCK_Q, BLOCK_C] + a * sample at (px, py), all three of [BLOCK_Q], in the level that begins at `base`.

    `step` leads from a pixel to the one below it.
    """
    x, y, tx, ty, _, _, left, right, upper, lower = locate(px, py, width, height, BORDER, ALIGNED, INDEX)
    pixel = base + ((y * width + x) * (H * C))[:, None] + cols[None, :]  # [BLOCK_Q, BLOCK_C]
    below = pixel + step
    v00 = load_rows(pixel, left & upper, cols, C)
    v01 = load_rows(pixel + H * C, right & upper, cols, C)
    v10 = load_rows(below, left & lower, cols, C)
    v11 = load_rows(below + H * C, right & lower, cols, C)
    sample = ((1 - ty) * (1 - tx))[:, None] * v00
    sample = tl.fma(v01, ((1 - ty) * tx)[:, None].broadcast_to(v01.shape), sample)
    sample = tl.fma(v10, (ty * (1 - tx))[:, None].broadcast_to(v10.shape), sample)
    sample = tl.fma(v11, (ty * tx)[:, None].broadcast_to(v11.shape), sample)
    return tl.fma(sample, a[:, None].broadcast_to(sample.shape), total)


@triton.jit
def moved(reference, offset, count, side, BOXES: tl.constexpr):
    """reference + offset / count, for boxes reference + offset / count * side * 0.5, every step rounded on its own."""
    step = tl.div_rn(offset, count)
    if BOXES:
        # Plain products would be contracted with the sum, see `sampling.place`.
        step = tl.fma(tl.fma(step, side, 0.0), 0.5, 0.0)
    return reference + step


@triton.jit
def softmax_of(logits_ptr, first, there, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """(maximum, 1 / sum of exp(logit - maximum)) of each row's K logits from `first` on, both of [BLOCK_Q].

    The second is NaN where a softmax is: the sum is one with a NaN, or with the difference of two infinities.
    """
    highest = tl.full([first.shape[0], BLOCK_K], -float("inf"), dtype=tl.float32)
    for begin in tl.range(0, K, BLOCK_K):
        highest = tl.maximum(highest, load_logits(logits_ptr, first, begin, there, K, BLOCK_K))
    highest = tl.max(highest, axis=1)
    sums = tl.zeros([first.shape[0], BLOCK_K], dtype=tl.float32)
    for begin in tl.range(0, K, BLOCK_K):
        sums += tl.exp(load_logits(logits_ptr, first, begin, there, K, BLOCK_K) - highest[:, None])
    return highest, tl.div_rn(1.0, tl.sum(sums, axis=1))


@triton.jit
def load_logits(logits_ptr, first, begin, there, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """[BLOCK_Q, BLOCK_K] float32 logits from `begin` on, -inf beyond the last; zeros for rows that are not there."""
    columns = begin + tl.arange(0, BLOCK_K)
    inside = (columns < K)[None, :]
    logits = tl.load(logits_ptr + first[:, None] + columns[None, :], mask=there[:, None] & inside, other=0.0)
    return tl.where(inside, logits.to(tl.float32), -float("inf"))
