"""Racy kernels of the fourth set: places that several programs use, without anything that orders them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import integers, multiprocessors, racy


def zeros(device, *sizes, dtype=torch.int32):
    return [torch.zeros(n, dtype=dtype, device=device) for n in sizes]


@triton.jit
def group_lock_kernel(dy_ptr, x_ptr, part_ptr, lock_ptr, N: tl.constexpr, GROUPS: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, N)
    x = tl.load(x_ptr + row * N + cols)
    share = tl.load(dy_ptr + row * N + cols) * (x - tl.sum(x, 0) / N)
    place = part_ptr + (row % GROUPS) * N + cols
    lock = lock_ptr + row // GROUPS
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.debug_barrier()
    tl.store(place, tl.load(place) + share)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


# Rows 0, 4 and 8 add to partial row 0, each with another lock; a lock orders only those that take the same one.
@racy("part_ptr", "read/write,write/write", "the lock is that of row // 4, the partial sum that of row % 4")
def layer_norm_locks_of_another_row(device):
    dy, x = integers(12, 16, seed=1), integers(12, 16, seed=2)
    part = torch.zeros(4, 16, device=device)
    group_lock_kernel[(12,)](dy.to(device), x.to(device), part, *zeros(device, 4), N=16, GROUPS=4)


@triton.jit
def persistent_weight_kernel(dy_ptr, x_ptr, rstd_ptr, part_ptr, rows, N: tl.constexpr, PARTS: tl.constexpr):
    pid = tl.program_id(0)
    cols = tl.arange(0, N)
    total = tl.zeros((N,), tl.float32)
    for row in range(pid, rows, tl.num_programs(0)):
        total += tl.load(dy_ptr + row * N + cols) * tl.load(x_ptr + row * N + cols) * tl.load(rstd_ptr + row)
    tl.store(part_ptr + (pid % PARTS) * N + cols, total)


# 40 programs and more: programs 0 and 32 store different sums in row 0.
@racy("part_ptr", "write/write", "a partial row per multiprocessor, in a buffer of 32 rows that goes round")
def rms_norm_partials_go_round(device):
    programs = max(multiprocessors(), 33)
    rows = 2 * programs + 5
    dy, x = integers(rows, 16, low=1, seed=1), integers(rows, 16, low=1, seed=2)
    rstd = integers(rows, low=1, high=4, seed=3)
    part = torch.zeros(32, 16, device=device)
    persistent_weight_kernel[(programs,)](
        dy.to(device), x.to(device), rstd.to(device), part, rows, N=16, PARTS=32
    )  # fmt: skip


@triton.jit
def split_k_plain_kernel(a_ptr, b_ptr, c_ptr, K: tl.constexpr, SPLITS: tl.constexpr, T: tl.constexpr):
    r, c = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
    acc = tl.zeros((T, T), tl.float32)
    for k in range(tl.program_id(1) * T, K, SPLITS * T):
        a = tl.load(a_ptr + (tl.program_id(0) * T + r) * K + k + c)
        acc += tl.dot(a, tl.load(b_ptr + (k + r) * T + c), input_precision="ieee")
    place = c_ptr + (tl.program_id(0) * T + r) * T + c
    acc += tl.load(place, cache_modifier=".cg")
    tl.store(place, acc, cache_modifier=".cg")


# A cache modifier chooses where the line lives; addition by load and store stays two accesses.
@racy("c_ptr", "read/write,write/write", "splits of K add to C by load and store past the first cache")
def split_k_added_past_the_cache(device):
    a, b = integers(32, 128, low=1, high=4, seed=1), integers(128, 16, low=1, high=4, seed=2)
    c = torch.zeros(32, 16, device=device)
    split_k_plain_kernel[(2, 4)](a.to(device), b.to(device), c, K=128, SPLITS=4, T=16)


@triton.jit
def double_chunks_kernel(x_ptr, tiles, BLOCK: tl.constexpr):
    per = tl.cdiv(tiles, tl.num_programs(0))
    first = tl.program_id(0) * per
    last = tl.minimum(first + per, tiles - 1)
    for tile in range(first, last + 1):
        i = tile * BLOCK + tl.arange(0, BLOCK)
        tl.store(x_ptr + i, tl.load(x_ptr + i) * 2)


# first + per is the next program's first tile: both load and store it.
@racy("x_ptr", "read/write,write/write", "chunks of tiles whose last one is the first of the next program")
def chunks_with_one_tile_too_many(device):
    programs = multiprocessors()
    tiles = 2 * programs + 3
    x = integers(tiles * 16, low=1).to(device)
    double_chunks_kernel[(programs,)](x, tiles, BLOCK=16)


@triton.jit
def triple_moved_kernel(x_ptr, n, BLOCK: tl.constexpr):
    start = tl.minimum(tl.program_id(0) * BLOCK, n - BLOCK)
    i = start + tl.arange(0, BLOCK)
    tl.store(x_ptr + i, tl.load(x_ptr + i) * 3)


# n = 100: the last program begins at 68 instead of 96 and shares 68..95 with the one before.
@racy("x_ptr", "read/write,write/write", "the last tile is moved back to fit, and scales in place what another scales")
def last_tile_moved_back_in_place(device):
    triple_moved_kernel[(4,)](integers(100, low=1).to(device), 100, BLOCK=32)


@triton.jit
def transpose_each_kernel(x_ptr, N: tl.constexpr, T: tl.constexpr):
    m, n = tl.program_id(0) * T, tl.program_id(1) * T
    r, c = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
    tile = tl.load(x_ptr + (m + r) * N + n + c)
    tl.debug_barrier()
    tl.store(x_ptr + (n + r) * N + m + c, tl.trans(tile))


# Program (0, 1) writes the tile (1, 0) that program (1, 0) reads; nothing makes either first. The diagonal is fine.
@racy("x_ptr", "read/write", "a transposition in place, each tile by a program of its own")
def transposed_in_place_by_every_tile(device):
    transpose_each_kernel[(3, 3)](integers(48, 48, low=-100, high=100).to(device), N=48, T=16)


@triton.jit
def smooth_in_place_kernel(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    left = tl.load(x_ptr + i - 1, (i > 0) & (i < n), other=0.0)
    mid = tl.load(x_ptr + i, i < n)
    right = tl.load(x_ptr + i + 1, i + 1 < n, other=0.0)
    tl.debug_barrier()
    tl.store(x_ptr + i, left + mid + right, i < n)


# Blocks meet at their borders only: element 31 is written by program 0 and read by program 1.
@racy("x_ptr", "read/write", "a stencil of three points in place")
def stencil_in_place(device):
    smooth_in_place_kernel[(4,)](integers(120).to(device), 120, BLOCK=32)


@triton.jit
def quantise_kernel(x_ptr, scale_ptr, q_ptr, n, BLOCK: tl.constexpr, ALL: tl.constexpr):
    pid = tl.program_id(0)
    if pid == 0:
        every = tl.arange(0, ALL)
        tl.store(scale_ptr, tl.max(tl.abs(tl.load(x_ptr + every, every < n, other=0.0)), 0) / 127)
    tl.debug_barrier()
    i = pid * BLOCK + tl.arange(0, BLOCK)
    q = tl.load(x_ptr + i, i < n, other=0.0) / tl.load(scale_ptr)
    tl.store(q_ptr + i, q.to(tl.int8), i < n)


@racy("scale_ptr", "read/write", "program 0 stores the scale that all programs of the same launch load")
def scale_from_program_zero(device):
    x, q = integers(250).to(device), torch.zeros(250, dtype=torch.int8, device=device)
    quantise_kernel[(8,)](x, torch.ones(1, device=device), q, 250, BLOCK=32, ALL=256)


@triton.jit
def pack_nibbles_kernel(q_ptr, packed_ptr, BYTES: tl.constexpr):
    row, half = tl.program_id(0), tl.program_id(1)
    j = tl.arange(0, BYTES)
    q = tl.load(q_ptr + (row * 2 + half) * BYTES + j)
    place = packed_ptr + row * BYTES + j
    old = tl.load(place)
    if half == 0:
        new = (old & 0xF0) | q
    else:
        new = (old & 0x0F) | (q << 4)
    tl.store(place, new)


# Nibbles differ, but memory is written by bytes: one half is lost.
@racy("packed_ptr", "read/write,write/write", "two programs write one half each of every byte")
def nibbles_of_one_byte_by_two_programs(device):
    q = integers(3, 2, 16, low=1, high=16, dtype=torch.uint8).to(device)
    packed = torch.zeros(3, 16, dtype=torch.uint8, device=device)
    pack_nibbles_kernel[(3, 2)](q, packed, BYTES=16)


@triton.jit
def embedding_gradient_kernel(dy_ptr, id_ptr, dw_ptr, tokens, PER: tl.constexpr, D: tl.constexpr):
    cols = tl.arange(0, D)
    for k in range(PER):
        token = tl.program_id(0) * PER + k
        if token < tokens:
            place = dw_ptr + tl.load(id_ptr + token) * D + cols
            tl.store(place, tl.load(place) + tl.load(dy_ptr + token * D + cols))


# Id 7 is in tokens of programs 0, 1 and 3; a repetition inside one program (2, 2) would be in order.
@racy("dw_ptr", "read/write,write/write", "rows of a gradient are added to by load and store, and ids repeat")
def embedding_gradient_by_stores(device):
    ids = torch.tensor([7, 1, 2, 2, 7, 0, 3, 4, 5, 6, 8, 9, 7, 10], dtype=torch.int32)
    dw = torch.zeros(11, 16, device=device)
    dy = integers(14, 16, low=1).to(device)
    embedding_gradient_kernel[(4,)](dy, ids.to(device), dw, 14, PER=4, D=16)


@triton.jit
def route_kernel(expert_ptr, count_ptr, out_ptr, CAP: tl.constexpr):
    token = tl.program_id(0)
    expert = tl.load(expert_ptr + token)
    tl.atomic_add(count_ptr + expert, 1)
    slot = tl.load(count_ptr + expert) - 1
    tl.store(out_ptr + expert * CAP + slot, token)


# The load is another access, neither atomic nor ordered after other programs' additions.
@racy("count_ptr", "atomic/read", "a token's slot is loaded after the count instead of returned by it")
def slot_loaded_after_the_count(device):
    expert = torch.tensor([0, 1, 0, 0, 2, 1, 0, 2, 2, 0], dtype=torch.int32).to(device)
    count, out = zeros(device, 3, 30)
    route_kernel[(10,)](expert, count, out, CAP=10)


@triton.jit
def scale_rows_kernel(x_ptr, out_ptr, stride_x, stride_out, N: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, N)
    tl.store(out_ptr + row * stride_out + cols, tl.load(x_ptr + row * stride_x + cols) * 2)


# out.stride(0) is 0: every row is the same memory.
@racy("out_ptr", "write/write", "the output is an expanded tensor, whose rows are one")
def output_that_is_expanded(device):
    x, out = integers(6, 32, low=-100, high=100).to(device), torch.zeros(1, 32, device=device).expand(6, 32)
    scale_rows_kernel[(6,)](x, out, x.stride(0), out.stride(0), N=32)


@triton.jit
def words_and_halves_kernel(words_ptr, halves_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    i = (pid // 2) * BLOCK + tl.arange(0, BLOCK)
    if pid % 2 == 0:
        tl.store(words_ptr + i, 0x01020304 + i)
    else:
        tl.store(halves_ptr + 2 * i + 1, (i + 77).to(tl.int16))


# The upper half of word i is the 16 bits at 2 i + 1: two tensors, one memory.
@racy("words_ptr,halves_ptr", "write/write", "even programs write words, odd ones the upper halves of the same words")
def words_and_halves_of_one_storage(device):
    (words,) = zeros(device, 64)
    words_and_halves_kernel[(8,)](words, words.view(torch.int16), BLOCK=16)


@triton.jit
def histogram_plain_kernel(x_ptr, hist_ptr, n, BLOCK: tl.constexpr, BINS: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    counts = tl.histogram(tl.load(x_ptr + i, i < n, other=0), BINS, mask=i < n)
    place = hist_ptr + tl.arange(0, BINS)
    tl.store(place, tl.load(place) + counts)


@racy("hist_ptr", "read/write,write/write", "histograms of blocks are added up by load and store")
def histogram_of_blocks_stored(device):
    x = integers(200, low=0, high=16, dtype=torch.int32).to(device)
    histogram_plain_kernel[(4,)](x, *zeros(device, 16), 200, BLOCK=64, BINS=16)


@triton.jit
def boxes_kernel(x_ptr, out_ptr, rows, STEP: tl.constexpr, BOX: tl.constexpr, N: tl.constexpr):
    pid = tl.program_id(0)
    out = tl.make_tensor_descriptor(out_ptr, shape=[rows, N], strides=[N, 1], block_shape=[BOX, N])
    r, c = tl.arange(0, BOX)[:, None], tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + (pid * STEP + r) * N + c)
    out.store([pid * STEP, 0], x + pid)


# Rows 6 and 7 are in the boxes of programs 0 and 1, which store x + 0 and x + 1.
@racy("out_ptr", "write/write", "boxes of 8 rows are stored by a descriptor every 6 rows")
def boxes_of_a_descriptor_overlap(device):
    triton.set_allocator(lambda size, *_: torch.empty(size, dtype=torch.int8, device=device))
    x, out = integers(32, 32).to(device), torch.zeros(30, 32, device=device)
    boxes_kernel[(5,)](x, out, 30, STEP=6, BOX=8, N=32)
