"""Operations of TTIR that compute each element for itself, as NumPy functions of arrays.

An array has the programs along its first axis and the tensor's own axes after it; any axis may have extent 1 where all
its elements are equal, so that a splat costs nothing. `ELEMENTWISE` has a builder for each operation, whose
result is called with the operands' arrays.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from retrograd.errors import UnsupportedOperationError
from retrograd.ttir.element_types import (
    Array,
    ElementType,
    chosen,
    element_type,
    from_bits,
    small_float,
    to_bits,
    truncate,
)
from retrograd.ttir.inline_asm import inline_asm
from retrograd.ttir.ir import Operation
from retrograd.ttir.libdevice import special, symbol

Compute = Callable[..., Any]
_ATTRIBUTE = re.compile(r"(\w+) = ((?:array<[^>]*>)|(?:\"(?:[^\"\\]|\\.)*\")|[-\w.]+)")


def refused(operation: Operation, why: str = "") -> UnsupportedOperationError:
    """What to raise for an operation that cannot be executed; names it and its line."""
    where = f" ({operation.place.file}:{operation.place.line})" if operation.place.file else ""
    reason = f": {why}" if why else ""
    return UnsupportedOperationError(f"{operation.name}{where} cannot be executed without a GPU{reason}")


def attributes(operation: Operation) -> dict[str, str]:
    """Attributes and keywords of an operation, as they are printed."""
    return {name: value.strip('"') for name, value in _ATTRIBUTE.findall(operation.text)}


def integers(text: str) -> tuple[int, ...]:
    """Numbers of "array<i32: 1, 0>" or "1"."""
    return tuple(int(n) for n in re.findall(r"-?\d+", text.partition(":")[2] or text))


def kind_of(operation: Operation, operand: int | None = None) -> ElementType:
    """Element type of the first result, or of an operand."""
    value = operation.results[0] if operand is None else operation.operands[operand]
    return element_type(value.type.element)


def _unsigned(values: Array) -> Array:
    return values if values.dtype == np.bool_ else values.view(f"u{values.dtype.itemsize}")


def _signed_bool(values: Array) -> Array:
    return -values.astype(np.int8) if values.dtype == np.bool_ else values


def _approximate_quotient(x: Array, y: Array) -> Array:
    """`div.approx.f32` of PTX: right but for divisors above 2^126, of which it gives 0, or NaN of an infinity."""
    large = (np.abs(y) > np.float32(2.0**126)) & np.isfinite(y)
    return np.where(large, np.where(np.isinf(x), np.float32(np.nan), np.copysign(np.float32(0), x * np.sign(y))), x / y)


def _floats(compute: Compute) -> Callable[[Operation], Compute]:
    """Builder for an operation on floats, whose result is rounded to its type."""

    def build(operation: Operation) -> Compute:
        rounding = kind_of(operation).round
        if rounding is None:
            return compute
        return lambda *operands: rounding(compute(*operands))

    return build


def _whole(compute: Compute, boolean: Compute | None = None) -> Callable[[Operation], Compute]:
    """Builder for an operation on integers that wrap; `boolean` for those of one bit."""

    def build(operation: Operation) -> Compute:
        if kind_of(operation, 0).name == "i1":
            if boolean is None:
                raise refused(operation, "not for values of one bit")
            return boolean
        return compute

    return build


def _as_unsigned(compute: Compute) -> Callable[[Operation], Compute]:
    def build(operation: Operation) -> Compute:
        dtype = kind_of(operation).compute
        return lambda *operands: compute(*map(_unsigned, operands)).view(dtype)

    return build


def _divide(a: Array, b: Array) -> Array:
    return (a - np.fmod(a, b)) // b


def _ceil_divide(a: Array, b: Array) -> Array:
    return -(-a // b)


def _shift(compute: Compute, unsigned: bool, beyond_keeps_sign: bool = False) -> Callable[[Operation], Compute]:
    """Shifts by the width or more give 0, or the sign, as on NVIDIA GPUs."""

    def build(operation: Operation) -> Compute:
        kind = kind_of(operation)
        bits = kind.bits

        def shift(a: Array, b: Array) -> Array:
            amount = _unsigned(b)
            value = _unsigned(a) if unsigned else a
            if beyond_keeps_sign:
                return compute(value, np.minimum(amount, bits - 1).astype(value.dtype))
            result = compute(value, np.minimum(amount, bits - 1).astype(value.dtype))
            return np.where(amount < bits, result, value.dtype.type(0)).view(kind.compute)

        return shift

    return build


_ORDER: dict[str, Compute] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


def _compare_whole(operation: Operation) -> Compute:
    word = operation.text.split(",")[0].strip()
    compare = _ORDER[word.lstrip("su") if word not in ("ne", "eq") else word]
    if word.startswith("u"):
        return lambda a, b: compare(_unsigned(a), _unsigned(b))
    if word.startswith("s") and kind_of(operation, 0).name == "i1":
        return lambda a, b: compare(_signed_bool(a), _signed_bool(b))
    return compare


def _compare_floats(operation: Operation) -> Compute:
    word = operation.text.split(",")[0].strip()
    if word in ("true", "false"):
        return lambda a, b: np.full(np.broadcast_shapes(a.shape, b.shape), word == "true")
    if word in ("ord", "uno"):
        unordered = lambda a, b: np.isnan(a) | np.isnan(b)  # noqa: E731
        return unordered if word == "uno" else lambda a, b: ~unordered(a, b)
    compare = _ORDER[word[1:]]
    if word == "one":
        return lambda a, b: (a < b) | (a > b)
    if word[0] == "o" or word == "une":
        return compare
    return lambda a, b: compare(a, b) | np.isnan(a) | np.isnan(b)


def _select(operation: Operation) -> Compute:
    return lambda condition, a, b: chosen(_like(condition, a, b), a, b)


def _like(condition: Array, a: Array, b: Array) -> Array:
    """A condition of one value a program, as wide as what it chooses from."""
    more = max(a.ndim, b.ndim) - condition.ndim
    return condition.reshape(condition.shape + (1,) * more) if more else condition


def _convert(compute: Callable[[Array, ElementType, ElementType], Array]) -> Callable[[Operation], Compute]:
    @functools.cache  # hundreds of operations of a kernel are alike
    def between(source: ElementType, target: ElementType) -> Compute:
        return lambda values: compute(values, source, target)

    return lambda operation: between(kind_of(operation, 0), kind_of(operation))


def _extend_signed(values: Array, source: ElementType, target: ElementType) -> Array:
    return _signed_bool(values).astype(target.compute)


def _extend_unsigned(values: Array, source: ElementType, target: ElementType) -> Array:
    return _unsigned(values).astype(target.compute)


def _truncate(values: Array, source: ElementType, target: ElementType) -> Array:
    return (values & 1).astype(np.bool_) if target.name == "i1" else values.astype(target.compute)


def _to_float(values: Array, source: ElementType, target: ElementType) -> Array:
    if target.name == "f16":  # at once: by way of float32 values of 64 bits would be rounded twice
        return values.astype(np.float16).astype(target.compute)
    result = values.astype(target.compute)
    return target.round(result) if target.round else result


def _to_whole(signed: bool) -> Callable[[Array, ElementType, ElementType], Array]:
    """Truncated, with NaN as 0 and what is beyond the range at its end, as NVIDIA GPUs convert.

    There are no conversions to 8 bits: they keep the low ones of 16, as an H200 does (300.0 is 44).
    """

    def convert(values: Array, source: ElementType, target: ElementType) -> Array:
        if target.name == "i1":
            return values.astype(np.bool_)
        dtype = np.dtype(f"{'i' if signed else 'u'}{max(target.size, 2)}")
        bounds = np.iinfo(dtype)
        wide = values.astype(np.float64)
        inside = np.where((wide > bounds.min) & (wide < bounds.max), wide, 0).astype(dtype)
        beyond = np.where(wide >= bounds.max, bounds.max, np.where(wide <= bounds.min, bounds.min, inside))
        return beyond.astype(dtype).astype(f"{dtype.kind}{target.size}").view(target.compute)

    return convert


def bitcast(values: Array, source: ElementType, target: ElementType) -> Array:
    """The same bits as another type of their size."""
    return values if source.name == target.name else from_bits(to_bits(values, source), target)


def _fp_to_fp(operation: Operation) -> Compute:
    source, target = kind_of(operation, 0), kind_of(operation)
    if attributes(operation).get("rounding") == "rtz" and target.name.startswith("f8"):
        small = small_float(target.name)
        return lambda values: small.decode(small.encode(values, toward_zero=True))
    if attributes(operation).get("rounding") == "rtz" and target.name in ("bf16", "f16"):
        return lambda values: truncate(values, target.name)
    return lambda values: _to_float(values, source, target)


def _clamp(operation: Operation) -> Compute:
    if attributes(operation).get("propagateNan") == "all":
        return lambda x, low, high: np.minimum(np.maximum(x, low), high)
    return lambda x, low, high: np.fmin(np.fmax(x, low), high)


def _high_product(operation: Operation) -> Compute:
    kind = kind_of(operation)
    if kind.size == 4:
        return lambda a, b: ((a.view("u4").astype("u8") * b.view("u4")) >> np.uint64(32)).astype("u4").view("i4")
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)

    def wide(a: Array, b: Array) -> Array:
        a, b = a.view("u8"), b.view("u8")
        a0, a1, b0, b1 = a & low, a >> half, b & low, b >> half
        middle = a1 * b0 + ((a0 * b0) >> half)
        other = a0 * b1 + (middle & low)
        return (a1 * b1 + (middle >> half) + (other >> half)).view("i8")

    return wide


def _addptr(operation: Operation) -> Compute:
    pointee = operation.operands[0].type.pointee
    if pointee is None:
        raise refused(operation)
    return _moving(element_type(pointee.element).size, kind_of(operation, 1).name == "i64")


@functools.cache
def _moving(size: int, is_wide: bool) -> Compute:
    def move(pointer: Array, offset: Array) -> Array:
        if size > 1:
            offset = np.multiply(offset, size) if is_wide else offset.astype(np.int64)
            if not is_wide:
                offset *= size
            if pointer.size == 1:  # in place, as are most
                offset += pointer.reshape((1,) * offset.ndim)
                return offset
        return pointer + offset

    return move


def _fma(a: Array, b: Array, c: Array) -> Array:
    return (a.astype(np.float64) * b + c).astype(a.dtype)


def _rsqrt(x: Array) -> Array:
    return (1 / np.sqrt(x.astype(np.float64))).astype(x.dtype)


def _extern(operation: Operation) -> Compute:
    name = attributes(operation).get("symbol", "")
    compute = symbol(name)
    if compute is None:
        raise refused(operation, f"the function {name!r} of a library")
    dtype = kind_of(operation).compute
    return lambda *operands: compute(*operands).astype(dtype, copy=False)


def _asm(operation: Operation) -> Compute:
    sources = [element_type(value.type.element) for value in operation.operands]
    targets = [element_type(value.type.element) for value in operation.results]
    text = _ATTRIBUTE_STRING.findall(operation.text)[0]
    compute = inline_asm(text, attributes(operation)["constraints"], int(attributes(operation)["packed_element"]))
    if isinstance(compute, str):
        raise refused(operation, f"inline assembly, {compute}")
    extents = operation.results[0].type.shape
    return lambda *operands: compute(operands, sources, targets, extents)


_ATTRIBUTE_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')


def as_it_is(values: Array) -> Array:
    """The operand itself."""
    return values


def _same(operation: Operation) -> Compute:
    return as_it_is


def _popcount(x: Array) -> Array:
    return np.bitwise_count(_unsigned(x)).astype(x.dtype)


def _logical(compute: Compute) -> Callable[[Operation], Compute]:
    return lambda operation: compute


ELEMENTWISE: dict[str, Callable[[Operation], Compute]] = {
    "arith.addf": _floats(np.add),
    "arith.subf": _floats(np.subtract),
    "arith.mulf": _floats(np.multiply),
    "arith.divf": _floats(np.divide),
    "arith.remf": _floats(np.fmod),
    "arith.negf": _floats(np.negative),
    "arith.maxnumf": _floats(np.fmax),
    "arith.minnumf": _floats(np.fmin),
    "arith.maximumf": _floats(np.maximum),
    "arith.minimumf": _floats(np.minimum),
    "arith.addi": _whole(np.add, np.logical_xor),
    "arith.subi": _whole(np.subtract, np.logical_xor),
    "arith.muli": _whole(np.multiply, np.logical_and),
    "arith.divsi": _whole(_divide),
    "arith.floordivsi": _whole(np.floor_divide),
    "arith.ceildivsi": _whole(_ceil_divide),
    "arith.remsi": _whole(np.fmod),
    "arith.maxsi": _whole(np.maximum, np.logical_and),
    "arith.minsi": _whole(np.minimum, np.logical_or),
    "arith.divui": _as_unsigned(np.floor_divide),
    "arith.ceildivui": _as_unsigned(lambda a, b: a // b + (a % b != 0)),
    "arith.remui": _as_unsigned(np.fmod),
    "arith.maxui": _as_unsigned(np.maximum),
    "arith.minui": _as_unsigned(np.minimum),
    "arith.andi": _logical(np.bitwise_and),
    "arith.ori": _logical(np.bitwise_or),
    "arith.xori": _logical(np.bitwise_xor),
    "arith.shli": _shift(np.left_shift, unsigned=True),
    "arith.shrui": _shift(np.right_shift, unsigned=True),
    "arith.shrsi": _shift(np.right_shift, unsigned=False, beyond_keeps_sign=True),
    "arith.cmpi": _compare_whole,
    "arith.cmpf": _compare_floats,
    "arith.select": _select,
    "arith.extsi": _convert(_extend_signed),
    "arith.extui": _convert(_extend_unsigned),
    "arith.trunci": _convert(_truncate),
    "arith.index_cast": _convert(lambda v, s, t: _extend_signed(v, s, t)),
    "arith.index_castui": _convert(_extend_unsigned),
    "arith.extf": _convert(_to_float),
    "arith.truncf": _convert(_to_float),
    "arith.sitofp": _convert(lambda v, s, t: _to_float(_signed_bool(v), s, t)),
    "arith.uitofp": _convert(lambda v, s, t: _to_float(_unsigned(v), s, t)),
    "arith.fptosi": _convert(_to_whole(signed=True)),
    "arith.fptoui": _convert(_to_whole(signed=False)),
    "arith.bitcast": _convert(bitcast),
    "math.fma": _floats(_fma),
    "math.rsqrt": _floats(_rsqrt),
    "math.absi": _whole(np.abs),
    "math.ctpop": _logical(_popcount),
    "tt.addptr": _addptr,
    "tt.bitcast": _convert(bitcast),
    "tt.clampf": _clamp,
    "tt.elementwise_inline_asm": _asm,
    "tt.extern_elementwise": _extern,
    "tt.fp_to_fp": _fp_to_fp,
    "tt.int_to_ptr": _same,
    "tt.mulhiui": _high_product,
    "tt.approx_divf": _floats(_approximate_quotient),
    "tt.precise_divf": _floats(np.divide),
    "tt.precise_sqrt": _floats(np.sqrt),
    "tt.ptr_to_int": _same,
} | {
    f"math.{name}": _floats(compute)
    for name, compute in {
        "absf": np.abs, "acos": np.arccos, "acosh": np.arccosh, "asin": np.arcsin, "asinh": np.arcsinh,
        "atan": np.arctan, "atan2": np.arctan2, "atanh": np.arctanh, "cbrt": np.cbrt, "ceil": np.ceil,
        "copysign": np.copysign, "cos": np.cos, "cosh": np.cosh, "erf": special("erf"), "erfc": special("erfc"),
        "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "floor": np.floor, "log": np.log, "log10": np.log10,
        "log1p": np.log1p, "log2": np.log2, "powf": np.power, "roundeven": np.rint, "sin": np.sin, "sinh": np.sinh,
        "sqrt": np.sqrt, "tan": np.tan, "tanh": np.tanh, "trunc": np.trunc,
    }.items()
}  # fmt: skip
