"""Values of single operations: types, roundings, libdevice and inline assembly beside torch and exact arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from retrograd.errors import RetrogradError, UnsupportedOperationError
from retrograd.ttir.element_types import chosen, element_type, from_bits, round_bf16, to_bits, truncate, truncate_tf32
from retrograd.ttir.execution import Execution
from retrograd.ttir.faults import FaultList
from retrograd.ttir.inline_asm import inline_asm
from retrograd.ttir.libdevice import symbol
from retrograd.ttir.parser import parse, parse_type
from retrograd.ttir.program import compile_text
from retrograd.ttir.storage import Pointer, Storage

EIGHT_BITS = {
    "f8E4M3FN": torch.float8_e4m3fn,
    "f8E5M2": torch.float8_e5m2,
    "f8E4M3FNUZ": torch.float8_e4m3fnuz,
    "f8E5M2FNUZ": torch.float8_e5m2fnuz,
}


def wide_values() -> np.ndarray:
    """Floats of every exponent and sign, ties of 8, 16 and 32 bits among them, and what is not finite."""
    exponents = np.exp2(np.arange(-150, 128, dtype=np.float64))
    fractions = np.array(
        [1, 1.0625, 1.125, 1.1875, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 2**-9 + 2**-20, 1.75, 1.96]
    )
    values = (exponents[:, None] * fractions).ravel()
    return np.concatenate([values, -values, [0.0, -0.0, np.inf, -np.inf, np.nan]]).astype(np.float32)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_halves_are_rounded_as_torch_does(name, dtype):
    values = wide_values()
    rounding = element_type(name).round
    assert rounding
    with np.errstate(over="ignore"):
        ours = rounding(values)
    assert np.array_equal(ours, torch.from_numpy(values).to(dtype).float().numpy(), equal_nan=True)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
@pytest.mark.parametrize("wide", [np.float32, np.float64])
def test_halves_toward_zero_are_the_greatest_that_are_no_greater(name, dtype, wide):
    halves = torch.arange(0x10000, dtype=torch.int32).to(torch.int16).view(dtype).double().numpy()
    grid = np.unique(halves[np.isfinite(halves) & (halves >= 0)])
    values = np.concatenate([wide_values().astype(wide), [1 + 2**-30, 2.0**-24 - 2.0**-40, 65519.99, 1e9]]).astype(wide)
    with np.errstate(over="ignore"):
        ours = truncate(values, name)
    finite = np.isfinite(values)
    expected = grid[np.searchsorted(grid, np.abs(values[finite]), side="right") - 1]
    assert np.array_equal(ours[finite], np.copysign(expected, values[finite]))
    assert np.array_equal(ours[~finite], values[~finite], equal_nan=True)


@pytest.mark.parametrize("payload", [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001])
def test_a_nan_of_any_payload_stays_one(payload):
    rounding = element_type("bf16").round
    assert rounding
    nan = np.array([payload], np.uint32).view(np.float32)
    for values in (rounding(nan), truncate(nan, "bf16")):
        assert np.isnan(from_bits(to_bits(values, element_type("bf16")), element_type("bf16"))).all()


@pytest.mark.parametrize(
    "values", [wide_values()[:, None], wide_values()[::3], np.broadcast_to(wide_values(), (2, wide_values().size))]
)
@pytest.mark.parametrize("rounding", [round_bf16, truncate_tf32])
def test_roundings_leave_what_they_are_given_and_take_any_strides(rounding, values):
    before = values.copy()
    assert np.array_equal(rounding(values), rounding(before), equal_nan=True)
    assert np.array_equal(values, before, equal_nan=True)


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_eight_bits_are_read_and_written_as_torch_does(name):
    kind = element_type(name)
    codes = torch.arange(256, dtype=torch.uint8)
    theirs = codes.view(EIGHT_BITS[name]).float()
    ours = from_bits(codes.numpy(), kind)
    assert np.array_equal(ours, theirs.numpy(), equal_nan=True)
    finite = theirs.isfinite()
    assert np.array_equal(to_bits(ours, kind)[finite.numpy()], codes[finite].numpy())
    values = wide_values()
    inside = np.abs(values) <= float(theirs[finite].max())
    assert kind.round
    expected = torch.from_numpy(values).to(EIGHT_BITS[name]).float().numpy()
    assert np.array_equal(kind.round(values)[inside], expected[inside])
    # Beyond, NVIDIA's conversions saturate.
    assert (np.abs(kind.round(values)[~inside & ~np.isnan(values)]) == float(theirs[finite].max())).all()


def test_tf32_keeps_ten_bits():
    x = np.array([1 + 2**-11, 1 + 2**-10 + 2**-12, 2 - 2**-20, -1 - 2**-11, np.inf, np.nan], np.float32)
    assert truncate_tf32(x)[:5].tolist() == [1, 1 + 2**-10, 2 - 2**-10, -1, np.inf]
    assert np.isnan(truncate_tf32(x)[5])


X = np.array([0.1, 0.5, 0.9, 1.5, 3.25], np.float64)
SAME = ("exp", "exp2", "expm1", "log", "log10", "log1p", "log2", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asinh",
        "atan", "erf", "erfc", "lgamma", "sqrt", "rsqrt", "ceil", "floor", "trunc")  # fmt: skip
OTHERS = {
    "tgamma": lambda x: math.gamma(x), "cbrt": lambda x: x ** (1 / 3), "exp10": lambda x: 10**x,
    "normcdf": lambda x: 0.5 * math.erfc(-x / math.sqrt(2)), "rint": round, "fabs": abs,
    "sinpi": lambda x: math.sin(math.pi * x), "rcbrt": lambda x: x ** (-1 / 3), "logb": lambda x: math.floor(math.log2(x)),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("suffix", ["", "f"])
def test_libdevice_beside_torch(name, suffix):
    compute = symbol(f"__nv_{name}{suffix}")
    assert compute
    x = X.astype(np.float32 if suffix else np.float64)
    theirs = getattr(torch, name)(torch.from_numpy(x.astype(np.float64))).numpy()
    ours = compute(x)
    assert np.abs(ours - theirs).max() <= 4 * np.spacing(np.abs(theirs).max())


@pytest.mark.parametrize("name", OTHERS)
def test_libdevice_beside_the_formula(name):
    compute = symbol(f"__nv_{name}")
    assert compute
    theirs = np.array([OTHERS[name](x) for x in X.tolist()])
    assert np.abs(compute(X) - theirs).max() <= 16 * np.spacing(np.abs(theirs).max())


def test_libdevice_has_every_function_that_triton_offers():
    libdevice = pytest.importorskip("triton.language.extra.cuda.libdevice")
    import inspect
    import re

    names = set(re.findall(r'"(__nv_\w+)"', inspect.getsource(libdevice)))
    assert len(names) > 300
    assert sorted(name for name in names if symbol(name) is None) == []
    assert symbol("__nv_nonesuch") is None


def integers(*values: int, dtype: str = "i4") -> np.ndarray:
    return np.array(values, dtype)


@pytest.mark.parametrize(
    ("name", "operands", "expected"),
    [
        ("clz", (integers(1, 0, -1),), [31, 32, 0]),
        ("popc", (integers(1, 0, -1),), [1, 0, 32]),
        ("ffs", (integers(8, 0, 1),), [4, 0, 1]),
        ("brev", (integers(1, 2),), [-(1 << 31), 1 << 30]),
        ("mulhi", (integers(1 << 30, -1), integers(8, 1)), [2, -1]),
        ("umulhi", (integers(-1), integers(-1)), [-2]),
        ("byte_perm", (integers(0x33221100), integers(0x77665544), integers(0x7531)), [0x77553311]),
        ("hadd", (integers(3, -3), integers(4, -4)), [3, -4]),
        ("rhadd", (integers(3), integers(4)), [4]),
        ("float2int_rz", (np.array([1.9, -1.9, np.nan, 1e30], np.float32),), [1, -1, 0, (1 << 31) - 1]),
        ("float2int_rn", (np.array([1.5, 2.5], np.float32),), [2, 2]),
        ("double2loint", (np.array([1.0000000000000002]),), [1]),
    ],
)
def test_libdevice_on_integers(name, operands, expected):
    compute = symbol(f"__nv_{name}")
    assert compute
    assert compute(*operands).tolist() == expected


def test_directed_rounding():
    a, b = np.array([1.0], np.float32), np.array([2.0**-30], np.float32)
    results = {mode: float(symbol(f"__nv_fadd_r{mode}")(a, b)[0]) for mode in "nzud"}  # type: ignore[misc]
    assert results == {"n": 1.0, "z": 1.0, "d": 1.0, "u": 1.0 + 2.0**-23}


@pytest.mark.parametrize(
    ("text", "constraints", "packed", "operands", "types", "target", "expected"),
    [
        ("shl.b32 $0, $1, 3;", "=r,r", 1, [integers(1, -1)], ["i32"], "i32", [8, -8]),
        ("{ .reg .b32 t; not.b32 t, $1; and.b32 $0, t, 0xff; }", "=r,r", 1, [integers(1)], ["i32"], "i32", [254]),
        ("lop3.b32 $0, $1, $2, $3, 0x96;", "=r,r,r,r", 1, [integers(5), integers(3), integers(9)], ["i32"] * 3, "i32",
         [5 ^ 3 ^ 9]),
        ("{.reg .pred p; setp.gt.f32 p, $1, 1.0; @p mov.f32 $0, 0f40000000; @!p mov.f32 $0, $1;}", "=f,f", 1,
         [np.array([0.5, 3], np.float32)], ["f32"], "f32", [0.5, 2.0]),
        ("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", 2, [np.array([[1.0, 3.14159]], np.float32)], ["f32"], "bf16",
         [[1.0, 3.140625]]),
        ("cvt.rna.tf32.f32 $0, $1;", "=r,f", 1, [np.array([1 + 2**-11, -1 - 2**-12, np.inf], np.float32)], ["f32"],
         "f32", [1 + 2**-10, -1.0, np.inf]),
        ("cvt.rn.tf32.f32 $0, $1;", "=r,f", 1, [np.array([1 + 2**-11, 1 + 3 * 2**-11], np.float32)], ["f32"], "f32",
         [1.0, 1 + 2**-9]),
        ("cvt.rz.tf32.f32 $0, $1;", "=r,f", 1, [np.array([1 + 2**-11, -1 - 3 * 2**-11], np.float32)], ["f32"], "f32",
         [1.0, -1 - 2**-10]),
        ("griddepcontrol.wait; // $0", "=r", 1, [], [], "i32", [0]),
        ("cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", 1,
         [np.array([1.0, -500.0, np.nan], np.float32), np.array([0.5, 2.0**-10, 448.0], np.float32)], ["f32"] * 2, "i16",
         [0x3038, 0x00FE, 0x7E7F]),
        ("cvt.rn.satfinite.e5m2x2.f16x2 $0, $1;", "=h,r", 2, [np.array([[1.0, -2.0]], np.float16)], ["f16"], "i8",
         [[0x3C, 0xC0 - 256]]),
        ("cvt.rn.f16x2.e4m3x2 $0, $1;", "=r,h", 2, [np.array([[0x38, 0xB0 - 256]], np.int8)], ["i8"], "f16",
         [[1.0, -0.5]]),
        ("{ .reg .b8 a; cvt.rn.satfinite.e2m1x2.f32 a, $2, $1; mov.b32 $0, {a, a, a, a}; }", "=r,f,f", 1,
         [np.array([0.75, 6.0, -9.0, 2.5, np.nan], np.float32), np.array([1.0, -0.2, 0.26, 5.0, -0.0], np.float32)],
         ["f32"] * 2, "i8", [0x22, 0x87 - 256, 0x1F, 0x64, 0x87 - 256]),
        ("cvt.rp.ue8m0x2.f32 $0, 0.0, $1;", "=h,f", 1,
         [np.array([1.0, 1.5, 0.0, 2.0**-127, 2.0**-127 * 1.5, np.nan], np.float32)], ["f32"], "i16",
         [127, 128, 0, 0, 1, 255]),
        ("cvt.rz.satfinite.ue8m0x2.f32 $0, $1, 1.0;", "=h,f", 1, [np.array([3.0, np.inf], np.float32)], ["f32"], "i16",
         [0x7F + (128 << 8) - 65536, 0x7F + (254 << 8) - 65536]),
    ],
)  # fmt: skip
def test_inline_assembly(text, constraints, packed, operands, types, target, expected):
    compute = inline_asm(text, constraints, packed)
    assert callable(compute)
    assert compute(operands, [element_type(t) for t in types], [element_type(target)]).tolist() == expected


def test_assembly_that_is_not_known_is_named():
    assert inline_asm("ld.global.b32 $0, [$1];", "=r,l", 1) == "its instruction 'ld.global.b32 $0, [$1]'"
    assert "cvt.rs.satfinite.e2m1x4.f32" in inline_asm("cvt.rs.satfinite.e2m1x4.f32 $0, {$1, $2, $3, $4}, $5;", "=h", 1)
    assert "cvt.rn.satfinite.relu.e4m3x2.f32" in inline_asm("cvt.rn.satfinite.relu.e4m3x2.f32 $0, $1, $2;", "=h,f,f", 1)
    assert "cvt.rna.satfinite.tf32.f32" in inline_asm("cvt.rna.satfinite.tf32.f32 $0, $1;", "=r,f", 1)


KERNEL = """
#loc = loc("kernel.py":1:0)
#loc1 = loc("kernel.py":2:4)
module {
  tt.func public @k(%x: !tt.ptr<f32> loc("x"(#loc)), %n: i32 loc("n"(#loc))) attributes {noinline = false} {
    %pid = tt.get_program_id x : i32 loc(#loc1)
BODY
    %place = tt.addptr %x, %pid : !tt.ptr<f32>, i32 loc(#loc1)
    tt.store %place, %value : !tt.ptr<f32> loc(#loc1)
    tt.return loc(#loc1)
  } loc(#loc)
} loc(#loc)
"""


def executed(body: str, programs: int = 4, n: int = 3, printed: list[str] | None = None) -> list[float]:
    """What a kernel whose body computes %value leaves, an element a program; `printed` takes its lines."""
    kernel = compile_text(KERNEL.replace("BODY", body))
    memory = torch.full((programs,), -1.0)
    pointer = Pointer.of("x", memory, Storage.of(memory.untyped_storage()))
    scalars = {kernel.arguments[0].slot: np.array([memory.data_ptr()]), kernel.arguments[1].slot: np.array([n], "i4")}
    execution = Execution(kernel, (programs, 1, 1), {0: pointer}, scalars, "")
    faults = FaultList()
    execution.run(execution.memory(faults), 0, 1000, (print if printed is None else printed.append))
    assert list(faults) == []
    return memory.tolist()


def test_loops_end_for_each_program_by_itself():
    body = """
    %zero = arith.constant 0 : i32 loc(#loc1)
    %one = arith.constant 1 : i32 loc(#loc1)
    %start = arith.constant 0.000000e+00 : f32 loc(#loc1)
    %step = arith.constant 2.000000e+00 : f32 loc(#loc1)
    %value = scf.for %i = %zero to %pid step %one iter_args(%sum = %start) -> (f32)  : i32 {
      %more = arith.addf %sum, %step : f32 loc(#loc1)
      scf.yield %more : f32 loc(#loc1)
    } loc(#loc1)"""
    assert executed(body) == [0, 2, 4, 6]


def test_branches_meet_again():
    body = """
    %two = arith.constant 2 : i32 loc(#loc1)
    %a = arith.constant 5.000000e+00 : f32 loc(#loc1)
    %b = arith.constant 7.000000e+00 : f32 loc(#loc1)
    %less = arith.cmpi slt, %pid, %two : i32 loc(#loc1)
    %value = scf.if %less -> (f32) {
      scf.yield %a : f32 loc(#loc1)
    } else {
      scf.yield %b : f32 loc(#loc1)
    } loc(#loc1)"""
    assert executed(body) == [5, 5, 7, 7]


def test_blocks_are_joined():
    body = """
    %two = arith.constant 2 : i32 loc(#loc1)
    %a = arith.constant 5.000000e+00 : f32 loc(#loc1)
    %less = arith.cmpi slt, %pid, %two : i32 loc(#loc1)
    %float = arith.sitofp %pid : i32 to f32 loc(#loc1)
    cf.cond_br %less, ^bb1, ^bb2(%float : f32) loc(#loc1)
  ^bb1:  // pred: ^bb0
    cf.br ^bb2(%a : f32) loc(#loc1)
  ^bb2(%value: f32 loc(#loc1)):  // 2 preds: ^bb0, ^bb1"""
    assert executed(body) == [5, 5, 2, 3]


def test_integers_wrap_and_shift_as_on_a_gpu():
    body = """
    %big = arith.constant 2147483647 : i32 loc(#loc1)
    %far = arith.constant 40 : i32 loc(#loc1)
    %wrapped = arith.addi %big, %pid : i32 loc(#loc1)
    %gone = arith.shli %wrapped, %far : i32 loc(#loc1)
    %sum = arith.addi %gone, %wrapped : i32 loc(#loc1)
    %value = arith.sitofp %sum : i32 to f32 loc(#loc1)"""
    assert executed(body, programs=2) == [2.0**31, -(2.0**31)]


def test_an_unknown_operation_is_named_with_its_line():
    with pytest.raises(UnsupportedOperationError, match=r"tt\.nonesuch \(kernel\.py:2\) cannot be executed"):
        compile_text(KERNEL.replace("BODY", "    %value = tt.nonesuch %pid : i32 -> f32 loc(#loc1)"))


def test_a_name_that_nothing_defines_is_an_error():
    with pytest.raises(RetrogradError, match="uses %nobody, which no operation before it defines"):
        parse(KERNEL.replace("BODY", "    %value = arith.sitofp %nobody : i32 to f32 loc(#loc1)"))


@pytest.mark.parametrize("marks", ["", ", 1", ', "constant"', ', 1, "constant"'])
def test_pointers_are_read_with_their_marks(marks):
    pointer = parse_type(f"!tt.ptr<bf16{marks}>")
    assert (pointer.element, str(pointer.pointee)) == ("ptr", "bf16")
    tensor = parse_type(f"tensor<2x4x!tt.ptr<i64{marks}>>")
    assert (tensor.shape, str(tensor.pointee)) == ((2, 4), "i64")
    kernel = KERNEL.replace("!tt.ptr<f32>", f"!tt.ptr<f32{marks}>")
    body = "    %value = arith.constant 1.000000e+00 : f32 loc(#loc1)"
    assert str(compile_text(kernel.replace("BODY", body)).arguments[0].type.pointee) == "f32"


@pytest.mark.parametrize("zero", [None, 0.0, -0.0, 1.0])
def test_what_is_chosen_has_the_bits_that_numpy_chooses(zero):
    values = np.array([[[1.0, np.nan, -0.0, np.inf, 2.0**-149, -3.0]]] * 2, np.float32)
    condition = np.array([[[True, False, True, False, True, False]]])
    others = None if zero is None else np.full((1, 1, 1), zero, np.float32)
    want = np.where(condition, values, np.float32(zero or 0.0) if zero is None else others)
    assert chosen(condition, values, others).tobytes() == want.tobytes()
    assert chosen(~condition, condition, None).tobytes() == np.zeros_like(condition).tobytes()


def test_float64_is_rounded_to_float16_once():
    """1 + 2^-11 + 2^-30 is above a tie, on which it falls where it is made a float32 first."""
    body = """    %wide = arith.constant 1.00048828218132257 : f64 loc(#loc1)
    %half = arith.truncf %wide : f64 to f16 loc(#loc1)
    %value = arith.extf %half : f16 to f32 loc(#loc1)"""
    assert executed(body, 1) == [1 + 2.0**-10]


@pytest.mark.parametrize(
    ("constant", "element", "attributes", "expected"),
    [
        ("-1", "i32", "hex = false, isSigned = array<i32: 1>", "-1"),
        ("-1", "i32", "hex = false, isSigned = array<i32: 0>", "4294967295"),
        ("-1", "i8", "hex = false, isSigned = array<i32: 0>", "255"),
        ("-2", "i16", "hex = true, isSigned = array<i32: 1>", "0xfffe"),
        ("10", "i64", "hex = true, isSigned = array<i32: 1>", "0x000000000000000a"),
        ("1.500000e+00", "f32", "hex = false, isSigned = array<i32: 0>", "1.500000"),
        ("1.500000e+00", "f32", "hex = true, isSigned = array<i32: 0>", "0x1.8000000000000p+0"),
        ("0xFF800000", "f32", "hex = false, isSigned = array<i32: 0>", "-inf"),
    ],
)
def test_numbers_are_printed_as_a_gpu_prints_them(constant, element, attributes, expected):
    printed: list[str] = []
    body = f"""    %row = arith.constant dense<{constant}> : tensor<1x12x{element}> loc(#loc1)
    tt.print " x: " {{{attributes}}} : %row : tensor<1x12x{element}> loc(#loc1)
    %value = arith.constant 0.000000e+00 : f32 loc(#loc1)"""
    executed(body, 1, printed=printed)
    assert printed == [f"pid (0, 0, 0) idx (0, {i:2}) x: {expected}" for i in range(12)]


def test_operands_of_a_print_are_numbered_and_what_is_too_much_is_said():
    printed: list[str] = []
    body = """    %row = arith.constant dense<7> : tensor<16384xi32> loc(#loc1)
    tt.print ": " {hex = false, isSigned = array<i32: 1, 1>} : %n, %row : i32, tensor<16384xi32> loc(#loc1)
    %value = arith.constant 0.000000e+00 : f32 loc(#loc1)"""
    executed(body, 1, printed=printed)
    assert printed[:2] == ["pid (0, 0, 0) idx (): (operand 0) 3", "pid (0, 0, 0) idx (    0): (operand 1) 7"]
    assert printed[-1] == "... and more of kernel.py:2"
    assert len(printed) == 16384 + 1
