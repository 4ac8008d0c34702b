"""Racy kernels of the sixth set: acquires that miss, rounds that are too short, what comes back too soon."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import integers, racy


def zeros(device, *sizes, dtype=torch.int32):
    return [torch.zeros(n, dtype=dtype, device=device) for n in sizes]


@triton.jit
def masked_acquire_kernel(x_ptr, data_ptr, flag_ptr, out_ptr, BLOCK: tl.constexpr):
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    if pid == 0:
        tl.store(data_ptr + cols, tl.load(x_ptr + cols) * 2)
        tl.debug_barrier()
        tl.atomic_xchg(flag_ptr, 1, sem="release")
    else:
        while tl.atomic_or(flag_ptr, 0, sem="relaxed") == 0:
            pass
        tl.atomic_add(flag_ptr, 0, pid == 1, sem="acquire")
        tl.debug_barrier()
        tl.store(out_ptr + pid * BLOCK + cols, tl.load(data_ptr + cols))


# An atomic whose mask is false is none: programs 2 and 3 have only looked relaxed.
@racy(
    "data_ptr", "read/write", "the flag is polled relaxed, and acquired once with a mask that holds in program 1 only"
)
def acquire_that_is_masked_away(device):
    x, data, out = integers(16, low=1).to(device), torch.zeros(16, device=device), torch.zeros(4, 16, device=device)
    masked_acquire_kernel[(4,)](x, data, *zeros(device, 1), out, BLOCK=16)


@triton.jit
def any_flag_kernel(x_ptr, part_ptr, flag_ptr, out_ptr, P: tl.constexpr, BLOCK: tl.constexpr):
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    if pid < P:
        tl.store(part_ptr + pid * BLOCK + cols, tl.load(x_ptr + pid * BLOCK + cols) * 2)
        tl.debug_barrier()
        tl.atomic_xchg(flag_ptr + pid, 1, sem="release")
    else:
        while tl.max(tl.atomic_add(flag_ptr + tl.arange(0, P), 0, sem="acquire"), 0) == 0:
            pass
        tl.debug_barrier()
        rows = tl.arange(0, P)[:, None]
        tl.store(out_ptr + cols, tl.sum(tl.load(part_ptr + rows * BLOCK + cols[None, :]), 0))


# The largest of the flags is 1 as soon as one of them is.
@racy("part_ptr", "read/write", "four flags are waited for by their maximum, where their minimum is meant")
def any_of_the_flags_instead_of_all(device):
    x, part, out = integers(4, 16, low=1).to(device), torch.zeros(4, 16, device=device), torch.zeros(16, device=device)
    any_flag_kernel[(5,)](x, part, *zeros(device, 4), out, P=4, BLOCK=16)


@triton.jit
def newest_of_two_kernel(x_ptr, buf_ptr, newest_ptr, out_ptr, VERSIONS: tl.constexpr, BLOCK: tl.constexpr):
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    for v in range(VERSIONS):
        if pid == 0:
            tl.store(buf_ptr + (v + 1) % 2 * BLOCK + cols, tl.load(x_ptr + v * BLOCK + cols))
            tl.debug_barrier()
            tl.atomic_xchg(newest_ptr, (v + 1) % 2, sem="release")
        else:
            newest = tl.atomic_add(newest_ptr, 0, sem="acquire")
            tl.debug_barrier()
            tl.store(out_ptr + (pid * VERSIONS + v) * BLOCK + cols, tl.load(buf_ptr + newest * BLOCK + cols))


# Who looks which buffer is the newest does not keep it: two versions later it is stored again.
@racy("buf_ptr", "read/write", "two buffers by turns; readers acquire the number of the newest one and do not take it")
def newest_buffer_looked_at_and_not_taken(device):
    x, buf, out = (
        integers(4, 16, low=1).to(device),
        torch.zeros(2, 16, device=device),
        torch.zeros(3, 4, 16, device=device),
    )
    newest_of_two_kernel[(3,)](x, buf, *zeros(device, 1), out, VERSIONS=4, BLOCK=16)


@triton.jit
def early_rounds_kernel(x_ptr, queue_ptr, done_ptr, PLAYERS: tl.constexpr, D: tl.constexpr):
    PAIRS: tl.constexpr = PLAYERS // 2
    OTHERS: tl.constexpr = PLAYERS - 1
    d = tl.arange(0, D)
    t = tl.atomic_add(queue_ptr, 1, sem="relaxed")
    while t < OTHERS * PAIRS:
        turn, k = t // PAIRS, t % PAIRS
        i = (turn + k) % OTHERS
        j = tl.where(k == 0, OTHERS, (turn + OTHERS - k) % OTHERS)
        while tl.atomic_add(done_ptr, 0, sem="acquire") < (turn - 1) * PAIRS:
            pass
        tl.debug_barrier()
        a, b = tl.load(x_ptr + i * D + d), tl.load(x_ptr + j * D + d)
        tl.debug_barrier()
        tl.store(x_ptr + i * D + d, a + b)
        tl.store(x_ptr + j * D + d, a - b)
        tl.debug_barrier()
        tl.atomic_add(done_ptr, 1, sem="release")
        t = tl.atomic_add(queue_ptr, 1, sem="relaxed")


# Pair 0 of round 1 has row 7, as that of round 0 had, and waits for none of round 0.
@racy(
    "x_ptr",
    "read/write,write/write",
    "all pairs of rows in rounds by tickets; a round begins when the last but one is done",
)
def rounds_of_pairs_that_begin_one_early(device):
    early_rounds_kernel[(4,)](integers(8, 16, low=1).to(device), *zeros(device, 1, 1), PLAYERS=8, D=16)


@triton.jit
def counted_tiles_kernel(x_ptr, part_ptr, count_ptr, out_ptr, tiles, ALL: tl.constexpr, BLOCK: tl.constexpr):
    pid, programs = tl.program_id(0), tl.num_programs(0)
    for tile in range(pid, tiles, programs):
        tl.store(part_ptr + tile, tl.sum(tl.load(x_ptr + tile * BLOCK + tl.arange(0, BLOCK)), 0))
        tl.debug_barrier()
        tl.atomic_add(count_ptr, 1, sem="release")
    while tl.atomic_add(count_ptr, 0, sem="acquire") < programs:
        pass
    tl.debug_barrier()
    t = tl.arange(0, ALL)
    tl.store(out_ptr + pid, tl.sum(tl.load(part_ptr + t, t < tiles, other=0.0), 0))


# Nine tiles of six programs: the count may be six when three tiles are missing.
@racy("part_ptr", "read/write", "a persistent kernel counts its tiles and waits for as many as there are programs")
def tiles_counted_and_programs_waited_for(device):
    x, part, out = integers(9, 16, low=1).to(device), torch.zeros(9, device=device), torch.zeros(6, device=device)
    counted_tiles_kernel[(6,)](x, part, *zeros(device, 1), out, 9, ALL=16, BLOCK=16)


@triton.jit
def few_rounds_kernel(x_ptr, part_ptr, sign_ptr, out_ptr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    pid, programs = tl.program_id(0), tl.num_programs(0)
    tl.store(part_ptr + pid, tl.sum(tl.load(x_ptr + pid * BLOCK + tl.arange(0, BLOCK)), 0))
    for k in tl.static_range(ROUNDS):
        tl.debug_barrier()
        tl.atomic_xchg(sign_ptr + k * programs + (pid + (1 << k)) % programs, 1, sem="release")
        while tl.atomic_add(sign_ptr + k * programs + pid, 0, sem="acquire") == 0:
            pass
    tl.debug_barrier()
    j = tl.arange(0, 8)
    tl.store(out_ptr + pid, tl.sum(tl.load(part_ptr + j, j < programs, other=0.0), 0))


# Behind two rounds a program knows of the three before it; of six there are two more.
@racy("part_ptr", "read/write", "signs go 1 and 2 further on, where six programs would need a third round")
def rounds_of_signs_rounded_down(device):
    x, (part, out) = integers(6, 16, low=1).to(device), torch.zeros(2, 6, device=device)
    few_rounds_kernel[(6,)](x, part, *zeros(device, 12), out, ROUNDS=2, BLOCK=16)


@triton.jit
def wrapped_bits_kernel(x_ptr, part_ptr, word_ptr, out_ptr, P: tl.constexpr, BLOCK: tl.constexpr):
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(part_ptr + pid * BLOCK + cols, tl.load(x_ptr + pid * BLOCK + cols) * 2)
    tl.debug_barrier()
    bit = (pid * 0 + 1) << (pid % 8)
    old = tl.atomic_or(word_ptr, bit, sem="acq_rel")
    tl.debug_barrier()
    if (old | bit) == 255:
        rows = tl.arange(0, P)[:, None]
        tl.store(out_ptr + cols, tl.sum(tl.load(part_ptr + rows * BLOCK + cols[None, :]), 0))


# Sixteen programs and eight bits: all bits are set when at most fifteen have come, and who comes then adds up as well.
@racy("part_ptr,out_ptr", "read/write,write/write", "each sets a bit when it comes, and two programs have the same one")
def arrivals_as_bits_that_wrap_around(device):
    x, part = integers(16, 16, low=1).to(device), torch.zeros(16, 16, device=device)
    wrapped_bits_kernel[(16,)](x, part, *zeros(device, 1), torch.zeros(16, device=device), P=16, BLOCK=16)


@triton.jit
def recycled_nodes_kernel(next_ptr, used_ptr, head_ptr, TURNS: tl.constexpr):
    for _ in range(TURNS):
        node = tl.atomic_or(head_ptr, 0, sem="acquire")
        seen = tl.atomic_cas(head_ptr, node, tl.load(next_ptr + node), sem="acq_rel")
        while seen != node:
            node = seen
            seen = tl.atomic_cas(head_ptr, node, tl.load(next_ptr + node), sem="acq_rel")
        tl.debug_barrier()
        tl.atomic_add(used_ptr + node, 1, sem="relaxed")
        top = tl.atomic_or(head_ptr, 0, sem="acquire")
        tl.store(next_ptr + node, top)
        tl.debug_barrier()
        seen = tl.atomic_cas(head_ptr, top, node, sem="acq_rel")
        while seen != top:
            top = seen
            tl.store(next_ptr + node, top)
            tl.debug_barrier()
            seen = tl.atomic_cas(head_ptr, top, node, sem="acq_rel")


# Who has seen a node at the top loads what is below it, when another may have taken it and be putting it back.
@racy(
    "next_ptr",
    "read/write",
    "nodes are taken from a stack and put back onto it by swaps, with their links in plain words",
)
def stack_whose_nodes_come_back(device):
    below = torch.tensor([0, 0, 1, 2, 3, 4, 5, 6], dtype=torch.int32).to(device)
    recycled_nodes_kernel[(4,)](below, *zeros(device, 8), torch.tensor([7], dtype=torch.int32).to(device), TURNS=3)


@triton.jit
def scopes_kernel(x_ptr, sum_ptr, BLOCK: tl.constexpr):
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + pid * BLOCK + cols)
    if pid == 2:
        tl.atomic_add(sum_ptr + cols, x, sem="relaxed", scope="cta")
    else:
        tl.atomic_add(sum_ptr + cols, x, sem="relaxed", scope="gpu")


# Two atomics are atomic to each other if the scope of each has the other's program in it.
@racy("sum_ptr", "atomic/atomic", "seven programs add atomically for the GPU and one for its own block")
def one_of_the_adders_for_its_block_only(device):
    scopes_kernel[(8,)](integers(8, 16, low=1).to(device), torch.zeros(16, device=device), BLOCK=16)


@triton.jit
def impatient_kernel(x_ptr, data_ptr, flag_ptr, out_ptr, BLOCK: tl.constexpr):
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    if pid == 0:
        tl.store(data_ptr + cols, tl.load(x_ptr + cols) * 2)
        tl.debug_barrier()
        tl.atomic_xchg(flag_ptr, 1, sem="release")
    else:
        tries = 0
        seen = tl.atomic_add(flag_ptr, 0, sem="acquire")
        while (seen == 0) & (tries < 8):
            seen = tl.atomic_add(flag_ptr, 0, sem="acquire")
            tries += 1
        tl.debug_barrier()
        tl.store(out_ptr + pid * BLOCK + cols, tl.load(data_ptr + cols))


# Eight looks take no time that program 0 would have to keep to.
@racy("data_ptr", "read/write", "a flag is waited for at most eight times, and the data are loaded whatever it was")
def flag_waited_for_a_while_only(device):
    x, data, out = integers(16, low=1).to(device), torch.zeros(16, device=device), torch.zeros(6, 16, device=device)
    impatient_kernel[(6,)](x, data, *zeros(device, 1), out, BLOCK=16)


@triton.jit
def handed_on_kernel(x_ptr, h_ptr, turn_ptr, out_ptr, STEPS: tl.constexpr, D: tl.constexpr):
    chunk, d = tl.program_id(0), tl.arange(0, D)
    while tl.atomic_add(turn_ptr, 0, sem="acquire") != chunk:
        pass
    tl.debug_barrier()
    h = tl.load(h_ptr + d)
    for t in range(STEPS):
        h = tl.load(x_ptr + (chunk * STEPS + t) * D + d) - h
    tl.store(h_ptr + d, h)
    tl.debug_barrier()
    tl.atomic_xchg(turn_ptr, chunk + 1, sem="release")
    tl.debug_barrier()
    tl.store(out_ptr + chunk * D + d, tl.load(h_ptr + d))


# The turn is the next chunk's by then, which stores its own state there.
@racy("h_ptr", "read/write", "a recurrence hands its state on in one place, and loads it once more behind that")
def state_loaded_again_after_it_was_handed_on(device):
    x, h, out = integers(5, 3, 16, low=1).to(device), torch.zeros(16, device=device), torch.zeros(5, 16, device=device)
    handed_on_kernel[(5,)](x, h, *zeros(device, 1), out, STEPS=3, D=16)


@triton.jit
def early_leader_kernel(x_ptr, part_ptr, near_ptr, go_ptr, far_ptr, out_ptr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    pid, programs = tl.program_id(0), tl.num_programs(0)
    group = pid // GROUP
    tl.store(part_ptr + pid, tl.sum(tl.load(x_ptr + pid * BLOCK + tl.arange(0, BLOCK)), 0))
    tl.debug_barrier()
    tl.atomic_add(near_ptr + group, 1, sem="release")
    if pid % GROUP == 0:
        while tl.atomic_add(near_ptr + group, 0, sem="acquire") < GROUP:
            pass
        tl.debug_barrier()
        tl.atomic_xchg(go_ptr + group, 1, sem="release")
        tl.atomic_add(far_ptr, 1, sem="release")
        while tl.atomic_add(far_ptr, 0, sem="acquire") < programs // GROUP:
            pass
    else:
        while tl.atomic_add(go_ptr + group, 0, sem="acquire") == 0:
            pass
    tl.debug_barrier()
    j = tl.arange(0, 8)
    tl.store(out_ptr + pid, tl.sum(tl.load(part_ptr + j, j < programs, other=0.0), 0))


# Programs 1 and 2 leave when their own group is there, and load the parts of the other one.
@racy("part_ptr", "read/write", "leaders of two groups meet, but let their groups go before they do")
def groups_let_go_before_their_leaders_meet(device):
    x, (part, out) = integers(6, 16, low=1).to(device), torch.zeros(2, 6, device=device)
    early_leader_kernel[(6,)](x, part, *zeros(device, 2, 2, 1), out, GROUP=3, BLOCK=16)


@triton.jit
def relaxed_list_kernel(x_ptr, value_ptr, next_ptr, head_ptr, out_ptr, N: tl.constexpr):
    pid = tl.program_id(0)
    if pid > 0:
        node = pid - 1
        tl.store(value_ptr + node, tl.load(x_ptr + node) * 2)
        top = tl.atomic_or(head_ptr, 0, sem="relaxed")
        tl.store(next_ptr + node, top)
        tl.debug_barrier()
        seen = tl.atomic_cas(head_ptr, top, node, sem="relaxed")
        while seen != top:
            top = seen
            tl.store(next_ptr + node, top)
            tl.debug_barrier()
            seen = tl.atomic_cas(head_ptr, top, node, sem="relaxed")
    else:
        got = 0
        total = 0
        while got < N:
            node = tl.atomic_xchg(head_ptr, -1, sem="acquire")
            tl.debug_barrier()
            while node >= 0:
                total += tl.load(value_ptr + node)
                got += 1
                node = tl.load(next_ptr + node)
        tl.store(out_ptr, total)


# The taker acquires the head, to which nobody has released the link and the value of a node.
@racy(
    "next_ptr,value_ptr",
    "read/write",
    "nodes are put onto a list by relaxed swaps, and the whole list taken by acquire",
)
def list_of_nodes_put_there_relaxed(device):
    x, (value, link, out) = integers(9, low=1, dtype=torch.int32), zeros(device, 9, 9, 1)
    head = torch.full((1,), -1, dtype=torch.int32, device=device)
    relaxed_list_kernel[(10,)](x.to(device), value, link, head, out, N=9)
