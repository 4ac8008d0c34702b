"""Healthy kernels of the fifth set: locks, tickets, versions, counters and turns that order what programs share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import Check, healthy, integers


def zeros(device, *sizes, dtype=torch.int32):
    return [torch.zeros(n, dtype=dtype, device=device) for n in sizes]


@triton.jit
def finish_group_kernel(x_ptr, part_ptr, count_ptr, lock_ptr, out_ptr, MEMBERS: tl.constexpr, N: tl.constexpr):
    row, n = tl.program_id(0), tl.arange(0, N)
    group = row // MEMBERS
    total = tl.load(x_ptr + row * N + n) * 3
    place = part_ptr + group * N + n
    while tl.atomic_cas(lock_ptr + group, 0, 1, sem="acquire") == 1:
        pass
    tl.debug_barrier()
    done = tl.load(count_ptr + group)
    tl.debug_barrier()
    if done > 0:
        total += tl.load(place)
    if done == MEMBERS - 1:
        tl.store(out_ptr + group * N + n, total)
        tl.store(count_ptr + group, 0)
    else:
        tl.store(place, total)
        tl.store(count_ptr + group, done + 1)
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr + group, 0, sem="release")


# Sum and count are loaded and stored plainly, both by who holds the group's lock; the last one stores the result.
@healthy("a layer norm's sums in groups of rows: a plain count under the lock says who begins and who finishes")
def groups_finished_under_their_locks(device):
    x, part, out = integers(12, 16), torch.empty(4, 16, device=device), torch.zeros(4, 16, device=device)
    count, lock = zeros(device, 4, 4)
    for _ in range(2):
        finish_group_kernel[(12,)](x.to(device), part, count, lock, out, MEMBERS=3, N=16)
    return [Check(out, 3 * x.view(4, 3, 16).sum(1)), Check(count, torch.zeros(4, dtype=torch.int32))]


@triton.jit
def split_k_epilogue_kernel(a_ptr, b_ptr, bias_ptr, c_ptr, ticket_ptr, turn_ptr,
                            K: tl.constexpr, SPLITS: tl.constexpr, T: tl.constexpr):  # fmt: skip
    m, split = tl.program_id(0), tl.program_id(1)
    r, c = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
    acc = tl.zeros((T, T), tl.float32)
    for k in range(split * T, K, SPLITS * T):
        a = tl.load(a_ptr + (m * T + r) * K + k + c)
        acc += tl.dot(a, tl.load(b_ptr + (k + r) * T + c), input_precision="ieee")
    place = c_ptr + (m * T + r) * T + c
    mine = tl.atomic_add(ticket_ptr + m, 1, sem="relaxed")
    while tl.atomic_max(turn_ptr + m, 0, sem="acquire") != mine:
        pass
    tl.debug_barrier()
    if mine > 0:
        acc += tl.load(place)
    if mine == SPLITS - 1:
        acc = tl.maximum(acc + tl.load(bias_ptr + c), 0.0)
    tl.store(place, acc)
    tl.debug_barrier()
    tl.atomic_add(turn_ptr + m, 1, sem="release")


# Turns go by the order of arrival: whom one waits for has drawn a ticket and is running.
@healthy("split-K: splits add to C in the order in which they come; the last one adds a bias and cuts off at 0")
def split_k_whose_last_has_the_epilogue(device):
    a, b, bias = integers(32, 96, seed=1), integers(96, 16, seed=2), integers(16, low=-99, high=99, seed=3)
    c = torch.empty(32, 16, device=device)
    split_k_epilogue_kernel[(2, 3)](
        a.to(device), b.to(device), bias.to(device), c, *zeros(device, 2, 2), K=96, SPLITS=3, T=16
    )  # fmt: skip
    return [Check(c, (a @ b + bias).clamp(min=0))]


@triton.jit
def bits_of_locks_kernel(x_ptr, sum_ptr, word_ptr, ROWS: tl.constexpr, N: tl.constexpr):
    pid, n = tl.program_id(0), tl.arange(0, N)
    row = pid % ROWS
    x = tl.load(x_ptr + pid * N + n)
    bit = (row * 0 + 1) << (8 * row)
    while (tl.atomic_or(word_ptr, bit, sem="acquire") & bit) != 0:
        pass
    tl.debug_barrier()
    tl.store(sum_ptr + row * N + n, tl.load(sum_ptr + row * N + n) + x)
    tl.debug_barrier()
    tl.atomic_and(word_ptr, bit ^ -1, sem="release")


# Swaps of other bits stand between one's release and the next one's acquire, all of them read-modify-write.
@healthy("locks of four rows are bits of one word, set by atomic or and cleared by atomic and")
def locks_that_are_bits_of_one_word(device):
    x, total = integers(12, 16), torch.zeros(4, 16, device=device)
    bits_of_locks_kernel[(12,)](x.to(device), total, *zeros(device, 1), ROWS=4, N=16)
    return [Check(total, x.view(3, 4, 16).sum(0))]


@triton.jit
def phases_kernel(x_ptr, value_ptr, phase_ptr, left_ptr, out_ptr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    readers = tl.num_programs(0) - 1
    for turn in range(ROUNDS):
        if pid == 0:
            while tl.atomic_add(left_ptr, 0, sem="acquire") < turn * readers:
                pass
            tl.debug_barrier()
            tl.store(value_ptr + cols, tl.load(x_ptr + turn * BLOCK + cols) * 2)
            tl.debug_barrier()
            tl.atomic_xchg(phase_ptr, turn + 1, sem="release")
        else:
            while tl.atomic_add(phase_ptr, 0, sem="acquire") <= turn:
                pass
            tl.debug_barrier()
            tl.store(out_ptr + ((pid - 1) * ROUNDS + turn) * BLOCK + cols, tl.load(value_ptr + cols))
            tl.debug_barrier()
            tl.atomic_add(left_ptr, 1, sem="release")


# The writer acquires all readers of a phase before the next. Four programs, which have to be there together.
@healthy("a writer and three readers by phases: each waits for the other side, four times")
def writer_and_readers_by_phases(device):
    x, out = integers(4, 16), torch.zeros(3, 4, 16, device=device)
    phases_kernel[(4,)](x.to(device), torch.empty(16, device=device), *zeros(device, 1, 1), out, ROUNDS=4, BLOCK=16)
    return [Check(out, (2 * x).expand(3, 4, 16))]


@triton.jit
def graced_versions_kernel(x_ptr, buf_ptr, version_ptr, seen_ptr, out_ptr,
                           VERSIONS: tl.constexpr, READERS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    for v in range(VERSIONS):
        place = buf_ptr + v % 2 * BLOCK + cols
        if pid == READERS:
            while tl.min(tl.atomic_add(seen_ptr + tl.arange(0, READERS), 0, sem="acquire"), 0) < v - 1:
                pass
            tl.debug_barrier()
            tl.store(place, tl.load(x_ptr + v * BLOCK + cols) + v)
            tl.debug_barrier()
            tl.atomic_add(version_ptr, 1, sem="release")
        else:
            while tl.atomic_add(version_ptr, 0, sem="acquire") <= v:
                pass
            tl.debug_barrier()
            tl.store(out_ptr + (pid * VERSIONS + v) * BLOCK + cols, tl.load(place))
            tl.debug_barrier()
            tl.atomic_xchg(seen_ptr + pid, v + 1, sem="release")


# Version v goes where v - 2 was, when all four readers have said that they are done with v - 2.
# Five programs, which have to be there together.
@healthy("versions in two buffers by turns: a buffer is written again when the vector of readers has left it")
def versions_in_two_buffers_with_grace(device):
    x, buf, out = integers(5, 16), torch.empty(2, 16, device=device), torch.zeros(4, 5, 16, device=device)
    graced_versions_kernel[(5,)](x.to(device), buf, *zeros(device, 1, 4), out, VERSIONS=5, READERS=4, BLOCK=16)
    return [Check(out, (x + torch.arange(5)[:, None]).expand(4, 5, 16))]


@triton.jit
def collect_kernel(x_ptr, part_ptr, count_ptr, out_ptr, P: tl.constexpr, HOW: tl.constexpr, BLOCK: tl.constexpr):
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    if pid < P:
        if (pid % 2 == 1) & (HOW == "idle"):
            tl.atomic_add(count_ptr, 1, sem="relaxed")
        else:
            tl.store(part_ptr + pid * BLOCK + cols, tl.load(x_ptr + pid * BLOCK + cols) * 2)
            tl.debug_barrier()
            tl.atomic_add(count_ptr, 1, sem="release")
    else:
        if HOW == "idle":
            while tl.atomic_add(count_ptr, 0, sem="acquire") < P:
                pass
        else:
            while tl.atomic_add(count_ptr, 0, sem="relaxed") < P:
                pass
            tl.atomic_add(count_ptr, 0, sem="acquire")
        tl.debug_barrier()
        rows = tl.arange(0, P)[:, None]
        tl.store(out_ptr + cols, tl.sum(tl.load(part_ptr + rows * BLOCK + cols[None, :]), 0))


# The acquire reads the same counter, which has all eight releases in it by then.
# The ninth program waits for the others, which have to be there.
@healthy("a count is polled relaxed and acquired once, when it is full")
def count_polled_relaxed_and_acquired_once(device):
    x, part, out = integers(8, 16), torch.zeros(8, 16, device=device), torch.zeros(16, device=device)
    collect_kernel[(9,)](x.to(device), part, *zeros(device, 1), out, P=8, HOW="once", BLOCK=16)
    return [Check(out, 2 * x.sum(0))]


# Additions carry on what was released into the counter before them, relaxed ones too.
@healthy("odd programs have nothing to publish and count themselves relaxed; even ones release")
def relaxed_arrivals_of_who_has_stored_nothing(device):
    x, part, out = integers(8, 16), torch.zeros(8, 16, device=device), torch.zeros(16, device=device)
    collect_kernel[(9,)](x.to(device), part, *zeros(device, 1), out, P=8, HOW="idle", BLOCK=16)
    return [Check(out, 2 * x[::2].sum(0))]


@triton.jit
def stream_k_turns_kernel(a_ptr, b_ptr, c_ptr, done_ptr, total, per, K: tl.constexpr, T: tl.constexpr):
    STEPS: tl.constexpr = K // T
    r, c = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
    at = tl.program_id(0) * per
    end = tl.minimum(at + per, total)
    while at < end:
        tile = at // STEPS
        stop = tl.minimum(end, (tile + 1) * STEPS)
        acc = tl.zeros((T, T), tl.float32)
        for step in range(at, stop):
            k = step % STEPS * T
            a = tl.load(a_ptr + (tile * T + r) * K + k + c)
            acc += tl.dot(a, tl.load(b_ptr + (k + r) * T + c), input_precision="ieee")
        place = c_ptr + (tile * T + r) * T + c
        while tl.atomic_add(done_ptr + tile, 0, sem="acquire") != at % STEPS:
            pass
        tl.debug_barrier()
        if at % STEPS != 0:
            acc += tl.load(place)
        tl.store(place, acc)
        tl.debug_barrier()
        tl.atomic_xchg(done_ptr + tile, stop - tile * STEPS, sem="release")
        at = stop


# A program waits for lower ones only; these few are there together.
@healthy("stream-K in turns: programs add their steps to C itself, in the order of the steps")
def stream_k_in_turns(device):
    a, b, tiles = integers(48, 64, seed=1), integers(64, 16, seed=2), []
    for per in (5, 2):
        tiles.append(torch.empty(48, 16, device=device))
        stream_k_turns_kernel[(triton.cdiv(12, per),)](
            a.to(device), b.to(device), tiles[-1], *zeros(device, 3), 12, per, K=64, T=16
        )  # fmt: skip
    return [Check(c, a @ b) for c in tiles]


@triton.jit
def last_of_row_kernel(x_ptr, y_ptr, count_ptr, COLS: tl.constexpr, BLOCK: tl.constexpr):
    row, col = tl.program_id(0), tl.program_id(1)
    at = (row * COLS + col) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at) * 2)
    tl.debug_barrier()
    ticket = tl.atomic_add(count_ptr + row, 1, sem="acq_rel")
    tl.debug_barrier()
    if ticket == COLS - 1:
        every = row * COLS * BLOCK + tl.arange(0, COLS * BLOCK)
        y = tl.load(y_ptr + every)
        tl.store(y_ptr + every, y - tl.sum(y, 0))


# The last ticket of a row has acquired the stores of the other three, over which it stores.
@healthy("tiles of a row are stored by four programs; the last of them subtracts the row's sum in place")
def row_finished_in_place_by_its_last_program(device):
    x, y = integers(5, 64), torch.zeros(5, 64, device=device)
    last_of_row_kernel[(5, 4)](x.to(device), y, *zeros(device, 5), COLS=4, BLOCK=16)
    return [Check(y, 2 * x - 2 * x.sum(1, keepdim=True))]


@triton.jit
def windows_back_kernel(x_ptr, out_ptr, word_ptr, BLOCK: tl.constexpr, W: tl.constexpr):
    tile, lane = tl.program_id(0), tl.arange(0, W)
    i = tile * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    total = tl.sum(x, 0).to(tl.int64)
    tl.atomic_xchg(word_ptr + tile, total | (1 << 32), sem="relaxed")
    before = total * 0
    at = tile - 1
    while at >= 0:
        inside = lane <= at
        places = word_ptr + tl.where(inside, at - lane, 0)
        words = tl.atomic_or(places, 0, inside, sem="relaxed")
        while tl.min(tl.where(inside, words, 1), 0) == 0:
            words = tl.atomic_or(places, 0, inside, sem="relaxed")
        first = tl.min(tl.where(inside & ((words >> 32) == 2), lane, W), 0)
        before += tl.sum(tl.where(inside & (lane <= first), words & 0xFFFFFFFF, 0), 0)
        at = tl.where(first < W, -1, at - W)
    tl.atomic_xchg(word_ptr + tile, (before + total) | (2 << 32), sem="relaxed")
    tl.store(out_ptr + i, tl.cumsum(x, 0) + before.to(tl.int32))


# State and sum are in one word. Tiles wait for lower ones, which have to have begun.
@healthy("a look-back over windows of four tiles at once, words of state and sum, relaxed, with a mask at the start")
def look_back_over_windows(device):
    x, (out,) = integers(256, low=0, dtype=torch.int32), zeros(device, 256)
    windows_back_kernel[(16,)](x.to(device), out, *zeros(device, 16, dtype=torch.int64), BLOCK=16, W=4)
    return [Check(out, x.cumsum(0).to(torch.int32))]
