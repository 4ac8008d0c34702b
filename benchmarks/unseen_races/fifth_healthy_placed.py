"""Healthy kernels of the fifth set: block pointers, autotuners, sequences, segments, filters, slots, bytes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import Check, healthy, integers


def zeros(device, *sizes, dtype=torch.int32):
    return [torch.zeros(n, dtype=dtype, device=device) for n in sizes]


@triton.jit
def double_columns_kernel(x_ptr, M, N, T: tl.constexpr):
    m, n = tl.program_id(0) * T, tl.program_id(1) * T
    block = tl.make_block_ptr(x_ptr, (M, N), (1, M), (m, n), (T, T), (0, 1))
    tl.store(block, tl.load(block, boundary_check=(0, 1)) * 2, boundary_check=(0, 1))


# A tile is checked in both directions: beyond the last row of a column would be the next column.
@healthy("a matrix kept by columns is doubled in place by block pointers, checked at both borders")
def columns_doubled_by_block_pointers(device):
    x = integers(37, 50)
    own = x.to(device, copy=True)
    double_columns_kernel[(4, 3)](own, 50, 37, T=16)
    return [Check(own, 2 * x)]


@triton.jit
def permute_heads_kernel(x_ptr, out_ptr, T: tl.constexpr, H: tl.constexpr, D: tl.constexpr):
    b, t, h = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    d = tl.arange(0, D)
    tl.store(out_ptr + ((b * H + h) * T + t) * D + d, tl.load(x_ptr + ((b * T + t) * H + h) * D + d))


# Each of the 42 programs stores a vector of its own, to a tensor that nobody loads.
@healthy("heads and tokens change places from one tensor to another, in a grid of three dimensions")
def heads_before_tokens(device):
    x, out = integers(2, 7, 3, 16), torch.zeros(2, 3, 7, 16, device=device)
    permute_heads_kernel[(2, 7, 3)](x.to(device), out, T=7, H=3, D=16)
    return [Check(out, x.transpose(1, 2))]


@triton.jit
def patches_kernel(x_ptr, w_ptr, out_ptr, n, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    i, j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None], tl.arange(0, 4)[None, :]
    mask = (i < n) & (j < STRIDE)
    place = out_ptr + i * STRIDE + j
    x = tl.load(x_ptr + i, i < n, other=0.0) * tl.load(w_ptr + j, j < STRIDE, other=0.0)
    tl.store(place, tl.load(place, mask, other=0.0) + x, mask)


# Patches are as long as their stride: lanes of j = 3, which would be the next patch's first, are masked.
@healthy("a transposed convolution whose patches lie side by side, added by load and store")
def patches_side_by_side(device):
    x, w, old = integers(45, seed=1), integers(3, seed=2), integers(135, seed=3)
    out = old.to(device, copy=True)
    patches_kernel[(3,)](x.to(device), w.to(device), out, 45, STRIDE=3, BLOCK=16)
    return [Check(out, old + (x[:, None] * w).flatten())]


@triton.autotune([triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 64})], key=["n"])
@triton.jit
def tuned_maximum_kernel(x_ptr, top_ptr, n, N: tl.constexpr, BLOCK: tl.constexpr):
    r, c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None], tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + r * N + c, (r < n) & (c >= 0), other=-100)
    tl.atomic_max(top_ptr + tl.arange(0, N), tl.max(x, 0), sem="relaxed")


# A maximum that was taken twice is the same.
@healthy("maxima by atomics are tuned without a reset, and need none")
def tuned_maxima_that_need_no_reset(device):
    x, top = integers(90, 16, dtype=torch.int32), torch.full((16,), -100, dtype=torch.int32, device=device)
    tuned_maximum_kernel[lambda meta: (triton.cdiv(90, meta["BLOCK"]),)](x.to(device), top, 90, N=16)
    return [Check(top, x.amax(0))]


@triton.autotune(
    [triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})], key=["n"], reset_to_zero=["count_ptr"]
)  # fmt: skip
@triton.jit
def tuned_last_kernel(x_ptr, part_ptr, count_ptr, out_ptr, n, BLOCK: tl.constexpr):
    pid, programs = tl.program_id(0), tl.num_programs(0)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    tl.store(part_ptr + pid, tl.sum(tl.load(x_ptr + i, i < n, other=0.0), 0))
    tl.debug_barrier()
    ticket = tl.atomic_add(count_ptr, 1)
    tl.debug_barrier()
    if ticket == programs - 1:
        j = tl.arange(0, 16)
        tl.store(out_ptr, tl.sum(tl.load(part_ptr + j, j < programs, other=0.0), 0))


# Parts left over from a smaller block are not read: the last one takes as many as there are programs.
@healthy("the last one adds up; it is tuned, and the counter is reset before each run")
def tuned_tickets_that_are_reset(device):
    x, part, out = integers(128), torch.zeros(8, device=device), torch.zeros(1, device=device)
    tuned_last_kernel[lambda meta: (triton.cdiv(128, meta["BLOCK"]),)](x.to(device), part, *zeros(device, 1), out, 128)
    return [Check(out, x.sum()[None])]


@triton.jit
def reverse_spans_kernel(x_ptr, start_ptr, BLOCK: tl.constexpr):
    first, end = tl.load(start_ptr + tl.program_id(0)), tl.load(start_ptr + tl.program_id(0) + 1)
    i = first + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < end)
    tl.debug_barrier()
    tl.store(x_ptr + first + end - 1 - i, x, i < end)


# A sequence belongs to one program, which has loaded all of it before it stores any.
@healthy("sequences of several lengths are reversed in place, a program each, one of them empty")
def sequences_reversed_in_place(device):
    starts, x = [0, 5, 5, 21, 28, 44], integers(44, low=-99, high=99)
    own, want = x.to(device, copy=True), x.clone()
    reverse_spans_kernel[(5,)](own, torch.tensor(starts, dtype=torch.int32).to(device), BLOCK=16)
    for k in range(5):
        want[starts[k] : starts[k + 1]] = x[starts[k] : starts[k + 1]].flip(0)
    return [Check(own, want)]


@triton.jit
def segment_pieces_kernel(x_ptr, start_ptr, part_ptr, PIECE: tl.constexpr, D: tl.constexpr):
    segment, piece, d = tl.program_id(0), tl.program_id(1), tl.arange(0, D)
    first = tl.load(start_ptr + segment) + piece * PIECE
    total = tl.zeros((D,), tl.float32)
    for k in range(first, tl.minimum(first + PIECE, tl.load(start_ptr + segment + 1))):
        total += tl.load(x_ptr + k * D + d)
    tl.store(part_ptr + (segment * tl.num_programs(1) + piece) * D + d, total)


@triton.jit
def add_pieces_kernel(part_ptr, out_ptr, PIECES: tl.constexpr, D: tl.constexpr):
    p, d = tl.arange(0, PIECES)[:, None], tl.arange(0, D)
    parts = tl.load(part_ptr + (tl.program_id(0) * PIECES + p) * D + d[None, :])
    tl.store(out_ptr + tl.program_id(0) * D + d, tl.sum(parts, 0))


# Pieces beyond a segment's end store zeros in rows of their own.
@healthy("long segments are added up in pieces of four rows, each with a row of its own, and those by the next kernel")
def long_segments_in_pieces(device):
    starts, x = [0, 3, 16, 16, 24], integers(24, 16)
    part, out = torch.empty(16, 16, device=device), torch.zeros(4, 16, device=device)
    segment_pieces_kernel[(4, 4)](
        x.to(device), torch.tensor(starts, dtype=torch.int32).to(device), part, PIECE=4, D=16
    )  # fmt: skip
    add_pieces_kernel[(4,)](part, out, PIECES=4, D=16)
    return [Check(out, torch.stack([x[starts[k] : starts[k + 1]].sum(0) for k in range(4)]))]


@triton.jit
def set_bits_kernel(x_ptr, word_ptr, found_ptr, n, BLOCK: tl.constexpr, ASK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n, other=0)
    found = i >= 0
    for factor in tl.static_range(7, 16, 4):
        bit = x * factor % 509 % 256
        if ASK:
            found = found & ((tl.load(word_ptr + bit // 32) >> (bit % 32)) & 1 != 0)
        else:
            tl.atomic_or(word_ptr + bit // 32, (bit * 0 + 1) << (bit % 32), i < n, sem="relaxed")
    if ASK:
        tl.store(found_ptr + i, found.to(tl.int32), i < n)


# Words are shared by atomics in one launch and loaded plainly in the next.
@healthy("a Bloom filter: bits are set by atomic or with a mask, three a key, and asked for by the next kernel")
def filter_of_bits_set_by_or(device):
    x, (word, found) = integers(40, low=1, high=9999, dtype=torch.int32), zeros(device, 8, 40)
    for ask in (False, True):
        set_bits_kernel[(3,)](x.to(device), word, found, 40, BLOCK=16, ASK=ask)
    return [Check(found, torch.ones(40, dtype=torch.int32))]


@triton.jit
def both_ends_kernel(x_ptr, out_ptr, count_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n, other=0)
    low, high = (i < n) & (x < 0), (i < n) & (x >= 0)
    front = tl.atomic_add(count_ptr + i * 0, 1, low, sem="relaxed")
    back = tl.atomic_add(count_ptr + 1 + i * 0, 1, high, sem="relaxed")
    tl.store(out_ptr + tl.where(low, front, n - 1 - back), x, i < n)


# As many slots as numbers: the two ends meet and do not cross.
@healthy("negative numbers are stored from the front and others from the back, slots of both are drawn by lanes")
def partition_from_both_ends(device):
    x, (out, count) = integers(100, dtype=torch.int32), zeros(device, 100, 2)
    both_ends_kernel[(4,)](x.to(device), out, count, 100, BLOCK=32)
    k = int((x < 0).sum())
    return [Check(torch.cat([out[:k].sort().values, out[k:].sort().values]), x.sort().values)]


@triton.jit
def byte_of_words_kernel(x_ptr, bytes_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    part = tl.program_id(0)
    tl.store(bytes_ptr + 4 * i + part, ((tl.load(x_ptr + i) >> (8 * part)) & 255).to(tl.uint8))


# Bytes are stored as bytes: neighbours within a word are left alone.
@healthy("the four bytes of a word are stored by four programs")
def four_bytes_of_a_word_by_four_programs(device):
    x = integers(32, low=0, high=1 << 30, dtype=torch.int32) * 2 + 1
    out = torch.zeros(32, dtype=torch.int32, device=device)
    byte_of_words_kernel[(4, 2)](x.to(device), out.view(torch.uint8), BLOCK=16)
    return [Check(out, x)]
