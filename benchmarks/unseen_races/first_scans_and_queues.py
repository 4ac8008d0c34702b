"""Scans that look back, queues that programs fill and empty, and who comes last."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import Check, healthy, integers, racy


def zeros(device, *sizes, dtype=torch.int32):
    return [torch.zeros(n, dtype=dtype, device=device) for n in sizes]


@triton.jit
def look_back_kernel(
    x_ptr, sum_ptr, prefix_ptr, state_ptr, order_ptr, out_ptr, BLOCK: tl.constexpr, MISTAKE: tl.constexpr
):
    """State of a block: 0 nothing, 1 its own sum is there, 2 the sum of all up to it is there."""
    block = tl.atomic_add(order_ptr, 1, sem="relaxed")
    i = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    own = tl.sum(x)
    if MISTAKE == "state first":
        tl.atomic_xchg(state_ptr + block, 1, sem="release")
        tl.store(sum_ptr + block, own)
    else:
        tl.store(sum_ptr + block, own)
        tl.debug_barrier()
        tl.atomic_xchg(state_ptr + block, 1, sem="release")
    before = tl.zeros((), tl.int32)
    back = block - 1
    while back >= 0:
        state = tl.atomic_add(state_ptr + back, 0, sem="relaxed" if MISTAKE == "relaxed look" else "acquire")
        while state == 0:
            state = tl.atomic_add(state_ptr + back, 0, sem="relaxed" if MISTAKE == "relaxed look" else "acquire")
        tl.debug_barrier()
        if state == 2:
            before += tl.load(prefix_ptr + back)
            back = -1
        else:
            before += tl.load(sum_ptr + back)
            back -= 1
    if MISTAKE == "one word":  # the sum of all goes where the block's own sum was read from
        tl.store(sum_ptr + block, before + own)
    tl.store(prefix_ptr + block, before + own)
    tl.debug_barrier()
    tl.atomic_xchg(state_ptr + block, 2, sem="release")
    tl.store(out_ptr + i, before + tl.cumsum(x, 0))


def _look_back(device, mistake=""):
    x = integers(8 * 32, dtype=torch.int32)
    sums, prefix, state, order, out = zeros(device, 8, 8, 8, 1, 256)
    look_back_kernel[(8,)](x.to(device), sums, prefix, state, order, out, BLOCK=32, MISTAKE=mistake)
    return [Check(out, x.cumsum(0).to(torch.int32))]


@healthy("decoupled look-back: blocks by a counter, sums and prefixes in memory of their own, a state behind each")
def look_back_of_three_states(device):
    return _look_back(device)


@racy("sum_ptr", "read/write", "the state says that the sum is there before it is stored")
def look_back_state_before_the_sum(device):
    _look_back(device, "state first")


@racy("sum_ptr,prefix_ptr", "read/write", "who looks back relaxed has no right to what stands before the state")
def look_back_by_relaxed_looks(device):
    _look_back(device, "relaxed look")


@racy("sum_ptr", "read/write", "the prefix overwrites the sum that others may be about to load, having seen state 1")
def look_back_with_sum_and_prefix_in_one_word(device):
    _look_back(device, "one word")


@triton.jit
def packed_look_back_kernel(x_ptr, word_ptr, out_ptr, BLOCK: tl.constexpr):
    """A word of 64 bits has the state in its two upper bits and a count below: nothing else is passed on."""
    block = tl.program_id(0)
    i = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    own = tl.sum(x).to(tl.int64)
    if block > 0:
        tl.atomic_xchg(word_ptr + block, own | (1 << 60), sem="relaxed")
    before = tl.zeros((), tl.int64)
    back = block - 1
    while back >= 0:
        word = tl.atomic_or(word_ptr + back, 0, sem="relaxed")
        while word == 0:
            word = tl.atomic_or(word_ptr + back, 0, sem="relaxed")
        before += word & ((1 << 60) - 1)
        back = tl.where((word >> 61) & 1 == 1, -1, back - 1)
    tl.atomic_xchg(word_ptr + block, (before + own) | (1 << 61), sem="relaxed")
    tl.store(out_ptr + i, before + tl.cumsum(x.to(tl.int64), 0))


@healthy("state and sum in one word of 64 bits, all of it relaxed: there is nothing else to be ordered")
def look_back_in_a_word(device):
    x = integers(6 * 16, low=0, dtype=torch.int32)
    words, out = zeros(device, 6, 96, dtype=torch.int64)
    packed_look_back_kernel[(6,)](x.to(device), words, out, BLOCK=16)
    return [Check(out, x.long().cumsum(0))]


@triton.jit
def _recur(a1, b1, a2, b2):
    return a1 * a2, b1 * a2 + b2


@triton.jit
def recurrence_kernel(a_ptr, b_ptr, carry_ptr, flag_ptr, h_ptr, T, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    """h_t = a_t h_(t-1) + b_t, channels along the first axis of the grid, pieces of time along the second."""
    channel, piece = tl.program_id(0), tl.program_id(1)
    t = piece * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(a_ptr + channel * T + t, t < T, other=1.0)
    b = tl.load(b_ptr + channel * T + t, t < T, other=0.0)
    a, b = tl.associative_scan((a, b), 0, _recur)
    pieces = tl.num_programs(1)
    flag = flag_ptr + (piece if MISTAKE else channel * pieces + piece)
    h = 0.0
    if piece > 0:
        while tl.atomic_cas(flag - 1, 1, 1, sem="acquire") != 1:
            pass
        tl.debug_barrier()
        h = tl.load(carry_ptr + channel * pieces + piece - 1)
    out = a * h + b
    tl.store(carry_ptr + channel * pieces + piece, tl.sum(tl.where(tl.arange(0, BLOCK) == BLOCK - 1, out, 0.0)))
    tl.debug_barrier()
    tl.atomic_xchg(flag, 1, sem="release")
    tl.store(h_ptr + channel * T + t, out, t < T)


def _recurrence(device, mistake):
    a, b = integers(4, 50, low=0, high=2, seed=1) * 2 - 1, integers(4, 50, seed=2)
    h = torch.zeros(4, 50, device=device)
    flags = torch.zeros(16, dtype=torch.int32, device=device)
    recurrence_kernel[(4, 4)](
        a.to(device), b.to(device), torch.empty(4, 4, device=device), flags, h, 50, BLOCK=16, MISTAKE=mistake
    )
    want, state = torch.zeros(4, 50), torch.zeros(4)
    for t in range(50):
        want[:, t] = state = a[:, t] * state + b[:, t]
    return [Check(h, want)]


@healthy("a linear recurrence in pieces of time, each with a flag of its channel's own")
def recurrence_in_pieces(device):
    return _recurrence(device, False)


@racy("carry_ptr", "read/write", "flags go by the piece alone: a channel starts when another channel's carry is there")
def recurrence_whose_flags_forget_the_channel(device):
    _recurrence(device, True)


@triton.jit
def frontier_kernel(
    edge_ptr, start_ptr, seen_ptr, queue_ptr, tail_ptr, head_ptr, NODES: tl.constexpr, MISTAKE: tl.constexpr
):
    """Breadth-first search by a queue: a place is taken by the tail, the node put there is published by its own word."""
    taken = tl.atomic_add(head_ptr, 1, sem="relaxed")
    while taken < NODES:
        if MISTAKE == "tail":
            while tl.atomic_add(tail_ptr, 0, sem="acquire") <= taken:
                pass
            node = tl.load(queue_ptr + taken)
        else:
            node = tl.atomic_add(queue_ptr + taken, 0, sem="relaxed")
            while node == 0:
                node = tl.atomic_add(queue_ptr + taken, 0, sem="relaxed")
        for e in range(tl.load(start_ptr + node - 1), tl.load(start_ptr + node)):
            to = tl.load(edge_ptr + e)
            if tl.atomic_xchg(seen_ptr + to, 1, sem="relaxed") == 0:
                place = tl.atomic_add(tail_ptr, 1, sem="acq_rel")
                if MISTAKE == "tail":
                    tl.store(queue_ptr + place, to + 1)
                else:
                    tl.atomic_xchg(queue_ptr + place, to + 1, sem="relaxed")
        taken = tl.atomic_add(head_ptr, 1, sem="relaxed")


def _frontier(device, mistake):
    edges = [[1, 2], [3, 4], [4, 5], [6], [6], [7], [7, 0], [0]]
    start = torch.tensor([0, *torch.tensor([len(e) for e in edges]).cumsum(0).tolist()], dtype=torch.int32)
    edge = torch.tensor([to for targets in edges for to in targets], dtype=torch.int32)
    seen, queue, tail, head = zeros(device, 8, 8, 1, 1)
    seen[0], queue[0], tail[0] = 1, 1, 1
    frontier_kernel[(3,)](edge.to(device), start.to(device), seen, queue, tail, head, NODES=8, MISTAKE=mistake)
    return [Check(queue.sort().values, torch.arange(1, 9, dtype=torch.int32))]


@healthy("a queue that its readers fill as well: the number of a node is its own flag")
def queue_of_a_search(device):
    return _frontier(device, "")


@racy("queue_ptr", "read/write", "the tail goes up before the node is in its place, and readers go by the tail")
def queue_whose_tail_goes_up_first(device):
    _frontier(device, "tail")


@triton.jit
def sequence_queue_kernel(
    x_ptr, value_ptr, seq_ptr, put_ptr, got_ptr, out_ptr, SLOTS: tl.constexpr, ITEMS: tl.constexpr, SEM: tl.constexpr
):
    """Half of the programs put ITEMS each into a ring, half get; a slot's number says whose turn it is."""
    pid, half = tl.program_id(0), tl.num_programs(0) // 2
    if pid < half:
        for n in range(ITEMS):
            item = tl.load(x_ptr + pid * ITEMS + n)
            place = tl.atomic_add(put_ptr, 1, sem="relaxed")
            slot = place % SLOTS
            while tl.atomic_add(seq_ptr + slot, 0, sem="acquire") != place:
                pass
            tl.debug_barrier()
            tl.store(value_ptr + slot, item)
            tl.debug_barrier()
            tl.atomic_xchg(seq_ptr + slot, place + 1, sem=SEM)
    else:
        for _ in range(ITEMS):
            place = tl.atomic_add(got_ptr, 1, sem="relaxed")
            slot = place % SLOTS
            while tl.atomic_add(seq_ptr + slot, 0, sem="acquire") != place + 1:
                pass
            tl.debug_barrier()
            tl.store(out_ptr + place, tl.load(value_ptr + slot))
            tl.debug_barrier()
            tl.atomic_xchg(seq_ptr + slot, place + SLOTS, sem="release")


