"""Kernels without a race, some of which look like one: flags, words, locks, atomics, launches, and own places."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import Check, healthy, integers, multiprocessors


def zeros(device, *shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype, device=device)


def counters(device, *shape):
    return torch.zeros(shape, dtype=torch.int32, device=device)


@triton.jit
def words_kernel(x_ptr, word_ptr, out_ptr, P: tl.constexpr, BLOCK: tl.constexpr):
    p, i, total = tl.program_id(0), tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.int32)
    word = (tl.load(x_ptr + p * BLOCK + i).to(tl.int64) << 32) | 1
    for q in range(P):
        tl.atomic_xchg(word_ptr + (q * P + p) * BLOCK + i, word, sem="relaxed")
    for q in range(P):
        got = tl.atomic_add(word_ptr + (p * P + q) * BLOCK + i, 0, sem="relaxed")
        while tl.min(got & 1, 0) == 0:
            got = tl.atomic_add(word_ptr + (p * P + q) * BLOCK + i, 0, sem="relaxed")
        total += (got >> 32).to(tl.int32)
    tl.store(out_ptr + p * BLOCK + i, total)


@healthy("values and the flags that they have come share words of 64 bits: relaxed atomics will do")
def sums_of_all_by_words_with_flags(device):
    x, out = integers(6, 16, dtype=torch.int32), counters(device, 6, 16)
    words_kernel[(6,)](x.to(device), zeros(device, 6, 6, 16, dtype=torch.int64), out, P=6, BLOCK=16)
    return [Check(out, x.sum(0).int().expand(6, 16))]


@triton.jit
def chunks_kernel(x_ptr, decay_ptr, state_ptr, y_ptr, chunks, L: tl.constexpr, D: tl.constexpr, PHASE: tl.constexpr):
    """States of chunks, states before chunks in the same place, and what follows from them."""
    chunk, d = tl.program_id(0), tl.arange(0, D)
    places = (chunk * L + tl.arange(0, L)[:, None]) * D + d[None, :]
    if PHASE == "states":
        tl.store(state_ptr + chunk * D + d, tl.sum(tl.load(x_ptr + places), 0))
    elif PHASE == "pass":
        state = tl.zeros([D], tl.float32)
        for c in range(chunks):
            own = tl.load(state_ptr + c * D + d)
            state = state * tl.load(decay_ptr + c)
            tl.store(state_ptr + c * D + d, state)
            state += own
    else:
        before = tl.load(state_ptr + chunk * D + d)
        tl.store(y_ptr + places, tl.cumsum(tl.load(x_ptr + places), 0) + before[None, :])


@healthy("states of chunks, then their scan in place by one program, then outputs: three launches")
def states_of_chunks_in_three_launches(device):
    x, decay, y = integers(6, 8, 16), torch.tensor([1.0, -1, 1, 0, 1, -1]), zeros(device, 6, 8, 16)
    state, want, h = zeros(device, 6, 16), torch.zeros(6, 8, 16), torch.zeros(16)
    for grid, phase in ((6, "states"), (1, "pass"), (6, "outputs")):
        chunks_kernel[(grid,)](x.to(device), decay.to(device), state, y, 6, L=8, D=16, PHASE=phase)
    for c in range(6):
        want[c] = x[c].cumsum(0) + h * decay[c]
        h = want[c, -1]
    return [Check(y, want)]


@triton.jit
def ticket_scan_kernel(x_ptr, ticket_ptr, flag_ptr, carry_ptr, out_ptr, BLOCK: tl.constexpr):
    tile = tl.atomic_add(ticket_ptr, 1, sem="relaxed")
    at, carry = tile * BLOCK + tl.arange(0, BLOCK), 0.0
    x = tl.load(x_ptr + at)
    if tile > 0:
        while tl.atomic_or(flag_ptr + tile - 1, 0, sem="acquire") == 0:
            pass
        tl.debug_barrier()
        carry = tl.load(carry_ptr + tile - 1)
    tl.store(carry_ptr + tile, carry + tl.sum(x, 0))
    tl.debug_barrier()
    tl.atomic_or(flag_ptr + tile, 1, sem="release")
    tl.store(out_ptr + at, carry + tl.cumsum(x, 0))


@healthy("tiles are numbered by a relaxed ticket, carries go on by flags")
def scan_of_tiles_by_tickets(device):
    x, out = integers(128), zeros(device, 128)
    ticket_scan_kernel[(8,)](x.to(device), counters(device, 1), counters(device, 8), zeros(device, 8), out, BLOCK=16)
    return [Check(out, x.cumsum(0))]


@triton.jit
def visit_kernel(from_ptr, to_ptr, now_ptr, next_ptr, seen_ptr, level_ptr, level, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    u, v = tl.load(from_ptr + i, i < n, other=0), tl.load(to_ptr + i, i < n, other=0)
    ahead = (i < n) & (((tl.load(now_ptr + u // 32) >> (u % 32)) & 1) == 1)
    bit = (v * 0 + 1) << (v % 32)
    new = ahead & ((tl.atomic_or(seen_ptr + v // 32, bit, ahead, sem="relaxed") & bit) == 0)
    tl.store(level_ptr + v, level, new)
    tl.atomic_or(next_ptr + v // 32, bit, new, sem="relaxed")


@healthy("of all edges to a node the one whose atomic finds its bit clear stores the level")
def levels_stored_by_the_first_visitor(device):
    start, end = torch.arange(50, dtype=torch.int32) % 40, torch.arange(50, dtype=torch.int32) * 3 % 37 + 3
    level, now, seen = counters(device, 40) - 1, counters(device, 2), counters(device, 2)
    now[0] = seen[0] = 1
    level[0] = 0
    want = [0] + [-1] * 39
    for step in range(1, 8):
        following = counters(device, 2)
        visit_kernel[(4,)](start.to(device), end.to(device), now, following, seen, level, step, 50, BLOCK=16)
        now = following
        for a, b in zip(start.tolist(), end.tolist(), strict=True):
            if want[a] == step - 1 and want[b] == -1:
                want[b] = step
    return [Check(level, torch.tensor(want, dtype=torch.int32))]


@triton.jit
def fields_kernel(word_ptr, half_ptr, byte_ptr, BLOCK: tl.constexpr):
    field, i = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if field == 0:
        tl.store(word_ptr + 2 * i, 1000 * i)
    elif field == 1:
        tl.store(half_ptr + 4 * i + 2, i + 100)
    else:
        tl.store(byte_ptr + 8 * i + 4 + field, i + field)


@healthy("records of 8 bytes whose fields of 4, 2, 1 and 1 bytes are stored by different programs")
def fields_of_records(device):
    data, i = zeros(device, 256, dtype=torch.int8), torch.arange(32)
    fields_kernel[(4, 2)](data.view(torch.int32), data.view(torch.int16), data, BLOCK=16)
    return [
        Check(data.view(torch.int32)[::2], (1000 * i).int()),
        Check(data.view(torch.int16)[2::4], (i + 100).short()),
        Check(data.view(32, 8)[:, 6:], torch.stack([i + 2, i + 3], 1).to(torch.int8)),
    ]


@triton.jit
def saturating_kernel(x_ptr, word_ptr, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    """A count in the upper bits and a sum that stops at LIMIT in the lower 20."""
    x = tl.sum(tl.load(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)), 0)
    old = tl.atomic_add(word_ptr, 0, sem="relaxed")
    tried = old - 1
    while tried != old:
        tried = old
        new = ((tried >> 20) + 1) << 20 | tl.minimum((tried & 0xFFFFF) + x, LIMIT)
        old = tl.atomic_cas(word_ptr, tried, new, sem="relaxed")


@healthy("a count and a saturating sum in one word, by compare and swap until it holds")
def saturating_sum_by_swaps(device):
    x, words = integers(10, 16, low=1, dtype=torch.int32), counters(device, 2)
    saturating_kernel[(10,)](x.to(device), words, LIMIT=300, BLOCK=16)
    saturating_kernel[(10,)](x.to(device), words[1:], LIMIT=100000, BLOCK=16)
    total = int(x.sum())
    return [Check(words, torch.tensor([10 << 20 | min(total, 300), 10 << 20 | total], dtype=torch.int32))]


@triton.jit
def triangle_kernel(a_ptr, packed_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    row, col = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(packed_ptr + row * (row + 1) // 2 + col, tl.load(a_ptr + row * N + col, col <= row), col <= row)


@healthy("rows of a lower triangle without gaps between them")
def triangle_packed(device):
    a, packed = integers(20, 20), zeros(device, 210)
    triangle_kernel[(20,)](a.to(device), packed, N=20, BLOCK=32)
    return [Check(packed, a[tuple(torch.tril_indices(20, 20))])]


@triton.jit
def transposed_tiles_kernel(x_ptr, out_ptr, M, N, TILE: tl.constexpr):
    source = tl.make_tensor_descriptor(x_ptr, (M, N), (N, 1), (TILE, TILE))
    target = tl.make_tensor_descriptor(out_ptr, (N, M), (M, 1), (TILE, TILE))
    row, col = tl.program_id(0) * TILE, tl.program_id(1) * TILE
    target.store([col, row], tl.trans(source.load([row, col])))


@healthy("tiles of a matrix through descriptors to the mirrored places of another one, at odd sizes")
def transposed_through_descriptors(device):
    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device=device))
    x, out = integers(24, 40), zeros(device, 40, 24)
    transposed_tiles_kernel[(2, 3)](x.to(device), out, 24, 40, TILE=16)
    return [Check(out, x.T.contiguous())]


@triton.jit
def parts_kernel(x_ptr, space_ptr, out_ptr, P: tl.constexpr, BLOCK: tl.constexpr, PHASE: tl.constexpr):
    pid = tl.program_id(0)
    x = tl.load(x_ptr + pid * BLOCK + tl.arange(0, BLOCK))
    if PHASE == "sum":
        tl.store(space_ptr + pid, tl.sum(x, 0))
    elif PHASE == "max":
        tl.store(space_ptr + pid, tl.max(x, 0))
    elif PHASE == "end sum":
        tl.store(out_ptr, tl.sum(tl.load(space_ptr + tl.arange(0, P)), 0))
    else:
        tl.store(out_ptr + 1, tl.max(tl.load(space_ptr + tl.arange(0, P)), 0))


@healthy("a workspace is written and read twice, by four launches")
def workspace_of_four_launches(device):
    x, space, out = integers(8, 16), zeros(device, 8), zeros(device, 2)
    for grid, phase in ((8, "sum"), (1, "end sum"), (8, "max"), (1, "end max")):
        parts_kernel[(grid,)](x.to(device), space, out, P=8, BLOCK=16, PHASE=phase)
    return [Check(out, torch.stack([x.sum(), x.max()]))]


@triton.jit
def broadcast_kernel(x_ptr, copy_ptr, flag_ptr, BLOCK: tl.constexpr):
    p, i = tl.program_id(0), tl.arange(0, BLOCK)
    if p == 0:
        tl.store(copy_ptr + i, tl.load(x_ptr + i))
    else:
        parent = (p - 1) // 2
        while tl.atomic_xchg(flag_ptr + p, 0, sem="acquire") == 0:
            pass
        tl.debug_barrier()
        tl.store(copy_ptr + p * BLOCK + i, tl.load(copy_ptr + parent * BLOCK + i) + 1)
    tl.debug_barrier()
    child = 2 * p + 1 + tl.arange(0, 2)
    tl.atomic_xchg(flag_ptr + child, 1, child < tl.num_programs(0), sem="release")


@healthy("copies go down a tree: each program waits for its parent's sign, which it takes away")
def copies_down_a_tree(device):
    x, copy, flag = integers(16), zeros(device, 12, 16), counters(device, 12)
    for _ in range(2):
        broadcast_kernel[(12,)](x.to(device), copy, flag, BLOCK=16)
    depth = torch.tensor([(p + 1).bit_length() - 1 for p in range(12)])
    return [Check(copy, x + depth[:, None]), Check(flag, torch.zeros(12, dtype=torch.int32))]


@triton.jit
def dissemination_kernel(x_ptr, a_ptr, flag_ptr, out_ptr, P: tl.constexpr, BLOCK: tl.constexpr):
    p, i, total = tl.program_id(0), tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.float32)
    tl.store(a_ptr + p * BLOCK + i, tl.load(x_ptr + p * BLOCK + i))
    for turn in tl.static_range(3):
        tl.debug_barrier()
        tl.atomic_xchg(flag_ptr + turn * P + (p + (1 << turn)) % P, 1, sem="release")
        while tl.atomic_max(flag_ptr + turn * P + p, 0, sem="acquire") == 0:
            pass
    tl.debug_barrier()
    for q in range(P):
        total += (q + 1) * tl.load(a_ptr + q * BLOCK + i)
    tl.store(out_ptr + p * BLOCK + i, total)


@healthy("a barrier of three rounds: a sign to those 1, 2 and 4 further on, each of which knows of more")
def barrier_by_dissemination(device):
    x, out = integers(8, 16), zeros(device, 8, 16)
    dissemination_kernel[(8,)](x.to(device), zeros(device, 8, 16), counters(device, 3, 8), out, P=8, BLOCK=16)
    return [Check(out, (x * torch.arange(1, 9)[:, None]).sum(0).expand(8, 16))]


@triton.jit
def stages_kernel(x_ptr, progress_ptr, tiles, BLOCK: tl.constexpr):
    stage, i = tl.program_id(0), tl.arange(0, BLOCK)
    for tile in range(tiles):
        if stage > 0:
            while tl.atomic_max(progress_ptr + stage - 1, 0, sem="acquire") <= tile:
                pass
        tl.debug_barrier()
        tl.store(x_ptr + tile * BLOCK + i, 2 * tl.load(x_ptr + tile * BLOCK + i) + stage)
        tl.debug_barrier()
        tl.atomic_max(progress_ptr + stage, tile + 1, sem="release")


@healthy("stages change the same tiles in place one after the other, a tile behind each other at least")
def stages_in_place(device):
    x = integers(6, 16)
    mine = x.to(device, copy=True)
    stages_kernel[(5,)](mine, counters(device, 5), 6, BLOCK=16)
    return [Check(mine, 32 * x + 26)]


@triton.jit
def last_split_kernel(x_ptr, part_ptr, count_ptr, out_ptr, M, N, BLOCK: tl.constexpr):
    tile, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    cols, total = tile * BLOCK + tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.float32)
    for row in range(split, M, splits):
        total += tl.load(x_ptr + row * N + cols)
    tl.store(part_ptr + split * N + cols, total)
    tl.debug_barrier()
    if tl.atomic_add(count_ptr + tile, 1) == splits - 1:
        tl.debug_barrier()
        total = tl.zeros([BLOCK], tl.float32)
        for other in range(splits):
            total += tl.load(part_ptr + other * N + cols)
        tl.store(out_ptr + cols, total)
        tl.atomic_xchg(count_ptr + tile, 0, sem="relaxed")


@healthy("splits by the number of multiprocessors, the last of which adds up as many as there are")
def last_of_the_splits_that_a_gpu_has(device):
    x, part, count, out = integers(48, 32), zeros(device, 16, 32), counters(device, 2), zeros(device, 32)
    for _ in range(2):
        grid = (2, max(1, min(multiprocessors() // 2, 16)))
        last_split_kernel[grid](x.to(device), part, count, out, 48, 32, BLOCK=16)
    return [Check(out, x.sum(0)), Check(count, torch.zeros(2, dtype=torch.int32))]


@triton.jit
def first_stores_kernel(x_ptr, sum_ptr, lock_ptr, used_ptr, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """The first program of a group to get the lock stores, over what was there before; others add."""
    group, i = tl.program_id(0) % GROUPS, tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + i)
    while tl.atomic_cas(lock_ptr + group, 0, 1) == 1:
        pass
    tl.debug_barrier()
    used = tl.load(used_ptr + group)
    tl.debug_barrier()
    if used == 0:
        tl.atomic_xchg(used_ptr + group, 1)
    else:
        x += tl.load(sum_ptr + group * BLOCK + i)
    tl.store(sum_ptr + group * BLOCK + i, x)
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr + group, 0)


@healthy("whether a sum has begun is loaded and set by an exchange, both under the lock of the sum")
def sums_begun_under_the_lock(device):
    x, total = integers(12, 16), zeros(device, 3, 16) + 1e9
    first_stores_kernel[(12,)](x.to(device), total, counters(device, 3), counters(device, 3), GROUPS=3, BLOCK=16)
    return [Check(total, x.view(4, 3, 16).sum(0))]


@triton.jit
def extents_kernel(label_ptr, box_ptr, W: tl.constexpr):
    row, col = tl.program_id(0), tl.arange(0, W)
    label = tl.load(label_ptr + row * W + col)
    tl.atomic_min(box_ptr + label * 4, row, label > 0, sem="relaxed")
    tl.atomic_max(box_ptr + label * 4 + 1, row, label > 0, sem="relaxed")
    tl.atomic_min(box_ptr + label * 4 + 2, col, label > 0, sem="relaxed")
    tl.atomic_max(box_ptr + label * 4 + 3, col, label > 0, sem="relaxed")


@healthy("boxes around labels by atomic minima and maxima, relaxed")
def boxes_around_labels(device):
    label, box = integers(12, 16, low=0, high=6, dtype=torch.int32), torch.tensor([[99, -1, 99, -1]] * 6)
    mine, places = box.int().to(device), [(label == k).nonzero() for k in range(6)]
    extents_kernel[(12,)](label.to(device), mine, W=16)
    for k in range(1, 6):
        low, high = places[k].amin(0), places[k].amax(0)
        box[k] = torch.stack([low[0], high[0], low[1], high[1]])
    return [Check(mine, box.int())]


@triton.jit
def sieve_kernel(word_ptr, N, BLOCK: tl.constexpr):
    number = (tl.arange(0, BLOCK) + 2) * (tl.program_id(0) + 2)
    tl.atomic_and(word_ptr + number // 32, ~((number * 0 + 1) << (number % 32)), number < N, sem="relaxed")


@healthy("bits of multiples are cleared by atomics, some of them by several programs")
def primes_that_are_left(device):
    words = counters(device, 8) - 1
    sieve_kernel[(14,)](words, 256, BLOCK=128)
    prime = torch.tensor([all(n % f for f in range(2, min(n, 16))) for n in range(256)])
    value = (prime.view(8, 32).long() << torch.arange(32)).sum(1)
    return [Check(words, torch.where(value >= 1 << 31, value - (1 << 32), value).int())]


@triton.jit
def walsh_kernel(x_ptr, y_ptr, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(x_ptr + i), tl.load(x_ptr + (i ^ STRIDE))
    tl.store(y_ptr + i, tl.where((i & STRIDE) == 0, a + b, b - a))


@healthy("a Walsh transform from a buffer to another and back, a launch for each stride")
def walsh_between_two_buffers(device):
    x, matrix = integers(64), torch.ones(1, 1)
    source, target = x.to(device, copy=True), zeros(device, 64)
    for log in range(6):
        walsh_kernel[(4,)](source, target, STRIDE=1 << log, BLOCK=16)
        source, target = target, source
        matrix = torch.kron(torch.tensor([[1.0, 1], [1, -1]]), matrix)
    return [Check(source, matrix @ x)]


@triton.jit
def hand_kernel(x_ptr, slot_ptr, full_ptr, out_ptr, BLOCK: tl.constexpr):
    pair, i = tl.program_id(0) // 2, tl.arange(0, BLOCK)
    if tl.program_id(0) % 2 == 0:
        tl.store(slot_ptr + pair * BLOCK + i, tl.load(x_ptr + pair * BLOCK + i))
        tl.debug_barrier()
        tl.atomic_cas(full_ptr + pair, 0, 1, sem="release")
    else:
        while tl.atomic_cas(full_ptr + pair, 1, 0, sem="acquire") != 1:
            pass
        tl.debug_barrier()
        tl.store(out_ptr + pair * BLOCK + i, 2 * tl.load(slot_ptr + pair * BLOCK + i))


@healthy("slots are marked full by a swap and empty by another, so that the next launch can use them again")
def slots_full_and_empty(device):
    x, slot, full, out = integers(2, 4, 16), zeros(device, 4, 16), counters(device, 4), zeros(device, 2, 4, 16)
    for turn in range(2):
        hand_kernel[(8,)](x[turn].to(device), slot, full, out[turn], BLOCK=16)
    return [Check(out, 2 * x), Check(full, torch.zeros(4, dtype=torch.int32))]


@triton.jit
def shared_tiles_kernel(x_ptr, out_ptr, PER, TOTAL, ITERATIONS: tl.constexpr, D: tl.constexpr):
    d, start = tl.arange(0, D), tl.program_id(0) * PER
    end = tl.minimum(start + PER, TOTAL)
    while start < end:
        tile = start // ITERATIONS
        stop, total = tl.minimum(end, (tile + 1) * ITERATIONS), tl.zeros([D], tl.float32)
        for step in range(start, stop):
            total += tl.load(x_ptr + step * D + d)
        if stop - start == ITERATIONS:
            tl.store(out_ptr + tile * D + d, total)
        else:
            tl.atomic_add(out_ptr + tile * D + d, total, sem="relaxed")
        start = stop


@healthy("tiles that a program has to itself are stored, those that it shares are added by atomics")
def tiles_stored_or_added(device):
    x, out = integers(20, 16), zeros(device, 5, 16)
    shared_tiles_kernel[(3,)](x.to(device), out, 7, 20, ITERATIONS=4, D=16)
    return [Check(out, x.view(5, 4, 16).sum(1))]


@triton.jit
def windows_kernel(x_ptr, out_ptr, first, BLOCK: tl.constexpr):
    window = 2 * tl.program_id(0) + first
    at = window * (BLOCK // 2) + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(out_ptr + at) + tl.load(x_ptr + window * BLOCK + tl.arange(0, BLOCK)))


@healthy("windows that overlap by half are added by two launches, whose windows lie beside each other")
def windows_of_two_launches(device):
    x, out, want = integers(8, 16), zeros(device, 72), torch.zeros(72)
    for first in range(2):
        windows_kernel[(4,)](x.to(device), out, first, BLOCK=16)
    for window in range(8):
        want[8 * window : 8 * window + 16] += x[window]
    return [Check(out, want)]
