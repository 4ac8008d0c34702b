"""Programs that order each other: exchanges, turns, locks, counters of tasks and trees, atomics beside loads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import Check, healthy, integers, racy


def zeros(device, *shape):
    return torch.zeros(shape, device=device)


def counters(device, *shape):
    return torch.zeros(shape or (1,), dtype=torch.int32, device=device)


@triton.jit
def signal(count_ptr):
    tl.debug_barrier()
    tl.atomic_add(count_ptr, 1, sem="release")


@triton.jit
def wait_for(count_ptr, goal):
    while tl.atomic_add(count_ptr, 0, sem="acquire") < goal:
        pass
    tl.debug_barrier()


@triton.jit
def exchange_kernel(send_ptr, got_ptr, count_ptr, out_ptr, P: tl.constexpr, PHASE: tl.constexpr, WAIT: tl.constexpr):
    p, q, d = tl.program_id(0), tl.arange(0, P)[:, None], tl.arange(0, 16)[None, :]
    if PHASE != "add":
        tl.store(got_ptr + (q * P + p) * 16 + d, tl.load(send_ptr + (p * P + q) * 16 + d))
    if WAIT != "":
        tl.debug_barrier()
        tl.atomic_add(count_ptr + tl.arange(0, P), 1, sem=WAIT)
        wait_for(count_ptr + p, P)
    if PHASE != "send":
        tl.store(out_ptr + p * 16 + tl.arange(0, 16), tl.sum(tl.load(got_ptr + (p * P + q) * 16 + d), 0))


def _exchange(device, phases, wait):
    send, got, out, count = integers(8, 8, 16), zeros(device, 8, 8, 16), zeros(device, 8, 16), counters(device, 8)
    for phase in phases:
        exchange_kernel[(8,)](send.to(device), got, count, out, P=8, PHASE=phase, WAIT=wait)
    return [Check(out, send.sum(0))]


@healthy("all send to all in one launch, all add up in the next one")
def all_to_all_in_two_launches(device):
    return _exchange(device, ("send", "add"), "")


@healthy("all send to all and count up the receivers, of which each waits until all have sent")
def all_to_all_counted_by_receivers(device):
    return _exchange(device, ("both",), "release")


@racy("got_ptr", "read/write", "all send to all and add up what has come, which nobody waited for")
def all_to_all_without_waiting(device):
    _exchange(device, ("both",), "")


@racy("got_ptr", "read/write", "senders count up the receivers relaxed, which publishes nothing of what they sent")
def all_to_all_counted_relaxed(device):
    _exchange(device, ("both",), "relaxed")


@triton.jit
def bins_kernel(x_ptr, bins_ptr, out_ptr, step, BINS: tl.constexpr, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    pid, b = tl.program_id(0), tl.arange(0, BINS)
    now, before = bins_ptr + step % 2 * BINS, bins_ptr + (step + 1) % 2 * BINS
    if pid == 0:
        tl.store(out_ptr + step * BINS + b, tl.load(before + b))
        tl.store((now if MISTAKE else before) + b, tl.zeros([BINS], tl.int32))
    x = tl.load(x_ptr + (step * tl.num_programs(0) + pid) * BLOCK + tl.arange(0, BLOCK))
    tl.atomic_add(now + x, 1, sem="relaxed")


@healthy("bins are cleared by stores while others are counted in, which are cleared in the next launch")
def bins_of_two_buffers(device, steps=4, mistake=False):
    x, bins, out = integers(4, 64, low=0, high=16).int(), counters(device, 2, 16), counters(device, 4, 16)
    for step in range(steps):
        bins_kernel[(4,)](x.to(device), bins, out, step, BINS=16, BLOCK=16, MISTAKE=mistake)
    want = torch.stack([torch.bincount(row, minlength=16).int() for row in x[:3]])
    return [Check(out[1:], want), Check(out[0], torch.zeros(16, dtype=torch.int32))]


@racy("bins_ptr", "atomic/write", "bins are cleared by the first program while others already count in them")
def bins_cleared_while_they_count(device):
    bins_of_two_buffers(device, 1, True)


@triton.jit
def bias_kernel(x_ptr, bias_ptr, out_ptr, BLOCK: tl.constexpr, STORE: tl.constexpr):
    tile, split, i = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    at = out_ptr + tile * BLOCK + i
    part = tl.load(x_ptr + (split * tl.num_programs(0) + tile) * BLOCK + i)
    if split == 0:
        part += tl.load(bias_ptr + tile * BLOCK + i)
    if (split == 0) & (STORE == 1):
        tl.store(at, part)
    else:
        tl.atomic_add(at, part, sem="relaxed")


@healthy("the first split adds its part and a bias by atomics as the others do")
def bias_added_by_the_first_split(device, store=0):
    x, bias, out = integers(4, 32), integers(32, seed=1), zeros(device, 32)
    bias_kernel[(2, 4)](x.to(device), bias.to(device), out, BLOCK=16, STORE=store)
    return [Check(out, x.sum(0) + bias)]


@racy("out_ptr", "atomic/write", "the first split stores its part, over what the others may have added by atomics")
def bias_stored_by_the_first_split(device):
    bias_added_by_the_first_split(device, 1)


@triton.jit
def rotated_kernel(x_ptr, sum_ptr, lock_ptr, TILES: tl.constexpr, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    pid, split, i = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    tile = (pid + split) % TILES
    lock, at = lock_ptr + (pid if MISTAKE else tile), sum_ptr + tile * BLOCK + i
    while tl.atomic_cas(lock, 0, 1, sem="acquire") != 0:
        pass
    tl.debug_barrier()
    tl.store(at, tl.load(at) + tl.load(x_ptr + (split * TILES + tile) * BLOCK + i))
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0, sem="release")


@healthy("splits that begin at different tiles take the lock of the tile that they add to")
def lock_of_the_rotated_tile(device, mistake=False):
    x, total = integers(4, 64), zeros(device, 64)
    rotated_kernel[(4, 4)](x.to(device), total, counters(device, 4), TILES=4, BLOCK=16, MISTAKE=mistake)
    return [Check(total, x.sum(0))]


@racy("sum_ptr", "read/write,write/write", "the lock is that of the tile before it was rotated by the split")
def lock_of_the_tile_before_rotation(device):
    lock_of_the_rotated_tile(device, True)


@triton.jit
def query_turns_kernel(part_ptr, dq_ptr, turn_ptr, QUERIES: tl.constexpr, BLOCK: tl.constexpr, SEM: tl.constexpr):
    key, i = tl.program_id(0), tl.arange(0, BLOCK)
    for query in range(QUERIES):
        part, at = tl.load(part_ptr + (key * QUERIES + query) * BLOCK + i), dq_ptr + query * BLOCK + i
        while tl.atomic_add(turn_ptr + query, 0, sem=SEM) != key:
            pass
        tl.debug_barrier()
        tl.store(at, 2 * tl.load(at) + part)
        signal(turn_ptr + query)


@healthy("blocks of keys come one after the other at each block of queries, a deterministic gradient")
def gradient_of_queries_in_turns(device, sem="acquire"):
    part, dq, want = integers(5, 4, 16), zeros(device, 4, 16), torch.zeros(4, 16)
    query_turns_kernel[(5,)](part.to(device), dq, counters(device, 4), QUERIES=4, BLOCK=16, SEM=sem)
    for key in range(5):
        want = 2 * want + part[key]
    return [Check(dq, want)]


@racy("dq_ptr", "read/write,write/write", "turns are passed on by a release and awaited by relaxed looks only")
def gradient_of_queries_in_turns_seen_relaxed(device):
    gradient_of_queries_in_turns(device, "relaxed")


@triton.jit
def above_mean_kernel(x_ptr, space_ptr, count_ptr, out_ptr, P: tl.constexpr, SPACES: tl.constexpr, MEET: tl.constexpr):
    p, all_programs = tl.program_id(0), tl.arange(0, P)
    x = tl.load(x_ptr + p * 16 + tl.arange(0, 16))
    tl.store(space_ptr + p, tl.sum(x, 0))
    signal(count_ptr)
    wait_for(count_ptr, P)
    total = tl.sum(tl.load(space_ptr + all_programs), 0)
    if MEET:
        signal(count_ptr)
        wait_for(count_ptr, 2 * P)
    second = space_ptr + (SPACES - 1) * P
    tl.store(second + p, tl.sum((x * (P * 16) > total).to(tl.float32), 0))
    signal(count_ptr)
    wait_for(count_ptr, (3 if MEET else 2) * P)
    tl.store(out_ptr + p, tl.sum(tl.load(second + all_programs), 0))


def _above_mean(device, spaces, meet):
    x, space, out = integers(8, 16), zeros(device, 16), zeros(device, 8)
    above_mean_kernel[(8,)](x.to(device), space, counters(device), out, P=8, SPACES=spaces, MEET=meet)
    return [Check(out, (x * 128 > x.sum()).sum().float().expand(8))]


@healthy("two sums over all programs, each in a workspace of its own")
def sums_in_two_workspaces(device):
    return _above_mean(device, 2, False)


@healthy("two sums over all programs in one workspace: all meet before it is used again, too")
def sums_in_a_workspace_with_a_meeting_between(device):
    return _above_mean(device, 1, True)


@racy("space_ptr", "read/write", "a workspace is used again by those who have read it while others still read it")
def sums_in_a_workspace_used_again(device):
    _above_mean(device, 1, False)


@triton.jit
def levels_kernel(x_ptr, part_ptr, group_ptr, count_ptr, top_ptr, out_ptr, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    p, i = tl.program_id(0), tl.arange(0, BLOCK)
    group, total = p // 4, tl.zeros([BLOCK], tl.float32)
    tl.store(part_ptr + p * BLOCK + i, tl.load(x_ptr + p * BLOCK + i))
    tl.debug_barrier()
    if tl.atomic_add(count_ptr + (p % 4 if MISTAKE else group), 1) == 3:
        tl.debug_barrier()
        for k in range(4):
            total += tl.load(part_ptr + (4 * group + k) * BLOCK + i)
        tl.store(group_ptr + group * BLOCK + i, total)
        tl.debug_barrier()
        if tl.atomic_add(top_ptr, 1) == 3:
            tl.debug_barrier()
            tl.store(out_ptr + i, tl.sum(tl.load(group_ptr + tl.arange(0, 4)[:, None] * BLOCK + i[None, :]), 0))


@healthy("the last of each group adds up its parts, the last of these adds up the groups")
def last_of_groups_and_last_of_all(device, mistake=False):
    x, part, group, out = integers(16, 16), zeros(device, 16, 16), zeros(device, 4, 16), zeros(device, 16)
    levels_kernel[(16,)](x.to(device), part, group, counters(device, 4), counters(device), out, 16, MISTAKE=mistake)
    return [Check(out, x.sum(0))]


@racy("part_ptr,group_ptr", "read/write,write/write", "programs are counted by their place in a group, not by groups")
def last_of_a_place_in_the_groups(device):
    last_of_groups_and_last_of_all(device, True)


@triton.jit
def tasks_kernel(x_ptr, y_ptr, next_ptr, done_ptr, TASKS, LAG, BLOCK: tl.constexpr, COUNTED: tl.constexpr):
    i = tl.arange(0, BLOCK)
    task = tl.atomic_add(next_ptr, 1, sem="relaxed")
    while task < TASKS:
        y = tl.load(x_ptr + task * BLOCK + i)
        if task >= LAG:
            wait_for(done_ptr + (0 if COUNTED else task - LAG), task - LAG + 1 if COUNTED else 1)
            y += 2 * tl.load(y_ptr + (task - LAG) * BLOCK + i)
        tl.store(y_ptr + task * BLOCK + i, y)
        signal(done_ptr + (0 if COUNTED else task))
        task = tl.atomic_add(next_ptr, 1, sem="relaxed")


@healthy("tasks of a queue wait for the flag of the task that they need")
def tasks_that_wait_for_their_source(device, counted=False, tasks=24, lag=4):
    x, y, done = integers(tasks, 16), zeros(device, tasks, 16), counters(device, tasks)
    tasks_kernel[(8,)](x.to(device), y, counters(device), done, tasks, lag, BLOCK=16, COUNTED=counted)
    want = x.clone()
    for task in range(lag, tasks):
        want[task] += 2 * want[task - lag]
    return [Check(y, want)]


@healthy("each task waits until as many are done as come before it: they can only be done in their order")
def tasks_that_wait_for_the_number_before(device):
    return tasks_that_wait_for_their_source(device, True, 12, 1)


@racy("y_ptr", "read/write", "tasks wait until enough others are done, as if these finished in their order")
def tasks_that_wait_for_a_number_of_others(device):
    tasks_that_wait_for_their_source(device, True)


@triton.jit
def users_kernel(x_ptr, table_ptr, users_ptr, out_ptr, BLOCK: tl.constexpr, SEM: tl.constexpr):
    p, i = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(out_ptr + p, tl.sum(tl.load(table_ptr + i) * tl.load(x_ptr + p * BLOCK + i), 0))
    tl.debug_barrier()
    if tl.atomic_add(users_ptr, -1, sem=SEM) == 1:
        tl.debug_barrier()
        tl.store(table_ptr + i, tl.full([BLOCK], -1.0, tl.float32))


@healthy("users of a table count themselves off, and the last one overwrites it")
def table_given_up_by_its_last_user(device, sem="acq_rel"):
    x, table, out = integers(8, 32, seed=1), integers(32, seed=2), zeros(device, 8)
    mine = table.to(device, copy=True)
    users_kernel[(8,)](x.to(device), mine, counters(device) + 8, out, BLOCK=32, SEM=sem)
    return [Check(out, x @ table), Check(mine, torch.full((32,), -1.0))]


@racy("table_ptr", "read/write", "users count themselves off by an acquire, which holds back none of their loads")
def table_given_up_by_acquire(device):
    table_given_up_by_its_last_user(device, "acquire")


@racy("table_ptr", "read/write", "users count themselves off relaxed: others' loads may come after the overwriting")
def table_given_up_relaxed(device):
    table_given_up_by_its_last_user(device, "relaxed")


@triton.jit
def ring_cells_kernel(x_ptr, step_ptr, N, STEPS: tl.constexpr, BLOCK: tl.constexpr, BUFFERS: tl.constexpr):
    p, programs = tl.program_id(0), tl.num_programs(0)
    at = p * BLOCK + tl.arange(0, BLOCK)
    for step in range(STEPS):
        source, target = x_ptr + step % BUFFERS * N, x_ptr + (step + 1) % BUFFERS * N
        wait_for(step_ptr + (p + 1) % programs, step)
        wait_for(step_ptr + (p + programs - 1) % programs, step)
        y = tl.load(source + (at + N - 1) % N) + tl.load(source + at) + tl.load(source + (at + 1) % N)
        tl.debug_barrier()
        tl.store(target + at, y)
        signal(step_ptr + p)


@healthy("cells go from a buffer to another, and each program waits for its two neighbours")
def cells_of_two_buffers(device, buffers=2):
    x = torch.stack([integers(96), torch.zeros(96)])
    mine = x.to(device)
    ring_cells_kernel[(6,)](mine, counters(device, 6), 96, STEPS=4, BLOCK=16, BUFFERS=buffers)
    want = x[0]
    for _ in range(4):
        want = want.roll(1) + want + want.roll(-1)
    return [Check(mine[0], want)]


@racy("x_ptr", "read/write", "cells are stored in place, which the neighbours may not have read in this step")
def cells_of_one_buffer(device):
    cells_of_two_buffers(device, 1)


@triton.jit
def countdown_kernel(x_ptr, y_ptr, left_ptr, BLOCK: tl.constexpr, SCOPE: tl.constexpr):
    i = tl.arange(0, BLOCK)
    left = tl.atomic_add(left_ptr, -1, sem="relaxed", scope=SCOPE)
    while left > 0:
        tl.store(y_ptr + (left - 1) * BLOCK + i, 2 * tl.load(x_ptr + (left - 1) * BLOCK + i))
        left = tl.atomic_add(left_ptr, -1, sem="relaxed", scope=SCOPE)


@healthy("tiles are taken from the last one on by a counter that falls")
def tiles_counted_down(device, scope="gpu"):
    x, y = integers(20, 16), zeros(device, 20, 16)
    countdown_kernel[(6,)](x.to(device), y, counters(device) + 20, BLOCK=16, SCOPE=scope)
    return [Check(y, 2 * x)]


@racy("left_ptr", "atomic/atomic", 'a counter from which all programs take tiles, by atomics of scope="cta"')
def tiles_counted_down_for_the_block_only(device):
    tiles_counted_down(device, "cta")


@triton.jit
def mixed_lock_kernel(x_ptr, sum_ptr, lock_ptr, BLOCK: tl.constexpr, ALL: tl.constexpr):
    p, i = tl.program_id(0), tl.arange(0, BLOCK)
    x, even = tl.load(x_ptr + p * BLOCK + i), p % 2 == 0
    if even | (ALL == 1):
        while tl.atomic_xchg(lock_ptr, 1, sem="acquire") == 1:
            pass
    tl.debug_barrier()
    if even:
        tl.store(sum_ptr + i, tl.load(sum_ptr + i) + x)
    else:
        tl.atomic_add(sum_ptr + i, x, sem="relaxed")
    tl.debug_barrier()
    if even | (ALL == 1):
        tl.atomic_xchg(lock_ptr, 0, sem="release")


@healthy("loads and stores, and atomics in other programs, all under the same lock")
def atomics_under_the_lock(device, everyone=1):
    x, total = integers(8, 16), zeros(device, 16)
    mixed_lock_kernel[(8,)](x.to(device), total, counters(device), BLOCK=16, ALL=everyone)
    return [Check(total, x.sum(0))]


@racy("sum_ptr", "atomic/read,atomic/write", "a lock around loads and stores keeps nobody off who adds by atomics")
def atomics_beside_the_lock(device):
    atomics_under_the_lock(device, 0)


@triton.jit
def group_kernel(key_ptr, x_ptr, table_ptr, value_ptr, SLOTS: tl.constexpr, ATOMIC: tl.constexpr):
    key, x = tl.load(key_ptr + tl.program_id(0)), tl.load(x_ptr + tl.program_id(0))
    slot = key * 5 % SLOTS
    found = tl.atomic_cas(table_ptr + slot, 0, key, sem="relaxed")
    while (found != 0) & (found != key):
        slot = (slot + 1) % SLOTS
        found = tl.atomic_cas(table_ptr + slot, 0, key, sem="relaxed")
    if ATOMIC:
        tl.atomic_add(value_ptr + slot, x, sem="relaxed")
    else:
        tl.store(value_ptr + slot, tl.load(value_ptr + slot) + x)


def _groups(device, different, atomic):
    key, x = torch.arange(24) * 7 % different + 1, integers(24, low=1)
    table, value = counters(device, 32), zeros(device, 32)
    group_kernel[(24,)](key.int().to(device), x.to(device), table, value, SLOTS=32, ATOMIC=atomic)
    want = torch.zeros(different + 1).index_add_(0, key, x)[1:]
    return [Check(value[torch.argsort(table)][-len(want) :], want), Check(value.sum()[None], x.sum()[None])]


@healthy("values of equal keys are added by atomics in the slot that a key has won")
def sums_by_keys(device):
    return _groups(device, 9, True)


@healthy("each key occurs once: its slot belongs to the program that won it")
def values_of_different_keys(device):
    return _groups(device, 24, False)


@racy("value_ptr", "read/write,write/write", "programs of equal keys add to the slot of their key without atomics")
def sums_by_keys_without_atomics(device):
    _groups(device, 9, False)


@triton.jit
def boxes_kernel(x_ptr, box_ptr, count_ptr, out_ptr, LEAVES: tl.constexpr, D: tl.constexpr, EARLY: tl.constexpr):
    p, d = tl.program_id(0), tl.arange(0, D)
    corner, node = tl.load(x_ptr + p * D + d), p + LEAVES
    while node > 1:
        if EARLY == 0:
            tl.store(box_ptr + node * D + d, corner)
        tl.debug_barrier()
        before = tl.atomic_add(count_ptr + node // 2, 1)
        tl.debug_barrier()
        if EARLY == 1:
            tl.store(box_ptr + node * D + d, corner)
        if before == 1:
            corner = tl.minimum(corner, tl.load(box_ptr + (node ^ 1) * D + d))
            node = node // 2
        else:
            node = 0
    if node == 1:
        tl.store(out_ptr + d, corner)


@healthy("of two children the second one to come finds the box of the first one")
def boxes_up_a_tree(device, early=0):
    x, box, out = integers(16, 16, low=-99, high=99), zeros(device, 32, 16), zeros(device, 16)
    boxes_kernel[(16,)](x.to(device), box, counters(device, 16), out, LEAVES=16, D=16, EARLY=early)
    return [Check(out, x.amin(0))]


@racy("box_ptr", "read/write", "a child counts itself before its box is stored, which the second one to come reads")
def boxes_stored_behind_their_count(device):
    boxes_up_a_tree(device, 1)
