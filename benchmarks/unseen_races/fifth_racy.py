"""Racy kernels of the fifth set: places that several programs use, without anything that orders them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import integers, multiprocessors, racy
from triton.tools.tensor_descriptor import TensorDescriptor


def whole(*values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


@triton.jit
def spmm_by_entries_kernel(row_ptr, col_ptr, val_ptr, b_ptr, c_ptr, entries, PER: tl.constexpr, N: tl.constexpr):
    n = tl.arange(0, N)
    for k in range(PER):
        e = tl.program_id(0) * PER + k
        if e < entries:
            place = c_ptr + tl.load(row_ptr + e) * N + n
            b = tl.load(b_ptr + tl.load(col_ptr + e) * N + n)
            tl.store(place, tl.load(place) + tl.load(val_ptr + e) * b)


# Row 1 has entries 2 to 6, of programs 0, 1 and 2: each loads, adds and stores it.
@racy(
    "c_ptr", "read/write,write/write", "a sparse product by entries in coordinates: a row goes on in the next program"
)
def sparse_rows_cut_by_programs(device):
    row = whole(0, 0, 1, 1, 1, 1, 1, 2, 3, 3, 4, device=device)
    col = whole(3, 1, 0, 2, 3, 1, 4, 4, 0, 2, 1, device=device)
    val, b = integers(11, low=1, seed=1).to(device), integers(5, 16, low=1, seed=2).to(device)
    spmm_by_entries_kernel[(4,)](row, col, val, b, torch.zeros(5, 16, device=device), 11, PER=3, N=16)


@triton.jit
def convolution_weight_kernel(x_ptr, dy_ptr, dw_ptr, L, BLOCK: tl.constexpr):
    tap, batch = tl.program_id(0), tl.program_id(1)
    steps = L - tl.num_programs(0) + 1
    i = tl.arange(0, BLOCK)
    dy = tl.load(dy_ptr + batch * steps + i, i < steps, other=0.0)
    x = tl.load(x_ptr + batch * L + tap + i, i < steps, other=0.0)
    tl.store(dw_ptr + tap, tl.load(dw_ptr + tap) + tl.sum(dy * x, 0))


# Programs (tap, 0) to (tap, 3) add to the same weight by load and store.
@racy(
    "dw_ptr", "read/write,write/write", "a convolution's weight gradient is added up over the batch by load and store"
)
def convolution_weights_over_the_batch(device):
    x, dy = integers(4, 30, low=1, seed=1).to(device), integers(4, 26, low=1, seed=2).to(device)
    convolution_weight_kernel[(5, 4)](x, dy, torch.zeros(5, device=device), 30, BLOCK=32)


@triton.jit
def append_key_kernel(k_ptr, page_ptr, length_ptr, cache_ptr, PAGES: tl.constexpr, PAGE: tl.constexpr,
                      D: tl.constexpr):  # fmt: skip
    seq, d = tl.program_id(0), tl.arange(0, D)
    length = tl.load(length_ptr + seq)
    page = tl.load(page_ptr + seq * PAGES + length // PAGE)
    tl.store(cache_ptr + (page * PAGE + length % PAGE) * D + d, tl.load(k_ptr + seq * D + d))


# Sequences 0 and 2 were forked: both append their own key at place 1 of page 3.
@racy("cache_ptr", "write/write", "two forked sequences append to their common last page, which was not copied")
def page_of_two_forked_sequences(device):
    k, cache = integers(4, 16, low=-99, high=99).to(device), torch.zeros(6, 4, 16, device=device)
    pages = whole([0, 3], [1, 4], [0, 3], [2, 5], device=device)
    append_key_kernel[(4,)](k, pages, whole(5, 6, 5, 2, device=device), cache, PAGES=2, PAGE=4, D=16)


@triton.jit
def gate_half_kernel(dy_ptr, gate_up_ptr, N: tl.constexpr):
    row, half = tl.program_id(0), tl.program_id(1)
    n = tl.arange(0, N)
    gate = tl.load(gate_up_ptr + row * 2 * N + n)
    up = tl.load(gate_up_ptr + row * 2 * N + N + n)
    d = tl.load(dy_ptr + row * N + n) * tl.where(half == 0, up, gate)
    tl.store(gate_up_ptr + (row * 2 + half) * N + n, d)


# Program (row, 0) stores the gate's gradient over the gate that program (row, 1) loads, and the other way round.
@racy("gate_up_ptr", "read/write", "gradients of gate and up are stored over both, by a program for each half")
def gate_and_up_by_a_program_each(device):
    dy, both = integers(5, 16, low=1, seed=1).to(device), integers(5, 32, low=2, seed=2).to(device)
    gate_half_kernel[(5, 2)](dy, both, N=16)


@triton.jit
def overlap_add_kernel(x_ptr, out_ptr, HOP: tl.constexpr, FRAME: tl.constexpr):
    frame, j = tl.program_id(0), tl.arange(0, FRAME)
    x = tl.load(x_ptr + frame * FRAME + j)
    place = out_ptr + frame * HOP + j
    if frame % 2 == 0:
        tl.store(place, x)
    else:
        tl.store(place, tl.load(place) + x)


# Even frames lie side by side and so do odd ones; frame 1 adds to 8..23, which frames 0 and 2 store.
@racy("out_ptr", "read/write,write/write", "even frames are stored and odd ones added to them, all in one launch")
def frames_stored_and_added_in_one_launch(device):
    overlap_add_kernel[(6,)](integers(6, 16, low=1).to(device), torch.zeros(56, device=device), HOP=8, FRAME=16)


@triton.jit
def wrapped_update_kernel(a_ptr, b_ptr, c_ptr, M, K: tl.constexpr, T: tl.constexpr):
    rows = (tl.program_id(0) * T + tl.arange(0, T)[:, None]) % M
    k, n = tl.arange(0, K), tl.arange(0, T)[None, :]
    acc = tl.dot(tl.load(a_ptr + rows * K + k[None, :]), tl.load(b_ptr + k[:, None] * T + n), input_precision="ieee")
    place = c_ptr + rows * T + n
    tl.store(place, tl.load(place) + acc)


# M = 40: the third program's rows are 32..39 and 0..7, and those are the first one's.
@racy("c_ptr", "read/write,write/write", "rows that wrap around are updated in place by the first program and the last")
def wrapped_rows_updated_in_place(device):
    a, b, c = (integers(*shape, low=1, seed=s).to(device) for s, shape in enumerate([(40, 16), (16, 16), (40, 16)]))
    wrapped_update_kernel[(3,)](a, b, c, 40, K=16, T=16)


@triton.jit
def nine_points_kernel(x_ptr, colour, W: tl.constexpr, BLOCK: tl.constexpr):
    row, col = tl.program_id(0) + 1, tl.arange(0, BLOCK)
    mine = (col > 0) & (col < W - 1) & ((row + col) % 2 == colour)
    at = x_ptr + row * W + col
    total = tl.zeros((BLOCK,), tl.float32)
    for dr in tl.static_range(-1, 2):
        for dc in tl.static_range(-1, 2):
            total += tl.load(at + dr * W + dc, mine, other=0.0)
    tl.debug_barrier()
    tl.store(at, total, mine)


# (2, 3) and (3, 4) have the same colour and are diagonal neighbours, of the programs of rows 2 and 3.
@racy("x_ptr", "read/write", "a stencil of nine points in place in two colours: diagonal neighbours have the same one")
def nine_points_in_two_colours(device):
    x = integers(10, 20, low=1).to(device)
    for colour in range(2):
        nine_points_kernel[(8,)](x, colour, W=20, BLOCK=32)


@triton.jit
def paired_partials_kernel(x_ptr, part_ptr, rows, N: tl.constexpr):
    pid, n = tl.program_id(0), tl.arange(0, N)
    total = tl.zeros((N,), tl.float32)
    for row in range(pid, rows, tl.num_programs(0)):
        total += tl.load(x_ptr + row * N + n)
    place = part_ptr + pid // 2 * N + n
    tl.store(place, tl.load(place) + total)


# Programs 0 and 1 both add to row 0 by load and store, whatever the number of multiprocessors.
@racy(
    "part_ptr", "read/write,write/write", "a program a multiprocessor, and a row of partial sums for each two of them"
)
def partial_row_of_two_multiprocessors(device):
    programs = multiprocessors()
    x, part = integers(2 * programs + 3, 16, low=1), torch.zeros(programs // 2 + 1, 16, device=device)
    paired_partials_kernel[(programs,)](x.to(device), part, 2 * programs + 3, N=16)


@triton.jit
def two_stages_kernel(x_ptr, mid_ptr, out_ptr, half, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    i = pid % half * BLOCK + tl.arange(0, BLOCK)
    if pid < half:
        tl.store(mid_ptr + i, tl.load(x_ptr + i) * 2)
    else:
        tl.store(out_ptr + i, tl.load(mid_ptr + i) + 1)


# Program half + t loads what program t stores; lower numbers need not be done first.
@racy("mid_ptr", "read/write", "the first half of the multiprocessors makes what the second half uses, in one launch")
def halves_of_the_gpu_as_two_stages(device):
    half = multiprocessors() // 2
    x, mid, out = integers(half * 16, low=1).to(device), *torch.zeros(2, half * 16, device=device)
    two_stages_kernel[(2 * half,)](x, mid, out, half, BLOCK=16)


@triton.jit
def swap_rows_kernel(x_ptr, a_ptr, b_ptr, N: tl.constexpr):
    pid, n = tl.program_id(0), tl.arange(0, N)
    a, b = x_ptr + tl.load(a_ptr + pid) * N + n, x_ptr + tl.load(b_ptr + pid) * N + n
    of_a, of_b = tl.load(a), tl.load(b)
    tl.debug_barrier()
    tl.store(a, of_b)
    tl.store(b, of_a)


# Row 3 is in the pairs of programs 1 and 2.
@racy("x_ptr", "read/write,write/write", "pairs of rows are swapped in place, and one row is in two pairs")
def swapped_rows_that_repeat(device):
    x = integers(8, 16, low=-99, high=99).to(device)
    swap_rows_kernel[(4,)](x, whole(0, 3, 5, 7, device=device), whole(2, 4, 3, 6, device=device), N=16)


@triton.jit
def double_clamped_kernel(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.minimum(tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), n - 1)
    x = tl.load(x_ptr + i) * 2
    tl.debug_barrier()
    tl.store(x_ptr + i, x)


# Programs 4 to 7 all double element 69, once or up to four times.
@racy(
    "x_ptr",
    "read/write,write/write",
    "indices beyond the end are clamped to the last element, which is doubled in place",
)
def lanes_clamped_to_the_last_element(device):
    double_clamped_kernel[(8,)](integers(70, low=1).to(device), 70, BLOCK=16)


@triton.jit
def welford_kernel(x_ptr, stat_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    mean = tl.sum(x, 0) / BLOCK
    squares = tl.sum((x - mean) * (x - mean), 0)
    count, old = tl.load(stat_ptr), tl.load(stat_ptr + 1)
    new, d = count + BLOCK, mean - old
    tl.store(stat_ptr, new)
    tl.store(stat_ptr + 1, old + d * BLOCK / new)
    tl.store(stat_ptr + 2, tl.load(stat_ptr + 2) + squares + d * d * count * BLOCK / new)


# All eight programs load and store the same three numbers.
@racy("stat_ptr", "read/write,write/write", "count, mean and squares are merged by each program by load and store")
def moments_merged_by_load_and_store(device):
    welford_kernel[(8,)](integers(128).to(device), torch.zeros(3, device=device), BLOCK=16)


@triton.jit
def two_widths_kernel(wide_ptr, low_ptr):
    pid = tl.program_id(0)
    if pid % 2 == 0:
        tl.atomic_add(wide_ptr + pid // 4, 1)
    else:
        tl.atomic_add(low_ptr + pid // 4 * 2, 1)


# Atomics of 64 and of 32 bits on the same bytes are not atomic to each other: the overlap has to be complete.
@racy("wide_ptr,low_ptr", "atomic/atomic", "even programs count in words of 64 bits, odd ones in their lower halves")
def counters_of_two_widths(device):
    wide = torch.zeros(2, dtype=torch.int64, device=device)
    two_widths_kernel[(8,)](wide, wide.view(torch.int32))


@triton.jit
def block_scales_kernel(x_ptr, scale_ptr, BLOCK: tl.constexpr, PER: tl.constexpr):
    first = tl.program_id(0) * BLOCK
    i = first + tl.arange(0, BLOCK)
    x = tl.abs(tl.load(x_ptr + i))
    for b in range(first // PER, (first + BLOCK - 1) // PER + 1):
        tl.store(scale_ptr + b, tl.max(tl.where(i // PER == b, x, 0.0), 0))


# Scale 1 is of elements 24..47: program 0 stores the maximum of 24..31, program 1 that of 32..47.
@racy("scale_ptr", "write/write", "a scale for 24 elements, and programs of 32: two of them store the scale in between")
def scales_of_blocks_across_programs(device):
    x, scale = torch.arange(96, dtype=torch.float32).to(device), torch.zeros(4, device=device)
    block_scales_kernel[(3,)](x, scale, BLOCK=32, PER=24)


@triton.jit
def split_k_descriptor_kernel(a_desc, b_desc, c_desc, T: tl.constexpr):
    m, split = tl.program_id(0) * T, tl.program_id(1) * T
    acc = tl.dot(a_desc.load([m, split]), b_desc.load([split, 0]), input_precision="ieee")
    c_desc.store([m, 0], c_desc.load([m, 0]) + acc)


# Programs (m, 0) to (m, 3) load and store the same tile of C.
@racy("c_desc", "read/write,write/write", "splits of K add to C by loads and stores of a descriptor")
def split_k_through_descriptors(device):
    a, b = integers(32, 64, low=1, high=4, seed=1).to(device), integers(64, 16, low=1, high=4, seed=2).to(device)
    c = torch.zeros(32, 16, device=device)
    descriptors = [TensorDescriptor.from_tensor(t, [16, 16]) for t in (a, b, c)]
    split_k_descriptor_kernel[(2, 4)](*descriptors, T=16)


@triton.jit
def stepped_blocks_kernel(x_ptr, M, N, STEP: tl.constexpr, T: tl.constexpr, WIDE: tl.constexpr):
    block = tl.make_block_ptr(x_ptr, (M, N), (N, 1), (tl.program_id(0) * STEP, 0), (T, WIDE), (1, 0))
    x = tl.load(block, boundary_check=(0, 1))
    tl.store(block, x * 2, boundary_check=(0, 1))


# 37 rows over four programs were rounded to 12 each: rows 12..15 are of programs 0 and 1.
@racy("x_ptr", "read/write,write/write", "blocks of 16 rows every 12 rows, doubled in place by block pointers")
def blocks_of_pointers_that_overlap(device):
    stepped_blocks_kernel[(4,)](integers(37, 30, low=1).to(device), 37, 30, STEP=12, T=16, WIDE=32)
