"""Healthy kernels of the sixth set: a place for each program by arithmetic or by data, neighbours in small types."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import Check, healthy, integers


def whole(*values):
    return torch.tensor(values, dtype=torch.int32)


@triton.jit
def least_of_cycle_kernel(x_ptr, M, SIZE):
    start = tl.program_id(0) + 1
    to = start * M % (SIZE - 1)
    least = start
    while to != start:
        least = tl.minimum(least, to)
        to = to * M % (SIZE - 1)
    if least == start:
        value = tl.load(x_ptr + start)
        to = start * M % (SIZE - 1)
        while to != start:
            saved = tl.load(x_ptr + to)
            tl.debug_barrier()
            tl.store(x_ptr + to, value)
            value = saved
            to = to * M % (SIZE - 1)
        tl.store(x_ptr + start, value)


# Cycles of a permutation do not meet, and each has one least element, whose program moves all of it.
@healthy("4 by 6 numbers change rows and columns in place; a cycle is followed from its least element only")
def cycles_followed_from_their_least_element(device):
    x = integers(24, low=-99, high=99)
    own = x.to(device, copy=True)
    least_of_cycle_kernel[(22,)](own, 4, 24)
    return [Check(own, x.view(4, 6).T.flatten())]


@triton.jit
def listed_step_kernel(p_ptr, m_ptr, g_ptr, first_ptr, end_ptr, BLOCK: tl.constexpr):
    tensor = tl.program_id(0)
    i = tl.load(first_ptr + tensor) + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < tl.load(end_ptr + tensor)
    m = tl.load(m_ptr + i, mask, other=0.0) * 2 + tl.load(g_ptr + i, mask, other=0.0)
    tl.store(m_ptr + i, m, mask)
    tl.store(p_ptr + i, tl.load(p_ptr + i, mask, other=0.0) - m, mask)


# Tensors of 37, 5 and 48 numbers lie beside each other; a tensor's last block is cut where the next one begins.
@healthy("one step with momentum over a list of tensors of odd sizes in one buffer, in place")
def steps_of_listed_tensors_of_odd_sizes(device):
    p, m, g = (integers(90, seed=s) for s in range(3))
    own_p, own_m = p.to(device, copy=True), m.to(device, copy=True)
    first, end = whole(0, 37, 42).to(device), whole(37, 42, 90).to(device)
    listed_step_kernel[(3, 3)](own_p, own_m, g.to(device), first, end, BLOCK=16)
    return [Check(own_p, p - 2 * m - g), Check(own_m, 2 * m + g)]


@triton.jit
def bag_maximum_gradient_kernel(dy_ptr, row_ptr, dw_ptr, D: tl.constexpr):
    bag, d = tl.program_id(0), tl.arange(0, D)
    row = tl.load(row_ptr + bag * D + d)
    tl.atomic_add(dw_ptr + row * D + d, tl.load(dy_ptr + bag * D + d), sem="relaxed")


# Bags share rows, which are only ever added to by atomics until the kernel is over.
@healthy("gradients of bags' maxima go to the rows they came from by relaxed atomics")
def gradient_of_the_maxima_of_bags_by_atomics(device):
    row, dy = integers(6, 16, low=0, high=3, dtype=torch.int32), integers(6, 16, seed=1)
    dw = torch.zeros(3, 16, device=device)
    bag_maximum_gradient_kernel[(6,)](dy.to(device), row.to(device), dw, D=16)
    return [Check(dw, torch.zeros(3, 16).scatter_add(0, row.long(), dy))]


@triton.jit
def ended_states_kernel(x_ptr, first_ptr, end_ptr, state_ptr, SEQS: tl.constexpr, CHUNK: tl.constexpr,
                        D: tl.constexpr):  # fmt: skip
    first, d = tl.program_id(0) * CHUNK, tl.arange(0, D)
    for s in range(SEQS):
        end = tl.load(end_ptr + s)
        if (end > first) & (end <= first + CHUNK):
            total = tl.zeros((D,), tl.float32)
            for t in range(tl.maximum(first, tl.load(first_ptr + s)), end):
                total += tl.load(x_ptr + t * D + d)
            tl.store(state_ptr + s * D + d, total)


# A border belongs to the chunk before it; sequences 1 and 2 both end in chunk 2, whose program stores both.
@healthy("the chunk that has a sequence's last token stores its state; one ends between two chunks")
def last_states_by_the_chunk_of_the_last_token(device):
    x, state = integers(24, 16), torch.zeros(3, 16, device=device)
    first, end = whole(0, 8, 20).to(device), whole(8, 20, 24).to(device)
    ended_states_kernel[(3,)](x.to(device), first, end, state, SEQS=3, CHUNK=8, D=16)
    return [Check(state, torch.stack([x[0:8].sum(0), x[16:20].sum(0), x[20:24].sum(0)]))]


@triton.jit
def page_scale_kernel(k_ptr, slot_ptr, scale_ptr, PAGE: tl.constexpr, D: tl.constexpr):
    token, d = tl.program_id(0), tl.arange(0, D)
    page = tl.load(slot_ptr + token) // PAGE
    tl.atomic_max(scale_ptr + page, tl.max(tl.abs(tl.load(k_ptr + token * D + d)), 0), sem="relaxed")


@triton.jit
def page_store_kernel(k_ptr, slot_ptr, scale_ptr, cache_ptr, PAGE: tl.constexpr, D: tl.constexpr):
    token, d = tl.program_id(0), tl.arange(0, D)
    slot = tl.load(slot_ptr + token)
    scale = tl.load(scale_ptr + slot // PAGE)
    tl.store(cache_ptr + slot * D + d, (scale - tl.load(k_ptr + token * D + d)).to(tl.int8))


# Scales grow by atomics and are loaded in the next launch; each token's slot, of bytes, is its own.
@healthy("the scale of a page by atomic maxima of its tokens, which the next kernel stores in 8 bits")
def scales_of_pages_a_kernel_before(device):
    k, slot = integers(6, 16, low=-50, high=50, dtype=torch.int32), whole(3, 9, 0, 14, 10, 2)
    cache = torch.zeros(16, 16, dtype=torch.int8, device=device)
    scale = torch.zeros(4, dtype=torch.int32, device=device)
    page_scale_kernel[(6,)](k.to(device), slot.to(device), scale, PAGE=4, D=16)
    page_store_kernel[(6,)](k.to(device), slot.to(device), scale, cache, PAGE=4, D=16)
    tops, want = torch.zeros(4, dtype=torch.int32), torch.zeros(16, 16, dtype=torch.int8)
    for t in range(6):
        tops[slot[t] // 4] = torch.maximum(tops[slot[t] // 4], k[t].abs().max())
    want[slot.long()] = (tops[(slot // 4).long()][:, None] - k).to(torch.int8)
    return [Check(scale, tops), Check(cache, want)]


@triton.jit
def even_and_odd_halves_kernel(x_ptr, out_ptr, N: tl.constexpr, PER: tl.constexpr):
    pid = tl.program_id(0)
    if pid % 2 == 0:
        i = tl.arange(0, N)
        tl.atomic_add(out_ptr + 2 * i, tl.load(x_ptr + pid // 2 * N + i), sem="relaxed")
    else:
        place = out_ptr + 2 * (pid // 2 * PER + tl.arange(0, PER)) + 1
        tl.store(place, tl.load(place) * 2)


# The two bytes of an even element and those of an odd one are different ones, though they lie in one word.
@healthy("float16: even elements are added to by atomics, odd ones between them are doubled by load and store")
def halves_by_atomics_between_halves_by_stores(device):
    x, out = integers(4, 32, dtype=torch.float16), integers(64, seed=1, dtype=torch.float16)
    own = out.to(device, copy=True)
    even_and_odd_halves_kernel[(8,)](x.to(device), own, N=32, PER=8)
    want = 2 * out
    want[::2] = out[::2] + x.sum(0)
    return [Check(own, want)]


@triton.jit
def every_fourth_kernel(x_ptr, BLOCK: tl.constexpr):
    place = x_ptr + tl.arange(0, BLOCK) * tl.num_programs(0) + tl.program_id(0)
    tl.store(place, tl.load(place) * 2 + tl.program_id(0))


# Four programs, four elements of 2 bytes in turn: neighbours, and no byte in common.
@healthy("bfloat16 in place, every fourth element by the same program")
def every_fourth_bfloat16(device):
    x = integers(128, dtype=torch.bfloat16)
    own = x.to(device, copy=True)
    every_fourth_kernel[(4,)](own, BLOCK=32)
    return [Check(own, 2 * x + torch.arange(4).repeat(32).to(torch.bfloat16))]


@triton.jit
def flip_flags_kernel(x_ptr, flag_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK) * tl.num_programs(0) + tl.program_id(0)
    x = tl.load(x_ptr + i, i < n, other=0.0)
    tl.store(flag_ptr + i, tl.load(flag_ptr + i, i < n, other=0) ^ (x > 0), i < n)


# A bool is a byte, and each byte one program's.
@healthy("flags of a byte are flipped in place, every third one by the same program")
def every_third_flag(device):
    x, flag = integers(50), integers(50, low=0, high=2, seed=1, dtype=torch.bool)
    own = flag.to(device, copy=True)
    flip_flags_kernel[(3,)](x.to(device), own, 50, BLOCK=32)
    return [Check(own, flag ^ (x > 0))]


@triton.jit
def segment_ends_kernel(id_ptr, x_ptr, head_ptr, tail_ptr, out_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    ids, x = tl.load(id_ptr + i), tl.load(x_ptr + i)
    head, tail = tl.min(ids, 0), tl.max(ids, 0)
    tl.store(head_ptr + pid, tl.sum(tl.where(ids == head, x, 0.0), 0))
    tl.store(tail_ptr + pid, tl.sum(tl.where((ids == tail) & (ids != head), x, 0.0), 0))
    tl.atomic_add(out_ptr + ids, x, (ids != head) & (ids != tail), sem="relaxed", scope="cta")


@triton.jit
def join_segments_kernel(id_ptr, head_ptr, tail_ptr, out_ptr, blocks, BLOCK: tl.constexpr):
    for b in range(blocks):
        head, tail = tl.load(id_ptr + b * BLOCK), tl.load(id_ptr + b * BLOCK + BLOCK - 1)
        tl.debug_barrier()
        tl.store(out_ptr + head, tl.load(out_ptr + head) + tl.load(head_ptr + b))
        tl.debug_barrier()
        tl.store(out_ptr + tail, tl.load(out_ptr + tail) + tl.load(tail_ptr + b))
        tl.debug_barrier()


# Cut segments have a place for each block's beginning and end; inner ones are of one block, whose scope will do.
@healthy("sums of sorted segments: cut ones by ends and beginnings that one program joins in the next launch")
def cut_segments_joined_by_a_second_kernel(device):
    ids, x = (torch.arange(64) // 5).to(torch.int32), integers(64)
    (head, tail), out = torch.zeros(2, 4, device=device), torch.zeros(13, device=device)
    segment_ends_kernel[(4,)](ids.to(device), x.to(device), head, tail, out, BLOCK=16)
    join_segments_kernel[(1,)](ids.to(device), head, tail, out, 4, BLOCK=16)
    return [Check(out, torch.zeros(13).index_add(0, ids, x))]


@triton.jit
def both_axes_kernel(x_ptr, tiles, BLOCK: tl.constexpr):
    first = tl.program_id(0) + tl.num_programs(0) * tl.program_id(1)
    for tile in range(first, tiles, tl.num_programs(0) * tl.num_programs(1)):
        i = tile * BLOCK + tl.arange(0, BLOCK)
        tl.store(x_ptr + i, tl.load(x_ptr + i) * 2 + tile)


# The six programs have the remainders 0 to 5, and step by 6.
@healthy("a persistent loop over tiles in place by all programs of a grid of two dimensions")
def persistent_loop_of_both_axes(device):
    x = integers(17, 16)
    own = x.to(device, copy=True)
    both_axes_kernel[(3, 2)](own, 17, BLOCK=16)
    return [Check(own, 2 * x + torch.arange(17)[:, None])]


@triton.jit
def batch_tiles_kernel(x_ptr, B, T, TILE: tl.constexpr, D: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, shape=[B, T, D], strides=[T * D, D, 1], block_shape=[1, TILE, D])
    at = tl.program_id(1) * TILE
    x.store([tl.program_id(0), at, 0], x.load([tl.program_id(0), at, 0]) * 2 + 1)


# The descriptor knows of sequences: rows 24..31 of one are cut off, and are not the first ones of the next.
@healthy("tiles of 16 rows of sequences of 24 in place, by descriptors of three dimensions")
def tiles_of_sequences_by_descriptors(device):
    triton.set_allocator(lambda size, *_: torch.empty(size, dtype=torch.int8, device=device))
    x = integers(3, 24, 16)
    own = x.to(device, copy=True)
    batch_tiles_kernel[(3, 2)](own, 3, 24, TILE=16, D=16)
    return [Check(own, 2 * x + 1)]


@triton.jit
def morton_kernel(x_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    m = (pid & 1) | ((pid >> 1) & 2)
    n = ((pid >> 1) & 1) | ((pid >> 2) & 2)
    i = (m * 4 + n) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + i, tl.load(x_ptr + i) + pid)


# Even bits of the number are the row, odd ones the column: of sixteen numbers no two are the same tile.
@healthy("tiles in place along a curve in the shape of a Z")
def tiles_along_a_curve(device):
    x, want = integers(4, 4, 16), torch.zeros(4, 4, 16)
    own = x.to(device, copy=True)
    morton_kernel[(16,)](own, BLOCK=16)
    for pid in range(16):
        want[(pid & 1) | ((pid >> 1) & 2), ((pid >> 1) & 1) | ((pid >> 2) & 2)] = pid
    return [Check(own, x + want)]


@triton.jit
def owned_elements_kernel(x_ptr, owner_ptr, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    for first in range(0, n, BLOCK):
        i = first + tl.arange(0, BLOCK)
        mine = (i < n) & (tl.load(owner_ptr + i, i < n, other=-1) == pid)
        tl.store(x_ptr + i, tl.load(x_ptr + i, mine, other=0.0) * 2 + pid, mine)


# An element has one owner, who alone loads and stores it.
@healthy("all programs go over all elements in place, with masks that a table of owners makes disjoint")
def elements_with_an_owner_each(device):
    x, owner = integers(100), integers(100, low=0, high=5, seed=1, dtype=torch.int32)
    own = x.to(device, copy=True)
    owned_elements_kernel[(5,)](own, owner.to(device), 100, BLOCK=32)
    return [Check(own, 2 * x + owner)]


@triton.jit
def page_chain_kernel(x_ptr, first_ptr, next_ptr, PAGE: tl.constexpr):
    seq = tl.program_id(0)
    page = tl.load(first_ptr + seq)
    place = 0
    while page >= 0:
        i = page * PAGE + tl.arange(0, PAGE)
        tl.store(x_ptr + i, tl.load(x_ptr + i) * 2 + place)
        place += 1
        page = tl.load(next_ptr + page)


# Chains end, and no page is in two of them; links are only loaded.
@healthy("pages of sequences are chained, and each program changes those of its own chain in place")
def pages_of_chains_that_do_not_meet(device):
    x, chains = integers(10, 16), [[3, 0, 7], [5], [9, 1, 2, 8]]
    own, want, link = x.to(device, copy=True), x.clone(), torch.full((10,), -1, dtype=torch.int32)
    for chain in chains:
        for place, page in enumerate(chain):
            want[page] = 2 * x[page] + place
            if place + 1 < len(chain):
                link[page] = chain[place + 1]
    page_chain_kernel[(3,)](own, whole(*(c[0] for c in chains)).to(device), link.to(device), PAGE=16)
    return [Check(own, want)]
