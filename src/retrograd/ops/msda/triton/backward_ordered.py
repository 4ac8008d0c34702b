"""grad_value in a fixed order: each sample's cell is written down, the samples are sorted, each pixel gathers its own.

A cell is known by its first pixel that is in the level, so that all keys of a head are pixels. The samples that touch
a pixel lie in its own cell, the one to the left and the two above these; two neighbours make one range of the sorted
list.
"""

from __future__ import annotations

import triton
import triton.language as tl

from retrograd.ops.msda.triton.sampling import level_size, load_points, locate, row_mask, rows_of_program


@triton.jit(do_not_specialize=["N", "Q", "S", "size0", "size1", "size2", "size3", "size4", "size5", "size6", "size7"])
def msda_bwd_kernel_cells(
    shapes_ptr,  # [L, 2] or None
    locations_ptr,  # [B, Q, H, K, 2]
    keys_ptr,  # [B, Q, H, K]
    N,
    Q,
    S,
    past,
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
    K: tl.constexpr,
    BORDER: tl.constexpr,
    ALIGNED: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write (b * H + h) * S + the first pixel of the cell of each of N samples; `past` if it touches no pixel."""
    sizes = (size0, size1, size2, size3, size4, size5, size6, size7)
    samples = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    there = samples < N
    k = (samples % K).to(tl.int32)
    sampler = samples // K
    px, py = load_points(locations_ptr, samples, there)
    width, height, base = samples * 0, samples * 0, samples * 0
    start = tl.zeros([], dtype=tl.int64)
    first = 0
    for level in tl.static_range(len(POINTS)):
        level_width, level_height, end = level_size(shapes_ptr, sizes, start, S, level)
        mine = k >= first
        width, height = tl.where(mine, level_width, width), tl.where(mine, level_height, height)
        base = tl.where(mine, start, base)
        start = end
        first += POINTS[level]
    x, y, _, _, _, _, left, right, upper, lower = locate(
        px, py, width.to(INDEX), height.to(INDEX), BORDER, ALIGNED, INDEX
    )
    pixel = base + tl.maximum(y, 0).to(tl.int64) * width + tl.maximum(x, 0)
    key = (sampler // (Q.to(tl.int64) * H) * H + sampler % H) * S + pixel
    key = tl.where((left | right) & (upper | lower), key, past)
    tl.store(keys_ptr + samples, key.to(keys_ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["Q", "S", "size0", "size1", "size2", "size3", "size4", "size5", "size6", "size7"])
def msda_bwd_kernel_ordered(
    grad_out_ptr,  # [B, Q, H, C]
    shapes_ptr,  # [L, 2] or None
    locations_ptr,  # [B, Q, H, K, 2]
    weights_ptr,  # [B, Q, H, K]
    order_ptr,  # [B * Q * H * K] int64, samples in the order of their keys
    begins_ptr,  # [B * H * S + 1], first place in order_ptr of each key
    grad_value_ptr,  # [B, S, H, C]
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
    LEVELS: tl.constexpr,
    K: tl.constexpr,
    BORDER: tl.constexpr,
    ALIGNED: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Program ((b, t), h) writes pixels [t * BLOCK_P, + BLOCK_P) of image b and head h, coarse levels first.

    Sample e of a pixel is added to sum e % ENTRIES, in the order of the list; the sums are added up at the end.
    """
    sizes = (size0, size1, size2, size3, size4, size5, size6, size7)
    image, head, pixels = rows_of_program(S, H, BLOCK_P)
    # The longest lists are those of the coarse levels, at the end of S.
    pixels = S - 1 - pixels  # [BLOCK_P]
    width, height, row, col = pixels * 0, pixels * 0, pixels * 0, pixels * 0
    there = tl.zeros(pixels.shape, dtype=tl.int1)
    start = tl.zeros([], dtype=tl.int64)
    for level in tl.static_range(LEVELS):
        level_width, level_height, end = level_size(shapes_ptr, sizes, start, S, level)
        mine = (pixels >= start) & (pixels < start + level_width * level_height)
        there = there | mine
        width, height = tl.where(mine, level_width, width), tl.where(mine, level_height, height)
        local = tl.where(mine, pixels - start, 0)
        row = tl.where(mine, local // tl.maximum(level_width, 1), row)
        col = tl.where(mine, local % tl.maximum(level_width, 1), col)
        start = end

    # Cells of the row above, then of the pixel's own row: each with the one to the left, if there is one.
    keys = (image * H + head) * S + pixels
    before = (col > 0).to(tl.int64)
    above = there & (row > 0)
    first = tl.load(begins_ptr + keys - width - before, mask=above, other=0).to(tl.int64)
    count = tl.load(begins_ptr + keys - width + 1, mask=above, other=0).to(tl.int64) - first
    second = tl.load(begins_ptr + keys - before, mask=there, other=0).to(tl.int64)
    both = count + tl.load(begins_ptr + keys + 1, mask=there, other=0).to(tl.int64) - second

    cols = tl.arange(0, BLOCK_C)  # [BLOCK_C]
    entries = tl.arange(0, ENTRIES)  # [ENTRIES]
    total = tl.zeros([BLOCK_P, ENTRIES, BLOCK_C], dtype=tl.float32)
    columns, lines = width.to(INDEX)[:, None], height.to(INDEX)[:, None]
    for begin in tl.range(0, tl.max(both, axis=0), ENTRIES):
        entry = begin + entries[None, :]  # [1, ENTRIES]
        live = entry < both[:, None]  # [BLOCK_P, ENTRIES]
        index = tl.where(entry < count[:, None], first[:, None] + entry, second[:, None] + entry - count[:, None])
        sample = tl.load(order_ptr + index, mask=live, other=0)
        px, py = load_points(locations_ptr, sample, live)
        a = tl.load(weights_ptr + sample, mask=live, other=0.0).to(tl.float32)
        x, y, tx, ty, _, _, _, _, _, _ = locate(px, py, columns, lines, BORDER, ALIGNED, INDEX)
        left, upper = x == col[:, None], y == row[:, None]
        touches = live & (left | (x + 1 == col[:, None])) & (upper | (y + 1 == row[:, None]))
        share = a * (tl.where(upper, 1 - ty, ty) * tl.where(left, 1 - tx, tx))
        share = tl.where(touches, share, 0.0)
        mask = touches[:, :, None]
        if BLOCK_C != C:
            mask = mask & (cols < C)[None, None, :]
        pointers = grad_out_ptr + (sample // K * C)[:, :, None] + cols[None, None, :]
        g = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        total = tl.fma(share[:, :, None].broadcast_to(g.shape), g, total)

    result = tl.sum(total, axis=1)  # [BLOCK_P, BLOCK_C]
    pointers = grad_value_ptr + ((image * S + pixels) * H + head)[:, None] * C + cols[None, :]
    tl.store(pointers, result.to(grad_value_ptr.dtype.element_ty), mask=row_mask(pixels >= 0, cols, C))
