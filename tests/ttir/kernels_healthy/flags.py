"""Flags, last blocks, barriers over the grid, stream-K and queues, with the orders that they need."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import Check, healthy, integers


@triton.jit
def flag_kernel(x_ptr, data_ptr, flag_ptr, out_ptr, SOURCE: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    if pid == SOURCE:
        tl.store(data_ptr + cols, tl.load(x_ptr + cols) + 5)
        tl.debug_barrier()
        tl.atomic_xchg(flag_ptr, 1, sem="release")
    else:
        while tl.atomic_add(flag_ptr, 0, sem="acquire") == 0:
            pass
        tl.debug_barrier()
        tl.store(out_ptr + pid * BLOCK + cols, tl.load(data_ptr + cols))


def _through_a_flag(device, source):
    x, out = integers(32), torch.zeros(4, 32, device=device)
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    flag_kernel[(4,)](x.to(device), torch.empty(32, device=device), flag, out, SOURCE=source, BLOCK=32)
    expected = (x + 5).repeat(4, 1)
    expected[source] = 0
    return [Check(out, expected)]


@healthy("one program releases a flag behind its data, the others acquire it before they load")
def flag_released_and_acquired(device):
    return _through_a_flag(device, 0)


@healthy("the same with the last program as the source: the first ones have to wait for it")
def flag_of_the_last_program(device):
    return _through_a_flag(device, 3)


@triton.jit
def last_block_kernel(
    x_ptr, partial_ptr, ticket_ptr, out_ptr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, SEM: tl.constexpr
):
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    tl.store(partial_ptr + pid, tl.sum(tl.load(x_ptr + pid * BLOCK + cols)))
    tl.debug_barrier()
    if tl.atomic_add(ticket_ptr, 1, sem=SEM) == PROGRAMS - 1:
        tl.debug_barrier()
        tl.store(out_ptr, tl.sum(tl.load(partial_ptr + tl.arange(0, PROGRAMS))))
        tl.atomic_xchg(ticket_ptr, 0, sem="relaxed")


@healthy(
    "the last block, by tickets that acquire and release, adds what the others stored, and resets the counter for the next launch"
)
def last_block_adds(device):
    x, ticket = integers(8, 32), torch.zeros(1, dtype=torch.int32, device=device)
    out, again = torch.zeros(2, 1, device=device)
    for total in (out, again):
        last_block_kernel[(8,)](
            x.to(device), torch.empty(8, device=device), ticket, total, BLOCK=32, PROGRAMS=8, SEM="acq_rel"
        )
    return [
        Check(out, x.sum().view(1)),
        Check(again, x.sum().view(1)),
        Check(ticket, torch.zeros(1, dtype=torch.int32)),
    ]


@triton.jit
def last_block_of_group_kernel(
    x_ptr, partial_ptr, ticket_ptr, out_ptr, N: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    row, part = tl.program_id(0), tl.program_id(1)
    cols = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + cols, cols < N, other=0.0)
    tl.store(partial_ptr + row * PARTS + part, tl.sum(x * x))
    tl.debug_barrier()
    if tl.atomic_add(ticket_ptr + row, 1) % PARTS == PARTS - 1:
        tl.debug_barrier()
        tl.store(out_ptr + row, tl.sum(tl.load(partial_ptr + row * PARTS + tl.arange(0, PARTS))))


@healthy("a counter a row: the last of the row's programs adds (the default order is acq_rel)")
def last_block_of_each_row(device):
    x, out = integers(5, 100), torch.zeros(5, device=device)
    tickets = torch.zeros(5, dtype=torch.int32, device=device)
    last_block_of_group_kernel[(5, 4)](
        x.to(device), torch.empty(5, 4, device=device), tickets, out, N=100, PARTS=4, BLOCK=32
    )
    return [Check(out, x.pow(2).sum(1))]


@triton.jit
def _grid_barrier(count_ptr, goal):
    tl.debug_barrier()
    arrived = tl.atomic_add(count_ptr, 1, sem="acq_rel") + 1
    while arrived < goal:
        arrived = tl.atomic_add(count_ptr, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit
def grid_barrier_kernel(x_ptr, y_ptr, out_ptr, count_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    tl.store(y_ptr + pid * BLOCK + cols, tl.load(x_ptr + pid * BLOCK + cols) * 2)
    _grid_barrier(count_ptr, tl.num_programs(0))
    other = tl.num_programs(0) - 1 - pid
    tl.store(out_ptr + pid * BLOCK + cols, tl.load(y_ptr + other * BLOCK + cols))


@healthy("a barrier over the grid: all arrive with a release and leave with an acquire")
def grid_barrier(device):
    x, (y, out) = integers(8, 32), torch.zeros(2, 8, 32, device=device)
    grid_barrier_kernel[(8,)](x.to(device), y, out, torch.zeros(1, dtype=torch.int32, device=device), BLOCK=32)
    return [Check(out, 2 * x.flip(0))]


@triton.jit
def jacobi_kernel(a_ptr, b_ptr, count_ptr, n, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    for step in tl.static_range(STEPS):
        if step % 2 == 0:
            source, target = a_ptr, b_ptr
        else:
            source, target = b_ptr, a_ptr
        left = tl.load(source + i - 1, (i > 0) & (i < n), other=0.0)
        right = tl.load(source + i + 1, i < n - 1, other=0.0)
        tl.store(target + i, left + right, i < n)
        _grid_barrier(count_ptr, (step + 1) * tl.num_programs(0))


@healthy("two buffers in turn with a barrier over the grid after each step")
def double_buffer(device):
    x = integers(100)
    a, b = x.to(device), torch.zeros(100, device=device)
    jacobi_kernel[(4,)](a, b, torch.zeros(1, dtype=torch.int32, device=device), 100, STEPS=3, BLOCK=32)
    steps = [x]
    for _ in range(3):
        padded = torch.nn.functional.pad(steps[-1], (1, 1))
        steps.append(padded[:-2] + padded[2:])
    return [Check(a, steps[2]), Check(b, steps[3])]


@triton.jit
def stream_k_kernel(
    a_ptr, b_ptr, c_ptr, part_ptr, flag_ptr, K, steps, per_program, TILE: tl.constexpr, N: tl.constexpr
):
    """Tiles of C of `steps` steps along K each; a program does `per_program` steps of them all, counted through."""
    pid = tl.program_id(0)
    start, end = pid * per_program, tl.minimum((pid + 1) * per_program, steps * (N // TILE))
    rows = tl.arange(0, TILE)
    while start < end:
        tile, first = start // steps, start % steps
        last = tl.minimum(steps, first + end - start)
        total = tl.zeros((TILE, TILE), tl.float32)
        for step in range(first, last):
            k = step * TILE + tl.arange(0, TILE)
            a = tl.load(a_ptr + rows[:, None] * K + k[None, :])
            b = tl.load(b_ptr + k[:, None] * N + tile * TILE + rows[None, :])
            total += tl.dot(a, b)
        place = rows[:, None] * TILE + rows[None, :]
        if first == 0:  # the owner of the tile waits for those who do the rest of it
            helper = pid + 1
            done = last
            while done < steps:
                while tl.atomic_add(flag_ptr + helper, 0, sem="acquire") == 0:
                    pass
                tl.debug_barrier()
                total += tl.load(part_ptr + helper * TILE * TILE + place)
                done = tl.minimum(steps, done + per_program)
                helper += 1
            tl.store(c_ptr + rows[:, None] * N + tile * TILE + rows[None, :], total)
        else:
            tl.store(part_ptr + pid * TILE * TILE + place, total)
            tl.debug_barrier()
            tl.atomic_xchg(flag_ptr + pid, 1, sem="release")
        start += last - first


@healthy("stream-K: who begins a tile waits for later programs, which release a flag each behind their part")
def stream_k(device):
    a, b = integers(16, 96, low=-4, high=4, seed=1), integers(96, 48, low=-4, high=4, seed=2)
    c, part = torch.zeros(16, 48, device=device), torch.empty(5, 16, 16, device=device)
    flags = torch.zeros(5, dtype=torch.int32, device=device)
    stream_k_kernel[(5,)](a.to(device), b.to(device), c, part, flags, 96, 6, 4, TILE=16, N=48)  # 18 steps by 5 programs
    return [Check(c, a @ b)]


@triton.jit
def chained_scan_kernel(x_ptr, carry_ptr, flag_ptr, out_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    carry = 0.0
    if pid > 0:
        while tl.atomic_add(flag_ptr + pid - 1, 0, sem="acquire") == 0:
            pass
        tl.debug_barrier()
        carry = tl.load(carry_ptr + pid - 1)
    tl.store(carry_ptr + pid, carry + tl.sum(x))
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptr + pid, 1, sem="release")
    tl.store(out_ptr + i, tl.cumsum(x, axis=0) + carry)


@healthy("a scan whose programs wait for the carry of the one before")
def scan_with_chained_carries(device):
    x, out = integers(128), torch.zeros(128, device=device)
    chained_scan_kernel[(4,)](
        x.to(device), torch.empty(4, device=device), torch.zeros(4, dtype=torch.int32, device=device), out, BLOCK=32
    )
    return [Check(out, x.cumsum(0))]


@triton.jit
def packed_carry_kernel(x_ptr, word_ptr, out_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    carry = tl.full((), 0, tl.int64)
    if pid > 0:
        word = tl.atomic_add(word_ptr + pid - 1, 0, sem="relaxed")
        while word == 0:
            word = tl.atomic_add(word_ptr + pid - 1, 0, sem="relaxed")
        carry = word >> 1
    carry += tl.sum(x)
    tl.atomic_xchg(word_ptr + pid, (carry << 1) | 1, sem="relaxed")
    tl.store(out_ptr + i, carry - tl.sum(x) + tl.cumsum(x, axis=0))


@healthy("flag and carry in one atomic word: relaxed suffices, because nothing else is passed on")
def scan_with_flag_and_carry_in_a_word(device):
    x = integers(128, low=0, dtype=torch.int64)
    out = torch.zeros(128, dtype=torch.int64, device=device)
    packed_carry_kernel[(4,)](x.to(device), torch.zeros(4, dtype=torch.int64, device=device), out, BLOCK=32)
    return [Check(out, x.cumsum(0))]


@triton.jit
def initialised_kernel(x_ptr, out_ptr, flag_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    if pid == 0:
        tl.store(out_ptr + cols, tl.zeros((BLOCK,), tl.float32))
        tl.debug_barrier()
        tl.atomic_xchg(flag_ptr, 1, sem="release")
    while tl.atomic_add(flag_ptr, 0, sem="acquire") == 0:
        pass
    tl.debug_barrier()
    tl.atomic_add(out_ptr + cols, tl.load(x_ptr + pid * BLOCK + cols), sem="relaxed")


@healthy("the first program zeroes the sum and releases a flag; atomics behind it may be relaxed")
def zeroed_behind_a_flag(device):
    x, out = integers(6, 32), torch.full((32,), 99.0, device=device)
    initialised_kernel[(6,)](x.to(device), out, torch.zeros(1, dtype=torch.int32, device=device), BLOCK=32)
    return [Check(out, x.sum(0))]


@triton.jit
def work_queue_kernel(x_ptr, out_ptr, next_ptr, tiles, BLOCK: tl.constexpr):
    tile = tl.atomic_add(next_ptr, 1, sem="relaxed")
    while tile < tiles:
        i = tile * BLOCK + tl.arange(0, BLOCK)
        tl.store(out_ptr + i, tl.load(x_ptr + i) * 2)
        tile = tl.atomic_add(next_ptr, 1, sem="relaxed")


@healthy("programs draw tiles from a queue: each tile has one owner, whoever it is")
def work_queue(device):
    x, out = integers(10 * 32), torch.zeros(320, device=device)
    count = torch.zeros(1, dtype=torch.int32, device=device)
    work_queue_kernel[(3,)](x.to(device), out, count, 10, BLOCK=32)
    return [Check(out, 2 * x), Check(count, torch.tensor([13], dtype=torch.int32))]


@triton.jit
def append_kernel(x_ptr, out_ptr, count_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n, other=0)
    keep = x > 0
    rank = tl.cumsum(keep.to(tl.int32), axis=0) - 1
    base = tl.atomic_add(count_ptr, tl.sum(keep.to(tl.int32)), sem="relaxed")
    tl.store(out_ptr + base + rank, x, keep)


@healthy("programs append what they keep: who gets which places varies, nobody shares them")
def appended_by_a_counter(device):
    x = integers(100, low=-50, high=50, dtype=torch.int32)
    out, count = torch.zeros(100, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    append_kernel[(4,)](x.to(device), out, count, 100, BLOCK=32)
    kept = x[x > 0].sort().values
    return [
        Check(out.sort().values[100 - len(kept) :], kept),
        Check(count, torch.tensor([len(kept)], dtype=torch.int32)),
    ]


@triton.jit
def _store(address, ORDER: tl.constexpr):
    tl.inline_asm_elementwise(
        "st." + ORDER + ".gpu.global.u32 [$1], 1; mov.u32 $0, 0;",
        "=r,l",
        [address],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _fence(SCOPE: tl.constexpr):
    tl.inline_asm_elementwise(
        "fence.acq_rel." + SCOPE + "; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def stored_flag_kernel(
    x_ptr, data_ptr, flag_ptr, out_ptr, ORDER: tl.constexpr, SCOPE: tl.constexpr, BLOCK: tl.constexpr
):
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    if pid == 0:
        tl.store(data_ptr + cols, tl.load(x_ptr + cols) + 5)
        tl.debug_barrier()
        if ORDER == "relaxed":
            _fence(SCOPE)
        _store(flag_ptr.to(tl.int64), ORDER)
    else:
        while tl.atomic_add(flag_ptr, 0, sem="acquire") == 0:
            pass
        tl.debug_barrier()
        tl.store(out_ptr + pid * BLOCK + cols, tl.load(data_ptr + cols))


def _stored(device, order, scope):
    x, out = integers(32), torch.zeros(4, 32, device=device)
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    stored_flag_kernel[(4,)](
        x.to(device), torch.empty(32, device=device), flag, out, ORDER=order, SCOPE=scope, BLOCK=32
    )
    return [Check(out[1:], (x + 5).repeat(3, 1))]


@healthy("a flag that inline assembly stores with release")
def flag_stored_in_assembly(device):
    return _stored(device, "release", "")


@healthy("a flag that inline assembly stores relaxed, behind a fence of the GPU")
def flag_stored_behind_a_fence(device):
    return _stored(device, "relaxed", "gpu")


@triton.jit
def set_back_kernel(x_ptr, partial_ptr, ticket_ptr, out_ptr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    pid = tl.program_id(0)
    tl.store(partial_ptr + pid, tl.sum(tl.load(x_ptr + pid * BLOCK + tl.arange(0, BLOCK))))
    tl.debug_barrier()
    if tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == PROGRAMS - 1:
        tl.debug_barrier()
        tl.store(out_ptr, tl.sum(tl.load(partial_ptr + tl.arange(0, PROGRAMS))))
        tl.store(ticket_ptr, 0)


@healthy("the last block sets the counter back by a plain store: all tickets were drawn before its own")
def last_block_sets_the_counter_back(device):
    x, ticket, out = integers(8, 32), torch.zeros(1, dtype=torch.int32, device=device), torch.zeros(1, device=device)
    for _ in range(2):
        set_back_kernel[(8,)](x.to(device), torch.empty(8, device=device), ticket, out, BLOCK=32, PROGRAMS=8)
    return [Check(out, x.sum().view(1)), Check(ticket, torch.zeros(1, dtype=torch.int32))]


@triton.jit
def looked_and_acquired_kernel(data_ptr, flag_ptr, out_ptr, BLOCK: tl.constexpr):
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    if pid == 0:
        tl.store(data_ptr + cols, cols)
        tl.debug_barrier()
        tl.atomic_xchg(flag_ptr, 1, sem="release")
    else:
        while tl.atomic_or(flag_ptr, 0, sem="relaxed") == 0:
            pass
        tl.atomic_or(flag_ptr, 0, sem="acquire")
        tl.debug_barrier()
        tl.store(out_ptr + pid * BLOCK + cols, tl.load(data_ptr + cols))


@healthy(
    "relaxed looks until the flag is there, then an acquire whose result nobody uses: it comes after what was seen"
)
def flag_seen_relaxed_and_acquired(device):
    data, flag, out = (torch.zeros(n, dtype=torch.int32, device=device) for n in (16, 1, 64))
    looked_and_acquired_kernel[(4,)](data, flag, out, BLOCK=16)
    return [Check(out.view(4, 16)[1:], torch.arange(16, dtype=torch.int32).repeat(3, 1))]


@triton.jit
def atomic_flag_kernel(
    x_ptr, data_ptr, flag_ptr, out_ptr, SOURCE: tl.constexpr, BLOCK: tl.constexpr, STORE: tl.constexpr,
    LOAD: tl.constexpr, POLL: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    if pid == SOURCE:
        tl.store(data_ptr + cols, tl.load(x_ptr + cols) + 5)
        tl.debug_barrier()
        tl.atomic_store(flag_ptr, 1, sem=STORE)
    else:
        if POLL:
            tl.atomic_poll(flag_ptr, 1, sem=LOAD)
        else:
            while tl.atomic_load(flag_ptr, sem=LOAD) == 0:
                pass
        tl.debug_barrier()
        tl.store(out_ptr + pid * BLOCK + cols, tl.load(data_ptr + cols))


def through_a_stored_flag(device, source, store, load, poll):
    x, out = integers(32), torch.zeros(4, 32, device=device)
    flag, data = torch.zeros(1, dtype=torch.int32, device=device), torch.empty(32, device=device)
    atomic_flag_kernel[(4,)](x.to(device), data, flag, out, source, BLOCK=32, STORE=store, LOAD=load, POLL=poll)
    expected = (x + 5).repeat(4, 1)
    expected[source] = 0
    return [Check(out, expected)]


@healthy("a flag of Triton 3.9: stored in release order, loaded in acquire order")
def flag_stored_and_loaded(device):
    return through_a_stored_flag(device, 2, "release", "acquire", False)


@healthy("the same, polled")
def flag_polled(device):
    return through_a_stored_flag(device, 3, "release", "acquire", True)


@triton.jit
def gathering_kernel(x_ptr, partial_ptr, flags_ptr, out_ptr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    pid = tl.program_id(0)
    cols, others = tl.arange(0, BLOCK), tl.arange(0, PROGRAMS)
    tl.store(partial_ptr + pid, tl.sum(tl.load(x_ptr + pid * BLOCK + cols)))
    tl.debug_barrier()
    tl.atomic_store(flags_ptr + pid, 1)
    if pid == 0:
        there = tl.atomic_poll(flags_ptr + others, 1)
        tl.store(out_ptr, tl.sum(tl.where(there, tl.load(partial_ptr + others), 0.0)))


@healthy("one program polls a block of flags, one of each program")
def flags_polled_together(device):
    x, out = integers(8, 32), torch.zeros(1, device=device)
    flags, partial = torch.zeros(8, dtype=torch.int32, device=device), torch.empty(8, device=device)
    gathering_kernel[(8,)](x.to(device), partial, flags, out, BLOCK=32, PROGRAMS=8)
    return [Check(out, x.sum().reshape(1))]
