"""Tiles that overlap, in place, through two arguments, or at sizes that no block divides."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import integers, multiprocessors, racy


@triton.jit
def strided_tiles_kernel(x_ptr, out_ptr, n, STEP: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    i = pid * STEP + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n, other=0.0)
    tl.store(out_ptr + i, x * (pid + 1), i < n)


@racy(
    "out_ptr", "write/write", "tiles of 32 begin every 24 elements: the last 8 of each are written twice, differently"
)
def tiles_at_the_wrong_stride(device):
    x = integers(100, low=1).to(device)
    strided_tiles_kernel[(5,)](x, torch.zeros_like(x), 100, STEP=24, BLOCK=32)


@triton.jit
def unmasked_rows_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + cols, cols < N, other=0.0)
    tl.store(out_ptr + row * N + cols, x)


@racy("out_ptr", "write/write", "rows of 50 are stored in blocks of 64: zeros go over the row below")
def row_without_its_mask(device):
    out = torch.zeros(7 * 50 + 14, device=device)
    unmasked_rows_kernel[(7,)](integers(7, 50, low=1).to(device), out, 50, BLOCK=64)


@triton.jit
def tile_rows_kernel(x_ptr, out_ptr, M, N, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = rows[:, None] * N + cols[None, :] < M * N  # the mask of a flat tensor, not of a matrix
    x = tl.load(x_ptr + rows[:, None] * N + cols[None, :], mask, other=0.0)
    tl.store(out_ptr + rows[:, None] * N + cols[None, :], x + tl.program_id(1), mask)


@racy(
    "out_ptr",
    "write/write",
    "columns over the edge pass the mask of the flat tensor and land in the next row's first tile",
)
def matrix_with_a_flat_mask(device):
    x = integers(20, 40).to(device)
    tile_rows_kernel[(3, 3)](x, torch.zeros_like(x), 20, 40, ROWS=8, COLS=16)


@triton.jit
def shift_kernel(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i + 1, i < n - 1, other=0.0)
    tl.debug_barrier()
    tl.store(x_ptr + i, x, i < n - 1)


@racy("x_ptr", "read/write", "a block's last element comes from the next block, which may have been shifted already")
def shift_in_place(device):
    shift_kernel[(4,)](integers(120).to(device), 120, BLOCK=32)


@triton.jit
def stencil_kernel(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    left = tl.load(x_ptr + i - 1, (i > 0) & (i < n), other=0.0)
    right = tl.load(x_ptr + i + 1, i < n - 1, other=0.0)
    tl.debug_barrier()
    tl.store(x_ptr + i, left + right, i < n)


@racy("x_ptr", "read/write", "neighbours at the edge of a block may be old or new")
def stencil_in_place(device):
    stencil_kernel[(4,)](integers(120).to(device), 120, BLOCK=32)


@triton.jit
def transpose_kernel(x_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + rows[:, None] * N + cols[None, :])
    tl.debug_barrier()
    tl.store(x_ptr + cols[None, :] * N + rows[:, None], x)


@racy("x_ptr", "read/write", "tile (i, j) is stored over tile (j, i), which another program may not have read yet")
def transpose_in_place(device):
    transpose_kernel[(4, 4)](integers(64, 64).to(device), N=64, BLOCK=16)


@triton.jit
def reverse_kernel(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + n - 1 - i, i < n, other=0)
    tl.debug_barrier()
    tl.store(x_ptr + i, x, i < n)


@racy("x_ptr", "read/write", "a block is stored where another program still has to read")
def reverse_in_place(device):
    reverse_kernel[(4,)](torch.arange(128, dtype=torch.int32, device=device), 128, BLOCK=32)


@triton.jit
def rope_kernel(k_ptr, GROUP: tl.constexpr, HALF: tl.constexpr):
    head = tl.program_id(0) // GROUP
    i = tl.arange(0, HALF)
    base = k_ptr + head * 2 * HALF
    first, second = tl.load(base + i), tl.load(base + HALF + i)
    tl.debug_barrier()
    tl.store(base + i, -second)
    tl.store(base + HALF + i, first)


@racy("k_ptr", "read/write,write/write", "the query heads of a group each turn the key head that they share, in place")
def rotation_of_shared_keys(device):
    rope_kernel[(8,)](integers(2, 32, low=1).to(device), GROUP=4, HALF=16)


@triton.jit
def two_outputs_kernel(x_ptr, sum_ptr, difference_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n, other=0.0)
    tl.store(sum_ptr + i, x + 1, i < n)
    tl.store(difference_ptr + i, x - 1, i < n)


@racy("sum_ptr,difference_ptr", "write/write", "the second output begins inside of the first")
def outputs_that_overlap(device):
    buffer = torch.zeros(160, device=device)
    two_outputs_kernel[(4,)](integers(100).to(device), buffer[:100], buffer[60:], 100, BLOCK=32)


@triton.jit
def copy_next_kernel(source_ptr, target_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target_ptr + i, tl.load(source_ptr + i, i < n), i < n)


@racy("source_ptr,target_ptr", "read/write", "source and target are two views of one tensor, 16 elements apart")
def copy_between_overlapping_views(device):
    buffer = integers(116).to(device)
    copy_next_kernel[(4,)](buffer[:100], buffer[16:], 100, BLOCK=32)


@triton.jit
def workspace_kernel(x_ptr, float_ptr, int_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    x = tl.load(x_ptr + pid * BLOCK + tl.arange(0, BLOCK))
    tl.store(float_ptr + pid, tl.sum(x))
    tl.store(int_ptr + pid, pid)


@racy(
    "float_ptr,int_ptr",
    "write/write",
    "a workspace of bytes: the integers begin at byte 24, where the seventh float is",
)
def workspace_of_floats_and_integers(device):
    workspace = torch.zeros(16, device=device)
    workspace_kernel[(8,)](integers(8, 16, low=1).to(device), workspace, workspace.view(torch.int32)[6:], BLOCK=16)


@triton.jit
def bytes_kernel(flag_ptr, word_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    if pid == 0:
        tl.store(flag_ptr + tl.arange(0, BLOCK), tl.full((BLOCK,), 1, tl.int8))
    else:
        tl.store(word_ptr + pid, pid * 1000)


@racy("flag_ptr,word_ptr", "write/write", "eight flags of a byte reach into the second word of four bytes")
def bytes_over_words(device):
    words = torch.zeros(4, dtype=torch.int32, device=device)
    bytes_kernel[(3,)](words.view(torch.int8), words, BLOCK=8)


@triton.jit
def dropout_mask_kernel(x_ptr, mask_ptr, out_ptr, n, seed, STEP: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * STEP + tl.arange(0, BLOCK)
    keep = tl.rand(seed, i) > 0.5
    tl.store(mask_ptr + i, keep.to(tl.int8), i < n)
    tl.store(out_ptr + i, tl.where(keep, tl.load(x_ptr + i, i < n, other=0.0) * 2, 0.0), i < n)


@racy(
    "mask_ptr,out_ptr", "same value", "overlapping programs make and store the same mask: harmless, but twice the work"
)
def dropout_mask_stored_twice(device):
    x = integers(100).to(device)
    mask = torch.zeros(100, dtype=torch.int8, device=device)
    dropout_mask_kernel[(6,)](x, mask, torch.zeros_like(x), 100, 7, STEP=16, BLOCK=32)


@triton.jit
def dropout_in_place_kernel(x_ptr, n, seed, STEP: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * STEP + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n, other=0.0)
    tl.debug_barrier()
    tl.store(x_ptr + i, tl.where(tl.rand(seed, i) > 0.25, x * 2, 0.0), i < n)


@racy("x_ptr", "read/write,write/write", "overlapping programs scale what they keep in place, once or twice")
def dropout_in_place_of_overlapping_programs(device):
    dropout_in_place_kernel[(6,)](integers(100, low=1).to(device), 100, 7, STEP=16, BLOCK=32)


@triton.jit
def persistent_kernel(x_ptr, n, tiles, stride, BLOCK: tl.constexpr):
    for tile in range(tl.program_id(0), tiles, stride):
        i = tile * BLOCK + tl.arange(0, BLOCK)
        tl.store(x_ptr + i, tl.load(x_ptr + i, i < n) * 2, i < n)


@racy("x_ptr", "read/write,write/write", "programs step by one less than there are, so that tiles are doubled twice")
def persistent_tiles_by_the_wrong_step(device):
    persistent_kernel[(4,)](integers(300, low=1).to(device), 300, 10, 3, BLOCK=32)


@triton.jit
def clamped_rows_kernel(x_ptr, rows, per_program, N, BLOCK: tl.constexpr):
    start = tl.minimum(tl.program_id(0) * per_program, rows - per_program)
    cols = tl.arange(0, BLOCK)
    for row in range(start, start + per_program):
        place = x_ptr + row * N + cols
        tl.store(place, tl.load(place, cols < N) * 2, cols < N)


@racy(
    "x_ptr",
    "read/write,write/write",
    "the last programs are moved back to fit, onto rows of others, where the number of SMs does not divide the rows: 40, 46 and 58 do it, 64 and more do not",
)
def rows_shared_by_some_numbers_of_sms(device):
    rows = 64
    programs = min(multiprocessors(), rows)
    clamped_rows_kernel[(programs,)](
        integers(rows, 20, low=1).to(device), rows, triton.cdiv(rows, programs), 20, BLOCK=32
    )


@triton.jit
def slots_of_sms_kernel(x_ptr, partial_ptr, rows, N, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        total += tl.load(x_ptr + row * N + cols, cols < N, other=0.0)
    tl.store(partial_ptr + (tl.program_id(0) % SLOTS) * N + cols, total, cols < N)


@racy("partial_ptr", "write/write", "a workspace of 32 rows of sums: programs of a GPU with more SMs share them")
def slots_for_fewer_sms(device):
    programs = min(multiprocessors(), 64)
    slots_of_sms_kernel[(programs,)](
        integers(64, 20, low=1).to(device), torch.zeros(32, 20, device=device), 64, 20, SLOTS=32, BLOCK=32
    )


@triton.jit
def normalised_in_place_kernel(x_ptr, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    part = tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    row = tl.program_id(0)
    whole = tl.load(x_ptr + row * N + cols, cols < N, other=0.0)
    mine = (cols >= part * ROWS) & (cols < (part + 1) * ROWS) & (cols < N)
    tl.debug_barrier()
    tl.store(x_ptr + row * N + cols, whole - tl.sum(whole), mine)


@racy("x_ptr", "read/write", "two programs share a row: each reads all of it and overwrites its half")
def row_normalised_in_place_by_halves(device):
    normalised_in_place_kernel[(4, 2)](integers(4, 32, low=1).to(device), 4, 32, ROWS=16, BLOCK=32)


@triton.jit
def dtype_cast_in_place_kernel(wide_ptr, narrow_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(wide_ptr + i, i < n, other=0.0)
    tl.debug_barrier()
    tl.store(narrow_ptr + i, x.to(tl.float16), i < n)


@racy(
    "wide_ptr,narrow_ptr",
    "read/write",
    "halves are packed into the front of the floats' own memory, before others have read it",
)
def packed_into_its_own_memory(device):
    wide = integers(128).to(device)
    dtype_cast_in_place_kernel[(4,)](wide, wide.view(torch.float16), 128, BLOCK=32)


@triton.jit
def table_by_parts_kernel(count_ptr, table_ptr, out_ptr, BLOCK: tl.constexpr):
    program, cols = tl.program_id(0), tl.arange(0, BLOCK)
    counts = tl.load(count_ptr + cols)
    tl.store(table_ptr + cols, tl.cumsum(counts, 0) - counts, cols // 2 == program // 2)
    tl.debug_barrier()
    tl.store(out_ptr + program, tl.load(table_ptr + (program + 2) % BLOCK))


@racy("table_ptr", "read/write", "two programs store the same values, and a third one loads them")
def table_of_two_for_a_third(device):
    counts = integers(16, low=0, high=9, dtype=torch.int32).to(device)
    table = torch.zeros(16, dtype=torch.int32, device=device)
    table_by_parts_kernel[(16,)](counts, table, torch.zeros_like(table), BLOCK=16)


@triton.jit
def table_of_all_kernel(count_ptr, table_ptr, out_ptr, BLOCK: tl.constexpr):
    program, cols = tl.program_id(0), tl.arange(0, BLOCK)
    counts = tl.load(count_ptr + cols)
    tl.store(table_ptr + cols, tl.cumsum(counts, 0) - counts)
    tl.debug_barrier()
    tl.store(out_ptr + program, tl.load(table_ptr + program))


@racy("table_ptr", "same value", "each program stores the whole table and loads what it has stored itself: harmless")
def table_that_all_store(device):
    counts = integers(16, low=0, high=9, dtype=torch.int32).to(device)
    table = torch.zeros(16, dtype=torch.int32, device=device)
    table_of_all_kernel[(16,)](counts, table, torch.zeros_like(table), BLOCK=16)


@triton.jit
def clear_and_count_kernel(count_ptr):
    tl.store(count_ptr, 0)
    tl.debug_barrier()
    tl.atomic_add(count_ptr, 1)


@racy("count_ptr", "atomic/write,same value", "each program clears the counter that others count in already")
def counter_that_all_clear_and_count_in(device):
    clear_and_count_kernel[(16,)](torch.ones(1, dtype=torch.int32, device=device))
