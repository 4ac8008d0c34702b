"""Healthy kernels of the fourth set: tables, graphs, lists, descriptors, block pointers, sorts, autotuners."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import Check, healthy, integers
from triton.tools.tensor_descriptor import TensorDescriptor


def zeros(device, *sizes, dtype=torch.int32):
    return [torch.zeros(n, dtype=dtype, device=device) for n in sizes]


@triton.jit
def lower_kernel(u_ptr, v_ptr, label_ptr, edges, BLOCK: tl.constexpr):
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    u, v = tl.load(u_ptr + e, e < edges, other=0), tl.load(v_ptr + e, e < edges, other=0)
    a = tl.atomic_or(label_ptr + u, 0, e < edges, sem="relaxed")
    b = tl.atomic_or(label_ptr + v, 0, e < edges, sem="relaxed")
    tl.atomic_min(label_ptr + u, b, e < edges, sem="relaxed")
    tl.atomic_min(label_ptr + v, a, e < edges, sem="relaxed")


# How far labels come in one launch depends on the order, where they end does not: the least one of each component.
@healthy("labels of a graph are read by atomics that change nothing and lowered by atomics, until they are stable")
def labels_lowered_by_atomics(device):
    order = torch.randperm(24, generator=torch.Generator().manual_seed(4))
    u, v = order[:-1].to(torch.int32), order[1:].to(torch.int32)
    keep = torch.arange(23) != 11
    u, v = u[keep].to(device), v[keep].to(device)
    label = torch.arange(24, dtype=torch.int32).to(device)
    for _ in range(12):
        lower_kernel[(3,)](u, v, label, 22, BLOCK=8)
    want = torch.empty(24, dtype=torch.int32)
    want[order[:12]], want[order[12:]] = order[:12].min().int(), order[12:].min().int()
    return [Check(label, want)]


@triton.jit
def insert_and_add_kernel(key_ptr, x_ptr, table_ptr, sum_ptr, SIZE: tl.constexpr):
    p = tl.program_id(0)
    key = tl.load(key_ptr + p)
    slot = (key * 7) % SIZE
    seen = tl.atomic_cas(table_ptr + slot, -1, key, sem="relaxed")
    while (seen != -1) & (seen != key):
        slot = (slot + 1) % SIZE
        seen = tl.atomic_cas(table_ptr + slot, -1, key, sem="relaxed")
    tl.atomic_add(sum_ptr + slot, tl.load(x_ptr + p), sem="relaxed")


@triton.jit
def look_up_kernel(key_ptr, table_ptr, sum_ptr, out_ptr, SIZE: tl.constexpr):
    p = tl.program_id(0)
    key = tl.load(key_ptr + p)
    slot = (key * 7) % SIZE
    while tl.load(table_ptr + slot) != key:
        slot = (slot + 1) % SIZE
    tl.store(out_ptr + p, tl.load(sum_ptr + slot))


# Which slot a key gets depends on the order; what is found under it does not. Plain loads come a kernel later.
@healthy("a hash table: keys are swapped in, values added by atomics, and the next kernel looks them up")
def hash_table_of_sums(device):
    keys = torch.tensor([5, 37, 9, 5, 2, 37, 11, 69], dtype=torch.int32)
    x = torch.arange(100, 108, dtype=torch.int32)
    table = torch.full((32,), -1, dtype=torch.int32, device=device)
    total, out = zeros(device, 32, 8)
    insert_and_add_kernel[(8,)](keys.to(device), x.to(device), table, total, SIZE=32)
    look_up_kernel[(8,)](keys.to(device), table, total, out, SIZE=32)
    return [Check(out, torch.stack([x[keys == k].sum() for k in keys]).to(torch.int32))]


@triton.jit
def swap_in_kernel(x_ptr, bits_ptr, BLOCK: tl.constexpr):
    x = tl.sum(tl.load(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)), 0)
    old = tl.atomic_or(bits_ptr, 0, sem="relaxed")
    new = (old.to(tl.float32, bitcast=True) + x).to(tl.int32, bitcast=True)
    seen = tl.atomic_cas(bits_ptr, old, new, sem="relaxed")
    while seen != old:
        old = seen
        new = (old.to(tl.float32, bitcast=True) + x).to(tl.int32, bitcast=True)
        seen = tl.atomic_cas(bits_ptr, old, new, sem="relaxed")


# Relaxed is enough: the sum is in the very word that is swapped.
@healthy("a float is added to by swapping its bits until nobody came between")
def float_added_by_swaps(device):
    x, total = integers(8, 16), torch.zeros(1, device=device)
    swap_in_kernel[(8,)](x.to(device), total.view(torch.int32), BLOCK=16)
    return [Check(total, x.sum()[None])]


@triton.jit
def push_kernel(bucket_ptr, head_ptr, next_ptr):
    p = tl.program_id(0)
    before = tl.atomic_xchg(head_ptr + tl.load(bucket_ptr + p), p, sem="relaxed")
    tl.store(next_ptr + p, before)


@triton.jit
def walk_kernel(x_ptr, head_ptr, next_ptr, out_ptr):
    bucket = tl.program_id(0)
    p = tl.load(head_ptr + bucket)
    total = p * 0
    while p >= 0:
        total += tl.load(x_ptr + p)
        p = tl.load(next_ptr + p)
    tl.store(out_ptr + bucket, total)


# Nobody reads `next` in the launch that writes it, and each program writes its own place.
@healthy("linked lists: heads are exchanged, what was there is the next one; the next kernel walks along them")
def lists_pushed_by_exchange(device):
    bucket, x = integers(24, low=0, high=3, dtype=torch.int32), integers(24, dtype=torch.int32, seed=1)
    head = torch.full((4,), -1, dtype=torch.int32, device=device)
    after, out = zeros(device, 24, 4)
    push_kernel[(24,)](bucket.to(device), head, after)
    walk_kernel[(4,)](x.to(device), head, after, out)
    return [Check(out, torch.stack([x[bucket == b].sum() for b in range(4)]).to(torch.int32))]


@triton.jit
def add_boxes_kernel(x_ptr, out, STEP: tl.constexpr, BOX: tl.constexpr, N: tl.constexpr):
    row = tl.program_id(0) * STEP
    r, c = tl.arange(0, BOX)[:, None], tl.arange(0, N)[None, :]
    out.atomic_add([row, 0], tl.load(x_ptr + (row + r) * N + c))


# What lies outside of the tensor is not written.
@healthy("boxes of 8 rows every 4 rows are added by a descriptor, atomically; the last one is cut off")
def boxes_added_by_a_descriptor(device):
    x, out = integers(24, 32), torch.zeros(22, 32, device=device)
    add_boxes_kernel[(5,)](x.to(device), TensorDescriptor.from_tensor(out, [8, 32]), STEP=4, BOX=8, N=32)
    twice = ((torch.arange(24) >= 4) & (torch.arange(24) < 20)).float() + 1
    return [Check(out, (x * twice[:, None])[:22])]


@triton.jit
def copy_blocks_kernel(x_ptr, out_ptr, M, N, stride_x, stride_out, T: tl.constexpr):
    row = tl.program_id(0) * T
    x = tl.make_block_ptr(x_ptr, (M, N), (stride_x, 1), (row, 0), (T, T), (1, 0))
    out = tl.make_block_ptr(out_ptr, (M, N), (stride_out, 1), (row, 0), (T, T), (1, 0))
    for _ in range(0, N, T):
        tl.store(out, tl.load(x, boundary_check=(0, 1)) + 1, boundary_check=(0, 1))
        x, out = tl.advance(x, (0, T)), tl.advance(out, (0, T))


# Without the check of columns a tile would reach into the next row's, which another program may have.
@healthy("block pointers that do not divide rows or columns, checked at both borders, to a part of a wider tensor")
def block_pointers_checked_at_borders(device):
    x, wide = integers(50, 30), torch.zeros(50, 40, device=device)
    copy_blocks_kernel[(4,)](x.to(device), wide[:, 5:35], 50, 30, 30, 40, T=16)
    want = torch.zeros(50, 40)
    want[:, 5:35] = x + 1
    return [Check(wide, want)]


@triton.jit
def merge_kernel(x_ptr, phase, blocks, HALF: tl.constexpr):
    first = 2 * tl.program_id(0) + phase
    if first + 1 < blocks:
        i = first * HALF + tl.arange(0, 2 * HALF)
        x = tl.load(x_ptr + i)
        tl.debug_barrier()
        tl.store(x_ptr + i, tl.sort(x))


# Pairs of one launch are disjoint; those of the next one overlap them, and come after.
@healthy("an odd-even sort in place: neighbouring blocks are sorted together, other neighbours in the next launch")
def sorted_in_place_by_phases(device):
    x = integers(96, low=-500, high=500, dtype=torch.int32)
    own = x.to(device, copy=True)
    for phase in range(7):
        merge_kernel[(3,)](own, phase % 2, 6, HALF=16)
    return [Check(own, x.sort().values)]


def clear(arguments):
    arguments["out_ptr"].zero_()


@triton.autotune([triton.Config({"BLOCK": 16}, pre_hook=clear), triton.Config({"BLOCK": 32}, pre_hook=clear)], ["n"])
@triton.jit
def hooked_sum_kernel(x_ptr, out_ptr, n, N: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    x = tl.load(x_ptr + rows * N + tl.arange(0, N)[None, :], rows < n, other=0.0)
    tl.atomic_add(out_ptr + tl.arange(0, N), tl.sum(x, 0))


# Hooks run before every timing and before the launch itself: the caller need not clear.
@healthy("a sum by atomics is tuned, and every configuration's hook clears it")
def tuned_sum_cleared_by_hooks(device):
    x, out = integers(100, 16), torch.full((16,), 5.0, device=device)
    hooked_sum_kernel[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](x.to(device), out, 100, N=16)
    return [Check(out, x.sum(0))]


@triton.autotune(
    [triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})],
    key=["n"],
    restore_value=["p_ptr", "m_ptr"],
    reset_to_zero=["norm_ptr"],
)
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def restored_step_kernel(p_ptr, m_ptr, g_ptr, norm_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (i >= 0) if EVEN else (i < n)
    g = tl.load(g_ptr + i, mask, other=0.0)
    m = tl.load(m_ptr + i, mask, other=0.0) * 2 + g
    tl.store(m_ptr + i, m, mask)
    tl.store(p_ptr + i, tl.load(p_ptr + i, mask, other=0.0) - m, mask)
    tl.atomic_add(norm_ptr, tl.sum(g * g, 0))


@healthy("an optimiser's step is tuned: what it changes is restored, what it adds to is reset, masks by a heuristic")
def tuned_step_restores_all(device):
    p, m, g = (integers(80, seed=s) for s in range(3))
    own_p, own_m, norm = p.to(device, copy=True), m.to(device, copy=True), torch.zeros(1, device=device)
    restored_step_kernel[lambda meta: (triton.cdiv(80, meta["BLOCK"]),)](own_p, own_m, g.to(device), norm, 80)
    return [Check(own_p, p - (2 * m + g)), Check(own_m, 2 * m + g), Check(norm, g.square().sum()[None])]


@triton.jit
def own_counts_kernel(x_ptr, count_ptr, PER: tl.constexpr, BINS: tl.constexpr):
    pid = tl.program_id(0)
    bins = tl.load(x_ptr + pid * PER + tl.arange(0, PER))
    tl.atomic_add(count_ptr + pid * BINS + bins, 1, sem="relaxed", scope="cta")


@triton.jit
def add_counts_kernel(count_ptr, out_ptr, PROGRAMS: tl.constexpr, BINS: tl.constexpr):
    at = tl.arange(0, PROGRAMS)[:, None] * BINS + tl.arange(0, BINS)[None, :]
    tl.store(out_ptr + tl.arange(0, BINS), tl.sum(tl.load(count_ptr + at), 0))


# The scope cta is enough for the threads of one program, whose row nobody else has.
@healthy("atomics of scope cta in a histogram of the program's own, and a second kernel that adds these up")
def atomics_of_a_cta_in_its_own_row(device):
    x, (count, out) = integers(8, 32, low=0, high=8, dtype=torch.int32), zeros(device, 64, 8)
    own_counts_kernel[(8,)](x.to(device), count, PER=32, BINS=8)
    add_counts_kernel[(1,)](count, out, PROGRAMS=8, BINS=8)
    return [Check(out, torch.bincount(x.flatten(), minlength=8).to(torch.int32))]
