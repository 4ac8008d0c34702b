"""Forward kernel of deformable attention: a program gathers for a block of queries of one head."""

from __future__ import annotations

import triton
import triton.language as tl

from retrograd.ops.msda.triton.sampling import level_size, load_points, load_rows, locate, row_mask, rows_of_program


@triton.jit(do_not_specialize=["Q", "S", "size0", "size1", "size2", "size3", "size4", "size5", "size6", "size7"])
def msda_fwd_kernel(
    value_ptr,  # [B, S, H, C]
    shapes_ptr,  # [L, 2] or None
    locations_ptr,  # [B, Q, H, K, 2]
    weights_ptr,  # [B, Q, H, K]
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
    BORDER: tl.constexpr,
    ALIGNED: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Program ((b, t), h) computes rows [t * BLOCK_Q, + BLOCK_Q) of image b and BLOCK_H heads from head h * BLOCK_H."""
    sizes = (size0, size1, size2, size3, size4, size5, size6, size7)
    image, head, queries, lanes = rows_of_program(Q, H, BLOCK_H, BLOCK_Q)
    there = queries < Q
    samplers = (image * Q + queries) * H + head + lanes  # [BLOCK_Q] int64, rows of out
    column = (lanes * C).to(INDEX)  # [BLOCK_Q]
    cols = tl.arange(0, BLOCK_C)  # [BLOCK_C]
    total = tl.zeros([BLOCK_Q, BLOCK_C], dtype=tl.float32)
    start = tl.zeros([], dtype=tl.int64)
    k = 0
    unknown = (Q < 0).to(tl.int32)  # 0; known, the loop is unrolled for AMD and takes all registers
    for level in tl.static_range(LEVELS):
        wide_width, wide_height, end = level_size(shapes_ptr, sizes, start, S, level)
        width, height = wide_width.to(INDEX), wide_height.to(INDEX)
        base = value_ptr + (image * S + start) * (H * C) + head * C
        for _ in tl.range(0, unknown + POINTS[level], loop_unroll_factor=UNROLL):
            px, py = load_points(locations_ptr, samplers * K + k, there)
            a = tl.load(weights_ptr + samplers * K + k, mask=there, other=0.0).to(tl.float32)
            total = add_sample(total, a, base, column, cols, px, py, width, height, H, C, BORDER, ALIGNED, INDEX)
            k += 1
        start = end
    out = out_ptr + samplers[:, None] * C + cols[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=row_mask(there, cols, C))


@triton.jit
def add_sample(
    total,
    a,
    base,
    column,
    cols,
    px,
    py,
    width,
    height,
    H: tl.constexpr,
    C: tl.constexpr,
    BORDER: tl.constexpr,
    ALIGNED: tl.constexpr,
    INDEX: tl.constexpr,
):
    """total [BLOCK_Q, BLOCK_C] + a * sample at (px, py), all three of [BLOCK_Q], in the level that begins at `base`."""
    x, y, tx, ty, _, _, left, right, upper, lower = locate(px, py, width, height, BORDER, ALIGNED, INDEX)
    pixel = base + ((y * width + x) * (H * C) + column)[:, None] + cols[None, :]  # [BLOCK_Q, BLOCK_C]
    below = pixel + width * (H * C)
    v00 = load_rows(pixel, left & upper, cols, C)
    v01 = load_rows(pixel + H * C, right & upper, cols, C)
    v10 = load_rows(below, left & lower, cols, C)
    v11 = load_rows(below + H * C, right & lower, cols, C)
    sample = ((1 - ty) * (1 - tx))[:, None] * v00
    sample = tl.fma(v01, ((1 - ty) * tx)[:, None].broadcast_to(v01.shape), sample)
    sample = tl.fma(v10, (ty * (1 - tx))[:, None].broadcast_to(v10.shape), sample)
    sample = tl.fma(v11, (ty * tx)[:, None].broadcast_to(v11.shape), sample)
    return tl.fma(sample, a[:, None].broadcast_to(sample.shape), total)
