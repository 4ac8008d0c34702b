"""Probe kernels: a few lines of Triton each, by which stock and sped-up interpretation are compared.

All take pointers to N inputs x and y of one dtype, to 2 N outputs of float32, and a number n < N.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def masks_kernel(x_ptr, y_ptr, out_ptr, n, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at, mask=at < n, other=1)
    y = tl.load(y_ptr + n - 1 - at, mask=(at < n) & (at != 2))
    tl.store(out_ptr + at, x.to(tl.float32), mask=(at > 0) | (n == 1))
    tl.store(out_ptr + N + at, y.to(tl.float32), mask=at < n - 1)


@triton.jit
def chained_kernel(x_ptr, y_ptr, out_ptr, n, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, tl.load(x_ptr + at).to(tl.float32), mask=1 <= at < n)


@triton.jit
def chained_assignment_kernel(x_ptr, y_ptr, out_ptr, n, N: tl.constexpr):
    at = tl.arange(0, N)
    inside = 1 <= at < n
    tl.store(out_ptr + at, tl.where(inside, 1.0, 2.0))


@triton.jit
def one_bit_kernel(x_ptr, y_ptr, out_ptr, n, N: tl.constexpr):
    at = tl.arange(0, N)
    x, y = tl.load(x_ptr + at) > 0, tl.load(y_ptr + at) > 0
    tl.store(out_ptr + at, (x + y).to(tl.float32))
    tl.store(out_ptr + N + at, (x * y).to(tl.float32) + (x & ~y).to(tl.float32) * 2 + (x ^ y).to(tl.float32) * 4)


@triton.jit
def arithmetic_kernel(x_ptr, y_ptr, out_ptr, n, N: tl.constexpr):
    at = tl.arange(0, N)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    tl.store(out_ptr + at, (x * y + x - y).to(tl.float32))
    tl.store(out_ptr + N + at, (x * 3 - n).to(tl.float32) + (-y).to(tl.float32))


@triton.jit
def comparisons_kernel(x_ptr, y_ptr, out_ptr, n, N: tl.constexpr):
    at = tl.arange(0, N)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    tl.store(out_ptr + at, tl.where(x < y, 1.0, 0.0) + tl.where(x >= y, 2.0, 0.0) + tl.where(x == y, 4.0, 0.0))
    tl.store(out_ptr + N + at, tl.where((x != y) & (at < n), x, y).to(tl.float32))


@triton.jit
def division_kernel(x_ptr, y_ptr, out_ptr, n, N: tl.constexpr):
    at = tl.arange(0, N)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    tl.store(out_ptr + at, x / y)
    tl.store(out_ptr + N + at, (at // 3 + at % n + tl.cdiv(n, 2)).to(tl.float32))


@triton.jit
def bits_kernel(x_ptr, y_ptr, out_ptr, n, N: tl.constexpr):
    at = tl.arange(0, N)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    tl.store(out_ptr + at, ((x >> 1) + (x << 2) + (x | y)).to(tl.float32))
    tl.store(out_ptr + N + at, ((x // (y | 1)) + (x % (y | 1)) + (x & n)).to(tl.float32))


@triton.jit
def casts_kernel(x_ptr, y_ptr, out_ptr, n, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at).to(tl.float32)
    tl.store(out_ptr + at, x.to(tl.bfloat16).to(tl.float32) + x.to(tl.float16).to(tl.float32))
    tl.store(out_ptr + N + at, (at.to(tl.float32).to(tl.int32, bitcast=True) >> 3).to(tl.float32))


@triton.jit
def bfloat16_kernel(x_ptr, y_ptr, out_ptr, n, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, (tl.load(x_ptr + at).to(tl.bfloat16) + tl.load(y_ptr + at).to(tl.bfloat16)).to(tl.float32))


@triton.jit
def bfloat16_sum_kernel(x_ptr, y_ptr, out_ptr, n, N: tl.constexpr):
    tl.store(out_ptr, tl.max(tl.load(x_ptr + tl.arange(0, N)).to(tl.bfloat16), axis=0).to(tl.float32))


@triton.jit
def nan_kernel(x_ptr, y_ptr, out_ptr, n, N: tl.constexpr):
    at = tl.arange(0, N)
    x, y = tl.load(x_ptr + at).to(tl.float32), tl.load(y_ptr + at).to(tl.float32)
    x = tl.where(at == 1, float("nan"), x)
    tl.store(out_ptr + at, tl.maximum(x, y) - tl.minimum(y, x))
    tl.store(out_ptr + N + at, tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def reductions_kernel(x_ptr, y_ptr, out_ptr, n, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at).to(tl.float32)
    square = x[:, None] * at[None, :]
    tl.store(out_ptr + at, tl.sum(square, axis=0) + tl.max(square, axis=1) + tl.argmax(square, axis=1))
    tl.store(out_ptr + N + at, tl.cumsum(x, axis=0) + tl.min(x, axis=0))


@triton.jit
def _halving(a, b):
    return a * 0.5 + b


@triton.jit
def own_reduction_kernel(x_ptr, y_ptr, out_ptr, n, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N)).to(tl.float32)
    tl.store(out_ptr, tl.reduce(x, 0, _halving))
    tl.store(out_ptr + tl.arange(0, N) + 1, tl.associative_scan(x, 0, _halving))


@triton.jit
def loops_kernel(x_ptr, y_ptr, out_ptr, n, N: tl.constexpr):
    total, steps = 0.0, 0
    for i in range(n):
        total += tl.load(x_ptr + i).to(tl.float32)
    for _ in tl.static_range(2):
        steps += 1
    while steps < n:
        steps += 2
    if tl.load(y_ptr) > 0:
        total = total * 2
    tl.store(out_ptr, total)
    tl.store(out_ptr + 1, total + steps)


@triton.jit
def _both(x, y, SWAPPED: tl.constexpr):
    if SWAPPED:
        return y, x
    return x, y


@triton.jit
def functions_kernel(x_ptr, y_ptr, out_ptr, n, N: tl.constexpr):
    at = tl.arange(0, N)
    x, y = _both(tl.load(x_ptr + at), tl.load(y_ptr + at), SWAPPED=True)
    tl.store(out_ptr + at, tl.sqrt(tl.abs(x.to(tl.float32))) + tl.exp(-tl.abs(y.to(tl.float32))))


@triton.jit
def atomics_kernel(x_ptr, y_ptr, out_ptr, n, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at).to(tl.float32)
    tl.atomic_add(out_ptr + at % 3, x, mask=at < n)
    tl.atomic_max(out_ptr + N + at, x)
    tl.store(out_ptr + 2 * N - 1, tl.atomic_xchg(out_ptr, 2.0))


@triton.jit
def products_kernel(x_ptr, y_ptr, out_ptr, n, N: tl.constexpr):
    at = tl.arange(0, N)
    x, y = tl.load(x_ptr + at).to(tl.float32), tl.load(y_ptr + at).to(tl.float32)
    a = tl.broadcast_to(x[:, None], (N, N)) + at[None, :]
    b = tl.where(at[:, None] <= at[None, :], y[None, :], 0.0)
    tl.store(out_ptr + at, tl.sum(tl.dot(tl.trans(a), b) + tl.dot(a, b.T), axis=1))


@triton.jit
def pointers_kernel(x_ptr, y_ptr, out_ptr, n, N: tl.constexpr):
    at = tl.arange(0, N)
    row = x_ptr + (at % 2)[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(out_ptr + at, tl.sum(tl.load(row).to(tl.float32), axis=1))
    tl.store(out_ptr + N + at, tl.load(y_ptr + tl.abs(tl.load(x_ptr + at).to(tl.int32)) % n).to(tl.float32))


@triton.jit
def shapes_kernel(x_ptr, y_ptr, out_ptr, n, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at).to(tl.float32)
    left, right = tl.split(tl.reshape(x, (N // 2, 2)))
    tl.store(out_ptr + at, tl.interleave(right, left) + tl.reshape(tl.trans(tl.reshape(x, (2, N // 2))), (N,)))
    tl.store(out_ptr + N + at, tl.flip(x))


@triton.jit
def programs_kernel(x_ptr, y_ptr, out_ptr, n, N: tl.constexpr):
    row = tl.program_id(0)
    x = tl.load(x_ptr + row).to(tl.float32)
    if x > 1:
        tl.store(out_ptr + row, x * tl.num_programs(0))
    else:
        tl.store(out_ptr + row, -x)


@triton.jit
def random_kernel(x_ptr, y_ptr, out_ptr, n, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, tl.rand(n, at))


@triton.jit
def fused_kernel(x_ptr, y_ptr, out_ptr, n, N: tl.constexpr):
    at = tl.arange(0, N)
    x, y = tl.load(x_ptr + at).to(tl.float32), tl.load(y_ptr + at).to(tl.float32)
    tl.store(out_ptr + at, tl.fma(x, y, x) + tl.clamp(x, -1.0, 1.0))
    tl.store(out_ptr + N + at, tl.umulhi(at * 1000003, n + at).to(tl.float32))


@triton.jit
def beyond_kernel(x_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    tl.store(x_ptr + at, x + 1.0)


PROBES = {
    "float32": (
        masks_kernel, chained_kernel, chained_assignment_kernel, one_bit_kernel, arithmetic_kernel, comparisons_kernel,
        division_kernel, casts_kernel, bfloat16_kernel, bfloat16_sum_kernel, nan_kernel, reductions_kernel,
        own_reduction_kernel, loops_kernel, functions_kernel, atomics_kernel, products_kernel, pointers_kernel,
        shapes_kernel, programs_kernel, random_kernel, fused_kernel,
    ),
    "float16": (arithmetic_kernel, division_kernel, comparisons_kernel, casts_kernel),
    "bfloat16": (masks_kernel, arithmetic_kernel, casts_kernel, pointers_kernel, comparisons_kernel),
    "int32": (arithmetic_kernel, comparisons_kernel, bits_kernel, one_bit_kernel, pointers_kernel),
    "int64": (arithmetic_kernel, bits_kernel, masks_kernel),
    "uint8": (arithmetic_kernel, bits_kernel, casts_kernel),
}  # fmt: skip
