"""Healthy kernels of the sixth set: atomics of all kinds, borders put aside, flags all set alike, a table of locks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import Check, healthy, integers


def whole(*values):
    return torch.tensor(values, dtype=torch.int32)


@triton.jit
def any_larger_kernel(x_ptr, any_ptr, limit, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    segment, part = tl.program_id(0), tl.program_id(1)
    x = tl.load(x_ptr + (segment * PARTS + part) * BLOCK + tl.arange(0, BLOCK))
    if tl.max(x, 0) > limit:
        tl.store(any_ptr + segment, 1)


# The milder kind: programs of a segment that find anything all store the same true.
@healthy("whether any number of a segment is larger is stored as a bool by every program that finds one")
def truth_stored_by_all_who_find_it(device):
    x, found = integers(6, 3, 16, low=0, high=100), torch.zeros(6, dtype=torch.bool, device=device)
    any_larger_kernel[(6, 3)](x.to(device), found, 95.5, PARTS=3, BLOCK=16)
    return [Check(found, (x > 95.5).flatten(1).any(1))]


@triton.jit
def save_borders_kernel(x_ptr, border_ptr, BLOCK: tl.constexpr):
    tile, k = tl.program_id(0), tl.arange(0, 2)
    before = tl.load(x_ptr + tile * BLOCK - 2 + k, (k >= 0) & (tile > 0), other=0.0)
    tl.store(border_ptr + 2 * tile + k, before)


@triton.jit
def filter_in_place_kernel(x_ptr, border_ptr, BLOCK: tl.constexpr):
    tile, j = tl.program_id(0), tl.arange(0, BLOCK)
    place = x_ptr + tile * BLOCK + j
    border = tl.load(border_ptr + 2 * tile + tl.minimum(j, 1))
    last = tl.load(border_ptr + 2 * tile + 1)
    one = tl.where(j >= 1, tl.load(place - 1, j >= 1, other=0.0), last)
    two = tl.where(j >= 2, tl.load(place - 2, j >= 2, other=0.0), border)
    total = tl.load(place) + 2 * one + 3 * two
    tl.debug_barrier()
    tl.store(place, total)


# What a tile needs of the one before it was put aside by an earlier launch.
@healthy("a causal filter of three numbers in place, with borders of tiles that a kernel has put aside before")
def filter_in_place_with_borders_put_aside(device):
    x = integers(80)
    own, border = x.to(device, copy=True), torch.empty(5, 2, device=device)
    save_borders_kernel[(5,)](own, border, BLOCK=16)
    filter_in_place_kernel[(5,)](own, border, BLOCK=16)
    padded = torch.cat([torch.zeros(2), x])
    return [Check(own, x + 2 * padded[1:-1] + 3 * padded[:-2])]


@triton.jit
def record_kernel(x_ptr, record_ptr, PER: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0) * PER + tl.arange(0, PER))
    tl.atomic_add(record_ptr, tl.sum(x, 0), sem="relaxed", scope="sys")
    tl.atomic_max(record_ptr + 1, tl.max(x, 0), sem="release")
    tl.atomic_min(record_ptr + 2, tl.min(x, 0), sem="acquire", scope="sys")
    tl.atomic_or(record_ptr + 3 + 0 * x, x, x % 3 == 0, sem="relaxed")
    tl.atomic_and(record_ptr + 4 + 0 * x, x | 0xFF, sem="acq_rel")
    tl.atomic_xor(record_ptr + 5, tl.xor_sum(x, 0), sem="relaxed", scope="gpu")


# A word for each kind, and each kind commutes with itself.
@healthy("sum, maximum, minimum, or, and, exclusive or in one record, by atomics of all orders, lanes at one word too")
def record_of_atomics_of_all_kinds(device):
    x = integers(96, low=1, high=1 << 20, dtype=torch.int32)
    start = whole(0, 0, 1 << 30, 0, -1, 0)
    record, want = start.to(device, copy=True), start.clone()
    record_kernel[(6,)](x.to(device), record, PER=16)
    want[0], want[1], want[2] = x.sum(), x.max(), x.min()
    for value in x:
        want[3] |= torch.where(value % 3 == 0, value, 0)
        want[4] &= value | 0xFF
        want[5] ^= value
    return [Check(record, want)]


@triton.jit
def add_brain_floats_kernel(x_ptr, id_ptr, out_ptr, D: tl.constexpr):
    token, d = tl.program_id(0), tl.arange(0, D)
    tl.atomic_add(out_ptr + tl.load(id_ptr + token) * D + d, tl.load(x_ptr + token * D + d), sem="relaxed")


# Whole numbers below 256 are exact in bfloat16.
@healthy("rows in bfloat16 are added up by atomics of 16 bits")
def rows_of_bfloat16_by_atomics(device):
    x, ids = integers(10, 16, dtype=torch.bfloat16), whole(2, 0, 2, 2, 1, 0, 3, 2, 0, 1)
    out = torch.zeros(4, 16, dtype=torch.bfloat16, device=device)
    add_brain_floats_kernel[(10,)](x.to(device), ids.to(device), out, D=16)
    return [Check(out, torch.zeros(4, 16).index_add(0, ids, x.float()).to(torch.bfloat16))]


@triton.jit
def rows_in_segments_kernel(lut_ptr, col_ptr, val_ptr, b_ptr, c_ptr, lock_ptr, N: tl.constexpr):
    at, n = lut_ptr + 4 * tl.program_id(0), tl.arange(0, N)
    first, lock = tl.load(at + 1), tl.load(at + 3)
    acc = tl.zeros((N,), tl.float32)
    for e in range(first, first + tl.load(at + 2)):
        acc += tl.load(val_ptr + e) * tl.load(b_ptr + tl.load(col_ptr + e) * N + n)
    if lock > 0:
        while tl.atomic_cas(lock_ptr + lock - 1, 0, 1, sem="acquire") == 1:
            pass
        tl.debug_barrier()
    place = c_ptr + tl.load(at) * N + n
    tl.store(place, tl.load(place) + acc)
    if lock > 0:
        tl.debug_barrier()
        tl.atomic_xchg(lock_ptr + lock - 1, 0, sem="release")


# Rows 0 and 2 are in two segments each and have a lock each, row 1 is in one and needs none.
@healthy("a table says which rows of a sparse product are split: those have a lock, the others are added plainly")
def split_rows_with_their_locks(device):
    lut = whole([0, 0, 3, 1], [0, 3, 2, 1], [1, 5, 2, 0], [2, 7, 2, 2], [2, 9, 2, 2])
    col, val, b = whole(3, 1, 0, 2, 3, 1, 4, 4, 0, 2, 1), integers(11, seed=1), integers(5, 16, seed=2)
    c, dense = torch.zeros(3, 16, device=device), torch.zeros(3, 5)
    locks = torch.zeros(2, dtype=torch.int32, device=device)
    rows_in_segments_kernel[(5,)](lut.to(device), col.to(device), val.to(device), b.to(device), c, locks, N=16)
    row = torch.tensor([0] * 5 + [1] * 2 + [2] * 4)
    dense.index_put_((row, col.long()), val, accumulate=True)
    return [Check(c, dense @ b), Check(locks, torch.zeros(2, dtype=torch.int32))]
