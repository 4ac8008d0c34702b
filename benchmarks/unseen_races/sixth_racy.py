"""Racy kernels of the sixth set: gradients, states, scales and tiles that two programs take for their own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import integers, racy


def whole(*values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


@triton.jit
def bag_maximum_gradient_kernel(dy_ptr, row_ptr, dw_ptr, D: tl.constexpr):
    bag, d = tl.program_id(0), tl.arange(0, D)
    place = dw_ptr + tl.load(row_ptr + bag * D + d) * D + d
    tl.store(place, tl.load(place) + tl.load(dy_ptr + bag * D + d))


# Six bags took their maxima from three rows: in each column two bags at least took it from the same one.
@racy("dw_ptr", "read/write,write/write", "gradients of bags' maxima go to the rows they came from by load and store")
def gradient_of_the_maxima_of_bags(device):
    row, dy = integers(6, 16, low=0, high=3, dtype=torch.int32), integers(6, 16, low=1, seed=1)
    bag_maximum_gradient_kernel[(6,)](dy.to(device), row.to(device), torch.zeros(3, 16, device=device), D=16)


@triton.jit
def sums_of_a_grid_kernel(x_ptr, part_ptr, BLOCK: tl.constexpr):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    across, down = tl.num_programs(0), tl.num_programs(1)
    tile = x + across * (y + down * z)
    total = tl.sum(tl.load(x_ptr + tile * BLOCK + tl.arange(0, BLOCK)), 0)
    tl.store(part_ptr + x + across * y + down * z, total)


# 3 by 4 by 2 programs: (1, 1, 0) and (0, 0, 1) both store part 4.
@racy("part_ptr", "write/write", "a grid of three dimensions whose last one steps by the second and not by both")
def sums_of_a_grid_counted_wrongly(device):
    x, part = torch.arange(24 * 16, dtype=torch.float32).to(device), torch.zeros(24, device=device)
    sums_of_a_grid_kernel[(3, 4, 2)](x, part, BLOCK=16)


@triton.jit
def final_states_kernel(x_ptr, end_ptr, state_ptr, SEQS: tl.constexpr, CHUNK: tl.constexpr, D: tl.constexpr):
    first, d = tl.program_id(0) * CHUNK, tl.arange(0, D)
    for s in range(SEQS):
        end = tl.load(end_ptr + s)
        if (end >= first) & (end <= first + CHUNK):
            total = tl.zeros((D,), tl.float32)
            for t in range(first, end):
                total += tl.load(x_ptr + t * D + d)
            tl.store(state_ptr + s * D + d, total)


# Sequence 0 ends at 8, which is the end of chunk 0 and the beginning of chunk 1, whose sum is that of nothing.
@racy("state_ptr", "write/write", "the chunk in which a sequence ends stores its last state, and a border is in two")
def last_states_of_sequences_that_end_between_chunks(device):
    x, state = integers(24, 16, low=1).to(device), torch.zeros(3, 16, device=device)
    final_states_kernel[(3,)](x, whole(8, 20, 24, device=device), state, SEQS=3, CHUNK=8, D=16)


@triton.jit
def quantised_key_kernel(k_ptr, slot_ptr, cache_ptr, scale_ptr, PAGE: tl.constexpr, D: tl.constexpr):
    token, d = tl.program_id(0), tl.arange(0, D)
    slot = tl.load(slot_ptr + token)
    k = tl.load(k_ptr + token * D + d)
    top = tl.max(tl.abs(k), 0)
    tl.store(scale_ptr + slot // PAGE, top)
    tl.store(cache_ptr + slot * D + d, (k * 127 / top).to(tl.int8))


# Tokens 0, 2 and 5 are in page 0, each with a largest magnitude of its own.
@racy("scale_ptr", "write/write", "keys are stored in 8 bits, and each token stores the scale of its page")
def scale_of_a_page_by_each_of_its_tokens(device):
    k, slot = torch.arange(1, 97, dtype=torch.float32).view(6, 16), whole(3, 9, 0, 14, 10, 2, device=device)
    cache = torch.zeros(16, 16, dtype=torch.int8, device=device)
    quantised_key_kernel[(6,)](k.to(device), slot, cache, torch.zeros(4, device=device), PAGE=4, D=16)


@triton.jit
def flat_step_kernel(p_ptr, g_ptr, first_ptr, size_ptr, from_ptr, BLOCK: tl.constexpr):
    tensor = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < tl.load(size_ptr + tensor)
    place = p_ptr + tl.load(first_ptr + tensor) + i
    g = tl.load(g_ptr + tl.load(from_ptr + tensor) + i, mask, other=0.0)
    tl.store(place, tl.load(place, mask, other=0.0) - g, mask)


# Tensor 3 is tensor 0 once more: a head that is tied to the embedding.
@racy("p_ptr", "read/write,write/write", "one step over a list of tensors, in which the tied one stands twice")
def tied_weights_that_step_twice(device):
    p, g = integers(80, seed=1).to(device), integers(120, low=1, seed=2).to(device)
    first, size = whole(0, 40, 64, 0, device=device), whole(40, 24, 16, 40, device=device)
    flat_step_kernel[(4, 3)](p, g, first, size, whole(0, 40, 64, 80, device=device), BLOCK=16)


@triton.jit
def packed_gradient_kernel(dk_ptr, dv_ptr, packed_ptr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr):
    token, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, D)
    row = packed_ptr + token * (H + 2 * G) * D + d
    tl.store(row + (H + head) * D, tl.load(dk_ptr + (token * G + head) * D + d))
    tl.store(row + (H + 1 + head) * D, tl.load(dv_ptr + (token * G + head) * D + d))


# Values begin a head behind the keys, of which there are two: head 0's value is where head 1's key is.
@racy("packed_ptr", "write/write", "queries, keys and values in one row; values begin where one key head would end")
def packed_rows_for_one_key_head(device):
    dk, dv = integers(5, 2, 16, low=1, seed=1).to(device), integers(5, 2, 16, low=-8, high=0, seed=2).to(device)
    packed_gradient_kernel[(5, 2)](dk, dv, torch.zeros(5, 8, 16, device=device), H=4, G=2, D=16)


@triton.jit
def half_of_a_word_kernel(x_ptr, word_ptr, half_ptr):
    pid = tl.program_id(0)
    k = pid // 2
    if pid % 2 == 0:
        old = tl.atomic_or(word_ptr + k, 0, sem="relaxed")
        seen = tl.atomic_cas(word_ptr + k, old, old + 3, sem="relaxed")
        while seen != old:
            old = seen
            seen = tl.atomic_cas(word_ptr + k, old, old + 3, sem="relaxed")
    else:
        tl.store(half_ptr + 2 * k + 1, tl.load(x_ptr + k))


# Swaps of the whole word are atomic to each other, but not to a plain store of its upper half.
@racy("word_ptr,half_ptr", "atomic/write", "16 bits are added to by swapping their word; the other 16 are stored")
def half_stored_beside_swaps_of_its_word(device):
    word, x = torch.zeros(4, dtype=torch.int32, device=device), integers(4, low=1, dtype=torch.bfloat16).to(device)
    half_of_a_word_kernel[(8,)](x, word, word.view(torch.bfloat16))


@triton.jit
def ranks_in_place_kernel(x_ptr, n, BLOCK: tl.constexpr, ALL: tl.constexpr):
    i, j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, ALL)
    x, every = tl.load(x_ptr + i, i < n, other=0), tl.load(x_ptr + j, j < n, other=0)
    rank = tl.sum(((every[None, :] < x[:, None]) & (j < n)[None, :]).to(tl.int32), 1)
    tl.debug_barrier()
    tl.store(x_ptr + rank, x, i < n)


# The barrier is the block's; another block counts over what is already sorted.
@racy("x_ptr", "read/write", "numbers are stored at their ranks in place, where others still count who is less")
def ranks_stored_over_what_is_counted(device):
    x = torch.randperm(60, generator=torch.Generator().manual_seed(4)).to(torch.int32)
    ranks_in_place_kernel[(4,)](x.to(device), 60, BLOCK=16, ALL=64)


@triton.jit
def draw_kernel(state_ptr, out_ptr, STATES: tl.constexpr):
    pid = tl.program_id(0)
    state = (tl.load(state_ptr + pid % STATES) * 5 + 3) & 0xFFFF
    tl.store(state_ptr + pid % STATES, state)
    tl.store(out_ptr + pid, state)


# Programs 0, 4 and 8 advance state 0 by load and store: they may all draw the same number.
@racy("state_ptr", "read/write,write/write", "twelve programs draw from four generators")
def generators_of_three_programs_each(device):
    draw_kernel[(12,)](whole(11, 22, 33, 44, device=device), whole(*[0] * 12, device=device), STATES=4)


@triton.jit
def rows_in_segments_kernel(lut_ptr, col_ptr, val_ptr, b_ptr, c_ptr, lock_ptr, N: tl.constexpr):
    at, n = lut_ptr + 4 * tl.program_id(0), tl.arange(0, N)
    first, lock = tl.load(at + 1), tl.load(at + 3)
    acc = tl.zeros((N,), tl.float32)
    for e in range(first, first + tl.load(at + 2)):
        acc += tl.load(val_ptr + e) * tl.load(b_ptr + tl.load(col_ptr + e) * N + n)
    if lock > 0:
        while tl.atomic_cas(lock_ptr + lock - 1, 0, 1, sem="acquire") == 1:
            pass
        tl.debug_barrier()
    place = c_ptr + tl.load(at) * N + n
    tl.store(place, tl.load(place) + acc)
    if lock > 0:
        tl.debug_barrier()
        tl.atomic_xchg(lock_ptr + lock - 1, 0, sem="release")


# Row, first entry, entries and lock: row 0 is in two segments with a lock, row 2 in two without one.
@racy("c_ptr", "read/write,write/write", "a table says which rows are split and need a lock, and forgets one of them")
def split_row_without_its_lock(device):
    lut = whole([0, 0, 3, 1], [0, 3, 2, 1], [1, 5, 2, 0], [2, 7, 2, 0], [2, 9, 2, 0], device=device)
    col = whole(3, 1, 0, 2, 3, 1, 4, 4, 0, 2, 1, device=device)
    val, b = integers(11, low=1, seed=1).to(device), integers(5, 16, low=1, seed=2).to(device)
    rows_in_segments_kernel[(5,)](lut, col, val, b, torch.zeros(3, 16, device=device), whole(0, device=device), N=16)


@triton.jit
def cut_segments_kernel(id_ptr, x_ptr, carry_ptr, out_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    ids, x = tl.load(id_ptr + i), tl.load(x_ptr + i)
    head, tail = tl.min(ids, 0), tl.max(ids, 0)
    tl.store(carry_ptr + pid, tl.sum(tl.where(ids == head, x, 0.0), 0))
    tl.store(carry_ptr + pid + 1, tl.sum(tl.where(ids == tail, x, 0.0), 0))
    tl.atomic_add(out_ptr + ids, x, (ids != head) & (ids != tail), sem="relaxed")


# Carry 1 is the end of block 0, which is 16, and the beginning of block 1, which is 17 + 18 + 19 + 20.
@racy(
    "carry_ptr", "write/write", "a block stores the sums at its beginning and its end, the latter where the next begins"
)
def carries_of_two_blocks_in_one_place(device):
    ids, x = (torch.arange(64) // 5).to(torch.int32).to(device), torch.arange(1.0, 65.0).to(device)
    cut_segments_kernel[(4,)](ids, x, torch.zeros(5, device=device), torch.zeros(13, device=device), BLOCK=16)


@triton.jit
def first_axis_kernel(x_ptr, tiles, BLOCK: tl.constexpr):
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        i = tile * BLOCK + tl.arange(0, BLOCK)
        tl.store(x_ptr + i, tl.load(x_ptr + i) * 2)


# Programs (0, 0) and (0, 1) go over the same tiles.
@racy("x_ptr", "read/write,write/write", "a grid of two dimensions, and a persistent loop that knows of the first one")
def persistent_loop_of_one_axis(device):
    first_axis_kernel[(4, 2)](integers(11 * 16, low=1).to(device), 11, BLOCK=16)


@triton.jit
def triangle_kernel(x_ptr, out_ptr, N: tl.constexpr):
    row, col = tl.program_id(0), tl.arange(0, N)
    tl.store(out_ptr + row * (row - 1) // 2 + col, tl.load(x_ptr + row * N + col), col <= row)


# Starts are those of a triangle without its diagonal, and rows have it: row 4's last number is row 5's first one.
@racy("out_ptr", "write/write", "rows of a triangle with a diagonal are packed as if they had none")
def triangle_packed_without_room_for_its_diagonal(device):
    triangle_kernel[(8,)](torch.arange(64.0).to(device), torch.zeros(36, device=device), N=8)


@triton.jit
def every_cycle_kernel(x_ptr, M, SIZE):
    start = tl.program_id(0) + 1
    value = tl.load(x_ptr + start)
    to = start * M % (SIZE - 1)
    while to != start:
        saved = tl.load(x_ptr + to)
        tl.debug_barrier()
        tl.store(x_ptr + to, value)
        value = saved
        to = to * M % (SIZE - 1)
    tl.store(x_ptr + start, value)


# A cycle would have to be gone round once, by one of its elements, and not by each of them.
@racy(
    "x_ptr", "read/write,write/write", "4 by 6 numbers change rows and columns in place, each followed along its cycle"
)
def cycles_followed_from_each_element(device):
    every_cycle_kernel[(22,)](torch.arange(24.0).to(device), 4, 24)
