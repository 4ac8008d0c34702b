"""Kernels whose programs wait for each other or count each other, most of them with a slip beside them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import Check, healthy, integers, racy


def zeros(device, *sizes, dtype=torch.int32):
    return [torch.zeros(n, dtype=dtype, device=device) for n in sizes]


@triton.jit
def conveyor_kernel(
    x_ptr,
    belt_ptr,
    put_ptr,
    got_ptr,
    out_ptr,
    ITEMS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLACK: tl.constexpr,
):
    """Rows go from even programs to odd ones over a belt of SLOTS."""
    pair, cols = tl.program_id(0) // 2, tl.arange(0, BLOCK)
    belt = belt_ptr + pair * SLOTS * BLOCK + cols
    for item in range(ITEMS):
        row = (pair * ITEMS + item) * BLOCK + cols
        if tl.program_id(0) % 2 == 0:
            while item - tl.atomic_add(got_ptr + pair, 0, sem="acquire") >= SLOTS + SLACK:
                pass
            tl.debug_barrier()
            tl.store(belt + item % SLOTS * BLOCK, tl.load(x_ptr + row))
            tl.debug_barrier()
            tl.atomic_add(put_ptr + pair, 1, sem="release")
        else:
            while tl.atomic_add(put_ptr + pair, 0, sem="acquire") <= item:
                pass
            tl.debug_barrier()
            tl.store(out_ptr + row, tl.load(belt + item % SLOTS * BLOCK))
            tl.debug_barrier()
            tl.atomic_add(got_ptr + pair, 1, sem="release")


def _conveyor(device, slack):
    x, out, belt = integers(2, 10, 16), torch.zeros(2, 10, 16, device=device), torch.zeros(2, 3, 16, device=device)
    conveyor_kernel[(4,)](x.to(device), belt, *zeros(device, 2, 2), out, ITEMS=10, SLOTS=3, BLOCK=16, SLACK=slack)
    return [Check(out, x)]


@healthy("two belts of three slots, each with a counter at both ends")
def belts_of_three_slots(device):
    return _conveyor(device, 0)


@racy(
    "belt_ptr",
    "read/write",
    "the producer may be one slot further than there are: it writes the slot that is being read",
)
def belts_of_one_slot_too_few(device):
    _conveyor(device, 1)


@triton.jit
def lazy_table_kernel(ready_ptr, lock_ptr, table_ptr, out_ptr, BLOCK: tl.constexpr, LOOK: tl.constexpr):
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    if tl.atomic_or(ready_ptr, 0, sem=LOOK) == 0:
        while tl.atomic_xchg(lock_ptr, 1, sem="acquire") == 1:
            pass
        tl.debug_barrier()
        if tl.atomic_or(ready_ptr, 0, sem="relaxed") == 0:
            tl.store(table_ptr + cols, cols + 5)
            tl.debug_barrier()
            tl.atomic_or(ready_ptr, 1, sem="release")
        tl.debug_barrier()
        tl.atomic_xchg(lock_ptr, 0, sem="release")
    tl.debug_barrier()
    tl.store(out_ptr + pid * BLOCK + cols, tl.load(table_ptr + cols))


def _lazy(device, look):
    ready, lock, table, out = zeros(device, 1, 1, 16, 160)
    lazy_table_kernel[(10,)](ready, lock, table, out, BLOCK=16, LOOK=look)
    return [Check(out.view(10, 16), (torch.arange(16, dtype=torch.int32) + 5).repeat(10, 1))]


@healthy("the look before the lock acquires; the one under it need not")
def table_looked_for_with_acquire(device):
    return _lazy(device, "acquire")


@racy(
    "table_ptr", "read/write", "the look before the lock is relaxed: who sees the table there may load what was before"
)
def table_looked_for_relaxed(device):
    _lazy(device, "relaxed")


@triton.jit
def added_parts_kernel(x_ptr, sum_ptr, count_ptr, out_ptr, BLOCK: tl.constexpr, SEM: tl.constexpr):
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    tl.atomic_add(sum_ptr + cols, tl.load(x_ptr + pid * BLOCK + cols), sem="relaxed")
    tl.debug_barrier()
    if tl.atomic_add(count_ptr, 1, sem=SEM) == tl.num_programs(0) - 1:
        tl.debug_barrier()
        total = tl.load(sum_ptr + cols)
        tl.store(out_ptr + cols, total * total)
        tl.store(sum_ptr + cols, tl.zeros((BLOCK,), tl.float32))


def _added_parts(device, sem):
    x, out, (total,) = integers(6, 16), torch.zeros(16, device=device), zeros(device, 16, dtype=torch.float32)
    added_parts_kernel[(6,)](x.to(device), total, *zeros(device, 1), out, BLOCK=16, SEM=sem)
    return [Check(out, x.sum(0).square()), Check(total, torch.zeros(16))]


@healthy("sums by relaxed atomics, loaded and zeroed plainly by the last program, behind a ticket that orders")
def sums_finished_by_the_last(device):
    return _added_parts(device, "acq_rel")


@racy("sum_ptr", "atomic/read,atomic/write", "the ticket is relaxed: additions of others may not have been made")
def sums_finished_by_the_last_of_relaxed_tickets(device):
    _added_parts(device, "relaxed")


@triton.jit
def two_barriers_kernel(x_ptr, a_ptr, b_ptr, out_ptr, count_ptr, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    pid, n, cols = tl.program_id(0), tl.num_programs(0), tl.arange(0, BLOCK)
    tl.store(a_ptr + pid * BLOCK + cols, tl.load(x_ptr + pid * BLOCK + cols) + 1)
    for step in tl.static_range(2):
        tl.debug_barrier()
        tl.atomic_add(count_ptr, 1, sem="acq_rel")
        while tl.atomic_add(count_ptr, 0, sem="acquire") < (n if MISTAKE else n * (step + 1)):
            pass
        tl.debug_barrier()
        if step == 0:
            tl.store(b_ptr + pid * BLOCK + cols, tl.load(a_ptr + ((pid + 1) % n) * BLOCK + cols) * 2)
        else:
            tl.store(out_ptr + pid * BLOCK + cols, tl.load(b_ptr + ((pid + 2) % n) * BLOCK + cols))


def _two_barriers(device, mistake):
    x, (a, b, out) = integers(6, 16), torch.zeros(3, 6, 16, device=device)
    two_barriers_kernel[(6,)](x.to(device), a, b, out, *zeros(device, 1), BLOCK=16, MISTAKE=mistake)
    return [Check(out, 2 * (x.roll(-3, 0) + 1))]


@healthy("one counter for two barriers: the second waits for twice as many")
def counter_of_two_barriers(device):
    return _two_barriers(device, False)


@racy("b_ptr", "read/write", "the second barrier waits for what the first one has counted already")
def second_barrier_that_is_open(device):
    _two_barriers(device, True)


@triton.jit
def dispatch_kernel(
    x_ptr, expert_ptr, count_ptr, out_ptr, CAPACITY: tl.constexpr, D: tl.constexpr, MISTAKE: tl.constexpr
):
    token, d = tl.program_id(0), tl.arange(0, D)
    expert = tl.load(expert_ptr + token)
    place = tl.atomic_add(count_ptr + expert, 1, sem="relaxed")
    if MISTAKE:
        place = tl.minimum(place, CAPACITY - 1)
    if place < CAPACITY:
        tl.store(out_ptr + (expert * CAPACITY + place) * D + d, tl.load(x_ptr + token * D + d))


def _dispatch(device, mistake):
    experts = torch.tensor([0, 1, 1, 2, 1, 0, 1, 1, 2, 1], dtype=torch.int32)
    x, out = torch.arange(1.0, 11.0)[:, None].repeat(1, 16), torch.zeros(3, 4, 16, device=device)
    counts = torch.zeros(3, dtype=torch.int32, device=device)
    dispatch_kernel[(10,)](x.to(device), experts.to(device), counts, out, CAPACITY=4, D=16, MISTAKE=mistake)
    sent = out.cpu()[:, :, 0]
    kept = [sorted(row[row > 0].tolist()) for row in sent]
    right = kept[0] == [1, 6] and kept[2] == [4, 9] and len(set(kept[1])) == 4 and set(kept[1]) <= {2, 3, 5, 7, 8, 10}
    return [Check(torch.tensor(right), torch.tensor(True)), Check(counts, torch.tensor([2, 6, 2], dtype=torch.int32))]


@healthy("tokens beyond an expert's capacity are dropped")
def tokens_dropped_beyond_capacity(device):
    return _dispatch(device, False)


@racy("out_ptr", "write/write", "tokens beyond the capacity are all put into the last place")
def tokens_clamped_to_capacity(device):
    _dispatch(device, True)


@triton.jit
def carried_kernel(x_ptr, carry_ptr, flag_ptr, out_ptr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    pid = tl.program_id(0)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    carry = 0
    if pid > 0:
        if EARLY:
            carry = tl.load(carry_ptr + pid - 1)
        while tl.atomic_add(flag_ptr + pid - 1, 0, sem="acquire") == 0:
            pass
        tl.debug_barrier()
        if not EARLY:
            carry = tl.load(carry_ptr + pid - 1)
    tl.store(carry_ptr + pid, tl.maximum(carry, tl.max(x, 0)))
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptr + pid, 1, sem="release")
    tl.store(out_ptr + i, tl.maximum(carry, tl.associative_scan(x, 0, _larger)))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


def _carried(device, early):
    x, (carry, flags, out) = integers(80, low=0, high=100, dtype=torch.int32), zeros(device, 5, 5, 80)
    carried_kernel[(5,)](x.to(device), carry, flags, out, BLOCK=16, EARLY=early)
    return [Check(out, x.cummax(0).values)]


@healthy("a running maximum whose carry is loaded behind its flag")
def maximum_carried_on(device):
    return _carried(device, False)


@racy("carry_ptr", "read/write", "the carry is loaded before its flag is waited for")
def maximum_carried_on_too_early(device):
    _carried(device, True)


@triton.jit
def fixup_kernel(x_ptr, part_ptr, flag_ptr, out_ptr, HELPERS: tl.constexpr, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    """Each tile has an owner and HELPERS helpers, who leave their parts for it."""
    tile, who, cols = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + (tile * (HELPERS + 1) + who) * BLOCK + cols)
    if who > 0:
        slot = tile if MISTAKE else tile * HELPERS + who - 1
        tl.store(part_ptr + slot * BLOCK + cols, x)
        tl.debug_barrier()
        tl.atomic_xchg(flag_ptr + tile * HELPERS + who - 1, 1, sem="release")
    else:
        for helper in range(HELPERS):
            while tl.atomic_cas(flag_ptr + tile * HELPERS + helper, 1, 0, sem="acquire") == 0:
                pass
            tl.debug_barrier()
            slot = tile if MISTAKE else tile * HELPERS + helper
            x += tl.load(part_ptr + slot * BLOCK + cols)
        tl.store(out_ptr + tile * BLOCK + cols, x)


def _fixup(device, mistake):
    x, out, parts = integers(3, 3, 16), torch.zeros(3, 16, device=device), torch.zeros(6, 16, device=device)
    (flags,) = zeros(device, 6)
    for _ in range(2):
        fixup_kernel[(3, 3)](x.to(device), parts, flags, out, HELPERS=2, BLOCK=16, MISTAKE=mistake)
    return [Check(out, x.sum(1)), Check(flags, torch.zeros(6, dtype=torch.int32))]


@healthy("parts of a tile in slots of their helpers'; the owner takes each flag down for the next launch")
def parts_in_slots_of_helpers(device):
    return _fixup(device, False)


@racy("part_ptr", "read/write,write/write", "all helpers of a tile have one slot")
def parts_in_slots_of_tiles(device):
    _fixup(device, True)


@triton.jit
def narrow_flag_kernel(x_ptr, y_ptr, flag_ptr, out_ptr, BLOCK: tl.constexpr, SCOPE: tl.constexpr):
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(y_ptr + pid * BLOCK + cols, tl.load(x_ptr + pid * BLOCK + cols) - 1)
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptr + pid, 1, sem="release", scope=SCOPE)
    left = (pid + tl.num_programs(0) - 1) % tl.num_programs(0)
    while tl.atomic_cas(flag_ptr + left, 1, 1, sem="acquire", scope="gpu") == 0:
        pass
    tl.debug_barrier()
    tl.store(out_ptr + pid * BLOCK + cols, tl.load(y_ptr + left * BLOCK + cols))


def _narrow(device, scope):
    x, (y, out) = integers(5, 16), torch.zeros(2, 5, 16, device=device)
    narrow_flag_kernel[(5,)](x.to(device), y, *zeros(device, 5), out, BLOCK=16, SCOPE=scope)
    return [Check(out, x.roll(1, 0) - 1)]


@healthy("a flag released to the system and acquired from the GPU: each scope has the other program in it")
def flag_of_two_scopes(device):
    return _narrow(device, "sys")


@racy("y_ptr,flag_ptr", "read/write,atomic/atomic", "the flag is released to its own block and waited for by another")
def flag_of_too_narrow_a_scope(device):
    _narrow(device, "cta")


@triton.jit
def finished_kernel(
    x_ptr, part_ptr, count_ptr, out_ptr, PARTS: tl.constexpr, BLOCK: tl.constexpr, MISTAKE: tl.constexpr
):
    part, cols = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(part_ptr + part * BLOCK + cols, tl.load(x_ptr + part * BLOCK + cols))
    tl.debug_barrier()
    came = tl.atomic_add(count_ptr, 1, sem="acq_rel")
    last = came >= PARTS - 1 if MISTAKE else came % PARTS == PARTS - 1
    if last:
        tl.debug_barrier()
        total = tl.zeros((BLOCK,), tl.float32)
        for p in tl.static_range(PARTS):
            total += tl.load(part_ptr + p * BLOCK + cols)
        tl.store(out_ptr + cols, total)


def _finished(device, mistake):
    out, parts, (count,) = torch.zeros(16, device=device), torch.zeros(6, 16, device=device), zeros(device, 1)
    for seed in (1, 2):
        x = integers(6, 16, seed=seed)
        finished_kernel[(6,)](x.to(device), parts, count, out, PARTS=6, BLOCK=16, MISTAKE=mistake)
    return [Check(out, x.sum(0))]


@healthy("tickets that are never set back, counted modulo the number of parts")
def tickets_modulo_parts(device):
    return _finished(device, False)


@racy(
    "part_ptr,out_ptr",
    "read/write,write/write",
    "tickets are never set back: in the second launch each program is taken for the last",
)
def tickets_never_set_back(device):
    _finished(device, True)


@triton.jit
def snapshot_kernel(x_ptr, sum_ptr, lock_ptr, out_ptr, BLOCK: tl.constexpr, LOCKED: tl.constexpr):
    """Programs add under a lock; the last one of the grid takes a copy of the sum as it is then."""
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    if (pid < tl.num_programs(0) - 1) | LOCKED:
        while tl.atomic_cas(lock_ptr, 0, 1, sem="acquire") == 1:
            pass
        tl.debug_barrier()
    if pid < tl.num_programs(0) - 1:
        tl.store(sum_ptr + cols, tl.load(sum_ptr + cols) + tl.load(x_ptr + pid * BLOCK + cols))
    else:
        tl.store(out_ptr + cols, tl.load(sum_ptr + cols))
    if (pid < tl.num_programs(0) - 1) | LOCKED:
        tl.debug_barrier()
        tl.atomic_xchg(lock_ptr, 0, sem="release")


def _snapshot(device, locked):
    x, (total, out) = integers(5, 16), torch.zeros(2, 16, device=device)
    snapshot_kernel[(6,)](x.to(device), total, *zeros(device, 1), out, BLOCK=16, LOCKED=locked)
    return [Check(total, x.sum(0))]


@healthy("a copy of a sum is taken under the lock under which it grows")
def copy_taken_under_the_lock(device):
    return _snapshot(device, True)


@racy("sum_ptr", "read/write", "the sum grows under a lock and is copied without it")
def copy_taken_beside_the_lock(device):
    _snapshot(device, False)
