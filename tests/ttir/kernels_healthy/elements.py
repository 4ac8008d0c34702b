"""Functions of single elements: that branch, in reductions and scans, of one bit, and in assembly."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import Check, healthy, integers


@triton.jit
def order_of(a, b):
    if a < b:
        return -1
    elif a == b:
        return 0
    else:
        return 1


@triton.jit
def orders_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.map_elementwise(order_of, tl.load(x_ptr + i, i < n), tl.load(y_ptr + i, i < n))
    tl.store(out_ptr + i, found, i < n)


@healthy("each element of a mapped function returns on a way of its own")
def elements_that_return_early(device):
    x, y = integers(100, seed=1).int(), integers(100, seed=2).int()
    out = torch.empty(100, dtype=torch.int32, device=device)
    orders_kernel[(4,)](x.to(device), y.to(device), out, 100, BLOCK=32)
    return [Check(out, torch.sign(x - y))]


@triton.jit
def halvings(n, other):
    rounds = 0
    while n > 1:
        n = n // 2
        rounds += 1
    return rounds, other, n, -other


@triton.jit
def halvings_kernel(x_ptr, rounds_ptr, rest_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    rounds, rest = tl.map_elementwise(halvings, tl.load(x_ptr + i), pack=2)
    tl.store(rounds_ptr + i, rounds)
    tl.store(rest_ptr + i, rest)


@healthy("pairs of elements go round a loop as often as the first of them says")
def pairs_that_go_round(device):
    x = torch.arange(1, 65, dtype=torch.int32)
    rounds, rest = (torch.empty(64, dtype=torch.int32, device=device) for _ in range(2))
    halvings_kernel[(1,)](x.to(device), rounds, rest, BLOCK=64)
    first, second = x[::2], x[1::2]
    lengths = torch.tensor([int(n).bit_length() - 1 for n in first], dtype=torch.int32)
    ones = torch.ones_like(first)
    return [
        Check(rounds, torch.stack([lengths, second], 1).ravel()),
        Check(rest, torch.stack([ones, -second], 1).ravel()),
    ]


@triton.jit
def larger(a, b):
    found = b
    if a > b:
        found = a
    return found


@triton.jit
def largest_kernel(x_ptr, out_ptr, so_far_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(out_ptr, tl.reduce(x, 0, larger))
    tl.store(so_far_ptr + tl.arange(0, BLOCK), tl.associative_scan(x, 0, larger))


@healthy("the function of a reduction and of a scan branches")
def largest_by_branches(device):
    x, out = integers(64, low=-50), torch.empty(1, device=device)
    so_far = torch.empty(64, device=device)
    largest_kernel[(1,)](x.to(device), out, so_far, BLOCK=64)
    return [Check(out, x.max().view(1)), Check(so_far, x.cummax(0).values)]


@triton.jit
def one_bit_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK)) > 0
    tl.store(out_ptr, tl.sum(x, dtype=tl.int1).to(tl.int32))
    tl.store(out_ptr + 1, tl.sum(x))
    tl.store(out_ptr + 2 + tl.arange(0, BLOCK), tl.cumsum(x, 0, dtype=tl.int1).to(tl.int32))


@healthy("sums of one bit wrap: they say whether a number is odd")
def sums_of_one_bit(device):
    x = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1])
    out = torch.empty(10, dtype=torch.int32, device=device)
    one_bit_kernel[(1,)](x.to(device), out, BLOCK=8)
    return [Check(out, torch.cat([x.sum().view(1) % 2, x.sum().view(1), x.cumsum(0) % 2]).int())]


@triton.jit
def to_eight_bits_kernel(x_ptr, signed_ptr, unsigned_ptr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + cols)
    tl.store(signed_ptr + cols, x.to(tl.int8))
    tl.store(unsigned_ptr + cols, x.to(tl.uint8))


@healthy("floats beyond 8 bits leave the low ones of 16, at whose ends they stop")
def floats_to_eight_bits(device):
    x = torch.tensor([128, 127.6, -129, 200, 255.9, 300, 70000, -70000])
    signed, unsigned = (torch.zeros(8, dtype=dtype, device=device) for dtype in (torch.int8, torch.uint8))
    to_eight_bits_kernel[(1,)](x.to(device), signed, unsigned, BLOCK=8)
    wrapped = torch.tensor([-128, 127, 127, -56, -1, 44, -1, 0], dtype=torch.int8)
    return [Check(signed, wrapped), Check(unsigned, torch.tensor([128, 127, 0, 200, 255, 44, 255, 0]).byte())]


@triton.jit
def eight_bit_pairs_kernel(x_ptr, pair_ptr, back_ptr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    low, high = tl.load(x_ptr + 2 * cols), tl.load(x_ptr + 2 * cols + 1)
    pair = tl.inline_asm_elementwise(
        "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [low, high], dtype=tl.int16, is_pure=True, pack=1
    )
    tl.store(pair_ptr + cols, pair)
    both = tl.inline_asm_elementwise(
        "cvt.rn.f16x2.e4m3x2 $0, $1;", "=r,h", [pair], dtype=tl.int32, is_pure=True, pack=1
    )
    tl.store(back_ptr + cols, both)


@healthy("pairs of floats of 8 bits in inline assembly, and back")
def pairs_of_eight_bits(device):
    x = torch.cat([torch.linspace(-440, 440, 120), torch.tensor([0.0, -0.0, 2.0**-10, -(2.0**-9), 500, -1e6, 0.3, 17])])
    pair, back = (torch.zeros(64, dtype=dtype, device=device) for dtype in (torch.int16, torch.int32))
    eight_bit_pairs_kernel[(1,)](x.to(device), pair, back, BLOCK=64)
    small = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    return [Check(pair, small.view(torch.int16)), Check(back, small.half().view(torch.int32))]
