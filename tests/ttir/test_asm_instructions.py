"""Instructions of inline assembly beside Python's own integers, and what is refused because it would be passed over."""

from __future__ import annotations

import numpy as np
import pytest

from retrograd.ttir.asm_instructions import execute_instruction, is_known

WORDS = [0, 1, 0x80000000, 0xFFFFFFFF, 0x12345678, 0xF0F0A5A5]
AMOUNTS = [0, 1, 7, 31, 32, 33, 63, 255]


def executed(name: str, *operands: int | np.ndarray, dtype: str = "u4") -> list[int]:
    registers = {f"r{i}": np.atleast_1d(np.asarray(value, dtype)) for i, value in enumerate(operands, 1)}
    execute_instruction(name.split("."), ["r0", *registers], registers)
    return registers["r0"].tolist()


@pytest.mark.parametrize("amount", AMOUNTS)
@pytest.mark.parametrize("way", ["l", "r"])
@pytest.mark.parametrize("beyond", ["wrap", "clamp"])
def test_funnel_shift(way, beyond, amount):
    by = amount % 32 if beyond == "wrap" else min(amount, 32)
    for low in WORDS:
        for high in WORDS:
            both = high << 32 | low
            expected = (both << by >> 32 if way == "l" else both >> by) & 0xFFFFFFFF
            assert executed(f"shf.{way}.{beyond}.b32", low, high, amount) == [expected]


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bits_of_a_field(kind):
    bits = int(kind[1:])
    for word in [*WORDS, *((w << 32 | 0x9ABCDEF0) for w in WORDS if bits == 64)]:
        for first in AMOUNTS:
            for count in AMOUNTS:
                signed = word - (1 << bits) if kind[0] == "s" and word >> (bits - 1) else word
                # Beyond the word an unsigned number has zeros and a signed one its sign: Python's shifts have them too.
                field = (signed >> first) & ((1 << count) - 1)
                sign = count and kind[0] == "s" and signed >> min(first + count - 1, bits - 1) & 1
                expected = (field - (sign and 1 << count)) & ((1 << bits) - 1)
                assert executed(f"bfe.{kind}", word, first, count, dtype=f"u{bits // 8}") == [expected]


@pytest.mark.parametrize("bits", [32, 64])
def test_field_that_is_put_in(bits):
    for word in WORDS:
        for other in WORDS:
            for first in AMOUNTS:
                for count in AMOUNTS:
                    mask = (((1 << count) - 1) << first) & ((1 << bits) - 1)
                    expected = (word << first) & mask | other & ~mask
                    assert executed(f"bfi.b{bits}", word, other, first, count, dtype=f"u{bits // 8}") == [expected]


def test_fields_of_many_elements_at_once():
    rows, columns = np.arange(6, dtype="u4").reshape(2, 3) * 0x1234567, np.array([[3], [9]], "u4")
    expected = [[int(word) >> int(at[0]) & 0xFF for word in row] for row, at in zip(rows, columns, strict=True)]
    assert executed("bfe.u32", rows, columns, 8) == expected


def test_which_of_two_floats():
    one, none = np.array([1.0], np.float32).view("u4"), np.array([np.nan], np.float32).view("u4")
    assert executed("max.f32", one, none) == one.tolist()
    assert np.isnan(np.array(executed("max.NaN.f32", one, none), "u4").view("f4")).all()
    minus = np.array([-0.0], np.float32).view("u4")  # copysign takes the sign of its first operand
    assert np.array(executed("copysign.f32", minus, one), "u4").view("f4").tolist() == [-1.0]


def floats(name: str, *values: float) -> float:
    registers = [np.array([value], np.float32).view("u4") for value in values]
    return np.array(executed(name, *registers), "u4").view("f4").item()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_extreme_of_magnitudes_with_the_product_of_signs(sign):
    assert floats("min.xorsign.abs.f32", -3.0, sign * 2.0) == -sign * 2.0
    assert floats("max.xorsign.abs.f32", -3.0, sign * 2.0) == -sign * 3.0
    assert floats("max.xorsign.abs.f32", np.nan, sign * 2.0) == sign * 2.0
    assert np.isnan(floats("min.NaN.xorsign.abs.f32", np.nan, sign * 2.0))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_subnormal_numbers_are_zeros_where_an_instruction_flushes_them(sign):
    small, smallest = sign * 2.0**-130, 2.0**-126
    assert floats("mul.f32", smallest, sign * 2.0**-4) == small
    for name, values in (("mul", (smallest, sign * 2.0**-4)), ("add", (small, 0.0)), ("ex2.approx", (-130.0,))):
        assert floats(f"{name}.ftz.f32", *values) == 0.0
    assert np.signbit(floats("mul.ftz.f32", smallest, sign * 2.0**-4)) == (sign < 0)
    assert floats("rsqrt.approx.f32", abs(small)) == 2.0**65
    with np.errstate(divide="ignore"):
        assert floats("rcp.approx.ftz.f32", small) == sign * np.inf
    assert floats("cvt.rpi.ftz.f32.f32", abs(small)) == 0.0
    assert floats("cvt.rpi.f32.f32", abs(small)) == 1.0
    assert floats("add.ftz.f32", sign * smallest, 0.0) == sign * smallest
    a, b = (np.array([value], np.float32).view("u4") for value in (small, 0.0))
    assert executed("setp.eq.ftz.f32", a, b) == [True]
    assert executed("setp.eq.f32", a, b) == [False]
    half = np.array([2.0**-20, 2.0**-14], np.float16).view("u4")
    assert np.array(executed("add.ftz.f16x2", half, half), "u4").view("f2").tolist() == [0.0, 2.0**-13]
    assert np.array(executed("add.f16x2", half, half), "u4").view("f2").tolist() == [2.0**-19, 2.0**-13]


@pytest.mark.parametrize("order", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_nothing_compares_with_nan_unless_it_is_asked_to(order):
    one, none = np.array([1.0], np.float32).view("u4"), np.array([np.nan], np.float32).view("u4")
    assert executed(f"setp.{order}.f32", one, none) == [False]
    if order in ("eq", "ne"):
        assert executed(f"setp.{order}u.f32", one, none) == [True]


@pytest.mark.parametrize(
    "name",
    ["add.sat.f32", "add.cc.u32", "add.rz.f32", "fma.rn.relu.f16x2", "cvt.rz.f32.f64", "cvt.rn.satfinite.relu.e4m3x2.f32",
     "setp.lt.and.f32", "min.abs.f32", "max.xorsign.f32", "prmt.b32.f4e", "vote.sync.ballot.b32",
     "cvta.to.global.u64"],
)  # fmt: skip
def test_modifiers_that_would_be_passed_over_are_refused(name):
    assert not is_known(name.split("."))


@pytest.mark.parametrize(
    "name",
    ["add.f32", "add.rn.f32", "fma.rn.ftz.f32", "ex2.approx.ftz.f32", "cvt.rn.bf16x2.f32", "cvt.rzi.s32.f32",
     "cvt.rni.f32.f32", "cvt.sat.f32.f32", "mul.wide.u32", "mad.lo.s32", "setp.ne.s32", "setp.lt.ftz.f32", "lop3.b32",
     "mov.b64", "selp.b32", "nanosleep.u32", "fence.acq_rel.gpu"],
)  # fmt: skip
def test_ordinary_instructions_are_executed(name):
    assert is_known(name.split("."))
