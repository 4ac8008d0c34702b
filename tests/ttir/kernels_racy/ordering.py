"""Producers and consumers in one launch, with no order between them, or one that a GPU does not keep."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import integers, racy

EARLY = "a program may read before the other has written"


@triton.jit
def next_tile_kernel(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    tl.store(y_ptr + pid * BLOCK + cols, tl.load(x_ptr + pid * BLOCK + cols) + 1)
    tl.debug_barrier()
    after = (pid + 1) % tl.num_programs(0)
    tl.store(out_ptr + pid * BLOCK + cols, tl.load(y_ptr + after * BLOCK + cols))


@racy("y_ptr", "read/write", "the barrier holds the threads of a program only; " + EARLY)
def neighbour_behind_a_barrier_of_the_block(device):
    x = integers(6, 32).to(device)
    next_tile_kernel[(6,)](x, torch.zeros_like(x), torch.zeros_like(x), BLOCK=32)


@triton.jit
def statistics_kernel(x_ptr, partial_ptr, out_ptr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    pid = tl.program_id(0)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(partial_ptr + pid, tl.sum(x))
    total = tl.sum(tl.load(partial_ptr + tl.arange(0, PROGRAMS)))
    tl.store(out_ptr + i, x - total)


@racy("partial_ptr", "read/write", "all read the sums of all in the launch that writes them; " + EARLY)
def statistics_without_a_second_kernel(device):
    x = integers(256).to(device)
    statistics_kernel[(8,)](x, torch.zeros(8, device=device), torch.zeros_like(x), BLOCK=32, PROGRAMS=8)


@triton.jit
def split_softmax_kernel(x_ptr, max_ptr, out_ptr, N, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    i = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + i, i < N, other=-float("inf"))
    tl.store(max_ptr + row * PARTS + part, tl.max(x))
    largest = tl.max(tl.load(max_ptr + row * PARTS + tl.arange(0, PARTS)))
    tl.store(out_ptr + row * N + i, x - largest, i < N)


@racy("max_ptr", "read/write", "the parts of a row exchange their maxima in one launch; " + EARLY)
def maxima_of_split_rows(device):
    x = integers(3, 50).to(device)
    split_softmax_kernel[(3, 2)](x, torch.zeros(3, 2, device=device), torch.zeros_like(x), 50, BLOCK=32, PARTS=2)


@triton.jit
def carry_kernel(x_ptr, carry_ptr, out_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    sums = tl.cumsum(tl.load(x_ptr + i), axis=0)
    carry = 0.0
    if pid > 0:
        carry = tl.load(carry_ptr + pid - 1)
    tl.store(carry_ptr + pid, carry + tl.max(sums))
    tl.store(out_ptr + i, sums + carry)


@racy("carry_ptr", "read/write", "programs are in no order, so that the carry of the one before may not be there yet")
def scan_carry_without_order(device):
    x = integers(128, low=0, high=8).to(device)
    carry_kernel[(4,)](x, torch.zeros(4, device=device), torch.zeros_like(x), BLOCK=32)


@triton.jit
def _grid_barrier(count_ptr, goal, SEM: tl.constexpr):
    tl.debug_barrier()
    arrived = tl.atomic_add(count_ptr, 1, sem=SEM) + 1
    while arrived < goal:
        arrived = tl.atomic_add(count_ptr, 0, sem=SEM)
    tl.debug_barrier()


@triton.jit
def grid_barrier_kernel(x_ptr, y_ptr, out_ptr, count_ptr, goal, BLOCK: tl.constexpr, SEM: tl.constexpr):
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    tl.store(y_ptr + pid * BLOCK + cols, tl.load(x_ptr + pid * BLOCK + cols) * 2)
    _grid_barrier(count_ptr, goal, SEM)
    other = tl.num_programs(0) - 1 - pid
    tl.store(out_ptr + pid * BLOCK + cols, tl.load(y_ptr + other * BLOCK + cols))


def _through_grid_barrier(device, goal, sem):
    x = integers(8, 32).to(device)
    count = torch.zeros(1, dtype=torch.int32, device=device)
    grid_barrier_kernel[(8,)](x, torch.zeros_like(x), torch.zeros_like(x), count, goal, BLOCK=32, SEM=sem)


@racy("y_ptr", "read/write", "relaxed arrivals order no other memory: all have arrived, their stores need not have")
def grid_barrier_of_relaxed_arrivals(device):
    _through_grid_barrier(device, 8, "relaxed")


@racy("y_ptr", "read/write", "the barrier opens at half of the arrivals; " + EARLY)
def grid_barrier_for_half_of_the_programs(device):
    _through_grid_barrier(device, 4, "acq_rel")


@triton.jit
def jacobi_kernel(a_ptr, b_ptr, count_ptr, n, STEPS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    for step in tl.static_range(STEPS):
        if step % 2 == 0:
            source, target = a_ptr, b_ptr
        else:
            source, target = b_ptr, a_ptr
        if SHIFT and step == 1:
            target = b_ptr
        left = tl.load(source + i - 1, (i > 0) & (i < n), other=0.0)
        right = tl.load(source + i + 1, i < n - 1, other=0.0)
        tl.store(target + i, left + right, i < n)
        _grid_barrier(count_ptr, (step + 1) * tl.num_programs(0), "acq_rel")


@racy("b_ptr", "read/write", "the second step writes the buffer whose neighbours it reads: the parity is wrong")
def double_buffer_of_wrong_parity(device):
    a = integers(100).to(device)
    count = torch.zeros(1, dtype=torch.int32, device=device)
    jacobi_kernel[(4,)](a, torch.zeros_like(a), count, 100, STEPS=3, SHIFT=True, BLOCK=32)


@triton.jit
def flag_kernel(
    x_ptr,
    data_ptr,
    flag_ptr,
    out_ptr,
    BLOCK: tl.constexpr,
    SET: tl.constexpr,
    WAIT: tl.constexpr,
    SCOPE: tl.constexpr,
    LATE: tl.constexpr,
):
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    if pid == 0:
        if LATE:
            tl.atomic_xchg(flag_ptr, 1, sem=SET, scope=SCOPE)
        tl.store(data_ptr + cols, tl.load(x_ptr + cols) + 5)
        tl.debug_barrier()
        if not LATE:
            tl.atomic_xchg(flag_ptr, 1, sem=SET, scope=SCOPE)
    else:
        while tl.atomic_add(flag_ptr, 0, sem=WAIT, scope=SCOPE) == 0:
            pass
        tl.debug_barrier()
        tl.store(out_ptr + pid * BLOCK + cols, tl.load(data_ptr + cols))


def _through_a_flag(device, set_by, waited_by, scope="gpu", late=False):
    x = integers(32).to(device)
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    out = torch.zeros(4, 32, device=device)
    flag_kernel[(4,)](x, torch.zeros_like(x), flag, out, BLOCK=32, SET=set_by, WAIT=waited_by, SCOPE=scope, LATE=late)


@racy("data_ptr", "read/write", "a relaxed flag orders no other memory: it may be seen before the data")
def flag_relaxed_on_both_sides(device):
    _through_a_flag(device, "relaxed", "relaxed")


@racy("data_ptr", "read/write", "without an acquire the consumer may have loaded the data before it saw the flag")
def flag_released_never_acquired(device):
    _through_a_flag(device, "release", "relaxed")


@racy("data_ptr", "read/write", "without a release the flag may be seen before the data is")
def flag_acquired_never_released(device):
    _through_a_flag(device, "relaxed", "acquire")


@racy("data_ptr,flag_ptr", "read/write,atomic/atomic", 'scope="cta" orders threads of one program, not programs')
def flag_of_the_block_only(device):
    _through_a_flag(device, "release", "acquire", scope="cta")


@racy("data_ptr", "read/write", "the flag is set before the data is stored")
def flag_set_too_early(device):
    _through_a_flag(device, "release", "acquire", late=True)


@triton.jit
def polled_kernel(data_ptr, flag_ptr, out_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    if pid == 0:
        tl.store(data_ptr + cols, cols.to(tl.float32))
        tl.debug_barrier()
        tl.atomic_xchg(flag_ptr, 1, sem="release")
    else:
        while tl.load(flag_ptr, volatile=True) == 0:
            pass
        tl.debug_barrier()
        tl.store(out_ptr + pid * BLOCK + cols, tl.load(data_ptr + cols))


@racy(
    "data_ptr,flag_ptr",
    "read/write,atomic/read",
    "a volatile load is no acquire: the data may be loaded before the flag",
)
def flag_polled_by_a_volatile_load(device):
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    polled_kernel[(3,)](torch.zeros(16, device=device), flag, torch.zeros(3, 16, device=device), BLOCK=16)


@triton.jit
def stream_k_kernel(x_ptr, part_ptr, flag_ptr, out_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)  # program 0 owns the tile; the others help
    cols = tl.arange(0, BLOCK)
    if pid > 0:
        tl.store(part_ptr + pid * 2 * BLOCK + cols, tl.load(x_ptr + pid * BLOCK + cols))
        tl.debug_barrier()
        tl.atomic_xchg(flag_ptr + pid, 1, sem="release")
        tl.store(part_ptr + (pid * 2 + 1) * BLOCK + cols, tl.load(x_ptr + pid * BLOCK + cols) * 2)
    else:
        total = tl.load(x_ptr + cols)
        for helper in range(1, tl.num_programs(0)):
            while tl.atomic_add(flag_ptr + helper, 0, sem="acquire") == 0:
                pass
            tl.debug_barrier()
            total += tl.load(part_ptr + helper * 2 * BLOCK + cols)
            total += tl.load(part_ptr + (helper * 2 + 1) * BLOCK + cols)
        tl.store(out_ptr + cols, total)


@racy("part_ptr", "read/write", "a helper sets its flag after the first of the two halves that are read behind it")
def stream_k_flag_after_half(device):
    x = integers(4, 32).to(device)
    flags = torch.zeros(4, dtype=torch.int32, device=device)
    stream_k_kernel[(4,)](x, torch.zeros(4, 2, 32, device=device), flags, torch.zeros(32, device=device), BLOCK=32)


@triton.jit
def initialised_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    if pid == 0:
        tl.store(out_ptr + cols, tl.zeros((BLOCK,), tl.float32))
    tl.debug_barrier()
    tl.atomic_add(out_ptr + cols, tl.load(x_ptr + pid * BLOCK + cols), sem="relaxed")


@racy("out_ptr", "atomic/write", "the first program may zero the sum after others have added to it")
def zeroed_by_the_first_program(device):
    initialised_kernel[(6,)](integers(6, 32).to(device), torch.empty(32, device=device), BLOCK=32)


@triton.jit
def mean_kernel(x_ptr, total_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n, other=0.0)
    tl.atomic_add(total_ptr, tl.sum(x))
    tl.store(out_ptr + i, x * n - tl.load(total_ptr), i < n)


@racy("total_ptr", "atomic/read", "the sum is loaded while other programs may still add to it")
def sum_read_while_it_grows(device):
    x = integers(100).to(device)
    mean_kernel[(4,)](x, torch.zeros(1, device=device), torch.zeros_like(x), 100, BLOCK=32)


@triton.jit
def block_scope_sum_kernel(x_ptr, dw_ptr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    tl.atomic_add(dw_ptr + cols, tl.load(x_ptr + tl.program_id(0) * BLOCK + cols), sem="relaxed", scope="cta")


@racy("dw_ptr", "atomic/atomic", 'with scope="cta" two programs\' additions need not be atomic to each other')
def sum_by_atomics_of_the_block(device):
    block_scope_sum_kernel[(6,)](integers(6, 32).to(device), torch.zeros(32, device=device), BLOCK=32)


@triton.jit
def _store(address):
    tl.inline_asm_elementwise(
        "st.relaxed.gpu.global.u32 [$1], 1; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _fence(SCOPE: tl.constexpr):
    tl.inline_asm_elementwise("fence." + SCOPE + "; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def stored_flag_kernel(data_ptr, flag_ptr, out_ptr, FENCE: tl.constexpr, BLOCK: tl.constexpr):
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    if pid == 0:
        tl.store(data_ptr + cols, cols + 5)
        tl.debug_barrier()
        if FENCE != "":
            _fence(FENCE)
        _store(flag_ptr.to(tl.int64))
    else:
        while tl.atomic_add(flag_ptr, 0, sem="acquire") == 0:
            pass
        tl.debug_barrier()
        tl.store(out_ptr + pid * BLOCK + cols, tl.load(data_ptr + cols))


def _stored(device, fence):
    data, flag, out = (torch.zeros(n, dtype=torch.int32, device=device) for n in (32, 1, 128))
    stored_flag_kernel[(4,)](data, flag, out, FENCE=fence, BLOCK=32)


@racy("data_ptr", "read/write", "inline assembly stores the flag relaxed: it may be seen before the data")
def flag_stored_relaxed_in_assembly(device):
    _stored(device, "")


@racy("data_ptr", "read/write", "the fence before the flag is one of the block")
def flag_stored_behind_a_fence_of_the_block(device):
    _stored(device, "acq_rel.cta")


@racy("data_ptr", "read/write", "the fence before the flag is between proxies, and orders nothing for other programs")
def flag_stored_behind_a_fence_of_proxies(device):
    _stored(device, "proxy.async")


@triton.jit
def atomic_flag_kernel(
    x_ptr, data_ptr, flag_ptr, out_ptr, BLOCK: tl.constexpr, STORE: tl.constexpr, LOAD: tl.constexpr, POLL: tl.constexpr
):
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    if pid == 0:
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


def _through_a_stored_flag(device, store, load, poll):
    out, flag = torch.zeros(4, 32, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    data = torch.zeros(32, device=device)
    atomic_flag_kernel[(4,)](integers(32).to(device), data, flag, out, BLOCK=32, STORE=store, LOAD=load, POLL=poll)


@racy("data_ptr", "read/write", "the flag is stored in no order with the data before it")
def flag_stored_relaxed(device):
    _through_a_stored_flag(device, "relaxed", "acquire", False)


@racy("data_ptr", "read/write", "the flag is loaded in no order with the data after it")
def flag_loaded_relaxed(device):
    _through_a_stored_flag(device, "release", "relaxed", False)


@racy("data_ptr", "read/write", "the flag is polled in no order with the data after it")
def flag_polled_relaxed(device):
    _through_a_stored_flag(device, "release", "relaxed", True)
