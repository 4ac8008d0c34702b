"""Backward kernel of deformable attention: gradients of weights and locations, and of value by atomic additions."""

from __future__ import annotations

import triton
import triton.language as tl

from retrograd.ops.msda.triton.sampling import (
    level_of_program,
    level_size,
    load_points,
    load_rows,
    locate,
    row_mask,
    rows_of_program,
    scale_of,
)


@triton.jit(do_not_specialize=["Q", "S", "size0", "size1", "size2", "size3", "size4", "size5", "size6", "size7"])
def msda_bwd_kernel(
    grad_out_ptr,  # [B, Q, H, C]
    value_ptr,  # [B, S, H, C]
    shapes_ptr,  # [L, 2] or None
    locations_ptr,  # [B, Q, H, K, 2]
    weights_ptr,  # [B, Q, H, K]
    grad_value_ptr,  # [B, S, H, C] float32 zeros, or None
    grad_locations_ptr,  # [B, Q, H, K, 2] or None
    grad_weights_ptr,  # [B, Q, H, K] or None
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
    SEGMENTS: tl.constexpr,
    K: tl.constexpr,
    BORDER: tl.constexpr,
    ALIGNED: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_C: tl.constexpr,
    APART: tl.constexpr,
):
    """Program ((b, t), h) handles rows [t * BLOCK_Q, + BLOCK_Q) of image b and head h.

    APART: number of levels, each of which has programs of its own; SEGMENTS are those of one level. 0: all in one.

    Results of point k wait in column k - first of tiles, which are stored at the ends of segments (see
    `plan.segments`): to store them one by one, each would have to change threads.
    """
    sizes = (size0, size1, size2, size3, size4, size5, size6, size7)
    image, head, queries = rows_of_program(Q, H, BLOCK_Q)
    there = queries < Q
    samplers = (image * Q + queries) * H + head  # [BLOCK_Q] int64, rows of grad_out
    cols = tl.arange(0, BLOCK_C)  # [BLOCK_C]
    g = load_rows(grad_out_ptr + samplers[:, None] * C + cols[None, :], there, cols, C)
    READS: tl.constexpr = grad_locations_ptr is not None or grad_weights_ptr is not None
    grad_a = tl.zeros([BLOCK_Q, BLOCK_C], dtype=tl.float32)
    # Coordinates of 16 bits wait as one integer, a tile of registers less, or sm_100 spills under Triton 3.6.
    # Those of 32 bits wait apart: as integers of 64 bits they take more registers.
    COORDINATE: tl.constexpr = locations_ptr.dtype.element_ty
    HALVES: tl.constexpr = COORDINATE.primitive_bitwidth == 16
    grad_x, grad_y = grad_a, grad_a
    grad_xy = tl.zeros([BLOCK_Q, BLOCK_C], dtype=tl.int32)
    start = tl.zeros([], dtype=tl.int64)
    end = start
    width, height = start.to(INDEX), start.to(INDEX)
    scale_x, scale_y = start.to(tl.float32), start.to(tl.float32)
    unknown = (Q < 0).to(tl.int32)  # 0; known, the loop is unrolled for AMD and takes all registers
    k = 0
    if APART:
        k = tl.program_id(1) * (K // APART)
    first = k
    for segment in tl.static_range(len(SEGMENTS)):
        if SEGMENTS[segment][0] >= 0:
            start = end
            if APART:
                wide_width, wide_height, start = level_of_program(shapes_ptr, sizes, S, APART)
            else:
                wide_width, wide_height, end = level_size(shapes_ptr, sizes, start, S, SEGMENTS[segment][0])
            width, height = wide_width.to(INDEX), wide_height.to(INDEX)
            scale_x, scale_y = scale_of(width, ALIGNED), scale_of(height, ALIGNED)
        origin = (image * S + start) * (H * C) + head * C
        for _ in tl.range(0, unknown + SEGMENTS[segment][1], loop_unroll_factor=1):
            px, py = load_points(locations_ptr, samplers * K + k, there)
            a = tl.load(weights_ptr + samplers * K + k, mask=there, other=0.0).to(tl.float32)
            x, y, tx, ty, moves_x, moves_y, left, right, upper, lower = locate(
                px, py, width, height, BORDER, ALIGNED, INDEX
            )
            pixel = (y * width + x) * (H * C)  # [BLOCK_Q]
            below = width * (H * C)
            s00, s01, s10, s11 = (1 - ty) * (1 - tx), (1 - ty) * tx, ty * (1 - tx), ty * tx
            if READS:
                corner = value_ptr + origin + pixel[:, None] + cols[None, :]
                v00 = load_rows(corner, left & upper, cols, C)
                v01 = load_rows(corner + H * C, right & upper, cols, C)
                v10 = load_rows(corner + below, left & lower, cols, C)
                v11 = load_rows(corner + below + H * C, right & lower, cols, C)
            if grad_value_ptr is not None:
                corner = grad_value_ptr + origin
                add_rows(corner, pixel, a * s00, g, left & upper, cols, C)
                add_rows(corner + H * C, pixel, a * s01, g, right & upper, cols, C)
                add_rows(corner + below, pixel, a * s10, g, left & lower, cols, C)
                add_rows(corner + below + H * C, pixel, a * s11, g, right & lower, cols, C)
            if READS:
                d00, d01 = tl.sum(v00 * g, axis=1), tl.sum(v01 * g, axis=1)  # [BLOCK_Q]
                d10, d11 = tl.sum(v10 * g, axis=1), tl.sum(v11 * g, axis=1)
                here = cols[None, :] == k - first
                if grad_weights_ptr is not None:
                    dot = tl.fma(s11, d11, tl.fma(s10, d10, tl.fma(s01, d01, s00 * d00)))
                    grad_a = tl.where(here, dot[:, None], grad_a)
                if grad_locations_ptr is not None:
                    slope_x = tl.fma(ty, d11 - d10, (1 - ty) * (d01 - d00)) * scale_x * a
                    slope_y = tl.fma(tx, d11 - d01, (1 - tx) * (d10 - d00)) * scale_y * a
                    slope_x, slope_y = tl.where(moves_x, slope_x, 0.0), tl.where(moves_y, slope_y, 0.0)
                    if HALVES:
                        grad_xy = tl.where(here, pairs(slope_x, slope_y, COORDINATE)[:, None], grad_xy)
                    else:
                        grad_x = tl.where(here, slope_x[:, None], grad_x)
                        grad_y = tl.where(here, slope_y[:, None], grad_y)
            k += 1
        if SEGMENTS[segment][2] > 0:
            wanted = row_mask(there, cols, SEGMENTS[segment][2])
            index = samplers[:, None] * K + (first + cols)[None, :]
            if grad_weights_ptr is not None:
                tl.store(grad_weights_ptr + index, grad_a.to(grad_weights_ptr.dtype.element_ty), mask=wanted)
            if grad_locations_ptr is not None:
                both = grad_xy if HALVES else pairs(grad_x, grad_y, COORDINATE)
                tl.store(grad_locations_ptr.to(tl.pointer_type(both.dtype), bitcast=True) + index, both, mask=wanted)
            first = k


@triton.jit
def add_rows(base, offsets, share, g, rows, cols, C: tl.constexpr):
    """base[offsets + c] += share * g[:, c] atomically, for the rows [BLOCK_Q] that are not masked out."""
    mask = row_mask(rows, cols, C)
    tl.atomic_add(base + offsets[:, None] + cols[None, :], share[:, None] * g, mask=mask, sem="relaxed")


@triton.jit
def pairs(x, y, dtype: tl.constexpr):
    """(x, y) rounded to `dtype` as integers that one store writes."""
    x, y = x.to(dtype), y.to(dtype)
    if dtype.primitive_bitwidth == 32:
        low, high = x.to(tl.uint32, bitcast=True).to(tl.int64), y.to(tl.uint32, bitcast=True).to(tl.int64)
        return low | (high << 32)
    else:
        low, high = x.to(tl.uint16, bitcast=True).to(tl.int32), y.to(tl.uint16, bitcast=True).to(tl.int32)
        return low | (high << 16)
