"""Kernels of the fused form's backward: locations and weights of references, offsets and logits, and the way back.

Between the two `msda_bwd` makes the gradients of locations and weights as ever.
"""

from __future__ import annotations

import triton
import triton.language as tl

from retrograd.ops.msda.triton.backward import pairs
from retrograd.ops.msda.triton.forward import load_logits, moved
from retrograd.ops.msda.triton.sampling import level_size, load_points


@triton.jit(do_not_specialize=["N", "S", "size0", "size1", "size2", "size3", "size4", "size5", "size6", "size7"])
def msda_points_kernel(
    references_ptr,  # [B, Q, L, 4] if BOXES, else [B, Q, L, 2]
    shapes_ptr,  # [L, 2] or None
    offsets_ptr,  # [B, Q, H, K, 2]
    logits_ptr,  # [B, Q, H, K]
    locations_ptr,  # [B, Q, H, K, 2] float32
    weights_ptr,  # [B, Q, H, K] float32
    N,
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
    POINTS: tl.constexpr,
    LEVELS: tl.constexpr,
    K: tl.constexpr,
    BOXES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program t writes the points of rows [t * BLOCK_R, + BLOCK_R) of N = B * Q * H."""
    sizes = (size0, size1, size2, size3, size4, size5, size6, size7)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)  # [BLOCK_R]
    k = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    level, count_x, count_y = counts_of(  # pyright: ignore[reportGeneralTypeIssues]
        shapes_ptr, sizes, S, POINTS, LEVELS, BOXES, BLOCK_K
    )
    there = (rows < N)[:, None] & (k < K)[None, :]
    index = rows[:, None] * K + k[None, :]  # [BLOCK_R, BLOCK_K]
    logits = load_logits(logits_ptr, rows * K, 0, rows < N, K, BLOCK_K)
    powers = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    share = tl.div_rn(1.0, tl.sum(powers, axis=1))
    tl.store(weights_ptr + index, powers * share[:, None], mask=there)
    px, py = load_points(offsets_ptr, index, there)
    reference = (rows // H)[:, None] * LEVELS + level[None, :]
    if BOXES:
        rx, ry = load_points(references_ptr, 2 * reference, there)
        side_x, side_y = load_points(references_ptr, 2 * reference + 1, there)
    else:
        rx, ry = load_points(references_ptr, reference, there)
        side_x, side_y = rx, ry
    both = pairs(moved(rx, px, count_x, side_x, BOXES), moved(ry, py, count_y, side_y, BOXES), tl.float32)
    tl.store(locations_ptr.to(tl.pointer_type(tl.int64), bitcast=True) + index, both, mask=there)


@triton.jit(do_not_specialize=["N", "S", "size0", "size1", "size2", "size3", "size4", "size5", "size6", "size7"])
def msda_points_bwd_kernel(
    references_ptr,  # [B, Q, L, 4] if BOXES, else [B, Q, L, 2]
    shapes_ptr,  # [L, 2] or None
    offsets_ptr,  # [B, Q, H, K, 2]
    weights_ptr,  # [B, Q, H, K] float32
    grad_locations_ptr,  # [B, Q, H, K, 2] float32, or None
    grad_weights_ptr,  # [B, Q, H, K] float32, or None
    grad_offsets_ptr,  # [B, Q, H, K, 2] or None
    grad_logits_ptr,  # [B, Q, H, K] or None
    grad_references_ptr,  # as references, or None
    N,
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
    POINTS: tl.constexpr,
    LEVELS: tl.constexpr,
    K: tl.constexpr,
    BOXES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program t handles queries [t * BLOCK_Q, + BLOCK_Q) of N = B * Q with all heads, BLOCK_H of them at once.

    The gradient of a reference is a sum over heads first, then over the points of its level.
    """
    sizes = (size0, size1, size2, size3, size4, size5, size6, size7)
    first = tl.program_id(0).to(tl.int64) * BLOCK_Q
    row = tl.arange(0, BLOCK_Q * BLOCK_H)
    queries = first + row // BLOCK_H  # [BLOCK_Q * BLOCK_H]
    k = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    level, count_x, count_y = counts_of(  # pyright: ignore[reportGeneralTypeIssues]
        shapes_ptr, sizes, S, POINTS, LEVELS, BOXES, BLOCK_K
    )
    sum_x = tl.zeros([BLOCK_Q * BLOCK_H, BLOCK_K], dtype=tl.float32)
    sum_y, sum_width, sum_height = sum_x, sum_x, sum_x
    for head in tl.range(0, H, BLOCK_H):
        heads = head + row % BLOCK_H
        there = ((queries < N) & (heads < H))[:, None] & (k < K)[None, :]
        index = (queries * H + heads)[:, None] * K + k[None, :]  # [BLOCK_Q * BLOCK_H, BLOCK_K]
        if grad_logits_ptr is not None:
            # d softmax: weight * (its gradient - the mean of all of them)
            weights = tl.load(weights_ptr + index, mask=there, other=0.0)
            grads = tl.load(grad_weights_ptr + index, mask=there, other=0.0)
            grads = weights * (grads - tl.sum(weights * grads, axis=1)[:, None])
            tl.store(grad_logits_ptr + index, grads.to(grad_logits_ptr.dtype.element_ty), mask=there)
        if grad_locations_ptr is not None:
            x, y = load_points(grad_locations_ptr, index, there)
            x, y = tl.where(there, x, 0.0), tl.where(there, y, 0.0)
            sum_x += x
            sum_y += y
            if BOXES:
                x, y = 0.5 * x, 0.5 * y
                if grad_references_ptr is not None:
                    ox, oy = load_points(offsets_ptr, index, there)
                    sum_width += tl.where(there, x * tl.div_rn(ox, count_x), 0.0)
                    sum_height += tl.where(there, y * tl.div_rn(oy, count_y), 0.0)
            if grad_offsets_ptr is not None:
                if BOXES:
                    reference = queries[:, None] * LEVELS + level[None, :]
                    side_x, side_y = load_points(references_ptr, 2 * reference + 1, there)
                    x, y = x * side_x, y * side_y
                both = pairs(tl.div_rn(x, count_x), tl.div_rn(y, count_y), grad_offsets_ptr.dtype.element_ty)
                tl.store(grad_offsets_ptr.to(tl.pointer_type(both.dtype), bitcast=True) + index, both, mask=there)
    if grad_references_ptr is not None:
        store_sums(grad_references_ptr, sum_x, sum_y, first, N, level, LEVELS, 0, BOXES, BLOCK_Q, BLOCK_H)
        if BOXES:
            store_sums(grad_references_ptr, sum_width, sum_height, first, N, level, LEVELS, 1, BOXES, BLOCK_Q, BLOCK_H)


@triton.jit
def counts_of(
    shapes_ptr, sizes, S, POINTS: tl.constexpr, LEVELS: tl.constexpr, BOXES: tl.constexpr, BLOCK_K: tl.constexpr
):
    """(level, what x, what y of offsets are divided by) of points: [BLOCK_K] int32, [1, BLOCK_K] float32 both.

    An empty level has no pixel to be away from: it counts as one of a pixel.
    """
    k = tl.arange(0, BLOCK_K)
    level_of = tl.zeros([BLOCK_K], dtype=tl.int32)
    count_x, count_y = tl.full([BLOCK_K], 1.0, dtype=tl.float32), tl.full([BLOCK_K], 1.0, dtype=tl.float32)
    start = tl.zeros([], dtype=tl.int64)
    first = 0
    for level in tl.static_range(LEVELS):
        here = k >= first  # and below the next level's first, which is looked at next
        level_of = tl.where(here, level, level_of)
        if BOXES:
            count_x = tl.where(here, tl.full([], POINTS[level], dtype=tl.float32), count_x)
            count_y = count_x
        else:
            width, height, start = level_size(shapes_ptr, sizes, start, S, level)
            count_x = tl.where(here, tl.maximum(width, 1).to(tl.float32), count_x)
            count_y = tl.where(here, tl.maximum(height, 1).to(tl.float32), count_y)
        first += POINTS[level]
    return level_of, count_x[None, :], count_y[None, :]


@triton.jit
def store_sums(
    pointer,
    x,
    y,
    first,
    N,
    level_of,
    LEVELS: tl.constexpr,
    HALF: tl.constexpr,
    BOXES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Sums of [BLOCK_Q * BLOCK_H, BLOCK_K] over heads and the points of each level, as pair HALF of each reference."""
    queries = first + tl.arange(0, BLOCK_Q)  # [BLOCK_Q]
    columns: tl.constexpr = x.shape[1]
    x = tl.sum(tl.reshape(x, [BLOCK_Q, BLOCK_H, columns]), axis=1)  # [BLOCK_Q, BLOCK_K]
    y = tl.sum(tl.reshape(y, [BLOCK_Q, BLOCK_H, columns]), axis=1)
    for level in tl.static_range(LEVELS):
        here = (level_of == level)[None, :]
        level_x = tl.sum(tl.where(here, x, 0.0), axis=1)
        level_y = tl.sum(tl.where(here, y, 0.0), axis=1)
        both = pairs(level_x, level_y, pointer.dtype.element_ty)
        index = queries * LEVELS + level
        if BOXES:
            index = 2 * index + HALF
        tl.store(pointer.to(tl.pointer_type(both.dtype), bitcast=True) + index, both, mask=queries < N)
