"""Locks, semaphores and hands that pass something on: by other atomics, scopes and numbers of holders."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import Check, healthy, integers, racy


def zeros(device, *sizes, dtype=torch.int32):
    return [torch.zeros(n, dtype=dtype, device=device) for n in sizes]


@triton.jit
def scoped_lock_kernel(
    x_ptr, sum_ptr, lock_ptr, BLOCK: tl.constexpr, TAKE: tl.constexpr, GIVE: tl.constexpr, SCOPE: tl.constexpr
):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + cols)
    if TAKE == "or":
        while tl.atomic_or(lock_ptr, 1, sem="acquire", scope=SCOPE) & 1 == 1:
            pass
    elif TAKE == "max":
        while tl.atomic_max(lock_ptr, 1, sem="acquire", scope=SCOPE) == 1:
            pass
    elif TAKE == "weak":
        while tl.atomic_cas(lock_ptr, 0, 1, sem="relaxed", scope=SCOPE) != 0:
            pass
    else:
        while tl.atomic_cas(lock_ptr, 0, 1, sem="acquire", scope=SCOPE) != 0:
            pass
    tl.debug_barrier()
    tl.store(sum_ptr + cols, tl.load(sum_ptr + cols) + x)
    tl.debug_barrier()
    if GIVE == "and":
        tl.atomic_and(lock_ptr, 0, sem="release", scope=SCOPE)
    elif GIVE == "cas":
        tl.atomic_cas(lock_ptr, 1, 0, sem="release", scope=SCOPE)
    elif GIVE == "weak":
        tl.atomic_xchg(lock_ptr, 0, sem="acquire", scope=SCOPE)
    elif GIVE == "add":
        tl.atomic_add(lock_ptr, -1, sem="release", scope=SCOPE)
    else:
        tl.atomic_min(lock_ptr, 0, sem="release", scope=SCOPE)


def _scoped(device, take, give, scope="gpu"):
    x, total = integers(6, 16), torch.zeros(16, device=device)
    scoped_lock_kernel[(6,)](x.to(device), total, *zeros(device, 1), BLOCK=16, TAKE=take, GIVE=give, SCOPE=scope)
    return [Check(total, x.sum(0))]


@healthy("a lock taken by a bit that was not set, given back by clearing it, at the scope of the system")
def lock_of_a_bit(device):
    return _scoped(device, "or", "and", "sys")


@healthy("a lock taken by a maximum that was 0 and given back by a minimum")
def lock_by_maximum_and_minimum(device):
    return _scoped(device, "max", "min")


@healthy("a lock taken and given back by compare and swap")
def lock_by_two_swaps(device):
    return _scoped(device, "cas", "cas")


@healthy("a lock that goes back by counting down")
def lock_counted_down(device):
    return _scoped(device, "cas", "add", "sys")


@racy(
    "sum_ptr",
    "read/write,write/write",
    "the lock is taken by a relaxed swap: what stands behind may have been done before",
)
def lock_taken_relaxed(device):
    _scoped(device, "weak", "min")


@racy("sum_ptr", "read/write,write/write", "the lock is given back by an acquire, which publishes nothing")
def lock_given_back_by_acquire(device):
    _scoped(device, "cas", "weak")


@racy("sum_ptr,lock_ptr", "read/write,write/write,atomic/atomic", 'a lock of scope="cta" excludes no other program')
def lock_of_the_blocks_scope(device):
    _scoped(device, "cas", "cas", "cta")


@triton.jit
def impatient_lock_kernel(
    x_ptr, sum_ptr, missed_ptr, lock_ptr, TRIES: tl.constexpr, BLOCK: tl.constexpr, MISTAKE: tl.constexpr
):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + cols)
    tries = 0
    held = tl.atomic_cas(lock_ptr, 0, 1) == 0
    while (held == 0) & (tries < TRIES):
        held = tl.atomic_cas(lock_ptr, 0, 1) == 0
        tries += 1
    tl.debug_barrier()
    if MISTAKE:
        tl.store(sum_ptr + cols, tl.load(sum_ptr + cols) + x)
        tl.debug_barrier()
        tl.atomic_xchg(lock_ptr, 0)
    else:
        if held:
            tl.store(sum_ptr + cols, tl.load(sum_ptr + cols) + x)
            tl.debug_barrier()
            tl.atomic_xchg(lock_ptr, 0)
        else:
            tl.atomic_add(missed_ptr + cols, x, sem="relaxed")


def _impatient(device, mistake):
    x, (total, missed) = integers(6, 16), torch.zeros(2, 16, device=device)
    impatient_lock_kernel[(6,)](x.to(device), total, missed, *zeros(device, 1), TRIES=2, BLOCK=16, MISTAKE=mistake)
    return [Check(total + missed, x.sum(0))]


@healthy("who does not get the lock in three tries adds by atomics elsewhere")
def lock_with_another_way(device):
    return _impatient(device, False)


@racy("sum_ptr", "read/write,write/write", "who has not got the lock after three tries goes on as if it had")
def lock_that_is_given_up(device):
    _impatient(device, True)


@triton.jit
def edge_kernel(edge_ptr, w_ptr, node_ptr, lock_ptr, D: tl.constexpr, BOTH: tl.constexpr):
    """Moves w from one node to the other, under locks of the nodes in the order of their numbers."""
    e, d = tl.program_id(0), tl.arange(0, D)
    a, b = tl.load(edge_ptr + 2 * e), tl.load(edge_ptr + 2 * e + 1)
    w = tl.load(w_ptr + e * D + d)
    first, second = tl.minimum(a, b), tl.maximum(a, b)
    while tl.atomic_cas(lock_ptr + first, 0, 1) == 1:
        pass
    if BOTH:
        while tl.atomic_cas(lock_ptr + second, 0, 1) == 1:
            pass
    tl.debug_barrier()
    tl.store(node_ptr + a * D + d, tl.load(node_ptr + a * D + d) - w)
    tl.store(node_ptr + b * D + d, tl.load(node_ptr + b * D + d) + w)
    tl.debug_barrier()
    if BOTH:
        tl.atomic_xchg(lock_ptr + second, 0)
    tl.atomic_xchg(lock_ptr + first, 0)


def _edges(device, both):
    edges = torch.tensor([[0, 1], [2, 1], [3, 0], [1, 3], [4, 2], [0, 4], [3, 4], [2, 0]], dtype=torch.int32)
    w, nodes = integers(8, 16), torch.zeros(5, 16, device=device)
    edge_kernel[(8,)](edges.to(device), w.to(device), nodes, *zeros(device, 5), D=16, BOTH=both)
    want = torch.zeros(5, 16).index_add(0, edges[:, 0].long(), -w).index_add(0, edges[:, 1].long(), w)
    return [Check(nodes, want)]


@healthy("two locks at once, always the lower one first")
def locks_of_both_ends(device):
    return _edges(device, True)


@racy("node_ptr", "read/write,write/write", "an edge changes both of its ends and locks one")
def lock_of_one_end(device):
    _edges(device, False)


@triton.jit
def row_lock_kernel(row_ptr, x_ptr, table_ptr, lock_ptr, LOCKS: tl.constexpr, D: tl.constexpr, MISTAKE: tl.constexpr):
    """An update of rows of a table that does not commute with atomics: the table keeps a maximum beside its place."""
    token, d = tl.program_id(0), tl.arange(0, D)
    row = tl.load(row_ptr + token)
    lock = lock_ptr + (token if MISTAKE else row) % LOCKS
    x = tl.load(x_ptr + token * D + d)
    while tl.atomic_cas(lock, 0, 1, sem="acquire") == 1:
        pass
    tl.debug_barrier()
    best = tl.load(table_ptr + row * 2 * D + d)
    at = tl.load(table_ptr + row * 2 * D + D + d)
    tl.store(table_ptr + row * 2 * D + d, tl.maximum(best, x))
    tl.store(table_ptr + row * 2 * D + D + d, tl.where((x > best) | ((x == best) & (token < at)), token, at))
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0, sem="release")


def _row_locks(device, mistake):
    rows, x = integers(12, low=0, high=5, dtype=torch.int32), integers(12, 16, low=0)
    table = torch.zeros(5, 2, 16)
    table[:, 0], table[:, 1] = -1, 99
    own = table.to(device, copy=True)
    row_lock_kernel[(12,)](rows.to(device), x.to(device), own, *zeros(device, 3), LOCKS=3, D=16, MISTAKE=mistake)
    for token in reversed(range(12)):
        row = int(rows[token])
        better = x[token] >= table[row, 0]
        table[row, 0], table[row, 1] = (
            torch.where(better, x[token], table[row, 0]),
            torch.where(better, token, table[row, 1]),
        )
    return [Check(own, table)]


@healthy("rows share three locks by their remainder, which is coarser than needed; ties go to the first token")
def locks_shared_by_rows(device):
    return _row_locks(device, False)


@racy("table_ptr", "read/write,write/write", "the lock goes by the token and not by the row that is updated")
def lock_of_the_token(device):
    _row_locks(device, True)


@triton.jit
def permits_kernel(
    x_ptr, scratch_ptr, out_ptr, free_ptr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, MISTAKE: tl.constexpr
):
    """A semaphore of SLOTS permits; a bit of a word says which scratch is free."""
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    word = tl.atomic_or(free_ptr, 0, sem="relaxed")
    slot = -1
    while slot < 0:
        want = -1
        for s in tl.static_range(SLOTS):
            want = tl.where((word >> s) & 1 == 1, s, want)
        if want >= 0:
            seen = tl.atomic_cas(free_ptr, word, word & ~(1 << want), sem="acquire")
            slot = tl.where(seen == word, want, -1)
            word = seen
        else:
            word = tl.atomic_or(free_ptr, 0, sem="relaxed")
    tl.debug_barrier()
    place = scratch_ptr + (0 if MISTAKE else slot) * BLOCK
    tl.store(place + cols, tl.load(x_ptr + pid * BLOCK + cols))
    tl.debug_barrier()
    tl.store(out_ptr + pid * BLOCK + cols, tl.load(place + BLOCK - 1 - cols))
    tl.debug_barrier()
    tl.atomic_or(free_ptr, 1 << slot, sem="release")


def _permits(device, mistake):
    x, out, scratch = integers(7, 16), torch.zeros(7, 16, device=device), torch.zeros(2, 16, device=device)
    free = torch.full((1,), 3, dtype=torch.int32, device=device)
    permits_kernel[(7,)](x.to(device), scratch, out, free, SLOTS=2, BLOCK=16, MISTAKE=mistake)
    return [Check(out, x.flip(1)), Check(free, torch.full((1,), 3, dtype=torch.int32))]


@healthy("two permits and two scratches: a bit that compare and swap clears says whose is whose")
def semaphore_of_two_scratches(device):
    return _permits(device, False)


@racy("scratch_ptr", "read/write,write/write", "two may be in at once, and both use the first scratch")
def semaphore_of_two_for_one_scratch(device):
    _permits(device, True)


@triton.jit
def readers_writer_kernel(data_ptr, word_ptr, out_ptr, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    """-1: a writer is in; n > 0: so many readers are. Programs 0 and 1 write."""
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    if pid < 2:
        while tl.atomic_cas(word_ptr, 0, -1, sem="acquire") != 0:
            pass
        tl.debug_barrier()
        tl.store(data_ptr + cols, tl.load(data_ptr + cols) + 1)
        tl.debug_barrier()
        tl.atomic_xchg(word_ptr, 0, sem="release")
    else:
        n = tl.atomic_add(word_ptr, 0, sem="relaxed")
        entered = 0
        while entered == 0:
            n = tl.maximum(n, 0)
            seen = tl.atomic_cas(word_ptr, n, n + 1, sem="acquire")
            entered = (seen == n).to(tl.int32)
            n = seen
        tl.debug_barrier()
        tl.store(out_ptr + pid * BLOCK + cols, tl.load(data_ptr + cols))
        tl.debug_barrier()
        tl.atomic_add(word_ptr, -1, sem="relaxed" if MISTAKE else "release")


def _readers_writer(device, mistake):
    data, word, out = zeros(device, 16, 1, 96)
    readers_writer_kernel[(6,)](data, word, out, BLOCK=16, MISTAKE=mistake)
    return [Check(data, torch.full((16,), 2, dtype=torch.int32)), Check(word, torch.zeros(1, dtype=torch.int32))]


@healthy("readers count themselves in where no writer is; all that leave release")
def lock_of_readers_and_writers(device):
    return _readers_writer(device, False)


@racy("data_ptr", "read/write", "readers leave relaxed: a writer may come in before they have loaded")
def lock_whose_readers_leave_relaxed(device):
    _readers_writer(device, True)


@triton.jit
def queue_lock_kernel(x_ptr, sum_ptr, tail_ptr, done_ptr, BLOCK: tl.constexpr):
    """Each waits for who was at the tail before it; 0 is nobody."""
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    before = tl.atomic_xchg(tail_ptr, pid + 1, sem="acq_rel")
    if before > 0:
        while tl.atomic_add(done_ptr + before, 0, sem="acquire") == 0:
            pass
    tl.debug_barrier()
    tl.store(sum_ptr + cols, tl.load(sum_ptr + cols) * 2 + tl.load(x_ptr + cols))
    tl.debug_barrier()
    tl.atomic_xchg(done_ptr + pid + 1, 1, sem="release")


@healthy("a queue lock: each spins on a word of its predecessor's")
def lock_by_a_queue(device):
    total = torch.zeros(16, device=device)
    queue_lock_kernel[(6,)](torch.ones(16, device=device), total, *zeros(device, 1, 8), BLOCK=16)
    return [Check(total, torch.full((16,), 63.0))]


@triton.jit
def hand_over_kernel(
    x_ptr, slot_ptr, full_ptr, out_ptr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr, MISTAKE: tl.constexpr
):
    """Pairs of programs hand blocks over through one slot: full and empty by turns."""
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    pair = pid // 2
    for r in range(ROUNDS):
        if pid % 2 == 0:
            while tl.atomic_add(full_ptr + pair, 0, sem="acquire") == 1:
                pass
            tl.debug_barrier()
            tl.store(slot_ptr + pair * BLOCK + cols, tl.load(x_ptr + (pair * ROUNDS + r) * BLOCK + cols))
            tl.debug_barrier()
            tl.atomic_xchg(full_ptr + pair, 1, sem="release")
        else:
            while tl.atomic_add(full_ptr + pair, 0, sem="acquire") == 0:
                pass
            tl.debug_barrier()
            if MISTAKE:
                tl.atomic_xchg(full_ptr + pair, 0, sem="release")
            tl.store(out_ptr + (pair * ROUNDS + r) * BLOCK + cols, tl.load(slot_ptr + pair * BLOCK + cols))
            if not MISTAKE:
                tl.debug_barrier()
                tl.atomic_xchg(full_ptr + pair, 0, sem="release")


def _hand_over(device, mistake):
    x, out, slots = integers(3, 4, 16), torch.zeros(3, 4, 16, device=device), torch.zeros(3, 16, device=device)
    hand_over_kernel[(6,)](x.to(device), slots, *zeros(device, 3), out, ROUNDS=4, BLOCK=16, MISTAKE=mistake)
    return [Check(out, x)]


@healthy("a slot that is full and empty by turns, four times")
def slot_by_turns(device):
    return _hand_over(device, False)


@racy("slot_ptr", "read/write", "the slot is called empty before it has been read")
def slot_called_empty_too_early(device):
    _hand_over(device, True)


@triton.jit
def turn_kernel(x_ptr, out_ptr, turn_ptr, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    """Deterministic accumulation: heads of a group add in their order."""
    group, member, cols = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + (group * tl.num_programs(1) + member) * BLOCK + cols)
    while tl.atomic_add(turn_ptr + group, 0, sem="acquire") < (member - 1 if MISTAKE == "early" else member):
        pass
    tl.debug_barrier()
    place = out_ptr + group * BLOCK + cols
    tl.store(place, tl.load(place) * 2 + x)
    if MISTAKE != "no release":
        tl.debug_barrier()
        tl.atomic_add(turn_ptr + group, 1, sem="release")
    else:
        tl.atomic_add(turn_ptr + group, 1, sem="relaxed")


def _turns(device, mistake=""):
    x, out = integers(3, 4, 16), torch.zeros(3, 16, device=device)
    turn_kernel[(3, 4)](x.to(device), out, *zeros(device, 3), BLOCK=16, MISTAKE=mistake)
    want = torch.zeros(3, 16)
    for member in range(4):
        want = 2 * want + x[:, member]
    return [Check(out, want)]


@healthy("members of a group add in the order of their numbers, by a turn each group has")
def turns_within_groups(device):
    return _turns(device)


@racy(
    "out_ptr",
    "read/write,write/write",
    "turns count from 0 and the comparison from 1: a member goes beside the one before it",
)
def turns_off_by_one(device):
    _turns(device, "early")


@racy("out_ptr", "read/write,write/write", "the turn is passed on relaxed: the next one may see it before the sum")
def turns_passed_on_relaxed(device):
    _turns(device, "no release")
