"""Parts that the kernels of deformable attention share: sizes of levels, places of points in cells, rows of pixels."""

from __future__ import annotations

import triton
import triton.language as tl

# Sizes known to the host are arguments of a kernel, one of 64 bits a level; further levels come in a tensor.
MAX_SIZES = 8


@triton.jit
def rows_of_program(N, H: tl.constexpr, BLOCK_R: tl.constexpr):
    """(image, head, rows [BLOCK_R]) of a program; image and rows are int64.

    Heads change fastest from program to program, then tiles of the N rows of an image, then images. A row beyond the
    last is N or more.
    """
    program = tl.program_id(0)
    tiles = tl.cdiv(N, BLOCK_R)
    rows = (program // H % tiles).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    return (program // H // tiles).to(tl.int64), program % H, rows


@triton.jit
def level_size(shapes_ptr, sizes, start, S, LEVEL: tl.constexpr):
    """(width, height, end) int64 of a level that starts at pixel `start`; empty where it does not fit into S."""
    if shapes_ptr is not None:
        height = tl.load(shapes_ptr + 2 * LEVEL).to(tl.int64)
        width = tl.load(shapes_ptr + 2 * LEVEL + 1).to(tl.int64)
    else:
        height = (sizes[LEVEL] >> 31) & 0x7FFFFFFF
        width = sizes[LEVEL] & 0x7FFFFFFF
    area = height * width
    end = start + area
    # Neither side beyond S: then the product of a level that is in use has not overflowed.
    fits = (height >= 0) & (width >= 0) & (height <= S) & (width <= S) & (end >= area) & (end <= S)
    zero = tl.zeros_like(area)
    return tl.where(fits, width, zero), tl.where(fits, height, zero), end


@triton.jit
def level_of_program(shapes_ptr, sizes, S, LEVELS: tl.constexpr):
    """(width, height, start) int64 of the level that is the program's number along the grid's second dimension."""
    start = tl.zeros([], dtype=tl.int64)
    its_width, its_height, its_start = start, start, start
    for level in tl.static_range(LEVELS):
        width, height, end = level_size(shapes_ptr, sizes, start, S, level)
        here = tl.program_id(1) == level
        its_width, its_height = tl.where(here, width, its_width), tl.where(here, height, its_height)
        its_start = tl.where(here, start, its_start)
        start = end
    return its_width, its_height, its_start


@triton.jit
def load_points(locations_ptr, index, mask):
    """(x, y) float32 of points numbered `index`, by one load each; NaN where masked."""
    dtype: tl.constexpr = locations_ptr.dtype.element_ty
    if dtype.primitive_bitwidth == 32:
        pair = tl.load(locations_ptr.to(tl.pointer_type(tl.int64), bitcast=True) + index, mask=mask, other=-1)
        return pair.to(tl.int32).to(dtype, bitcast=True), (pair >> 32).to(tl.int32).to(dtype, bitcast=True)
    else:
        pair = tl.load(locations_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + index, mask=mask, other=-1)
        x, y = pair.to(tl.int16).to(dtype, bitcast=True), (pair >> 16).to(tl.int16).to(dtype, bitcast=True)
        return x.to(tl.float32), y.to(tl.float32)


@triton.jit
def place(p, exists, size, BORDER: tl.constexpr, ALIGNED: tl.constexpr, INDEX: tl.constexpr):
    """(cell, fraction, moves) of points along one axis; what is not near the level is in cell -2.

    Args:
        p: [BLOCK_Q] coordinates, 0 where not `exists` and BORDER.
        exists: whether both coordinates are finite; looked at for BORDER only.
        size: pixels of the level along the axis.
    """
    # A product followed by a sum would be contracted. This one is rounded, as is the sum.
    if ALIGNED:
        x = tl.fma(p, (size - 1).to(tl.float32), 0.0)
    else:
        x = tl.fma(p, size.to(tl.float32), 0.0) - 0.5
    if BORDER:
        last = (size - 1).to(tl.float32)
        moves = exists & (x > 0.0) & (x < last)
        x = tl.minimum(tl.maximum(x, 0.0), last)
    else:
        moves = exists
        # False for NaN as well.
        far: tl.constexpr = 2.0 ** (INDEX.primitive_bitwidth - 2)
        x = tl.where(tl.abs(x) < far, x, -2.0)
    cell = tl.floor(x)
    if ALIGNED and not BORDER:
        # NVIDIA's floor takes a subnormal for 0; positions are none in the other modes, or not below 0.
        cell = tl.where((x < 0.0) & (cell == 0.0), -1.0, cell)
    return cell.to(INDEX), x - cell, moves


@triton.jit
def scale_of(size, ALIGNED: tl.constexpr):
    """Pixels per unit of a location."""
    if ALIGNED:
        return (size - 1).to(tl.float32)
    else:
        return size.to(tl.float32)


@triton.jit
def locate(px, py, width, height, BORDER: tl.constexpr, ALIGNED: tl.constexpr, INDEX: tl.constexpr):
    """(x, y, tx, ty, moves_x, moves_y, left, right, upper, lower) of points [BLOCK_Q] in a level.

    `left` says whether the column x is in the level and the point exists, `right` likewise x + 1; `upper`, `lower`
    the rows y and y + 1. With zeros outside moves_x and moves_y say whether any corner may be in the level.
    """
    exists = tl.full(px.shape, 1, dtype=tl.int1)
    if BORDER:
        infinite: tl.constexpr = float("inf")
        exists = (tl.abs(px) < infinite) & (tl.abs(py) < infinite)
        px, py = tl.where(exists, px, 0.0), tl.where(exists, py, 0.0)
    x, tx, moves_x = place(px, exists, width, BORDER, ALIGNED, INDEX)
    y, ty, moves_y = place(py, exists, height, BORDER, ALIGNED, INDEX)
    left, right = (x >= 0) & (x < width), (x >= -1) & (x < width - 1)
    upper, lower = (y >= 0) & (y < height), (y >= -1) & (y < height - 1)
    if BORDER:
        upper, lower = upper & exists, lower & exists
    else:
        moves_x = (left | right) & (upper | lower)
        moves_y = moves_x
    return x, y, tx, ty, moves_x, moves_y, left, right, upper, lower


@triton.jit
def load_rows(pointers, rows, cols, C: tl.constexpr):
    """[BLOCK_Q, BLOCK_C] float32; rows that are masked out are not read and are zeros."""
    return tl.load(pointers, mask=row_mask(rows, cols, C), other=0.0).to(tl.float32)


@triton.jit
def row_mask(rows, cols, C: tl.constexpr):
    """[BLOCK_Q, BLOCK_C] mask of rows without the columns beyond C."""
    mask = rows[:, None]
    if cols.shape[0] != C:
        mask = mask & (cols < C)[None, :]
    return mask
