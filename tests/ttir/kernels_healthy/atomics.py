"""Atomics in every mode, and sums that they make right."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import Check, healthy, integers, normal


@triton.jit
def modes_kernel(x_ptr, out_ptr, n, MODE: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    x = tl.load(x_ptr + i, mask, other=0)
    place = out_ptr + tl.arange(0, BLOCK)
    if MODE == "add":
        tl.atomic_add(place, x, mask)
    elif MODE == "max":
        tl.atomic_max(place, x, mask)
    elif MODE == "min":
        tl.atomic_min(place, x, mask)
    elif MODE == "and":
        tl.atomic_and(place, x, mask)
    elif MODE == "or":
        tl.atomic_or(place, x, mask)
    else:
        tl.atomic_xor(place, x, mask)


def _folded(device, mode, x, start):
    """All rows of 16 of x (the last one short) folded into a start value, by the kernel and by torch."""
    combine = {"add": torch.add, "max": torch.maximum, "min": torch.minimum, "and": torch.bitwise_and,
               "or": torch.bitwise_or, "xor": torch.bitwise_xor}[mode]  # fmt: skip
    expected = torch.full((16,), start).to(x.dtype)
    out = expected.clone().to(device)
    for row in x.split(16):
        expected[: len(row)] = combine(expected[: len(row)], row)
    modes_kernel[(triton.cdiv(len(x), 16),)](x.to(device), out, len(x), MODE=mode, BLOCK=16)
    return [Check(out, expected)]


@healthy("float32 additions of whole numbers, exact in any order")
def atomic_add_float32(device):
    return _folded(device, "add", integers(90), 3.0)


@healthy("float64 additions")
def atomic_add_float64(device):
    return _folded(device, "add", integers(90, dtype=torch.float64), 0.5)


@healthy("float16 additions of small whole numbers, exact in any order")
def atomic_add_float16(device):
    return _folded(device, "add", integers(90, dtype=torch.float16), 1.0)


@healthy("bfloat16 additions: 8 bits hold the sums of six numbers below 8")
def atomic_add_bfloat16(device):
    return _folded(device, "add", integers(90, dtype=torch.bfloat16), 1.0)


@healthy("int32 additions that overflow, two's complement")
def atomic_add_int32(device):
    return _folded(device, "add", integers(90, low=2**29, high=2**31, dtype=torch.int32), 2**31 - 1)


@healthy("int64 additions")
def atomic_add_int64(device):
    return _folded(device, "add", integers(90, low=-(2**40), high=2**40, dtype=torch.int64), 5)


@healthy("signed maximum")
def atomic_max_int32(device):
    return _folded(device, "max", integers(90, low=-1000, high=1000, dtype=torch.int32), -7)


@healthy("signed minimum of 64 bits")
def atomic_min_int64(device):
    return _folded(device, "min", integers(90, low=-(2**40), high=2**40, dtype=torch.int64), 9)


@healthy("float maximum of both signs, which Triton makes of integer maxima and unsigned minima")
def atomic_max_float32(device):
    return _folded(device, "max", normal(90), -0.5)


@healthy("float minimum of both signs")
def atomic_min_float32(device):
    return _folded(device, "min", normal(90), 0.25)


@healthy("bitwise and")
def atomic_and_int32(device):
    return _folded(device, "and", integers(90, low=-(2**31), high=2**31, dtype=torch.int64).to(torch.int32), -1)


@healthy("bitwise or")
def atomic_or_int32(device):
    return _folded(device, "or", integers(90, low=0, high=2**20, dtype=torch.int32), 0)


@healthy("exclusive or of 64 bits")
def atomic_xor_int64(device):
    return _folded(device, "xor", integers(90, low=-(2**40), high=2**40, dtype=torch.int64), 3)


@triton.jit
def unsigned_kernel(x_ptr, largest_ptr, smallest_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    tl.atomic_max(largest_ptr, tl.max(x))
    tl.atomic_min(smallest_ptr + tl.arange(0, BLOCK), x)


@healthy("unsigned maximum and minimum: the bits of -1 are the largest")
def atomic_max_uint32(device):
    bits = torch.tensor([5, -1, 7, 2**31 - 1, -(2**31), 12, 3, 4] * 2, dtype=torch.int32)
    bits[8:] += 1
    largest = torch.zeros(1, dtype=torch.int32, device=device)
    smallest = torch.full((8,), -1, dtype=torch.int32, device=device)
    unsigned_kernel[(2,)](
        bits.to(device).view(torch.uint32), largest.view(torch.uint32), smallest.view(torch.uint32), BLOCK=8
    )
    wide = (bits.long() & 0xFFFFFFFF).view(2, 8)
    expected = wide.amin(0)
    signed = torch.where(expected >= 2**31, expected - 2**32, expected)
    return [Check(largest, torch.tensor([-1], dtype=torch.int32)), Check(smallest, signed.to(torch.int32))]


@triton.jit
def bitcast_max_kernel(x_ptr, bits_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    largest = tl.max(tl.abs(tl.load(x_ptr + i, i < n, other=0.0)))
    tl.atomic_max(bits_ptr.to(tl.pointer_type(tl.int32), bitcast=True), largest.to(tl.int32, bitcast=True))


@healthy("maximum of floats >= 0 through the integers of their bits, the pointer bitcast")
def atomic_max_by_bitcast(device):
    x, amax = normal(300), torch.zeros(1, device=device)
    bitcast_max_kernel[(5,)](x.to(device), amax, 300, BLOCK=64)
    return [Check(amax, x.abs().max().view(1))]


@triton.jit
def exchange_kernel(word_ptr, old_ptr):
    pid = tl.program_id(0)
    tl.store(old_ptr + pid, tl.atomic_xchg(word_ptr, pid + 1))


@healthy("exchanges form a chain: the old values and the last one are all values, in an order that varies")
def atomic_xchg_chain(device):
    word, old = torch.zeros(1, dtype=torch.int32, device=device), torch.zeros(8, dtype=torch.int32, device=device)
    exchange_kernel[(8,)](word, old)
    return [Check(torch.cat([old, word]).sort().values, torch.arange(9, dtype=torch.int32))]


@triton.jit
def product_kernel(x_ptr, out_ptr):
    x = tl.load(x_ptr + tl.program_id(0))
    bits = out_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    old = tl.atomic_or(bits, 0)
    new = (old.to(tl.float32, bitcast=True) * x).to(tl.int32, bitcast=True)
    seen = tl.atomic_cas(bits, old, new)
    while seen != old:
        old = seen
        new = (old.to(tl.float32, bitcast=True) * x).to(tl.int32, bitcast=True)
        seen = tl.atomic_cas(bits, old, new)


@healthy("a product by a loop over CAS on the bits; powers of two, exact in any order")
def atomic_product_by_cas(device):
    x, out = 2.0 ** integers(8, low=-3, high=4), torch.ones(1, device=device)
    product_kernel[(8,)](x.to(device), out)
    return [Check(out, x.prod().view(1))]


@triton.jit
def winner_kernel(owner_ptr, won_ptr):
    pid = tl.program_id(0)
    old = tl.atomic_cas(owner_ptr, -1, pid, sem="relaxed")
    tl.store(won_ptr + pid, (old == -1).to(tl.int32))


@healthy("CAS lets exactly one program win")
def atomic_cas_of_one_winner(device):
    owner, won = (
        torch.full((1,), -1, dtype=torch.int32, device=device),
        torch.zeros(8, dtype=torch.int32, device=device),
    )
    winner_kernel[(8,)](owner, won)
    return [Check(won.sum().view(1), torch.ones(1, dtype=torch.int64)), Check(won.argmax().view(1), owner.cpu().long())]


@triton.jit
def returned_kernel(count_ptr, seen_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    old = tl.atomic_add(count_ptr + tl.zeros((BLOCK,), tl.int32), 1, sem="relaxed")
    tl.store(seen_ptr + i, old)


@healthy("64 lanes add to one counter: each gets another old value")
def atomic_add_returns_each_value_once(device):
    count, seen = torch.zeros(1, dtype=torch.int32, device=device), torch.zeros(64, dtype=torch.int32, device=device)
    returned_kernel[(4,)](count, seen, BLOCK=16)
    return [
        Check(seen.sort().values, torch.arange(64, dtype=torch.int32)),
        Check(count, torch.tensor([64], dtype=torch.int32)),
    ]


@triton.jit
def histogram_kernel(x_ptr, count_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n, other=0)
    tl.atomic_add(count_ptr + x, 1, i < n, sem="relaxed")


@healthy("a histogram by an atomic an element, duplicates within a program included")
def histogram_by_atomics(device):
    x, counts = integers(300, low=0, high=9, dtype=torch.int32), torch.zeros(9, dtype=torch.int32, device=device)
    histogram_kernel[(5,)](x.to(device), counts, 300, BLOCK=64)
    return [Check(counts, x.bincount(minlength=9).to(torch.int32))]


@triton.jit
def embedding_gradient_kernel(index_ptr, dy_ptr, dw_ptr, D: tl.constexpr):
    token = tl.program_id(0)
    cols = tl.arange(0, D)
    word = tl.load(index_ptr + token)
    tl.atomic_add(dw_ptr + word * D + cols, tl.load(dy_ptr + token * D + cols))


@healthy("gradients of repeated words added by atomics")
def embedding_gradient(device):
    index, dy, dw = torch.tensor([3, 1, 4, 1, 5, 0, 2, 6]), integers(8, 16), torch.zeros(7, 16, device=device)
    embedding_gradient_kernel[(8,)](index.to(device), dy.to(device), dw, D=16)
    return [Check(dw, torch.zeros(7, 16).index_add(0, index, dy))]


@triton.jit
def split_k_kernel(a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K, BLOCK_K: tl.constexpr):
    rows, cols = tl.arange(0, M), tl.arange(0, N)
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    a = tl.load(a_ptr + rows[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + cols[None, :])
    tl.atomic_add(c_ptr + rows[:, None] * N + cols[None, :], tl.dot(a, b), sem="relaxed")


@healthy("split-K by atomics over a C that the host zeroed")
def split_k_by_atomics(device):
    a, b, c = integers(16, 64, seed=1), integers(64, 16, seed=2), torch.zeros(16, 16, device=device)
    split_k_kernel[(4,)](a.to(device), b.to(device), c, M=16, N=16, K=64, BLOCK_K=16)
    return [Check(c, a @ b)]


@triton.jit
def weight_gradient_kernel(x_ptr, dy_ptr, dw_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + cols, cols < N, other=0.0)
    dy = tl.load(dy_ptr + row * N + cols, cols < N, other=0.0)
    tl.atomic_add(dw_ptr + cols, x * dy, cols < N)


@triton.jit
def scale_kernel(dw_ptr, out_ptr, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(dw_ptr + i, i < N) * 2, i < N)


@healthy("atomics in one kernel, plain loads of the sums in the next: the boundary of kernels orders them")
def weight_gradient_then_a_second_kernel(device):
    x, dy = integers(12, 50, seed=1), integers(12, 50, seed=2)
    dw, out = torch.zeros(2, 50, device=device)
    weight_gradient_kernel[(12,)](x.to(device), dy.to(device), dw, 50, BLOCK=64)
    scale_kernel[(4,)](dw, out, 50, BLOCK=16)
    return [Check(dw, (x * dy).sum(0)), Check(out, 2 * (x * dy).sum(0))]


@triton.jit
def block_scope_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr, BINS: tl.constexpr):
    i = tl.arange(0, BLOCK)
    pid = tl.program_id(0)
    x = tl.load(x_ptr + pid * BLOCK + i)
    tl.atomic_add(out_ptr + pid * BINS + x, 1, sem="relaxed", scope="cta")


@healthy('scope="cta" is enough where each program has sums of its own')
def sums_of_each_program_by_atomics_of_the_block(device):
    x, out = integers(4, 64, low=0, high=8, dtype=torch.int32), torch.zeros(4, 8, dtype=torch.int32, device=device)
    block_scope_kernel[(4,)](x.to(device), out, BLOCK=64, BINS=8)
    return [Check(out, torch.nn.functional.one_hot(x.long(), 8).sum(1).to(torch.int32))]


@triton.jit
def system_scope_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    tl.atomic_add(out_ptr, tl.sum(x), sem="acq_rel", scope="sys")


@healthy('scope="sys" is wider than needed')
def sum_by_atomics_of_the_system(device):
    x, out = integers(6, 32), torch.zeros(1, device=device)
    system_scope_kernel[(6,)](x.to(device), out, BLOCK=32)
    return [Check(out, x.sum().view(1))]


@triton.autotune([triton.Config({"BLOCK": b}) for b in (32, 64)], key=["n"], reset_to_zero=["total_ptr"])
@triton.jit
def tuned_sum_kernel(x_ptr, total_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(total_ptr, tl.sum(tl.load(x_ptr + i, i < n, other=0.0)))


@healthy("a sum whose configurations are tried with reset_to_zero")
def autotune_with_reset(device):
    x, total = integers(200, low=1, high=5), torch.zeros(1, device=device)
    tuned_sum_kernel[lambda meta: (triton.cdiv(200, meta["BLOCK"]),)](x.to(device), total, 200)
    return [Check(total, x.sum().view(1))]


@triton.autotune([triton.Config({"BLOCK": b}) for b in (32, 64)], key=["n"], restore_value=["x_ptr"])
@triton.jit
def tuned_scale_kernel(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + i, tl.load(x_ptr + i, i < n) * 3, i < n)


@healthy("in place, with restore_value")
def autotune_with_restored_value(device):
    x = integers(100, low=1, high=5)
    scaled = x.to(device, copy=True)
    tuned_scale_kernel[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](scaled, 100)
    return [Check(scaled, 3 * x)]


@triton.autotune([triton.Config({"BLOCK": b}) for b in (32, 64)], key=["n"], reset_to_zero=["dw_ptr", "db_ptr"])
@triton.jit
def tuned_gradients_kernel(x_ptr, dw_ptr, db_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n, other=0.0)
    tl.atomic_add(dw_ptr, tl.sum(x * x))
    tl.atomic_add(db_ptr, tl.sum(x))


@healthy("two sums in one tensor, both reset between trials")
def autotune_with_both_sums_reset(device):
    x, (dw, db) = integers(100, low=1, high=5), torch.zeros(2, 1, device=device)
    tuned_gradients_kernel[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](x.to(device), dw, db, 100)
    return [Check(dw, x.square().sum().view(1)), Check(db, x.sum().view(1))]


@triton.jit
def widths_kernel(words_ptr, halves_ptr):
    pid = tl.program_id(0)
    tl.atomic_add(words_ptr, pid + 1)
    tl.atomic_add(halves_ptr + 2 + pid % 2, pid + 1)


@triton.jit
def afterwards_kernel(halves_ptr):
    tl.atomic_add(halves_ptr, 1)


@healthy("atomics of 64 and of 32 bits on words of their own, and on the same one by launches of their own")
def words_and_halves_counted_apart(device):
    words = torch.zeros(2, dtype=torch.int64, device=device)
    widths_kernel[(6,)](words, words.view(torch.int32))
    afterwards_kernel[(4,)](words.view(torch.int32))
    return [Check(words, torch.tensor([21 + 4, 9 + (12 << 32)]))]
