"""Locks and semaphores that guard what they should."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import Check, healthy, integers


@triton.jit
def lock_kernel(x_ptr, dw_ptr, lock_ptr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + cols)
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    tl.debug_barrier()
    tl.store(dw_ptr + cols, tl.load(dw_ptr + cols) + x)
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr, 0)


@healthy("a sum guarded by a lock that CAS takes and an exchange gives back")
def lock_by_cas(device):
    x, dw = integers(8, 32), torch.zeros(32, device=device)
    lock_kernel[(8,)](x.to(device), dw, torch.zeros(1, dtype=torch.int32, device=device), BLOCK=32)
    return [Check(dw, x.sum(0))]


@triton.jit
def acquire_release_lock_kernel(x_ptr, dw_ptr, lock_ptr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + cols)
    while tl.atomic_xchg(lock_ptr, 1, sem="acquire") == 1:
        pass
    tl.debug_barrier()
    tl.store(dw_ptr + cols, tl.load(dw_ptr + cols) + x)
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr, 0, sem="release")


@healthy("the same with the weakest orders that suffice: acquire to take, release to give back")
def lock_by_exchange(device):
    x, dw = integers(8, 32), torch.zeros(32, device=device)
    acquire_release_lock_kernel[(8,)](x.to(device), dw, torch.zeros(1, dtype=torch.int32, device=device), BLOCK=32)
    return [Check(dw, x.sum(0))]


@triton.jit
def grouped_lock_kernel(x_ptr, dw_ptr, lock_ptr, used_ptr, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    group = pid % GROUPS
    cols = tl.arange(0, BLOCK)
    dw = tl.load(x_ptr + pid * BLOCK + cols)
    place = dw_ptr + group * BLOCK + cols
    while tl.atomic_cas(lock_ptr + group, 0, 1) == 1:
        pass
    tl.debug_barrier()
    used = tl.load(used_ptr + group)
    if used == 0:
        tl.atomic_xchg(used_ptr + group, 1)
    else:
        dw += tl.load(place)
    tl.store(place, dw)
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr + group, 0)


@triton.jit
def column_sum_kernel(x_ptr, out_ptr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.arange(0, ROWS)[:, None] * BLOCK + cols[None, :])
    tl.store(out_ptr + cols, tl.sum(x, axis=0))


@healthy("locks by groups and a second kernel, as in Triton's tutorial on layer norm; the first holder does not read")
def lock_of_each_group(device):
    x, dw = integers(16, 32), torch.empty(4, 32, device=device)
    lock, used = torch.zeros(2, 4, dtype=torch.int32, device=device)
    out = torch.zeros(32, device=device)
    grouped_lock_kernel[(16,)](x.to(device), dw, lock, used, GROUPS=4, BLOCK=32)
    column_sum_kernel[(1,)](dw, out, ROWS=4, BLOCK=32)
    return [Check(dw, x.view(4, 4, 32).sum(0)), Check(out, x.sum(0))]


@triton.jit
def two_locks_kernel(x_ptr, a_ptr, b_ptr, lock_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + pid * BLOCK + cols)
    for which in tl.static_range(2):
        place = (a_ptr if which == 0 else b_ptr) + cols
        while tl.atomic_cas(lock_ptr + which, 0, 1, sem="acquire") != 0:
            pass
        tl.debug_barrier()
        tl.store(place, tl.load(place) + x * (which + 1))
        tl.debug_barrier()
        tl.atomic_xchg(lock_ptr + which, 0, sem="release")


@healthy("two sums, each under its own lock, one after the other")
def lock_for_each_sum(device):
    x, (a, b) = integers(6, 16), torch.zeros(2, 16, device=device)
    two_locks_kernel[(6,)](x.to(device), a, b, torch.zeros(2, dtype=torch.int32, device=device), BLOCK=16)
    return [Check(a, x.sum(0)), Check(b, 2 * x.sum(0))]


@triton.jit
def ticket_lock_kernel(x_ptr, dw_ptr, next_ptr, serving_ptr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + cols)
    ticket = tl.atomic_add(next_ptr, 1, sem="relaxed")
    while tl.atomic_add(serving_ptr, 0, sem="acquire") != ticket:
        pass
    tl.debug_barrier()
    tl.store(dw_ptr + cols, tl.load(dw_ptr + cols) + x)
    tl.debug_barrier()
    tl.atomic_add(serving_ptr, 1, sem="release")


@healthy("a ticket lock: drawing may be relaxed, serving orders")
def lock_by_tickets(device):
    x, dw = integers(8, 32), torch.zeros(32, device=device)
    counters = torch.zeros(2, dtype=torch.int32, device=device)
    ticket_lock_kernel[(8,)](x.to(device), dw, counters[:1], counters[1:], BLOCK=32)
    return [Check(dw, x.sum(0))]


@triton.jit
def semaphore_kernel(x_ptr, out_ptr, turn_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + pid * BLOCK + cols)
    while tl.atomic_add(turn_ptr, 0, sem="acquire") != pid:
        pass
    tl.debug_barrier()
    before = tl.load(out_ptr + cols)
    tl.store(out_ptr + cols, before * 3 + x)
    tl.debug_barrier()
    tl.atomic_xchg(turn_ptr, pid + 1, sem="release")


@healthy("a semaphore gives the programs their turns, so that even an update that does not commute is determined")
def semaphore_of_turns(device):
    x, out = integers(6, 16), torch.zeros(16, device=device)
    semaphore_kernel[(6,)](x.to(device), out, torch.zeros(1, dtype=torch.int32, device=device), BLOCK=16)
    expected = torch.zeros(16)
    for row in x:
        expected = expected * 3 + row
    return [Check(out, expected)]


@triton.jit
def backward_turns_kernel(x_ptr, out_ptr, turn_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    turn = tl.num_programs(0) - 1 - pid
    while tl.atomic_cas(turn_ptr, turn, turn, sem="acquire") != turn:
        pass
    tl.debug_barrier()
    tl.store(out_ptr + cols, tl.load(out_ptr + cols) * 2 - tl.load(x_ptr + pid * BLOCK + cols))
    tl.debug_barrier()
    tl.atomic_add(turn_ptr, 1, sem="release")


@healthy("turns from the last program to the first: a schedule that runs program after program would never end")
def semaphore_from_the_last_program(device):
    x, out = integers(6, 16), torch.zeros(16, device=device)
    backward_turns_kernel[(6,)](x.to(device), out, torch.zeros(1, dtype=torch.int32, device=device), BLOCK=16)
    expected = torch.zeros(16)
    for row in x.flip(0):
        expected = expected * 2 - row
    return [Check(out, expected)]


@triton.jit
def split_k_semaphore_kernel(a_ptr, b_ptr, c_ptr, turn_ptr, N: tl.constexpr, K, TILE: tl.constexpr):
    tile, part = tl.program_id(0), tl.program_id(1)
    rows, cols = tl.arange(0, TILE), tile * TILE + tl.arange(0, TILE)
    k = part * TILE + tl.arange(0, TILE)
    a = tl.load(a_ptr + rows[:, None] * K + k[None, :])
    product = tl.dot(a, tl.load(b_ptr + k[:, None] * N + cols[None, :]))
    place = c_ptr + rows[:, None] * N + cols[None, :]
    while tl.atomic_add(turn_ptr + tile, 0, sem="acquire") != part:
        pass
    tl.debug_barrier()
    if part > 0:
        product += tl.load(place)
    tl.store(place, product)
    tl.debug_barrier()
    tl.atomic_xchg(turn_ptr + tile, part + 1, sem="release")


@healthy("split-K in turns, a semaphore a tile; the first part stores without loading")
def split_k_in_turns(device):
    a, b = integers(16, 64, seed=1), integers(64, 32, seed=2)
    c, turns = torch.empty(16, 32, device=device), torch.zeros(2, dtype=torch.int32, device=device)
    split_k_semaphore_kernel[(2, 4)](a.to(device), b.to(device), c, turns, N=32, K=64, TILE=16)
    return [Check(c, a @ b)]
