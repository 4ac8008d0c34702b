"""Healthy kernels of the fourth set: programs that share places and are ordered by releases and acquires."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import Check, healthy, integers


def zeros(device, *sizes, dtype=torch.int32):
    return [torch.zeros(n, dtype=dtype, device=device) for n in sizes]


@triton.jit
def group_sums_kernel(dy_ptr, x_ptr, part_ptr, lock_ptr, N: tl.constexpr, GROUPS: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, N)
    share = tl.load(dy_ptr + row * N + cols) * tl.load(x_ptr + row * N + cols)
    group = row % GROUPS
    lock, begun = lock_ptr + group, lock_ptr + GROUPS + group
    place = part_ptr + group * N + cols
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.debug_barrier()
    first = tl.load(begun) == 0
    tl.debug_barrier()
    if first:
        tl.atomic_xchg(begun, 1)
    else:
        share += tl.load(place)
    tl.store(place, share)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


@triton.jit
def add_groups_kernel(part_ptr, out_ptr, N: tl.constexpr, GROUPS: tl.constexpr):
    at = tl.arange(0, GROUPS)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out_ptr + tl.arange(0, N), tl.sum(tl.load(part_ptr + at), 0))


# `begun` is loaded plainly and exchanged atomically, by whoever holds its lock; the buffer need not be zeroed.
@healthy("a layer norm's partial sums under the lock of their group, the first of which stores instead of adding")
def layer_norm_partials_under_locks(device):
    dy, x = integers(12, 16, seed=1), integers(12, 16, seed=2)
    part, out = torch.empty(4, 16, device=device), torch.zeros(16, device=device)
    group_sums_kernel[(12,)](dy.to(device), x.to(device), part, *zeros(device, 8), N=16, GROUPS=4)
    add_groups_kernel[(1,)](part, out, N=16, GROUPS=4)
    return [Check(out, (dy * x).sum(0))]


@triton.jit
def split_k_in_turn_kernel(a_ptr, b_ptr, c_ptr, turn_ptr, K: tl.constexpr, SPLITS: tl.constexpr, T: tl.constexpr):
    m, split = tl.program_id(0), tl.program_id(1)
    r, c = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
    acc = tl.zeros((T, T), tl.float32)
    for k in range(split * (K // SPLITS), (split + 1) * (K // SPLITS), T):
        a = tl.load(a_ptr + (m * T + r) * K + k + c)
        acc += tl.dot(a, tl.load(b_ptr + (k + r) * T + c), input_precision="ieee")
    place = c_ptr + (m * T + r) * T + c
    while tl.atomic_or(turn_ptr + m, 0, sem="acquire") != split:
        pass
    tl.debug_barrier()
    if split > 0:
        acc += tl.load(place)
    tl.store(place, acc)
    tl.debug_barrier()
    tl.atomic_xchg(turn_ptr + m, split + 1, sem="release")


# Each acquires what the one before released; the sum has one order.
@healthy("splits of K add to C by load and store, each in its turn")
def split_k_in_turn(device):
    a, b, c = integers(32, 96, seed=1), integers(96, 16, seed=2), torch.empty(32, 16, device=device)
    split_k_in_turn_kernel[(2, 3)](a.to(device), b.to(device), c, *zeros(device, 2), K=96, SPLITS=3, T=16)
    return [Check(c, a @ b)]


@triton.jit
def published_scale_kernel(x_ptr, scale_ptr, flag_ptr, out_ptr, n, BLOCK: tl.constexpr, ALL: tl.constexpr):
    pid = tl.program_id(0)
    if pid == 0:
        every = tl.arange(0, ALL)
        tl.store(scale_ptr, tl.max(tl.load(x_ptr + every, every < n, other=0.0), 0))
        tl.debug_barrier()
        tl.atomic_xchg(flag_ptr, 1, sem="release")
    else:
        while tl.atomic_cas(flag_ptr, 2, 2, sem="acquire") != 1:
            pass
    tl.debug_barrier()
    i = pid * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i, i < n) * tl.load(scale_ptr), i < n)


# The swap compares with 2, which is never there: it only reads, and acquires.
@healthy("program 0 stores a scale and releases a flag; the others acquire that before they load the scale")
def scale_published_by_program_zero(device):
    x, scale, out = integers(250, low=1), torch.empty(1, device=device), torch.zeros(250, device=device)
    published_scale_kernel[(8,)](x.to(device), scale, *zeros(device, 1), out, 250, BLOCK=32, ALL=256)
    return [Check(out, x * x.max())]


@triton.jit
def last_adds_and_clears_kernel(x_ptr, part_ptr, count_ptr, out_ptr, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    tile, split = tl.program_id(0), tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    at = tile * SPLITS + split
    tl.store(part_ptr + at * BLOCK + cols, tl.load(x_ptr + at * BLOCK + cols) * 2)
    tl.debug_barrier()
    ticket = tl.atomic_add(count_ptr + tile, 1, sem="acq_rel")
    tl.debug_barrier()
    if ticket == SPLITS - 1:
        total = tl.zeros((BLOCK,), tl.float32)
        for s in range(SPLITS):
            total += tl.load(part_ptr + (tile * SPLITS + s) * BLOCK + cols)
        tl.store(out_ptr + tile * BLOCK + cols, total)
        tl.store(count_ptr + tile, 0)


# The last ticket acquired all others, so the plain store of 0 comes after each of them.
@healthy("the last split adds up and clears the counter by a plain store; the next launch counts again")
def last_adds_and_clears_the_counter(device):
    x, part, out = integers(8, 16), torch.empty(8, 16, device=device), torch.zeros(2, 16, device=device)
    (count,) = zeros(device, 2)
    for _ in range(2):
        last_adds_and_clears_kernel[(2, 4)](x.to(device), part, count, out, SPLITS=4, BLOCK=16)
    return [Check(out, 2 * x.view(2, 4, 16).sum(1)), Check(count, torch.zeros(2, dtype=torch.int32))]


@triton.jit
def release_then_acquire_kernel(x_ptr, part_ptr, count_ptr, out_ptr, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    split = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    tl.store(part_ptr + split * BLOCK + cols, tl.load(x_ptr + split * BLOCK + cols) + split)
    tl.debug_barrier()
    ticket = tl.atomic_add(count_ptr, 1, sem="release")
    if ticket == SPLITS - 1:
        tl.atomic_add(count_ptr, 0, sem="acquire")
        tl.debug_barrier()
        rows = tl.arange(0, SPLITS)[:, None]
        tl.store(out_ptr + cols, tl.sum(tl.load(part_ptr + rows * BLOCK + cols[None, :]), 0))


# The acquiring addition reads the end of a chain of additions, each of which released its part.
@healthy("tickets release only; the last one acquires by a second atomic on the same counter, and adds up")
def tickets_release_and_the_last_acquires(device):
    x, part, out = integers(8, 16), torch.empty(8, 16, device=device), torch.zeros(16, device=device)
    release_then_acquire_kernel[(8,)](x.to(device), part, *zeros(device, 1), out, SPLITS=8, BLOCK=16)
    return [Check(out, x.sum(0) + 28)]


@triton.jit
def ticket_lock_kernel(x_ptr, sum_ptr, max_ptr, lock_ptr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + cols)
    mine = tl.atomic_add(lock_ptr, 1, sem="relaxed")
    while tl.atomic_add(lock_ptr + 1, 0, sem="acquire") != mine:
        pass
    tl.debug_barrier()
    tl.store(sum_ptr + cols, tl.load(sum_ptr + cols) + x)
    tl.store(max_ptr + cols, tl.maximum(tl.load(max_ptr + cols), x))
    tl.debug_barrier()
    tl.atomic_add(lock_ptr + 1, 1, sem="release")


# Tickets may be relaxed: they say who is next, and the number being served orders what is done.
@healthy("a lock of tickets, relaxed, and of the number being served, acquired and released")
def lock_of_tickets(device):
    x, total, top = integers(6, 16), torch.zeros(16, device=device), torch.full((16,), -99.0, device=device)
    ticket_lock_kernel[(6,)](x.to(device), total, top, *zeros(device, 2), BLOCK=16)
    return [Check(total, x.sum(0)), Check(top, x.amax(0))]


@triton.jit
def look_back_in_words_kernel(x_ptr, out_ptr, word_ptr, BLOCK: tl.constexpr):
    tile = tl.program_id(0)
    i = tile * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    total = tl.sum(x, 0).to(tl.int64)
    tl.atomic_xchg(word_ptr + tile, total | (1 << 32), sem="relaxed")
    before = total * 0
    at = tile - 1
    while at >= 0:
        word = tl.atomic_add(word_ptr + at, 0, sem="relaxed")
        while word == 0:
            word = tl.atomic_add(word_ptr + at, 0, sem="relaxed")
        before += word & 0xFFFFFFFF
        at = tl.where((word >> 32) == 2, -1, at - 1)
    tl.atomic_xchg(word_ptr + tile, (before + total) | (2 << 32), sem="relaxed")
    tl.store(out_ptr + i, tl.cumsum(x, 0) + before.to(tl.int32))


# State and value arrive together, in the word that is read: nothing else has to be ordered.
@healthy("a look-back whose words of 64 bits hold state and sum, all relaxed")
def look_back_in_words(device):
    x, out = integers(128, low=0, dtype=torch.int32), torch.zeros(128, dtype=torch.int32, device=device)
    look_back_in_words_kernel[(8,)](x.to(device), out, *zeros(device, 8, dtype=torch.int64), BLOCK=16)
    return [Check(out, x.cumsum(0).to(torch.int32))]


@triton.jit
def add(a, b):
    return a + b


@triton.jit
def look_back_kernel(x_ptr, out_ptr, sum_ptr, prefix_ptr, state_ptr, ticket_ptr, BLOCK: tl.constexpr):
    tile = tl.atomic_add(ticket_ptr, 1, sem="relaxed")
    i = tile * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    total = tl.sum(x, 0)
    tl.store(sum_ptr + tile, total)
    tl.debug_barrier()
    tl.atomic_xchg(state_ptr + tile, 1, sem="release")
    before = total * 0
    at = tile - 1
    while at >= 0:
        state = tl.atomic_add(state_ptr + at, 0, sem="acquire")
        while state == 0:
            state = tl.atomic_add(state_ptr + at, 0, sem="acquire")
        tl.debug_barrier()
        if state == 2:
            before += tl.load(prefix_ptr + at)
            at = at * 0 - 1
        else:
            before += tl.load(sum_ptr + at)
            at = at - 1
    tl.store(prefix_ptr + tile, before + total)
    tl.debug_barrier()
    tl.atomic_xchg(state_ptr + tile, 2, sem="release")
    tl.store(out_ptr + i, tl.associative_scan(x, 0, add) + before)


# Tickets number tiles in the order in which programs began: whom one waits for is running.
@healthy("a look-back over tiles that tickets number, with sums and prefixes behind states that are released")
def look_back_at_released_states(device):
    x, out = integers(128), torch.zeros(128, device=device)
    total, prefix = torch.empty(2, 8, device=device)
    look_back_kernel[(8,)](x.to(device), out, total, prefix, *zeros(device, 8, 1), BLOCK=16)
    return [Check(out, x.cumsum(0))]


@triton.jit
def stream_k_kernel(a_ptr, b_ptr, c_ptr, part_ptr, flag_ptr, total, per, K: tl.constexpr, T: tl.constexpr):
    pid = tl.program_id(0)
    STEPS: tl.constexpr = K // T
    r, c = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
    at = pid * per
    end = tl.minimum(at + per, total)
    while at < end:
        tile = at // STEPS
        stop = tl.minimum(end, (tile + 1) * STEPS)
        acc = tl.zeros((T, T), tl.float32)
        for step in range(at, stop):
            k = (step % STEPS) * T
            a = tl.load(a_ptr + (tile * T + r) * K + k + c)
            acc += tl.dot(a, tl.load(b_ptr + (k + r) * T + c), input_precision="ieee")
        if at % STEPS != 0:
            tl.store(part_ptr + (pid * T + r) * T + c, acc)
            tl.debug_barrier()
            tl.atomic_xchg(flag_ptr + pid, 1, sem="release")
        else:
            covered = stop
            other = pid + 1
            while covered < (tile + 1) * STEPS:
                while tl.atomic_add(flag_ptr + other, 0, sem="acquire") == 0:
                    pass
                tl.debug_barrier()
                acc += tl.load(part_ptr + (other * T + r) * T + c)
                covered += per
                other += 1
            tl.store(c_ptr + (tile * T + r) * T + c, acc)
        at = stop


# A program has at most one part (where it begins inside a tile), and gives it away before it waits for anyone.
@healthy("stream-K: 3 tiles of 4 steps over 6 programs; who begins a tile waits for all others that have steps of it")
def stream_k_waits_for_all(device):
    a, b = integers(48, 64, seed=1), integers(64, 16, seed=2)
    for per, programs in ((2, 6), (3, 5), (1, 12)):
        c, part = torch.zeros(48, 16, device=device), torch.empty(programs, 16, 16, device=device)
        stream_k_kernel[(programs,)](
            a.to(device), b.to(device), c, part, *zeros(device, programs), 12, per, K=64, T=16
        )  # fmt: skip
        if per == 3:
            three = c
    return [Check(c, a @ b), Check(three, a @ b)]


@triton.jit
def ring_kernel(x_ptr, ring_ptr, full_ptr, taken_ptr, out_ptr, ITEMS: tl.constexpr, SLOTS: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    cols = tl.arange(0, BLOCK)
    if tl.program_id(0) == 0:
        for t in range(ITEMS):
            while tl.atomic_add(taken_ptr, 0, sem="acquire") + SLOTS <= t:
                pass
            tl.debug_barrier()
            tl.store(ring_ptr + (t % SLOTS) * BLOCK + cols, tl.load(x_ptr + t * BLOCK + cols) * 2)
            tl.debug_barrier()
            tl.atomic_xchg(full_ptr, t + 1, sem="release")
    else:
        for t in range(ITEMS):
            while tl.atomic_add(full_ptr, 0, sem="acquire") <= t:
                pass
            tl.debug_barrier()
            item = tl.load(ring_ptr + (t % SLOTS) * BLOCK + cols)
            tl.store(out_ptr + t * BLOCK + cols, item)
            tl.debug_barrier()
            tl.atomic_xchg(taken_ptr, t + 1, sem="release")


# Slot t % 3 is written again when item t - 3 was taken, which the producer has acquired.
@healthy("a ring of three slots: the producer waits for room, the consumer for items")
def ring_with_waiting_for_room(device):
    x, ring, out = integers(8, 16), torch.empty(3, 16, device=device), torch.zeros(8, 16, device=device)
    ring_kernel[(2,)](x.to(device), ring, *zeros(device, 1, 1), out, ITEMS=8, SLOTS=3, BLOCK=16)
    return [Check(out, 2 * x)]


@triton.jit
def jacobi_kernel(buf_ptr, count_ptr, n, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for step in range(STEPS):
        src = buf_ptr + (step % 2) * n
        dst = buf_ptr + ((step + 1) % 2) * n
        left = tl.load(src + i - 1, i > 0, other=0.0)
        right = tl.load(src + i + 1, i + 1 < n, other=0.0)
        tl.store(dst + i, left + right)
        tl.debug_barrier()
        tl.atomic_add(count_ptr, 1, sem="release")
        while tl.atomic_add(count_ptr, 0, sem="acquire") < (step + 1) * tl.num_programs(0):
            pass
        tl.debug_barrier()


# The counter only grows; six programs are resident together on any GPU.
@healthy("a stencil of four steps in one launch, between them a barrier of the grid by a counter")
def stencil_between_grid_barriers(device):
    x = integers(96, low=0, high=4)
    buf = torch.cat([x, torch.zeros(96)]).to(device)
    jacobi_kernel[(6,)](buf, *zeros(device, 1), 96, STEPS=4, BLOCK=16)
    steps = [x]
    for _ in range(4):
        old = steps[-1]
        steps.append(torch.cat([torch.zeros(1), old[:-1]]) + torch.cat([old[1:], torch.zeros(1)]))
    return [Check(buf, torch.cat([steps[4], steps[3]]))]
