"""Racy kernels of the fifth set: something orders their programs, but too little of it or too late; autotuners."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import integers, racy


def zeros(device, *sizes, dtype=torch.int32):
    return [torch.zeros(n, dtype=dtype, device=device) for n in sizes]


@triton.jit
def maxima_of_stages_kernel(x_ptr, data_ptr, stage_ptr, out_ptr, STAGES: tl.constexpr, BLOCK: tl.constexpr):
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    for s in range(STAGES):
        if pid == 0:
            tl.store(data_ptr + s * BLOCK + cols, tl.load(x_ptr + s * BLOCK + cols) * 2)
            tl.debug_barrier()
            tl.atomic_max(stage_ptr, s + 1, sem="relaxed")
        else:
            while tl.atomic_max(stage_ptr, 0, sem="acquire") <= s:
                pass
            tl.debug_barrier()
            tl.store(out_ptr + (pid * STAGES + s) * BLOCK + cols, tl.load(data_ptr + s * BLOCK + cols))


# Nothing is released: that the stage is 1 says nothing of what program 0 has stored.
@racy("data_ptr", "read/write", "stages are published by relaxed maxima and looked at with acquire")
def stages_published_by_relaxed_maxima(device):
    x, data, out = integers(3, 16).to(device), torch.zeros(3, 16, device=device), torch.zeros(4, 3, 16, device=device)
    maxima_of_stages_kernel[(4,)](x, data, *zeros(device, 1), out, STAGES=3, BLOCK=16)


@triton.jit
def column_locks_kernel(x_ptr, sum_ptr, top_ptr, lock_ptr, COLS: tl.constexpr, BLOCK: tl.constexpr):
    row, col = tl.program_id(0), tl.program_id(1)
    j = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + (row * COLS + col) * BLOCK + j)
    while tl.atomic_cas(lock_ptr + col, 0, 1, sem="acquire") == 1:
        pass
    tl.debug_barrier()
    sums = sum_ptr + col * BLOCK + j
    tl.store(sums, tl.load(sums) + x)
    tl.store(top_ptr + row, tl.maximum(tl.load(top_ptr + row), tl.max(x, 0)))
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr + col, 0, sem="release")


# Sums of a column are under its lock; programs (0, 0) and (0, 1) change the maximum of row 0 under different ones.
@racy(
    "top_ptr", "read/write,write/write", "sums of columns and maxima of rows are both changed under the column's lock"
)
def maxima_of_rows_under_locks_of_columns(device):
    x, total, top = integers(4, 64).to(device), torch.zeros(64, device=device), torch.full((4,), -99.0, device=device)
    column_locks_kernel[(4, 4)](x, total, top, *zeros(device, 4), COLS=4, BLOCK=16)


@triton.jit
def two_served_kernel(x_ptr, sum_ptr, ticket_ptr, serving_ptr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + cols)
    mine = tl.atomic_add(ticket_ptr, 1, sem="relaxed")
    while tl.atomic_add(serving_ptr, 0, sem="acquire") < mine - 1:
        pass
    tl.debug_barrier()
    tl.store(sum_ptr + cols, tl.load(sum_ptr + cols) + x)
    tl.debug_barrier()
    tl.atomic_add(serving_ptr, 1, sem="release")


# Tickets 0 and 1 are both served at 0; a schedule in which each comes after the one before is in order by luck.
@racy("sum_ptr", "read/write,write/write", "a ticket is served when the number is one less, beside the one before it")
def two_tickets_served_at_once(device):
    x, total = integers(12, 16, low=1).to(device), torch.zeros(16, device=device)
    two_served_kernel[(12,)](x, total, *zeros(device, 1, 1), BLOCK=16)


@triton.jit
def two_parts_kernel(x_ptr, part_ptr, count_ptr, out_ptr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    first = 2 * pid * BLOCK + cols
    tl.store(part_ptr + first, tl.load(x_ptr + first) * 2)
    tl.debug_barrier()
    ticket = tl.atomic_add(count_ptr, 2, sem="acq_rel")
    tl.debug_barrier()
    tl.store(part_ptr + first + BLOCK, tl.load(x_ptr + first + BLOCK) * 2)
    tl.debug_barrier()
    if ticket == PARTS - 2:
        rows = tl.arange(0, PARTS)[:, None]
        tl.store(out_ptr + cols, tl.sum(tl.load(part_ptr + rows * BLOCK + cols[None, :]), 0))


# Part 1 of program 0 is stored behind its ticket, which does not release it to the last program.
@racy("part_ptr", "read/write", "each program counts its two parts when it has stored the first of them")
def ticket_of_two_parts_after_the_first(device):
    x, part, out = integers(8, 16, low=1).to(device), torch.zeros(8, 16, device=device), torch.zeros(16, device=device)
    two_parts_kernel[(4,)](x, part, *zeros(device, 1), out, PARTS=8, BLOCK=16)


@triton.jit
def meet(count_ptr, goal):
    tl.debug_barrier()
    tl.atomic_add(count_ptr, 1, sem="release")
    while tl.atomic_add(count_ptr, 0, sem="acquire") < goal:
        pass
    tl.debug_barrier()


@triton.jit
def relax_in_place_kernel(x_ptr, count_ptr, n, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for step in range(STEPS):
        left = tl.load(x_ptr + i - 1, i > 0, other=0.0)
        right = tl.load(x_ptr + i + 1, i + 1 < n, other=0.0)
        meet(count_ptr, (step + 1) * tl.num_programs(0))
        tl.store(x_ptr + i, left + right)
        tl.debug_barrier()


# All have loaded before any stores; whether a neighbour has stored before step 1 loads is open.
@racy("x_ptr", "read/write", "steps in place meet between load and store, and not between store and the next load")
def one_meeting_where_two_are_needed(device):
    relax_in_place_kernel[(6,)](integers(96, low=0, high=4).to(device), *zeros(device, 1), 96, STEPS=3, BLOCK=16)


@triton.jit
def two_teams_kernel(buf_ptr, count_ptr, n, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    for step in range(STEPS):
        src, dst = buf_ptr + step % 2 * n, buf_ptr + (step + 1) % 2 * n
        left = tl.load(src + i - 1, i > 0, other=0.0)
        tl.store(dst + i, left + tl.load(src + i))
        meet(count_ptr + pid % 2, (step + 1) * (tl.num_programs(0) // 2))


# Programs meet with those of the same parity, and their neighbours are of the other.
@racy("buf_ptr", "read/write", "even and odd programs have a counter each to meet at, and read from each other")
def teams_that_meet_apart(device):
    buf = torch.cat([integers(96, low=0, high=4), torch.zeros(96)]).to(device)
    two_teams_kernel[(6,)](buf, *zeros(device, 2), 96, STEPS=3, BLOCK=16)


@triton.jit
def look_two_back_kernel(x_ptr, out_ptr, sum_ptr, prefix_ptr, state_ptr, BLOCK: tl.constexpr):
    tile = tl.program_id(0)
    i = tile * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    total = tl.sum(x, 0)
    tl.store(sum_ptr + tile, total)
    tl.debug_barrier()
    tl.atomic_xchg(state_ptr + tile, 1, sem="release")
    before = total * 0
    if tile > 0:
        while tl.atomic_add(state_ptr + tile - 1, 0, sem="acquire") == 0:
            pass
        tl.debug_barrier()
        before += tl.load(sum_ptr + tile - 1)
        if tile > 1:
            before += tl.load(prefix_ptr + tile - 2)
    tl.store(prefix_ptr + tile, before + total)
    tl.store(out_ptr + i, tl.cumsum(x, 0) + before)


# The state of tile t - 1 says that its sum is there; the prefix of tile t - 2 is behind no state at all.
@racy("prefix_ptr", "read/write", "a look-back that waits for the last sum and takes the prefix before it as given")
def look_back_past_the_state(device):
    x, out, (total, prefix) = (
        integers(128).to(device),
        torch.zeros(128, device=device),
        torch.zeros(2, 8, device=device),
    )
    look_two_back_kernel[(8,)](x, out, total, prefix, *zeros(device, 8), BLOCK=16)


@triton.jit
def helper_of_tiles_kernel(x_ptr, part_ptr, flag_ptr, out_ptr, TILES: tl.constexpr, BLOCK: tl.constexpr):
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    if pid == 0:
        for tile in range(TILES):
            tl.store(part_ptr + cols, tl.load(x_ptr + tile * 2 * BLOCK + cols))
            tl.debug_barrier()
            tl.atomic_xchg(flag_ptr + tile, 1, sem="release")
            tl.debug_barrier()
    else:
        tile = pid - 1
        acc = tl.load(x_ptr + (tile * 2 + 1) * BLOCK + cols)
        while tl.atomic_add(flag_ptr + tile, 0, sem="acquire") == 0:
            pass
        tl.debug_barrier()
        tl.store(out_ptr + tile * BLOCK + cols, acc + tl.load(part_ptr + cols))


# The helper stores the part of tile 1 where the owner of tile 0, which has its flag, may not have loaded yet.
@racy("part_ptr", "read/write", "stream-K whose helper has one slot for its parts of all tiles")
def stream_k_slot_used_again(device):
    x, part, out = (
        integers(3, 2, 16, low=1).to(device),
        torch.zeros(16, device=device),
        torch.zeros(3, 16, device=device),
    )
    helper_of_tiles_kernel[(4,)](x, part, *zeros(device, 3), out, TILES=3, BLOCK=16)


@triton.jit
def two_tiles_a_ticket_kernel(x_ptr, queue_ptr, BLOCK: tl.constexpr):
    first = tl.atomic_add(queue_ptr, 1)
    for tile in range(first, first + 2):
        i = tile * BLOCK + tl.arange(0, BLOCK)
        tl.store(x_ptr + i, tl.load(x_ptr + i) * 2)


# Tile 1 belongs to tickets 0 and 1; the ticket is drawn before the work and orders nothing of it.
@racy("x_ptr", "read/write,write/write", "each draws one number from the queue and doubles two tiles in place")
def two_tiles_for_each_number_drawn(device):
    two_tiles_a_ticket_kernel[(8,)](integers(9 * 16, low=1).to(device), *zeros(device, 1), BLOCK=16)


@triton.jit
def versions_kernel(x_ptr, data_ptr, version_ptr, seen_ptr, out_ptr, BLOCK: tl.constexpr):
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    if pid == 0:
        tl.store(data_ptr + cols, tl.load(x_ptr + cols))
        tl.debug_barrier()
        tl.atomic_xchg(version_ptr, 1, sem="release")
        while tl.atomic_add(seen_ptr, 0, sem="acquire") < tl.num_programs(0) - 1:
            pass
        tl.debug_barrier()
        tl.store(data_ptr + cols, tl.load(x_ptr + BLOCK + cols))
    else:
        while tl.atomic_add(version_ptr, 0, sem="acquire") == 0:
            pass
        tl.debug_barrier()
        tl.atomic_add(seen_ptr, 1, sem="release")
        tl.debug_barrier()
        tl.store(out_ptr + pid * BLOCK + cols, tl.load(data_ptr + cols))


# Readers say that they have seen the version and load afterwards, beside the store of the next one.
@racy("data_ptr", "read/write", "a version is acknowledged when it was seen, and overwritten before it was read")
def version_acknowledged_before_it_is_read(device):
    x, data, out = integers(2, 16).to(device), torch.zeros(16, device=device), torch.zeros(4, 16, device=device)
    versions_kernel[(4,)](x, data, *zeros(device, 1, 1), out, BLOCK=16)


@triton.jit
def carry_kernel(x_ptr, carry_ptr, flag_ptr, out_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    before = tl.sum(x, 0) * 0
    if pid > 0:
        while tl.atomic_add(flag_ptr + pid - 1, 0, sem="acquire", scope="cta") == 0:
            pass
        tl.debug_barrier()
        before += tl.load(carry_ptr + pid - 1)
    tl.store(carry_ptr + pid, before + tl.sum(x, 0))
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptr + pid, 1, sem="release")
    tl.store(out_ptr + i, tl.cumsum(x, 0) + before)


# The scope of the acquiring addition does not have the program in it that released.
@racy(
    "carry_ptr,flag_ptr", "read/write,atomic/atomic", "carries are released to the GPU and acquired for the block only"
)
def carry_acquired_for_the_block_only(device):
    x, carry, out = integers(96).to(device), torch.zeros(6, device=device), torch.zeros(96, device=device)
    carry_kernel[(6,)](x, carry, *zeros(device, 6), out, BLOCK=16)


@triton.jit
def news_kernel(x_ptr, data_ptr, first_ptr, second_ptr, out_ptr, HOW: tl.constexpr, BLOCK: tl.constexpr):
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    if pid == 0:
        tl.store(data_ptr + cols, tl.load(x_ptr + cols) * 3)
        tl.debug_barrier()
        tl.atomic_xchg(first_ptr, 1, sem="release")
    elif HOW == "another":
        while tl.atomic_or(first_ptr, 0, sem="relaxed") == 0:
            pass
        tl.atomic_add(second_ptr, 0, sem="acquire")
        tl.debug_barrier()
        tl.store(out_ptr + pid * BLOCK + cols, tl.load(data_ptr + cols))
    elif pid == 1:
        while tl.atomic_or(first_ptr, 0, sem="relaxed") == 0:
            pass
        tl.debug_barrier()
        tl.atomic_xchg(second_ptr, 1, sem="release")
    else:
        while tl.atomic_or(second_ptr, 0, sem="acquire") == 0:
            pass
        tl.debug_barrier()
        tl.store(out_ptr + pid * BLOCK + cols, tl.load(data_ptr + cols))


def _news(device, how):
    x, data, out = integers(16, low=1).to(device), torch.zeros(16, device=device), torch.zeros(3, 16, device=device)
    news_kernel[(3,)](x, data, *zeros(device, 1, 1), out, HOW=how, BLOCK=16)


# An acquire orders what is behind it after the release that it read from, and nobody released the second word.
@racy("data_ptr", "read/write", "the flag is seen relaxed; then another word is acquired, as if that were a fence")
def acquired_on_another_word(device):
    _news(device, "another")


# Program 1 has not acquired program 0's store, so its release to program 2 does not pass it on.
@racy("data_ptr", "read/write", "news are handed on by a program that saw them relaxed")
def news_handed_on_by_who_saw_them_relaxed(device):
    _news(device, "handed")


@triton.jit
def one_relaxed_kernel(x_ptr, part_ptr, count_ptr, out_ptr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(part_ptr + pid * BLOCK + cols, tl.load(x_ptr + pid * BLOCK + cols) * 2)
    tl.debug_barrier()
    if pid == 2:
        ticket = tl.atomic_add(count_ptr, 1, sem="relaxed")
    else:
        ticket = tl.atomic_add(count_ptr, 1, sem="acq_rel")
    tl.debug_barrier()
    if ticket == PARTS - 1:
        rows = tl.arange(0, PARTS)[:, None]
        tl.store(out_ptr + cols, tl.sum(tl.load(part_ptr + rows * BLOCK + cols[None, :]), 0))


# Part 2 is not released; and if program 2 is the last, it has acquired none of the others.
@racy("part_ptr", "read/write", "the last one adds up; one of the tickets is relaxed, all others acquire and release")
def one_ticket_of_eight_is_relaxed(device):
    x, part, out = integers(8, 16, low=1).to(device), torch.zeros(8, 16, device=device), torch.zeros(16, device=device)
    one_relaxed_kernel[(8,)](x, part, *zeros(device, 1), out, PARTS=8, BLOCK=16)


@triton.autotune([triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})], key=["n"])
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


# Timing leaves the counter somewhere: later runs have no last one, or one that comes before the others.
@racy(
    "count_ptr,part_ptr,out_ptr", "autotune,read/write", "the last one adds up; it is tuned, and tickets are not reset"
)
def tuned_tickets_not_reset(device):
    x, part, out = integers(128, low=1).to(device), torch.zeros(8, device=device), torch.zeros(1, device=device)
    tuned_last_kernel[lambda meta: (triton.cdiv(128, meta["BLOCK"]),)](x, part, *zeros(device, 1), out, 128)


@triton.autotune([triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})], key=["n"])
@triton.jit
def tuned_parity_kernel(x_ptr, word_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_xor(word_ptr, tl.xor_sum(tl.load(x_ptr + i, i < n, other=0), 0), sem="relaxed")


# Two runs cancel: the result is the checksum or 0, as the number of timing runs is even or odd.
@racy("word_ptr", "autotune", "a checksum by atomic xor is tuned and not reset")
def tuned_checksum_not_reset(device):
    x = integers(100, low=0, high=1 << 20, dtype=torch.int32).to(device)
    tuned_parity_kernel[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](x, *zeros(device, 1), 100)
