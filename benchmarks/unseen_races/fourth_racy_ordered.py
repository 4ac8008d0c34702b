"""Racy kernels of the fourth set: something orders their programs, but too little of it or too late; autotuners."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import integers, racy


def zeros(device, *sizes, dtype=torch.int32):
    return [torch.zeros(n, dtype=dtype, device=device) for n in sizes]


@triton.jit
def normalise_kernel(x_ptr, part_ptr, out_ptr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    pid = tl.program_id(0)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(part_ptr + pid, tl.sum(x, 0))
    tl.debug_barrier()
    total = tl.sum(tl.load(part_ptr + tl.arange(0, PROGRAMS)), 0)
    tl.store(out_ptr + i, x / total)


# A barrier of threads of one program; the other programs' parts may not be there.
@racy("part_ptr", "read/write", "tl.debug_barrier is taken for a barrier of the grid")
def barrier_of_a_program_for_the_grid(device):
    x = integers(128, low=1).to(device)
    part, out = torch.ones(8, device=device), torch.zeros(128, device=device)
    normalise_kernel[(8,)](x, part, out, BLOCK=16, PROGRAMS=8)


@triton.jit
def volatile_flag_kernel(x_ptr, data_ptr, flag_ptr, out_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    if pid == 0:
        tl.store(data_ptr + cols, tl.load(x_ptr + cols) * 2, cache_modifier=".wt")
        tl.debug_barrier()
        tl.atomic_xchg(flag_ptr, 1, sem="release")
    else:
        while tl.load(flag_ptr, volatile=True) == 0:
            pass
        tl.debug_barrier()
        tl.store(out_ptr + pid * BLOCK + cols, tl.load(data_ptr + cols, cache_modifier=".cv") + pid)


# A volatile load is a relaxed one: the flag is seen, the data need not be.
@racy("data_ptr", "read/write", "the flag is polled by a volatile load, which acquires nothing")
def flag_polled_by_a_volatile_load(device):
    x, data, out = integers(16).to(device), torch.zeros(16, device=device), torch.zeros(4, 16, device=device)
    volatile_flag_kernel[(4,)](x, data, *zeros(device, 1), out, BLOCK=16)


@triton.jit
def last_adds_kernel(x_ptr, part_ptr, count_ptr, out_ptr,
                     SPLITS: tl.constexpr, BLOCK: tl.constexpr, HOW: tl.constexpr):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    at = tile * SPLITS + split
    x = tl.load(x_ptr + at * BLOCK + cols)
    if HOW == "early":
        ticket = tl.atomic_add(count_ptr + tile, 1)
        tl.debug_barrier()
        tl.store(part_ptr + at * BLOCK + cols, x * x)
    else:
        tl.store(part_ptr + at * BLOCK + cols, x * x)
        tl.debug_barrier()
        if HOW == "relaxed":
            ticket = tl.atomic_add(count_ptr + tile, 1, sem="relaxed")
        else:
            ticket = tl.atomic_add(count_ptr + tile, 1, scope="cta")
    tl.debug_barrier()
    if ticket == SPLITS - 1:
        total = tl.zeros((BLOCK,), tl.float32)
        for s in range(SPLITS):
            total += tl.load(part_ptr + (tile * SPLITS + s) * BLOCK + cols)
        tl.store(out_ptr + tile * BLOCK + cols, total)


def _last(device, how):
    x, part, out = integers(8, 16).to(device), torch.zeros(8, 16, device=device), torch.zeros(2, 16, device=device)
    last_adds_kernel[(2, 4)](x, part, *zeros(device, 2), out, SPLITS=4, BLOCK=16, HOW=how)


# The last one knows that it is the last, and not that the others' stores are visible.
@racy("part_ptr", "read/write", "the last split adds up; the tickets are relaxed")
def parts_added_after_relaxed_tickets(device):
    _last(device, "relaxed")


# What a program stores after its ticket is not released by it.
@racy("part_ptr", "read/write", "the last split adds up; each takes its ticket before it stores its part")
def parts_stored_after_the_ticket(device):
    _last(device, "early")


# Atomics of scope cta by different programs are not even atomic to each other.
@racy("part_ptr,count_ptr", "read/write,atomic/atomic", "the last split adds up; tickets are of scope cta")
def parts_added_after_tickets_of_a_cta(device):
    _last(device, "cta")


@triton.jit
def add_under_lock_kernel(x_ptr, sum_ptr, lock_ptr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + cols)
    while tl.atomic_xchg(lock_ptr, 1, sem="acquire") == 1:
        pass
    tl.debug_barrier()
    total = tl.load(sum_ptr + cols) + x
    if EARLY:
        tl.debug_barrier()
        tl.atomic_xchg(lock_ptr, 0, sem="release")
        tl.debug_barrier()
        tl.store(sum_ptr + cols, total)
    else:
        tl.store(sum_ptr + cols, total)
        tl.debug_barrier()
        tl.store(lock_ptr, 0)


@racy("sum_ptr", "read/write,write/write", "the lock goes back after the load and before the store")
def lock_given_back_before_the_store(device):
    x, total = integers(6, 16, low=1).to(device), torch.zeros(16, device=device)
    add_under_lock_kernel[(6,)](x, total, *zeros(device, 1), BLOCK=16, EARLY=True)


# A plain store neither releases nor is it atomic beside the exchanges of those who wait.
@racy("sum_ptr,lock_ptr", "read/write,write/write,atomic/write", "the lock goes back by a plain store")
def lock_given_back_by_a_plain_store(device):
    x, total = integers(6, 16, low=1).to(device), torch.zeros(16, device=device)
    add_under_lock_kernel[(6,)](x, total, *zeros(device, 1), BLOCK=16, EARLY=False)


@triton.jit
def permits_kernel(x_ptr, sum_ptr, permit_ptr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + cols)
    free = tl.maximum(tl.atomic_add(permit_ptr, 0, sem="relaxed"), 1)
    while tl.atomic_cas(permit_ptr, free, free - 1, sem="acquire") != free:
        free = tl.maximum(tl.atomic_add(permit_ptr, 0, sem="relaxed"), 1)
    tl.debug_barrier()
    tl.store(sum_ptr + cols, tl.load(sum_ptr + cols) + x)
    tl.debug_barrier()
    tl.atomic_add(permit_ptr, 1, sem="release")


# Two may hold it at once, and then nothing orders them; one after the other (a schedule that happens) is in order.
@racy("sum_ptr", "read/write,write/write", "a semaphore of two permits is taken for a lock")
def semaphore_of_two_permits(device):
    x, total = integers(8, 16, low=1).to(device), torch.zeros(16, device=device)
    permits_kernel[(8,)](x, total, torch.full((1,), 2, dtype=torch.int32, device=device), BLOCK=16)


@triton.jit
def look_back_relaxed_kernel(x_ptr, out_ptr, sum_ptr, prefix_ptr, state_ptr, BLOCK: tl.constexpr):
    tile = tl.program_id(0)
    i = tile * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    total = tl.sum(x, 0)
    tl.store(sum_ptr + tile, total)
    tl.debug_barrier()
    tl.atomic_xchg(state_ptr + tile, 1, sem="relaxed")
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
    tl.atomic_xchg(state_ptr + tile, 2, sem="relaxed")
    tl.store(out_ptr + i, tl.cumsum(x, 0) + before)


# An acquire needs a release that it reads from; there is none.
@racy("sum_ptr,prefix_ptr", "read/write", "a look-back that acquires states which were published relaxed")
def look_back_at_relaxed_states(device):
    x, out = integers(128).to(device), torch.zeros(128, device=device)
    total, prefix = torch.zeros(2, 8, device=device)
    look_back_relaxed_kernel[(8,)](x, out, total, prefix, *zeros(device, 8), BLOCK=16)


@triton.jit
def fix_up_kernel(a_ptr, b_ptr, c_ptr, part_ptr, flag_ptr, PARTS: tl.constexpr, K: tl.constexpr, T: tl.constexpr):
    pid = tl.program_id(0)
    part, first = pid % PARTS, pid - pid % PARTS
    r, c = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
    k = part * T
    a = tl.load(a_ptr + ((pid // PARTS) * T + r) * K + k + c)
    acc = tl.dot(a, tl.load(b_ptr + (k + r) * T + c), input_precision="ieee")
    if part != 0:
        tl.store(part_ptr + (pid * T + r) * T + c, acc)
        tl.debug_barrier()
        tl.atomic_xchg(flag_ptr + pid, 1, sem="release")
    else:
        while tl.atomic_cas(flag_ptr + first + PARTS - 1, 1, 1, sem="acquire") != 1:
            pass
        tl.debug_barrier()
        for other in range(1, PARTS):
            acc += tl.load(part_ptr + ((first + other) * T + r) * T + c)
        tl.store(c_ptr + (first // PARTS * T + r) * T + c, acc)


# Contributors 1 and 2 have flags of their own that nobody reads.
@racy("part_ptr", "read/write", "the owner of a tile waits for its last contributor and adds up all three")
def stream_k_waits_for_the_last_only(device):
    a, b = integers(32, 64, seed=1).to(device), integers(64, 16, seed=2).to(device)
    c, part = torch.zeros(32, 16, device=device), torch.zeros(8, 16, 16, device=device)
    fix_up_kernel[(8,)](a, b, c, part, *zeros(device, 8), PARTS=4, K=64, T=16)


@triton.jit
def ring_without_room_kernel(x_ptr, ring_ptr, full_ptr, out_ptr, ITEMS: tl.constexpr, SLOTS: tl.constexpr,
                             BLOCK: tl.constexpr):  # fmt: skip
    cols = tl.arange(0, BLOCK)
    if tl.program_id(0) == 0:
        for t in range(ITEMS):
            tl.store(ring_ptr + (t % SLOTS) * BLOCK + cols, tl.load(x_ptr + t * BLOCK + cols) * 2)
            tl.debug_barrier()
            tl.atomic_xchg(full_ptr, t + 1, sem="release")
    else:
        for t in range(ITEMS):
            while tl.atomic_add(full_ptr, 0, sem="acquire") <= t:
                pass
            tl.debug_barrier()
            tl.store(out_ptr + t * BLOCK + cols, tl.load(ring_ptr + (t % SLOTS) * BLOCK + cols))


# Item 3 overwrites item 0, whether or not that one was taken.
@racy("ring_ptr", "read/write", "a ring of three slots whose producer never waits for room")
def ring_without_waiting_for_room(device):
    x, ring, out = integers(8, 16).to(device), torch.zeros(3, 16, device=device), torch.zeros(8, 16, device=device)
    ring_without_room_kernel[(2,)](x, ring, *zeros(device, 1), out, ITEMS=8, SLOTS=3, BLOCK=16)


@triton.jit
def jacobi_early_kernel(buf_ptr, count_ptr, n, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for step in range(STEPS):
        src = buf_ptr + (step % 2) * n
        dst = buf_ptr + ((step + 1) % 2) * n
        left = tl.load(src + i - 1, i > 0, other=0.0)
        right = tl.load(src + i + 1, i + 1 < n, other=0.0)
        tl.store(dst + i, left + right)
        tl.debug_barrier()
        tl.atomic_add(count_ptr, 1, sem="release")
        while tl.atomic_add(count_ptr, 0, sem="acquire") < step * tl.num_programs(0):
            pass
        tl.debug_barrier()


# After step 0 nobody waits (for 0 arrivals), after step 1 for those of step 0.
# A schedule in which all arrive before any looks is in order by luck.
@racy("buf_ptr", "read/write", "a barrier of the grid that waits for the arrivals of one round less")
def grid_barrier_one_round_early(device):
    buf = torch.cat([integers(96, low=0, high=4), torch.zeros(96)]).to(device)
    jacobi_early_kernel[(6,)](buf, *zeros(device, 1), 96, STEPS=4, BLOCK=16)


@triton.jit
def hook_kernel(u_ptr, v_ptr, label_ptr, edges, BLOCK: tl.constexpr):
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    u, v = tl.load(u_ptr + e, e < edges, other=0), tl.load(v_ptr + e, e < edges, other=0)
    low = tl.minimum(tl.load(label_ptr + u, e < edges), tl.load(label_ptr + v, e < edges))
    tl.atomic_min(label_ptr + u, low, e < edges, sem="relaxed")
    tl.atomic_min(label_ptr + v, low, e < edges, sem="relaxed")


# The algorithm gets over a stale label, but a weak load beside another program's atomic is a race all the same.
@racy("label_ptr", "atomic/read", "labels are lowered by atomics and read by plain loads in the same launch")
def labels_read_by_plain_loads(device):
    order = torch.randperm(24, generator=torch.Generator().manual_seed(4)).to(torch.int32)
    u, v = order[:-1].to(device), order[1:].to(device)
    label = torch.arange(24, dtype=torch.int32).to(device)
    for _ in range(2):
        hook_kernel[(3,)](u, v, label, 23, BLOCK=8)


@triton.jit
def insert_kernel(key_ptr, x_ptr, table_ptr, value_ptr, SIZE: tl.constexpr):
    p = tl.program_id(0)
    key = tl.load(key_ptr + p)
    slot = (key * 7) % SIZE
    seen = tl.atomic_cas(table_ptr + slot, -1, key)
    while (seen != -1) & (seen != key):
        slot = (slot + 1) % SIZE
        seen = tl.atomic_cas(table_ptr + slot, -1, key)
    tl.debug_barrier()
    tl.store(value_ptr + slot, tl.load(x_ptr + p))


# Keys 5 and 37 come twice, with different values; the swap orders what came before it, not the store after it.
@racy("value_ptr", "write/write", "a hash table whose keys are swapped in and whose values all store who found one")
def hash_table_whose_values_are_stored(device):
    keys = torch.tensor([5, 37, 9, 5, 2, 37, 11, 69], dtype=torch.int32).to(device)
    table = torch.full((32,), -1, dtype=torch.int32, device=device)
    x = torch.arange(100, 108, dtype=torch.int32).to(device)
    insert_kernel[(8,)](keys, x, table, *zeros(device, 32), SIZE=32)


@triton.jit
def max_kernel(x_ptr, max_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    if pid == 0:
        tl.store(max_ptr, float("-inf"))
    tl.debug_barrier()
    tl.atomic_max(max_ptr, tl.max(tl.load(x_ptr + pid * BLOCK + tl.arange(0, BLOCK)), 0), sem="relaxed")


# Program 0's store may come after the others' maxima and lose them.
@racy("max_ptr", "atomic/write", "program 0 initialises the maximum that all raise by atomics in the same launch")
def maximum_initialised_by_program_zero(device):
    max_kernel[(8,)](integers(128).to(device), torch.zeros(1, device=device), BLOCK=16)


@triton.autotune([triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})], key=["n"], restore_value=["m_ptr"])
@triton.jit
def momentum_kernel(p_ptr, m_ptr, g_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = tl.load(m_ptr + i, i < n) * 0.5 + tl.load(g_ptr + i, i < n)
    tl.store(m_ptr + i, m, i < n)
    tl.store(p_ptr + i, tl.load(p_ptr + i, i < n) - m, i < n)


# No two programs meet; every timing run takes one more step of p.
@racy("p_ptr", "autotune", "an optimiser's step is tuned; its momentum is restored and its weights are not")
def tuned_step_restores_half(device):
    p, m, g = (integers(100, low=1, seed=s).to(device) for s in range(3))
    momentum_kernel[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](p, m, g, 100)


@triton.autotune([triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 64})], key=["n"])
@triton.jit
def tuned_parts_kernel(x_ptr, part_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(part_ptr + tl.program_id(0), tl.sum(tl.load(x_ptr + i, i < n, other=0.0), 0))


@triton.jit
def add_parts_kernel(part_ptr, out_ptr, PARTS: tl.constexpr):
    tl.store(out_ptr, tl.sum(tl.load(part_ptr + tl.arange(0, PARTS)), 0))


# Blocks of 16 leave 8 parts; if blocks of 64 turn out faster, 2 parts are new and 6 are what timing left.
@racy("part_ptr", "autotune", "parts of a smaller block, left by timing, are added to those of the chosen one")
def parts_left_by_timing_are_added(device):
    x, part, out = integers(128, low=1).to(device), torch.zeros(8, device=device), torch.zeros(1, device=device)
    tuned_parts_kernel[lambda meta: (triton.cdiv(128, meta["BLOCK"]),)](x, part, 128)
    add_parts_kernel[(1,)](part, out, PARTS=8)