def _sequence_queue(device, sem):
    x = torch.arange(1, 13, dtype=torch.int32)
    values, put, got, out = zeros(device, 4, 1, 1, 12)
    seq = torch.arange(4, dtype=torch.int32, device=device)
    sequence_queue_kernel[(6,)](x.to(device), values, seq, put, got, out, SLOTS=4, ITEMS=4, SEM=sem)
    return [Check(out.sort().values, x)]


@healthy("a bounded queue of several producers and consumers, each slot with its own sequence number")
def queue_of_sequence_numbers(device):
    return _sequence_queue(device, "release")


@racy("value_ptr", "read/write", "the sequence number goes up relaxed: it may be seen before the value is")
def queue_whose_numbers_are_relaxed(device):
    _sequence_queue(device, "relaxed")


@triton.jit
def persistent_queue_kernel(x_ptr, out_ptr, sum_ptr, next_ptr, tiles, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    tile = tl.atomic_add(next_ptr, 1)
    while tile < tiles:
        x = tl.load(x_ptr + tile * BLOCK + cols)
        tl.store(out_ptr + tile * BLOCK + cols, x + 1)
        if MISTAKE:
            tl.store(sum_ptr + cols, tl.load(sum_ptr + cols) + x)
        total += x
        tile = tl.atomic_add(next_ptr, 1)
    if not MISTAKE:
        tl.atomic_add(sum_ptr + cols, total, sem="relaxed")


def _persistent_queue(device, mistake):
    x, out, total = integers(12, 16), torch.zeros(12, 16, device=device), torch.zeros(16, device=device)
    persistent_queue_kernel[(4,)](x.to(device), out, total, *zeros(device, 1), 12, BLOCK=16, MISTAKE=mistake)
    return [Check(out, x + 1), Check(total, x.sum(0))]


@healthy("tiles from a queue, sums kept in registers and added at the end by atomics")
def queue_of_tiles_with_a_sum(device):
    return _persistent_queue(device, False)


@racy(
    "sum_ptr",
    "read/write,write/write",
    "the queue's counter orders by chance, and each tile's owner adds by load and store",
)
def queue_of_tiles_with_a_plain_sum(device):
    _persistent_queue(device, True)


@triton.jit
def last_of_tile_kernel(
    x_ptr, part_ptr, count_ptr, out_ptr, PARTS: tl.constexpr, BLOCK: tl.constexpr, MISTAKE: tl.constexpr
):
    tile, part, cols = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    place = part_ptr + (tile * PARTS + part) * BLOCK + cols
    tl.store(place, tl.load(x_ptr + (tile * PARTS + part) * BLOCK + cols))
    tl.debug_barrier()
    came = tl.atomic_add(count_ptr + (0 if MISTAKE == "one counter" else tile), 1)
    if came == PARTS - (2 if MISTAKE == "early" else 1):
        tl.debug_barrier()
        total = tl.zeros((BLOCK,), tl.float32)
        for p in range(PARTS):
            total += tl.load(part_ptr + (tile * PARTS + p) * BLOCK + cols)
        tl.store(out_ptr + tile * BLOCK + cols, total)
        tl.atomic_xchg(count_ptr + tile, 0)


def _last_of_tile(device, mistake=""):
    x, out = integers(3, 4, 16), torch.zeros(3, 16, device=device)
    parts, counts = torch.empty(3, 4, 16, device=device), torch.zeros(3, dtype=torch.int32, device=device)
    for _ in range(2):
        last_of_tile_kernel[(3, 4)](x.to(device), parts, counts, out, PARTS=4, BLOCK=16, MISTAKE=mistake)
    return [Check(out, x.sum(1)), Check(counts, torch.zeros(3, dtype=torch.int32))]


@healthy("split-K whose last part of a tile adds them in a fixed order and sets the counter back, launched twice")
def last_part_of_each_tile(device):
    return _last_of_tile(device)


@racy("part_ptr", "read/write", "the last but one adds up: one part may not be there yet")
def last_part_but_one_adds(device):
    _last_of_tile(device, "early")


@racy(
    "part_ptr", "read/write", "tiles share a counter: who is fourth there has not waited for the parts of its own tile"
)
def last_part_by_a_counter_of_all_tiles(device):
    _last_of_tile(device, "one counter")


@triton.jit
def stale_flag_kernel(x_ptr, y_ptr, flag_ptr, out_ptr, epoch, BLOCK: tl.constexpr, EPOCHS: tl.constexpr):
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(y_ptr + pid * BLOCK + cols, tl.load(x_ptr + pid * BLOCK + cols) * epoch)
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptr + pid, epoch if EPOCHS else 1, sem="release")
    beside = (pid + 1) % tl.num_programs(0)
    while tl.atomic_add(flag_ptr + beside, 0, sem="acquire") < (epoch if EPOCHS else 1):
        pass
    tl.debug_barrier()
    tl.store(out_ptr + pid * BLOCK + cols, tl.load(y_ptr + beside * BLOCK + cols))


