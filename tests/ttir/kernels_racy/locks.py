"""Locks, tickets and last blocks that guard less than they should."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import integers, racy


@triton.jit
def lock_kernel(x_ptr, dw_ptr, lock_ptr, BLOCK: tl.constexpr, MISTAKE: tl.constexpr, SEM: tl.constexpr):
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + pid * BLOCK + cols)
    lock = lock_ptr
    if MISTAKE == "a lock each":
        lock = lock_ptr + pid
    dw = tl.zeros((BLOCK,), tl.float32)
    if MISTAKE == "load before":
        dw = tl.load(dw_ptr + cols)
    while tl.atomic_cas(lock, 0, 1, sem=SEM) == 1:
        pass
    tl.debug_barrier()
    if MISTAKE != "load before":
        dw = tl.load(dw_ptr + cols)
    if MISTAKE == "store after":
        tl.debug_barrier()
        tl.atomic_xchg(lock, 0, sem=SEM)
        tl.store(dw_ptr + cols, dw + x)
    else:
        tl.store(dw_ptr + cols, dw + x)
        tl.debug_barrier()
        if MISTAKE == "plain release":
            tl.store(lock, 0)
        else:
            tl.atomic_xchg(lock, 0, sem=SEM)


def _under_lock(device, mistake, sem="acq_rel"):
    x = integers(8, 32).to(device)
    lock = torch.zeros(8, dtype=torch.int32, device=device)
    lock_kernel[(8,)](x, torch.zeros(32, device=device), lock, BLOCK=32, MISTAKE=mistake, SEM=sem)


@racy(
    "dw_ptr",
    "read/write,write/write",
    "the lock is given back before the sum is stored: the next one loads the old sum",
)
def lock_released_before_the_store(device):
    _under_lock(device, "store after")


@racy("dw_ptr", "read/write,write/write", "a relaxed lock orders no other memory: the next holder may load the old sum")
def lock_by_relaxed_atomics(device):
    _under_lock(device, "", sem="relaxed")


@racy(
    "dw_ptr,lock_ptr",
    "atomic/write,read/write,write/write",
    "a plain store releases nothing: the lock may be seen free before the sum is",
)
def lock_released_by_a_plain_store(device):
    _under_lock(device, "plain release")


@racy("dw_ptr", "read/write,write/write", "each program takes a lock of its own, so that none excludes another")
def lock_of_each_program(device):
    _under_lock(device, "a lock each")


@racy("dw_ptr", "read/write", "the sum is loaded before the lock is taken, and may be old")
def lock_taken_after_the_load(device):
    _under_lock(device, "load before")


@triton.jit
def grouped_lock_kernel(x_ptr, dw_ptr, lock_ptr, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    lock = lock_ptr + pid % GROUPS
    place = dw_ptr + (pid // GROUPS) * BLOCK + cols
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.debug_barrier()
    tl.store(place, tl.load(place) + tl.load(x_ptr + pid * BLOCK + cols))
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


@racy(
    "dw_ptr",
    "read/write,write/write",
    "locks go by the remainder and sums by the quotient: a sum's programs hold other locks",
)
def lock_of_another_group(device):
    lock = torch.zeros(4, dtype=torch.int32, device=device)
    grouped_lock_kernel[(16,)](integers(16, 32).to(device), torch.zeros(4, 32, device=device), lock, GROUPS=4, BLOCK=32)


@triton.jit
def shared_lock_kernel(x_ptr, dw_ptr, total_ptr, lock_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + pid * BLOCK + cols)
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    tl.debug_barrier()
    tl.store(dw_ptr + cols, tl.load(dw_ptr + cols) + x)
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr, 0)
    tl.store(total_ptr, tl.load(total_ptr) + tl.sum(x))


@racy("total_ptr", "read/write,write/write", "one of two sums is guarded by the lock, the other is updated behind it")
def lock_around_one_of_two_sums(device):
    lock = torch.zeros(1, dtype=torch.int32, device=device)
    x = integers(8, 32).to(device)
    shared_lock_kernel[(8,)](x, torch.zeros(32, device=device), torch.zeros(1, device=device), lock, BLOCK=32)


@triton.jit
def last_block_kernel(
    x_ptr,
    partial_ptr,
    ticket_ptr,
    out_ptr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SEM: tl.constexpr,
    EARLY: tl.constexpr,
):
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    total = tl.sum(tl.load(x_ptr + pid * BLOCK + cols))
    if EARLY:
        ticket = tl.atomic_add(ticket_ptr, 1, sem=SEM)
        tl.store(partial_ptr + pid, total)
    else:
        tl.store(partial_ptr + pid, total)
        tl.debug_barrier()
        ticket = tl.atomic_add(ticket_ptr, 1, sem=SEM)
    if ticket == PROGRAMS - 1:
        tl.debug_barrier()
        tl.store(out_ptr, tl.sum(tl.load(partial_ptr + tl.arange(0, PROGRAMS))))


def _last_block(device, sem, early=False):
    ticket = torch.zeros(1, dtype=torch.int32, device=device)
    last_block_kernel[(8,)](integers(8, 32).to(device), torch.zeros(8, device=device), ticket, torch.zeros(1, device=device),
                            BLOCK=32, PROGRAMS=8, SEM=sem, EARLY=early)  # fmt: skip


@racy(
    "partial_ptr",
    "read/write",
    "the last block has all tickets before it, but relaxed ones: sums may not be visible yet",
)
def last_block_with_relaxed_tickets(device):
    _last_block(device, "relaxed")


@racy("partial_ptr", "read/write", "the tickets acquire and do not release: sums may not be visible yet")
def last_block_with_acquired_tickets(device):
    _last_block(device, "acquire")


@racy("partial_ptr", "read/write", "the ticket is drawn before the sum is stored")
def last_block_with_early_tickets(device):
    _last_block(device, "acq_rel", early=True)


@triton.jit
def slot_kernel(x_ptr, slot_ptr, ticket_ptr, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    slot = tl.atomic_add(ticket_ptr, 1, sem="relaxed") % SLOTS
    tl.store(slot_ptr + slot * BLOCK + cols, tl.load(x_ptr + pid * BLOCK + cols))


@racy("slot_ptr", "write/write", "there are fewer slots than tickets, so that two programs get the same one")
def tickets_for_too_few_slots(device):
    ticket = torch.zeros(1, dtype=torch.int32, device=device)
    slot_kernel[(8,)](integers(8, 32).to(device), torch.zeros(4, 32, device=device), ticket, SLOTS=4, BLOCK=32)


@triton.jit
def plain_ticket_kernel(x_ptr, slot_ptr, ticket_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    slot = tl.load(ticket_ptr)
    tl.debug_barrier()
    tl.store(ticket_ptr, slot + 1)
    tl.store(slot_ptr + slot * BLOCK + cols, tl.load(x_ptr + pid * BLOCK + cols))


@racy("ticket_ptr", "read/write,write/write", "tickets are drawn by load and store: two programs may draw the same one")
def tickets_without_atomics(device):
    ticket = torch.zeros(1, dtype=torch.int32, device=device)
    plain_ticket_kernel[(8,)](integers(8, 32).to(device), torch.zeros(8, 32, device=device), ticket, BLOCK=32)


@triton.jit
def reread_ticket_kernel(x_ptr, slot_ptr, ticket_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    tl.atomic_add(ticket_ptr, 1, sem="relaxed")
    slot = tl.load(ticket_ptr) - 1
    tl.store(slot_ptr + slot * BLOCK + cols, tl.load(x_ptr + pid * BLOCK + cols))


@racy(
    "ticket_ptr,slot_ptr",
    "atomic/read,write/write",
    "the ticket is loaded again after it was drawn, when others may have drawn theirs",
)
def ticket_read_again(device):
    ticket = torch.zeros(1, dtype=torch.int32, device=device)
    reread_ticket_kernel[(8,)](integers(8, 32).to(device), torch.zeros(8, 32, device=device), ticket, BLOCK=32)


@triton.jit
def counter_reset_kernel(x_ptr, slot_ptr, ticket_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    if pid == 0:
        tl.store(ticket_ptr, 0)
    tl.debug_barrier()
    slot = tl.atomic_add(ticket_ptr, 1, sem="relaxed") % tl.num_programs(0)
    tl.store(slot_ptr + slot * BLOCK + cols, tl.load(x_ptr + pid * BLOCK + cols))


@racy(
    "ticket_ptr,slot_ptr",
    "atomic/write,write/write",
    "the first program resets the counter when others may have drawn already",
)
def tickets_reset_in_the_same_launch(device):
    ticket = torch.zeros(1, dtype=torch.int32, device=device)
    counter_reset_kernel[(8,)](integers(8, 32).to(device), torch.zeros(8, 32, device=device), ticket, BLOCK=32)


@triton.jit
def set_back_kernel(ticket_ptr, out_ptr, EARLY: tl.constexpr):
    ticket = tl.atomic_add(ticket_ptr, 1, sem="acq_rel")
    tl.store(out_ptr + tl.program_id(0), ticket)
    if ticket == tl.num_programs(0) - 1 - EARLY:
        tl.store(ticket_ptr, 0)


@racy(
    "ticket_ptr", "atomic/write", "the last but one sets the counter back, which the last may have drawn from by then"
)
def counter_set_back_by_the_last_but_one(device):
    ticket, out = torch.zeros(1, dtype=torch.int32, device=device), torch.zeros(8, dtype=torch.int32, device=device)
    set_back_kernel[(8,)](ticket, out, EARLY=1)


@triton.jit
def failed_swap_kernel(data_ptr, lock_ptr, there_ptr, out_ptr):
    if tl.program_id(0) == 0:  # has the lock from the beginning
        while tl.atomic_add(there_ptr, 0, sem="relaxed") == 0:
            pass
        tl.atomic_xchg(lock_ptr, 0)
        tl.store(out_ptr, tl.load(data_ptr))
    else:
        tl.store(data_ptr, 7)
        tl.debug_barrier()
        held = tl.atomic_cas(lock_ptr, 0, 1)
        tl.atomic_xchg(there_ptr, 1, sem="relaxed")
        while held == 1:
            held = tl.atomic_cas(lock_ptr, 0, 1)


@racy("data_ptr", "read/write", "a swap that fails writes nothing, so that nobody hears from it what was done before")
def news_by_a_swap_that_fails(device):
    data, there, out = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(3))
    failed_swap_kernel[(2,)](data, torch.ones(1, dtype=torch.int32, device=device), there, out)


@triton.jit
def early_ticket_kernel(x_ptr, sum_ptr, ticket_ptr, out_ptr, BLOCK: tl.constexpr):
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    ticket = tl.atomic_add(ticket_ptr, 1)
    tl.atomic_add(sum_ptr + cols, tl.load(x_ptr + pid * BLOCK + cols))
    if ticket == tl.num_programs(0) - 1:
        tl.debug_barrier()
        tl.store(out_ptr + cols, tl.load(sum_ptr + cols))


@racy("sum_ptr", "atomic/read", "the ticket is drawn before the sum is added to: that the last one adds last is chance")
def last_ticket_before_the_sum(device):
    ticket = torch.zeros(1, dtype=torch.int32, device=device)
    total, out = torch.zeros(2, 16, device=device)
    early_ticket_kernel[(8,)](integers(8, 16).to(device), total, ticket, out, BLOCK=16)


@triton.jit
def near_slots_kernel(x_ptr, slot_ptr, put_ptr, got_ptr, out_ptr, ITEMS: tl.constexpr):
    if tl.program_id(0) == 0:
        for i in range(ITEMS):
            while tl.atomic_add(got_ptr, 0, sem="acquire") < i - 2:
                pass
            tl.debug_barrier()
            tl.store(slot_ptr + i % 2, tl.load(x_ptr + i))
            tl.debug_barrier()
            tl.atomic_add(put_ptr, 1, sem="release")
    else:
        for i in range(ITEMS):
            while tl.atomic_add(put_ptr, 0, sem="acquire") <= i:
                pass
            tl.debug_barrier()
            tl.store(out_ptr + i, tl.load(slot_ptr + i % 2))
            tl.debug_barrier()
            tl.atomic_add(got_ptr, 1, sem="release")


@racy(
    "slot_ptr", "read/write", "two slots, and the producer may be three items ahead: a consumer that keeps up hides it"
)
def slots_of_a_hasty_producer(device):
    put, got = torch.zeros(2, 1, dtype=torch.int32, device=device)
    x, out = integers(4).to(device), torch.zeros(4, device=device)
    near_slots_kernel[(2,)](x, torch.zeros(2, device=device), put, got, out, ITEMS=4)
