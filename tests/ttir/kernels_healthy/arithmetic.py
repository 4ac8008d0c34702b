"""Integers, floats, bits and conversions, elementwise.

Exact but for the operations that a GPU approximates. Their bounds are PTX's: ex2, rsqrt and lg2 (outside [0.5, 2]) have
2^-22 relative, lg2 inside 2^-22 absolute, sqrt 2^-23, div.full 2 ulp, sin and cos 2^-20.5 within [-2 pi, 2 pi]; libdevice's functions what
CUDA's tables say, in ulp.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from programs import U32, Check, healthy, integers, normal
from triton.language.extra import libdevice

APPROXIMATE = 2.0**-22


@triton.jit
def signed_kernel(a_ptr, b_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    mask = i < n
    a, b = tl.load(a_ptr + i, mask, other=1), tl.load(b_ptr + i, mask, other=1)
    tl.store(out_ptr + i, a // b, mask)
    tl.store(out_ptr + n + i, a % b, mask)
    tl.store(out_ptr + 2 * n + i, (a >> 1) ^ (b << 2), mask)
    tl.store(out_ptr + 3 * n + i, tl.cdiv(tl.abs(a), tl.abs(b)), mask)
    tl.store(out_ptr + 4 * n + i, tl.minimum(a, b) * tl.maximum(a, -b), mask)
    tl.store(out_ptr + 5 * n + i, tl.where(a < b, a & b, a | ~b), mask)


@healthy("signed integers: division and remainder go towards zero, as in C")
def signed_integers(device):
    checks = []
    for dtype in (torch.int32, torch.int64, torch.int16):
        a, b = integers(60, low=-90, high=90, seed=1, dtype=dtype), integers(60, low=1, high=9, seed=2, dtype=dtype)
        b[::2] *= -1
        out = torch.zeros(6, 60, dtype=dtype, device=device)
        signed_kernel[(1,)](a.to(device), b.to(device), out, 60, BLOCK=64)
        rows = [a.div(b, rounding_mode="trunc"), a.fmod(b), (a >> 1) ^ (b << 2), (a.abs() + b.abs() - 1) // b.abs(),
                torch.minimum(a, b) * torch.maximum(a, -b), torch.where(a < b, a & b, a | ~b)]  # fmt: skip
        checks.append(Check(out, torch.stack(rows).to(dtype)))
    return checks


@triton.jit
def unsigned_kernel(a_ptr, b_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a, b = tl.load(a_ptr + i), tl.load(b_ptr + i)
    tl.store(out_ptr + i, a // b)
    tl.store(out_ptr + BLOCK + i, a % b)
    tl.store(out_ptr + 2 * BLOCK + i, a >> 3)
    tl.store(out_ptr + 3 * BLOCK + i, tl.umulhi(a, b))
    tl.store(out_ptr + 4 * BLOCK + i, a * b)
    tl.store(out_ptr + 5 * BLOCK + i, (a < b).to(tl.uint32))
    tl.store(out_ptr + 6 * BLOCK + i, tl.maximum(a, b))


@healthy("unsigned integers: bits of negative ones are large; the high half of a product")
def unsigned_integers(device):
    a, b = (
        integers(32, low=0, high=2**32, seed=1, dtype=torch.int64),
        integers(32, low=1, high=2**31, seed=2, dtype=torch.int64),
    )
    b[::3] = integers(11, low=1, high=9, seed=3, dtype=torch.int64)
    out = torch.zeros(7, 32, dtype=torch.int32, device=device)
    unsigned_kernel[(1,)](
        *(t.to(torch.int32).to(device).view(torch.uint32) for t in (a, b)), out.view(torch.uint32), BLOCK=32
    )
    product = [x * y for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    high, low = torch.tensor([p >> 32 for p in product]), torch.tensor([p & 0xFFFFFFFF for p in product])
    rows = torch.stack([a // b, a % b, a >> 3, high, low, (a < b).long(), torch.maximum(a, b)])
    return [Check(out, rows.to(torch.int32))]


@triton.jit
def narrow_kernel(x_ptr, out_ptr, wide_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(out_ptr + i, x * x + x)
    tl.store(wide_ptr + i, x.to(tl.int32) * x.to(tl.int32))


@healthy("8 bits wrap around, signed and unsigned, and widen by their sign")
def narrow_integers(device):
    checks = []
    for dtype in (torch.int8, torch.uint8):
        x = torch.arange(64).mul(3).to(dtype)
        out, wide = torch.zeros(64, dtype=dtype, device=device), torch.zeros(64, dtype=torch.int32, device=device)
        narrow_kernel[(1,)](x.to(device), out, wide, BLOCK=64)
        checks += [Check(out, (x.int() * x.int() + x.int()).to(dtype)), Check(wide, x.int() * x.int())]
    return checks


@triton.jit
def logic_kernel(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    tl.store(out_ptr + i, (x & ~y) | (i % 5 == 0))


@healthy("tensors of bool, a byte each")
def booleans(device):
    x, y = integers(64, low=0, high=2, seed=1, dtype=torch.bool), integers(64, low=0, high=2, seed=2, dtype=torch.bool)
    out = torch.zeros(64, dtype=torch.bool, device=device)
    logic_kernel[(1,)](x.to(device), y.to(device), out, BLOCK=64)
    return [Check(out, (x & ~y) | (torch.arange(64) % 5 == 0))]


@triton.jit
def rounding_kernel(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr, MODE: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    if MODE == "add":
        z = x + y
    elif MODE == "sub":
        z = x - y
    else:
        z = x * y
    tl.store(out_ptr + i, z)


@healthy("one addition, subtraction or product, rounded once in its own dtype")
def rounded_once(device):
    checks = []
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        x, y = normal(128, seed=1).to(dtype), normal(128, seed=2).to(dtype)
        for mode, expected in (("add", x + y), ("sub", x - y), ("mul", x * y)):
            out = torch.zeros(128, dtype=dtype, device=device)
            rounding_kernel[(2,)](x.to(device), y.to(device), out, BLOCK=64, MODE=mode)
            checks.append(Check(out, expected))
    return checks


@healthy("float32 below 2^-126: Triton's additions and products keep subnormal numbers")
def subnormal_numbers(device):
    x, y = normal(128, seed=1) * 2.0**-100, normal(128, seed=2) * 2.0**-30
    product, total = torch.zeros(2, 128, device=device)
    rounding_kernel[(2,)](x.to(device), y.to(device), product, BLOCK=64, MODE="mul")
    tiny = normal(128, seed=3) * 2.0**-127
    rounding_kernel[(2,)](tiny.to(device), (-tiny).roll(1).to(device), total, BLOCK=64, MODE="add")
    wide = x.double() * y.double()
    return [Check(product, wide.float()), Check(total, (tiny.double() - tiny.roll(1).double()).float())]


@triton.jit
def rounded_twice_kernel(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    z = x + y
    tl.store(out_ptr + i, z + x)


@healthy("two additions in 16 bits, rounded after each: in float32 they would be rounded once")
def rounded_after_each_addition(device):
    checks = []
    for dtype in (torch.float16, torch.bfloat16):
        x, y = (normal(256, seed=1) * 100).to(dtype), normal(256, seed=2).to(dtype)
        out = torch.zeros(256, dtype=dtype, device=device)
        rounded_twice_kernel[(1,)](x.to(device), y.to(device), out, BLOCK=256)
        checks.append(Check(out, (x + y) + x))
    return checks


@triton.jit
def cast_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i).to(out_ptr.dtype.element_ty))


def _cast(device, x, dtype, expected=None):
    out = torch.zeros(len(x), dtype=dtype, device=device)
    cast_kernel[(1,)](x.to(device), out, BLOCK=len(x))
    return Check(out, x.to(dtype) if expected is None else expected)


@healthy("floats to narrower floats go to the nearest even; wider ones are exact")
def casts_of_floats(device):
    x = normal(64, seed=1) * 50
    x[:4] = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, float("inf"), float("nan")])
    half = x.half()
    return [_cast(device, x, torch.bfloat16), _cast(device, x, torch.float16), _cast(device, x.double(), torch.float32),
            _cast(device, half, torch.float32), _cast(device, x.bfloat16(), torch.float32), _cast(device, x, torch.float64)]  # fmt: skip


@healthy("floats to integers are cut towards zero, integers to floats go to the nearest even")
def casts_of_integers(device):
    x = normal(64, seed=1) * 50
    whole = integers(64, low=2**24, high=2**30, dtype=torch.int32)
    return [_cast(device, x, torch.int32), _cast(device, x, torch.int64), _cast(device, x / 2, torch.int8),
            _cast(device, whole, torch.float32), _cast(device, whole.long() * 2**20 + 1, torch.float32),
            _cast(device, whole.long() * 2**20 + 1, torch.int32), _cast(device, -whole, torch.int64)]  # fmt: skip


@healthy("float8 stores of numbers within range, to the nearest even, and loads of them")
def casts_to_float8(device):
    x = normal(64, seed=1) * 8
    x[:3] = torch.tensor([448.0, 1.0625, -0.001])
    checks = []
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        out, back = torch.zeros(64, dtype=dtype, device=device), torch.zeros(64, device=device)
        cast_kernel[(1,)](x.to(device), out, BLOCK=64)
        cast_kernel[(1,)](out, back, BLOCK=64)
        checks += [Check(out.view(torch.uint8), x.to(dtype).view(torch.uint8)), Check(back, x.to(dtype).float())]
    return checks


@triton.jit
def bits_kernel(x_ptr, out_ptr, half_ptr, short_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    bits = x.to(tl.int32, bitcast=True)
    tl.store(out_ptr + i, (bits ^ -2147483648).to(tl.float32, bitcast=True))
    h = tl.load(half_ptr + i)
    tl.store(short_ptr + i, h.to(tl.int16, bitcast=True) & 0x7FFF)


@healthy("bits of floats as integers, 32 and 16")
def bits_of_floats(device):
    x, out, short = normal(64), torch.zeros(64, device=device), torch.zeros(64, dtype=torch.int16, device=device)
    bits_kernel[(1,)](x.to(device), out, x.bfloat16().to(device), short, BLOCK=64)
    return [Check(out, -x), Check(short, x.bfloat16().view(torch.int16) & 0x7FFF)]


@triton.jit
def choices_kernel(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    tl.store(out_ptr + i, tl.where(x > y, x, -y))
    tl.store(out_ptr + BLOCK + i, tl.clamp(x, -1.0, 1.0))
    tl.store(out_ptr + 2 * BLOCK + i, tl.abs(x) - tl.floor(y))
    tl.store(out_ptr + 3 * BLOCK + i, tl.ceil(x))
    tl.store(out_ptr + 4 * BLOCK + i, tl.maximum(x, y))
    tl.store(out_ptr + 5 * BLOCK + i, tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL))


@healthy("choices; maxima pass over NaN unless told to propagate it")
def choices_between_floats(device):
    x, y = normal(64, seed=1) * 3, normal(64, seed=2) * 3
    x[5], y[9] = float("nan"), float("nan")
    out = torch.zeros(6, 64, device=device)
    choices_kernel[(1,)](x.to(device), y.to(device), out, BLOCK=64)
    rows = [
        torch.where(x > y, x, -y),
        x.clamp(-1, 1),
        x.abs() - y.floor(),
        x.ceil(),
        torch.fmax(x, y),
        torch.minimum(x, y),
    ]
    expected = torch.stack(rows)
    keep = torch.ones_like(expected, dtype=torch.bool)
    keep[1, 5] = False  # tl.clamp of NaN is undefined
    return [Check(out.cpu()[keep], expected[keep])]


@triton.jit
def roots_kernel(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    tl.store(out_ptr + i, tl.sqrt_rn(x))
    tl.store(out_ptr + BLOCK + i, tl.div_rn(y, x))
    tl.store(out_ptr + 2 * BLOCK + i, tl.fma(x, x, y))


@healthy("square root and division rounded to nearest, and a fused multiply-add, exact in float64 before it is rounded")
def correctly_rounded(device):
    x = 1 + integers(64, low=0, high=2**20, seed=1) * 2.0**-20
    y = integers(64, low=-(2**20), high=2**20, seed=2) * 2.0**-20
    out = torch.zeros(3, 64, device=device)
    roots_kernel[(1,)](x.to(device), y.to(device), out, BLOCK=64)
    wide, other = x.double(), y.double()  # the quotient of 21 and 21 bits is not near enough to a tie to round twice
    return [Check(out, torch.stack([wide.sqrt().float(), (other / wide).float(), (wide * wide + other).float()]))]


@triton.jit
def functions_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    positive = tl.abs(x) + 0.25
    tl.store(out_ptr + i, tl.exp(x))
    tl.store(out_ptr + BLOCK + i, tl.exp2(x))
    tl.store(out_ptr + 2 * BLOCK + i, tl.log(positive))
    tl.store(out_ptr + 3 * BLOCK + i, tl.log2(positive))
    tl.store(out_ptr + 4 * BLOCK + i, tl.sqrt(positive))
    tl.store(out_ptr + 5 * BLOCK + i, tl.rsqrt(positive))
    tl.store(out_ptr + 6 * BLOCK + i, tl.sin(x))
    tl.store(out_ptr + 7 * BLOCK + i, tl.cos(x))
    tl.store(out_ptr + 8 * BLOCK + i, x / positive)
    tl.store(out_ptr + 9 * BLOCK + i, tl.sigmoid(x))
    tl.store(out_ptr + 10 * BLOCK + i, tl.erf(x))


def exp_error(x):
    """Of exp as ex2(x log2 e): 2^-22, and x log2 e is rounded twice."""
    return APPROXIMATE + 2 * U32 * x.abs()


@healthy("functions within the error that PTX and CUDA state")
def functions_of_floats(device):
    x = normal(64) * 2
    out = torch.zeros(11, 64, device=device)
    functions_kernel[(1,)](x.to(device), out, BLOCK=64)
    wide = x.double()
    positive = (x.abs() + 0.25).double()
    exact = [wide.exp(), wide.exp2(), positive.log(), positive.log2(), positive.sqrt(), positive.rsqrt(), wide.sin(), wide.cos(),
             wide / positive, wide.sigmoid(), wide.erf()]  # fmt: skip
    log2_error = APPROXIMATE * positive.log2().abs().clamp(min=1)
    sigmoid = exact[9]
    bounds = [
        exact[0] * exp_error(wide),
        exact[1] * APPROXIMATE,
        log2_error * math.log(2) + 2 * U32 * exact[2].abs(),  # times ln 2, which is rounded, and the product too
        log2_error,
        exact[4] * 2 * U32,
        exact[5] * APPROXIMATE,
        torch.full_like(wide, 2.0**-20.5),
        torch.full_like(wide, 2.0**-20.5),
        exact[8].abs() * 4 * U32,
        sigmoid * ((1 - sigmoid) * exp_error(wide) + 5 * U32),  # 1 + exp(-x) rounded, then divided
        exact[10].abs() * 4 * U32,
    ]
    return [Check(out, torch.stack(exact), torch.stack(bounds) * (1 + 2.0**-10))]


@triton.jit
def libdevice_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    positive = tl.abs(x) + 0.25
    tl.store(out_ptr + i, libdevice.tanh(x))
    tl.store(out_ptr + BLOCK + i, libdevice.expm1(x))
    tl.store(out_ptr + 2 * BLOCK + i, libdevice.log1p(positive))
    tl.store(out_ptr + 3 * BLOCK + i, libdevice.pow(positive, x))
    tl.store(out_ptr + 4 * BLOCK + i, libdevice.erf(x))
    tl.store(out_ptr + 5 * BLOCK + i, libdevice.atan2(x, positive))
    tl.store(out_ptr + 6 * BLOCK + i, libdevice.hypot(x, positive))
    tl.store(out_ptr + 7 * BLOCK + i, libdevice.rsqrt(positive))
    tl.store(out_ptr + 8 * BLOCK + i, libdevice.rint(x))
    tl.store(out_ptr + 9 * BLOCK + i, libdevice.copysign(positive, x))
    tl.store(out_ptr + 10 * BLOCK + i, libdevice.fmod(x, positive))
    tl.store(out_ptr + 11 * BLOCK + i, libdevice.ffs((i + 1) * 4).to(tl.float32))
    tl.store(out_ptr + 12 * BLOCK + i, libdevice.isnan(x).to(tl.float32))


@healthy("libdevice within the ulp of CUDA's table, exact where it is exact")
def libdevice_of_floats(device):
    x = normal(64) * 2
    out = torch.zeros(13, 64, device=device)
    libdevice_kernel[(1,)](x.to(device), out, BLOCK=64)
    wide, positive = x.double(), (x.abs() + 0.25).double()
    lowest = torch.tensor([float((4 * n & -(4 * n)).bit_length()) for n in range(1, 65)], dtype=torch.float64)
    exact = [wide.tanh(), wide.expm1(), positive.log1p(), positive.pow(wide), wide.erf(), torch.atan2(wide, positive),
             torch.hypot(wide, positive), positive.rsqrt(), wide.round(), positive.copysign(wide), wide.fmod(positive), lowest,
             torch.zeros(64, dtype=torch.float64)]  # fmt: skip
    ulps = [2, 1, 1, 4, 2, 3, 3, 2, 0, 0, 0, 0, 0]
    bounds = [2 * U32 * ulp * value.abs() for ulp, value in zip(ulps, exact, strict=True)]
    return [Check(out, torch.stack(exact), torch.stack(bounds))]


@triton.jit
def assembly_kernel(x_ptr, y_ptr, out_ptr, root_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    total = tl.inline_asm_elementwise("add.s32 $0, $1, $2;", "=r,r,r", [x, y], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(out_ptr + i, total)
    root = tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x.to(tl.float32)], dtype=tl.float32, is_pure=True, pack=1
    )
    tl.store(root_ptr + i, root)


@healthy("inline assembly, element by element")
def inline_assembly(device):
    x, y = integers(64, seed=1, dtype=torch.int32), integers(64, seed=2, dtype=torch.int32)
    out, power = torch.zeros(64, dtype=torch.int32, device=device), torch.zeros(64, device=device)
    assembly_kernel[(1,)](x.to(device), y.to(device), out, power, BLOCK=64)
    expected = 2.0 ** x.double()
    return [Check(out, x + y), Check(power, expected, expected * APPROXIMATE)]


@triton.jit
def double_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n, other=0.0)
    tl.store(out_ptr, tl.sum(x * x))


@healthy("float64 keeps what float32 would lose")
def sum_in_float64(device):
    x = integers(60, low=2**20, high=2**25, dtype=torch.float64)  # squares below 2^50, their sum below 2^56
    x = x - x % 8  # so that all of it is exact
    out = torch.zeros(1, dtype=torch.float64, device=device)
    double_kernel[(1,)](x.to(device), out, 60, BLOCK=64)
    return [Check(out, (x * x).sum().view(1))]