def _twice_through_flags(device, epochs):
    x, (y, out) = integers(4, 16), torch.zeros(2, 4, 16, device=device)
    (flags,) = zeros(device, 4)
    for epoch in (1, 2):
        stale_flag_kernel[(4,)](x.to(device), y, flags, out, epoch, BLOCK=16, EPOCHS=epochs)
    return [Check(out, 2 * x.roll(-1, 0))]


@healthy("flags count launches, so that none need be set back between them")
def flags_that_count_launches(device):
    return _twice_through_flags(device, True)


@racy("y_ptr", "read/write", "flags are still up from the launch before: the second one waits for nothing")
def flags_left_up_by_the_launch_before(device):
    _twice_through_flags(device, False)


@triton.jit
def sense_barrier_kernel(a_ptr, bar_ptr, STEPS: tl.constexpr, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    """A barrier whose upper bit turns over when all have come, as cooperative groups have it."""
    pid, n, cols = tl.program_id(0), tl.num_programs(0), tl.arange(0, BLOCK)
    for step in range(STEPS):
        x = tl.load(a_ptr + (step % 2) * n * BLOCK + ((pid + 1) % n) * BLOCK + cols)
        tl.store(a_ptr + ((step + 1) % 2) * n * BLOCK + pid * BLOCK + cols, x + pid)
        tl.debug_barrier()
        add = tl.where(pid == 0, 2147483647 - (n - 2), 1)
        old = tl.atomic_add(bar_ptr, add, sem="release" if MISTAKE else "acq_rel")
        while ((old ^ tl.atomic_add(bar_ptr, 0, sem="relaxed" if MISTAKE else "acquire")) >> 31) == 0:
            pass
        tl.debug_barrier()


def _sense_barrier(device, mistake):
    a = torch.stack([integers(4, 16), torch.zeros(4, 16)])
    own, want = a.to(device), a[0]
    sense_barrier_kernel[(4,)](own, *zeros(device, 1), STEPS=4, BLOCK=16, MISTAKE=mistake)
    for _ in range(4):
        want = want.roll(-1, 0) + torch.arange(4.0)[:, None]
    return [Check(own[0], want)]


@healthy("a barrier of the grid by one bit that turns over, used four times")
def barrier_by_a_bit(device):
    return _sense_barrier(device, False)


@racy("a_ptr", "read/write", "all release at the barrier, and who leaves it has acquired nothing")
def barrier_by_a_bit_without_acquire(device):
    _sense_barrier(device, True)


@triton.jit
def counted_producers_kernel(
    x_ptr, y_ptr, ready_ptr, out_ptr, PRODUCERS: tl.constexpr, BLOCK: tl.constexpr, WAIT: tl.constexpr
):
    """PRODUCERS programs make the pieces of each row; one more program a row waits until WAIT of them are there."""
    row, part, cols = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    if part < PRODUCERS:
        at = (row * PRODUCERS + part) * BLOCK + cols
        tl.store(y_ptr + at, tl.load(x_ptr + at) * 2)
        tl.debug_barrier()
        tl.atomic_add(ready_ptr + row, 1, sem="release")
    else:
        while tl.atomic_add(ready_ptr + row, 0, sem="acquire") < WAIT:
            pass
        tl.debug_barrier()
        for p in range(PRODUCERS):
            at = (row * PRODUCERS + p) * BLOCK + cols
            tl.store(out_ptr + at, tl.load(y_ptr + at) + 1)


def _counted_producers(device, wait):
    x, out = integers(3, 48), torch.zeros(3, 48, device=device)
    counted_producers_kernel[(3, 4)](
        x.to(device), torch.empty(3, 48, device=device), *zeros(device, 3), out, PRODUCERS=3, BLOCK=16, WAIT=wait
    )
    return [Check(out, 2 * x + 1)]


@healthy("a consumer of each row waits until all its producers have counted themselves")
def consumer_of_counted_producers(device):
    return _counted_producers(device, 3)


@racy("y_ptr", "read/write", "the consumer waits for the first of three producers")
def consumer_of_the_first_producer(device):
    _counted_producers(device, 1)
