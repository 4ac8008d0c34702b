"""Element types of TTIR: how memory holds them, which NumPy array computes with them, and how results are rounded.

Floats narrower than 32 bits are computed in float32 arrays and rounded after each operation, which for a sum, product,
quotient or root of two of them gives the bits of the narrow operation itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from retrograd.errors import RetrogradError

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ElementType:
    """An element type.

    Attributes:
        name: as TTIR writes it.
        memory: dtype of the bits in memory, unsigned or as NumPy has it.
        compute: dtype of arrays that hold values.
        decode: bits of memory -> values.
        encode: values -> bits of memory.
        round: values of the compute dtype -> the nearest values of this type; None where all are.
    """

    name: str
    memory: np.dtype[Any]
    compute: np.dtype[Any]
    decode: Callable[[Array], Array]
    encode: Callable[[Array], Array]
    round: Callable[[Array], Array] | None = None

    @cached_property  # each access asks
    def size(self) -> int:
        return self.memory.itemsize

    @cached_property
    def decodes(self) -> bool:
        """Whether values are other than what memory holds."""
        return self.decode is not _same

    @property
    def is_float(self) -> bool:
        return self.compute.kind == "f"

    @property
    def bits(self) -> int:
        return 1 if self.name == "i1" else 8 * self.size


def _same(values: Array) -> Array:
    return values


def round_bf16(values: Array) -> Array:
    """float32 values rounded to bfloat16, to nearest even; still in float32."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits >> 16  # in place from here on, as this runs for every operation on bfloat16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded &= 0xFFFF0000
    if np.isnan(np.maximum.reduce(values, axis=None, initial=0.0)):  # a fourth of what to look at each takes
        rounded[np.isnan(values)] = 0x7FC00000
    return rounded.view(np.float32)


def truncate_tf32(values: Array) -> Array:
    """float32 values with the 10 bits of mantissa that tensor cores read of what tl.dot hands them: the rest is cut.

    Measured on an H200 with mma and wgmma (benchmarks/tf32.py): 1e-6 from products of cut factors, 2e-2 from those of
    rounded ones, as cuBLAS has.
    """
    return _cut(values, 0xFFFFE000)


def _cut(values: Array, mask: int) -> Array:
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    cut = bits & np.uint32(mask)
    if np.isnan(np.maximum.reduce(values, axis=None, initial=0.0)):
        cut[np.isnan(values)] = 0x7FC00000  # whose digits may all be among those cut, which leaves an infinity
    return cut.view(np.float32)


def truncate(values: Array, name: str) -> Array:
    """float32 or float64 values rounded toward zero to "f16" or "bf16"; in float32."""
    if name == "bf16":
        return _cut(_toward_zero(values, np.float32), 0xFFFF0000)
    return _toward_zero(values, np.float16).astype(np.float32)


def _toward_zero(values: Array, dtype: Any) -> Array:
    near = values.astype(dtype)
    beyond = np.abs(near.astype(values.dtype)) > np.abs(values)
    near[beyond] = np.nextafter(near[beyond], dtype(0))
    return near


def _round_f16(values: Array) -> Array:
    return values.astype(np.float16).astype(np.float32)


