"""Healthy kernels of the sixth set: flags, exchanges, rounds, lists and stacks that order what programs share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import Check, healthy, integers


def zeros(device, *sizes, dtype=torch.int32):
    return [torch.zeros(n, dtype=dtype, device=device) for n in sizes]


@triton.jit
def masked_acquire_kernel(x_ptr, data_ptr, flag_ptr, out_ptr, BLOCK: tl.constexpr):
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    if pid == 0:
        tl.store(data_ptr + cols, tl.load(x_ptr + cols) * 2)
        tl.debug_barrier()
        tl.atomic_add(flag_ptr, 0, sem="release")
        tl.atomic_xchg(flag_ptr, 1, sem="relaxed")
    else:
        while tl.atomic_or(flag_ptr, 0, sem="relaxed") == 0:
            pass
        tl.atomic_add(flag_ptr, 0, pid != 0, sem="acquire")
        tl.debug_barrier()
        tl.store(out_ptr + (pid - 1) * BLOCK + cols, tl.load(data_ptr + cols))


# The relaxed exchange goes on with the release of the addition before it. The mask holds in all who acquire.
@healthy("a flag is released by adding 0, then set relaxed; it is polled relaxed and acquired once, with a mask")
def release_by_adding_nothing_and_masked_acquire(device):
    x, data, out = integers(16), torch.empty(16, device=device), torch.zeros(3, 16, device=device)
    masked_acquire_kernel[(4,)](x.to(device), data, *zeros(device, 1), out, BLOCK=16)
    return [Check(out, (2 * x).expand(3, 16))]


@triton.jit
def three_buffers_kernel(buf_ptr, middle_ptr, out_ptr, mixed_ptr, VERSIONS: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    if tl.program_id(0) == 0:
        back = 0
        for v in range(VERSIONS):
            tl.store(buf_ptr + back * BLOCK + cols, cols * 0 + v + 1)
            tl.debug_barrier()
            back = tl.atomic_xchg(middle_ptr, back | 4, sem="acq_rel") & 3
            tl.debug_barrier()
    else:
        front = 2
        version = 0
        mixed = 0
        while version < VERSIONS:
            if (tl.atomic_or(middle_ptr, 0, sem="relaxed") & 4) != 0:
                front = tl.atomic_xchg(middle_ptr, front, sem="acq_rel") & 3
                tl.debug_barrier()
                seen = tl.load(buf_ptr + front * BLOCK + cols)
                version = tl.max(seen, 0)
                mixed += tl.sum((seen != version).to(tl.int32), 0)
                tl.debug_barrier()
        tl.store(out_ptr, version)
        tl.store(mixed_ptr, mixed)


# Each of three buffers is the writer's, the reader's or in the middle, and changes hands by exchanges of its number.
# Bit 2 says that the middle one is new. Two programs, which have to be there together.
@healthy("a writer that never waits and a reader, who exchange their buffers for the one in the middle")
def three_buffers_that_change_hands(device):
    buf, out, mixed = zeros(device, 48, 1, 1)
    middle = torch.ones(1, dtype=torch.int32, device=device)
    three_buffers_kernel[(2,)](buf, middle, out, mixed, VERSIONS=6, BLOCK=16)
    return [Check(out, torch.tensor([6], dtype=torch.int32)), Check(mixed, torch.zeros(1, dtype=torch.int32))]


@triton.jit
def rounds_kernel(x_ptr, queue_ptr, done_ptr, PLAYERS: tl.constexpr, D: tl.constexpr):
    PAIRS: tl.constexpr = PLAYERS // 2
    OTHERS: tl.constexpr = PLAYERS - 1
    d = tl.arange(0, D)
    t = tl.atomic_add(queue_ptr, 1, sem="relaxed")
    while t < OTHERS * PAIRS:
        turn, k = t // PAIRS, t % PAIRS
        i = (turn + k) % OTHERS
        j = tl.where(k == 0, OTHERS, (turn + OTHERS - k) % OTHERS)
        while tl.atomic_add(done_ptr, 0, sem="acquire") < turn * PAIRS:
            pass
        tl.debug_barrier()
        a, b = tl.load(x_ptr + i * D + d), tl.load(x_ptr + j * D + d)
        tl.debug_barrier()
        tl.store(x_ptr + i * D + d, a + b)
        tl.store(x_ptr + j * D + d, a - b)
        tl.debug_barrier()
        tl.atomic_add(done_ptr, 1, sem="release")
        t = tl.atomic_add(queue_ptr, 1, sem="relaxed")


# A round's pairs have no row in common. Who waits has a higher ticket than those waited for, which are all drawn.
@healthy("all pairs of rows in rounds by tickets: a round begins when the one before it is done")
def rounds_of_pairs_by_tickets(device):
    x = integers(8, 16)
    own, want = x.to(device, copy=True), x.clone()
    rounds_kernel[(3,)](own, *zeros(device, 1, 1), PLAYERS=8, D=16)
    for turn in range(7):
        for k in range(4):
            i, j = (turn + k) % 7, (turn - k) % 7 if k else 7
            want[i], want[j] = want[i] + want[j], want[i] - want[j]
    return [Check(own, want)]


@triton.jit
def counted_tiles_kernel(x_ptr, part_ptr, count_ptr, out_ptr, tiles, ALL: tl.constexpr, BLOCK: tl.constexpr):
    pid, programs = tl.program_id(0), tl.num_programs(0)
    for tile in range(pid, tiles, programs):
        tl.store(part_ptr + tile, tl.sum(tl.load(x_ptr + tile * BLOCK + tl.arange(0, BLOCK)), 0))
        tl.debug_barrier()
        tl.atomic_add(count_ptr, 1, sem="release")
    while tl.atomic_add(count_ptr, 0, sem="acquire") < tiles:
        pass
    tl.debug_barrier()
    t = tl.arange(0, ALL)
    tl.store(out_ptr + pid, tl.sum(tl.load(part_ptr + t, t < tiles, other=0.0), 0))


# Some programs count twice, and the count is that of the tiles. Six programs at once.
@healthy("a persistent kernel counts its tiles, and all wait for as many as there are")
def tiles_counted_and_waited_for(device):
    x, part, out = integers(9, 16), torch.empty(9, device=device), torch.zeros(6, device=device)
    counted_tiles_kernel[(6,)](x.to(device), part, *zeros(device, 1), out, 9, ALL=16, BLOCK=16)
    return [Check(out, x.sum().expand(6))]


@triton.jit
def all_bits_kernel(x_ptr, part_ptr, word_ptr, out_ptr, P: tl.constexpr, ALL: tl.constexpr, BLOCK: tl.constexpr):
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(part_ptr + pid * BLOCK + cols, tl.load(x_ptr + pid * BLOCK + cols) * 2)
    tl.debug_barrier()
    bit = (pid * 0 + 1) << pid
    old = tl.atomic_or(word_ptr, bit, sem="acq_rel")
    tl.debug_barrier()
    if (old | bit) == (1 << P) - 1:
        rows = tl.arange(0, ALL)[:, None]
        tl.store(out_ptr + cols, tl.sum(tl.load(part_ptr + rows * BLOCK + cols[None, :], rows < P, other=0.0), 0))


# A bit a program: only the last to come finds all others set, and has acquired them.
@healthy("each program sets its bit when its part is there, and who completes the word adds up")
def last_bit_of_the_word_adds_up(device):
    x, part, out = integers(12, 16), torch.empty(12, 16, device=device), torch.zeros(16, device=device)
    all_bits_kernel[(12,)](x.to(device), part, *zeros(device, 1), out, P=12, ALL=16, BLOCK=16)
    return [Check(out, 2 * x.sum(0))]


@triton.jit
def take_node(head_ptr, next_ptr):
    """Node from the top of a stack, whose word has tag above and node below, 0 if there is none."""
    word = tl.atomic_or(head_ptr, 0, sem="acquire")
    node = 0
    while node == 0:
        top = (word & 0xFFFF).to(tl.int32)
        if top == 0:
            word = tl.atomic_or(head_ptr, 0, sem="acquire")
        else:
            below = tl.atomic_or(next_ptr + top, 0, sem="relaxed").to(tl.int64)
            seen = tl.atomic_cas(head_ptr, word, (((word >> 32) + 1) << 32) | below, sem="acq_rel")
            node = tl.where(seen == word, top, 0)
            word = seen
    return node


@triton.jit
def give_node(head_ptr, next_ptr, node):
    word = tl.atomic_or(head_ptr, 0, sem="relaxed")
    given = 0
    while given == 0:
        tl.atomic_xchg(next_ptr + node, (word & 0xFFFF).to(tl.int32), sem="relaxed")
        tl.debug_barrier()
        seen = tl.atomic_cas(head_ptr, word, (((word >> 32) + 1) << 32) | node.to(tl.int64), sem="acq_rel")
        given = (seen == word).to(tl.int32)
        word = seen


@triton.jit
def shared_nodes_kernel(next_ptr, used_ptr, head_ptr, TURNS: tl.constexpr):
    for _ in range(TURNS):
        node = take_node(head_ptr, next_ptr)
        tl.debug_barrier()
        used = tl.load(used_ptr + node)
        tl.debug_barrier()
        tl.store(used_ptr + node, used + 1)
        tl.debug_barrier()
        give_node(head_ptr, next_ptr, node)


# Links are atomics and tags only grow, so that a swap fails if the node came back meanwhile. A node in hand is its
# taker's, from the acquire that took it to the release that gives it back. Waiting programs need those with a node.
@healthy("three nodes of a stack with tags are taken, counted up plainly and put back by five programs")
def stack_with_tags_and_links_of_atomics(device):
    below = torch.tensor([0, 0, 1, 2], dtype=torch.int32).to(device)
    (used,), head = zeros(device, 4), torch.tensor([3], dtype=torch.int64).to(device)
    shared_nodes_kernel[(5,)](below, used, head, TURNS=3)
    return [Check(used.sum()[None].int(), torch.tensor([15], dtype=torch.int32))]


@triton.jit
def patient_or_not_kernel(x_ptr, data_ptr, flag_ptr, out_ptr, BLOCK: tl.constexpr):
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    value = tl.load(x_ptr + cols) * 3
    if pid == 0:
        tl.store(data_ptr + cols, value)
        tl.debug_barrier()
        tl.atomic_xchg(flag_ptr, 1, sem="release")
    else:
        tries = 0
        seen = tl.atomic_add(flag_ptr, 0, sem="acquire")
        while (seen == 0) & (tries < 4):
            seen = tl.atomic_add(flag_ptr, 0, sem="acquire")
            tries += 1
        tl.debug_barrier()
        if seen != 0:
            value = tl.load(data_ptr + cols)
    tl.store(out_ptr + pid * BLOCK + cols, value + pid)


# The data are loaded only by who has acquired the flag; the others have computed them.
@healthy("a flag is looked at five times at most, and who has not seen it by then goes on with what it has itself")
def who_has_not_seen_the_flag_computes(device):
    x, data, out = integers(16), torch.empty(16, device=device), torch.zeros(6, 16, device=device)
    patient_or_not_kernel[(6,)](x.to(device), data, *zeros(device, 1), out, BLOCK=16)
    return [Check(out, 3 * x + torch.arange(6)[:, None])]


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
    tl.store(out_ptr + chunk * D + d, h)


# One place for all states, which is the chunk's whose turn it is. Chunks wait for lower ones, five are there together.
@healthy("a recurrence hands its state on in one place, and what it needs later it has in registers")
def state_handed_on_in_one_place(device):
    x, out = integers(5, 3, 16), torch.zeros(5, 16, device=device)
    h, want = torch.zeros(16), []
    handed_on_kernel[(5,)](x.to(device), torch.zeros(16, device=device), *zeros(device, 1), out, STEPS=3, D=16)
    for chunk in x:
        for row in chunk:
            h = row - h
        want.append(h)
    return [Check(out, torch.stack(want))]


@triton.jit
def leaders_kernel(x_ptr, part_ptr, near_ptr, go_ptr, far_ptr, out_ptr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    pid, programs = tl.program_id(0), tl.num_programs(0)
    group = pid // GROUP
    tl.store(part_ptr + pid, tl.sum(tl.load(x_ptr + pid * BLOCK + tl.arange(0, BLOCK)), 0))
    tl.debug_barrier()
    tl.atomic_add(near_ptr + group, 1, sem="release")
    if pid % GROUP == 0:
        while tl.atomic_add(near_ptr + group, 0, sem="acquire") < GROUP:
            pass
        tl.debug_barrier()
        tl.atomic_add(far_ptr, 1, sem="release")
        while tl.atomic_add(far_ptr, 0, sem="acquire") < programs // GROUP:
            pass
        tl.debug_barrier()
        tl.atomic_xchg(go_ptr + group, 1, sem="release")
    else:
        while tl.atomic_add(go_ptr + group, 0, sem="acquire") == 0:
            pass
    tl.debug_barrier()
    j = tl.arange(0, 8)
    tl.store(out_ptr + pid, tl.sum(tl.load(part_ptr + j, j < programs, other=0.0), 0))


# What a leader has acquired, of its group and then of the other leader, it releases with its sign to go.
@healthy("leaders of two groups wait for their own, then for each other, and let their groups go behind that")
def groups_let_go_when_their_leaders_have_met(device):
    x, part, out = integers(6, 16), torch.empty(6, device=device), torch.zeros(6, device=device)
    leaders_kernel[(6,)](x.to(device), part, *zeros(device, 2, 2, 1), out, GROUP=3, BLOCK=16)
    return [Check(out, x.sum().expand(6))]


@triton.jit
def taken_list_kernel(x_ptr, value_ptr, next_ptr, head_ptr, out_ptr, N: tl.constexpr):
    pid = tl.program_id(0)
    if pid > 0:
        node = pid - 1
        tl.store(value_ptr + node, tl.load(x_ptr + node) * 2)
        top = tl.atomic_or(head_ptr, 0, sem="relaxed")
        tl.store(next_ptr + node, top)
        tl.debug_barrier()
        seen = tl.atomic_cas(head_ptr, top, node, sem="release")
        while seen != top:
            top = seen
            tl.store(next_ptr + node, top)
            tl.debug_barrier()
            seen = tl.atomic_cas(head_ptr, top, node, sem="release")
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


# The exchange acquires all swaps since the last one, each of which has released its node. Program 0 waits for the nine.
@healthy("nodes are put onto a list by swaps that release, and the whole list is taken by an exchange, again and again")
def list_taken_as_a_whole(device):
    x, (value, link, out) = integers(9, dtype=torch.int32), zeros(device, 9, 9, 1)
    head = torch.full((1,), -1, dtype=torch.int32, device=device)
    taken_list_kernel[(10,)](x.to(device), value, link, head, out, N=9)
    return [Check(out, 2 * x.sum()[None].to(torch.int32))]
