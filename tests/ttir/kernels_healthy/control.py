"""Control flow: loops, branches, early returns, calls, functions as arguments."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import Check, healthy, integers


@triton.jit
def early_return_kernel(x_ptr, length_ptr, out_ptr, N: tl.constexpr):
    row = tl.program_id(0)
    length = tl.load(length_ptr + row)
    if length == 0:
        return
    cols = tl.arange(0, N)
    tl.store(out_ptr + row, tl.sum(tl.load(x_ptr + row * N + cols, cols < length, other=0.0)))
    if length < 10:
        return
    tl.store(out_ptr + row, -1.0)


@healthy("early returns, before anything and in the middle")
def early_return(device):
    x, length = integers(6, 16), torch.tensor([0, 3, 12, 7, 0, 16], dtype=torch.int32)
    out = torch.full((6,), 99.0, device=device)
    early_return_kernel[(6,)](x.to(device), length.to(device), out, N=16)
    sums = torch.stack([row[:n].sum() for row, n in zip(x, length.tolist(), strict=True)])
    return [Check(out, torch.where(length == 0, 99.0, torch.where(length >= 10, -1.0, sums)))]


@triton.jit
def collatz_kernel(out_ptr):
    start = tl.program_id(0) + 1
    n, steps = start, 0
    while n != 1:
        if n % 2 == 0:
            n = n // 2
        else:
            n = 3 * n + 1
        steps += 1
    tl.store(out_ptr + start - 1, steps)


@healthy("a while loop whose length differs between programs")
def while_loop(device):
    out = torch.zeros(40, dtype=torch.int32, device=device)
    collatz_kernel[(40,)](out)
    steps = []
    for n in range(1, 41):
        steps.append(0)
        while n != 1:
            n = n // 2 if n % 2 == 0 else 3 * n + 1
            steps[-1] += 1
    return [Check(out, torch.tensor(steps, dtype=torch.int32))]


@triton.jit
def nested_kernel(x_ptr, out_ptr, N: tl.constexpr, DEPTH: tl.constexpr):
    row = tl.program_id(0)
    total = 0
    for i in range(0, row):
        for j in range(i, N, 3):
            x = tl.load(x_ptr + row * N + j)
            if x > 0:
                if x % 2 == 0:
                    total += x
                else:
                    total -= 1
            elif x < -5:
                total += 100
        k = 0
        while k * k < i:
            k += 1
            total += k
    for _ in tl.static_range(DEPTH):
        total = total * 2 + 1
    tl.store(out_ptr + row, total)


@healthy("loops and branches in each other, loops of no turn, unrolled loops")
def nested_control_flow(device):
    x, out = integers(6, 16, dtype=torch.int32), torch.zeros(6, dtype=torch.int32, device=device)
    nested_kernel[(6,)](x.to(device), out, N=16, DEPTH=3)
    totals = []
    for row, values in enumerate(x.tolist()):
        total = 0
        for i in range(row):
            for v in values[i::3]:
                total += (v if v % 2 == 0 else -1) if v > 0 else 100 if v < -5 else 0
            k = 0
            while k * k < i:
                k += 1
                total += k
        totals.append(total * 8 + 7)
    return [Check(out, torch.tensor(totals, dtype=torch.int32))]


@triton.jit(noinline=True)
def _called(x, y):
    return x * 3 + y, x - y


@triton.jit
def call_kernel(x_ptr, out_ptr):
    i = tl.program_id(0)
    x = tl.load(x_ptr + i)
    a, b = _called(x, x + 1)
    c, _ = _called(b, a)
    tl.store(out_ptr + i, c)


@healthy("a function that is not inlined (of scalars, as Triton wants), with two results, called twice")
def call_without_inlining(device):
    x, out = integers(12, dtype=torch.int32), torch.zeros(12, dtype=torch.int32, device=device)
    call_kernel[(12,)](x.to(device), out)
    a, b = x * 3 + x + 1, torch.full_like(x, -1)
    return [Check(out, b * 3 + a)]


@triton.jit
def _square(x):
    return x * x


@triton.jit
def _negative(x):
    return -x


@triton.jit
def function_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr, FUNCTION: tl.constexpr, NAME: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = FUNCTION(tl.load(x_ptr + i))
    tl.static_assert(BLOCK % 16 == 0)
    if NAME == "half":
        x = x * 0.5
    tl.store(out_ptr + i, x)


@healthy("a function and a name as constants of the kernel")
def functions_as_constants(device):
    x, (a, b) = integers(64), torch.zeros(2, 64, device=device)
    function_kernel[(2,)](x.to(device), a, BLOCK=32, FUNCTION=_square, NAME="whole")
    function_kernel[(2,)](x.to(device), b, BLOCK=32, FUNCTION=_negative, NAME="half")
    return [Check(a, x * x), Check(b, -x / 2)]


@triton.jit
def _root(a, b):
    return a * 2 + b, a - b


@triton.jit
def map_kernel(x_ptr, y_ptr, a_ptr, b_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.map_elementwise(_root, tl.load(x_ptr + i), tl.load(y_ptr + i))
    tl.store(a_ptr + i, a)
    tl.store(b_ptr + i, b)


if hasattr(tl, "map_elementwise"):

    @healthy("tl.map_elementwise with two results")
    def map_elementwise(device):
        x, y = integers(64, seed=1, dtype=torch.int32), integers(64, seed=2, dtype=torch.int32)
        a, b = torch.zeros(2, 64, dtype=torch.int32, device=device)
        map_kernel[(2,)](x.to(device), y.to(device), a, b, BLOCK=32)
        return [Check(a, 2 * x + y), Check(b, x - y)]


@triton.jit
def pointer_loop_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    here = x_ptr + tl.program_id(0) * N + cols
    total = tl.zeros((BLOCK,), tl.float32)
    largest = tl.full((BLOCK,), -float("inf"), tl.float32)
    for start in range(0, N, BLOCK):
        mask = start + cols < N
        total += tl.load(here, mask, other=0.0)
        largest = tl.maximum(largest, tl.load(here, mask, other=-float("inf")))
        here += BLOCK
    tl.store(out_ptr + tl.program_id(0), tl.sum(total) + tl.max(largest))


@healthy("pointers carried through a loop, loop-carried tensors of two kinds")
def pointers_carried_through_a_loop(device):
    x, out = integers(6, 75), torch.zeros(6, device=device)
    pointer_loop_kernel[(6,)](x.to(device), out, 75, BLOCK=16)
    return [Check(out, x.sum(1) + x.amax(1))]


@triton.jit
def asserted_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n, other=1)
    tl.device_assert(x > 0, "holds")
    tl.store(out_ptr + i, 100 // x, i < n)


@healthy("an assertion that holds; masked lanes count with their other")
def device_assert_that_holds(device):
    x, out = integers(50, low=1, high=9, dtype=torch.int32), torch.zeros(50, dtype=torch.int32, device=device)
    asserted_kernel[(2,)](x.to(device), out, 50, BLOCK=32, debug=True)
    return [Check(out, 100 // x)]


@triton.jit
def scalar_arguments_kernel(out_ptr, whole, fraction, flag, wide, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    x = lanes * whole + fraction
    if flag:
        x = -x
    tl.store(out_ptr + lanes, x)
    tl.store(out_ptr + BLOCK, (wide >> 32).to(tl.float32))


@healthy("numbers as arguments: 1 and multiples of 16 are specialised, large ones have 64 bits, floats have 32")
def numbers_as_arguments(device):
    checks = []
    for whole, fraction, flag, wide in ((1, 0.5, True, 2**40), (16, 0.1, False, 2**33), (7, 3.0, True, 5 * 2**32)):
        out = torch.zeros(17, device=device)
        scalar_arguments_kernel[(1,)](out, whole, fraction, flag, wide, BLOCK=16)
        x = torch.arange(16, dtype=torch.float32) * whole + torch.tensor(fraction)
        checks.append(Check(out, torch.cat([-x if flag else x, torch.tensor([float(wide >> 32)])])))
    return checks