def _decode_bf16(bits: Array) -> Array:
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def _encode_bf16(values: Array) -> Array:
    return (np.ascontiguousarray(values, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)


_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


def chosen(condition: Array, values: Array, others: Array | None) -> Array:
    """np.where; where the others are zeros, None standing for them, in a fourth of its time."""
    if values.dtype.kind == "b":
        return values & condition if others is None else np.where(condition, values, others)
    bits = _UNSIGNED[values.itemsize]
    if others is None or (others.size == 1 and not others.view(bits).any()):
        return (values.view(bits) * condition).view(values.dtype)
    return np.where(condition, values, others)


class SmallFloat:
    """A float of 8 or fewer bits, by a table of its values: encoding by search, saturating as NVIDIA GPUs convert."""

    def __init__(self, exponent: int, mantissa: int, bias: int, nan: str) -> None:
        """nan: "ieee" (and infinities), "all ones" (S.1111.111), "negative zero" or "none"."""
        count = 1 << (exponent + mantissa)
        codes = np.arange(count)
        field = codes >> mantissa
        fraction = (codes & ((1 << mantissa) - 1)) / (1 << mantissa)
        values = np.where(field == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (field - bias))
        last = count - 1
        if nan == "ieee":
            values[field == (1 << exponent) - 1] = np.where(fraction[-(1 << mantissa) :] == 0, np.inf, np.nan)
            last = count - (1 << mantissa) - 1
        elif nan == "all ones":
            values[-1], last = np.nan, count - 2
        both = np.concatenate([values, -values])
        if nan == "negative zero":
            both[count] = np.nan
        self.values = both.astype(np.float32)
        self._finite = values[: last + 1]
        self._sign = count
        self._nan = {"ieee": count - 1, "all ones": count - 1, "negative zero": count, "none": 0}[nan]
        self._negative_zero = nan != "negative zero"

    def decode(self, bits: Array) -> Array:
        return self.values[bits]

    def encode(self, values: Array, toward_zero: bool = False) -> Array:
        """Codes of the nearest values (ties to even), or of those next toward zero; the greatest where beyond it."""
        size = np.abs(values).astype(np.float64)
        if toward_zero:
            code = np.searchsorted(self._finite, size, side="right") - 1
        else:
            middle = (self._finite[1:] + self._finite[:-1]) / 2
            low = np.searchsorted(middle, size, side="left")
            high = np.searchsorted(middle, size, side="right")
            code = np.where(low % 2 == 0, low, high)
        code = np.where(np.signbit(values) & ((code > 0) | self._negative_zero), code + self._sign, code)
        return np.where(np.isnan(values), self._nan, code).astype(np.uint8)


_SMALL = {
    "f8E4M3FN": (4, 3, 7, "all ones"),
    "f8E5M2": (5, 2, 15, "ieee"),
    "f8E4M3FNUZ": (4, 3, 8, "negative zero"),
    "f8E5M2FNUZ": (5, 2, 16, "negative zero"),
    "f8E4M3B11FNUZ": (4, 3, 11, "negative zero"),
    "f4E2M1FN": (2, 1, 1, "none"),
}


@cache
def small_float(name: str) -> SmallFloat:
    """Table of an 8-bit float by its name in TTIR, or of the 4-bit float "f4E2M1FN"."""
    return SmallFloat(*_SMALL[name])


@cache
def element_type(name: str) -> ElementType:
    """The element type of a name of TTIR; pointers are addresses in 64 bits.

    Raises:
        RetrogradError: there is no such type here.
    """
    if name == "bf16":
        return _type(name, "u2", "f4", _decode_bf16, _encode_bf16, round_bf16)
    if name == "f16":
        return _type(name, "f2", "f4", lambda b: b.astype(np.float32), lambda v: v.astype(np.float16), _round_f16)
    if name in ("f32", "f64"):
        return _type(name, f"f{int(name[1:]) // 8}", f"f{int(name[1:]) // 8}", _same, _same)
    if name in _SMALL:
        small = small_float(name)
        return _type(name, "u1", "f4", small.decode, small.encode, lambda v: small.decode(small.encode(v)))
    if name == "i1":
        return _type(name, "u1", "?", lambda b: b != 0, lambda v: v.astype(np.uint8))
    if name in ("ptr", "index"):
        return _type(name, "i8", "i8", _same, _same)
    if name in ("i8", "i16", "i32", "i64"):
        return _type(name, f"i{int(name[1:]) // 8}", f"i{int(name[1:]) // 8}", _same, _same)
    raise RetrogradError(f"values of type {name} cannot be computed without a GPU")


def _type(
    name: str,
    memory: str,
    compute: str,
    decode: Callable[[Array], Array],
    encode: Callable[[Array], Array],
    rounding: Callable[[Array], Array] | None = None,
) -> ElementType:
    return ElementType(name, np.dtype(memory), np.dtype(compute), decode, encode, rounding)


def to_bits(values: Array, kind: ElementType) -> Array:
    """Values as the unsigned integers that memory holds of them."""
    return np.ascontiguousarray(kind.encode(values)).view(f"u{kind.size}")


def from_bits(bits: Array, kind: ElementType) -> Array:
    """Values of unsigned integers as memory holds them."""
    return kind.decode(bits.view(kind.memory))
