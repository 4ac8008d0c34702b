"""Conversions of PTX between two floats of 8 or 4 bits in a word and wider ones."""

from __future__ import annotations

import numpy as np

from retrograd.ttir.element_types import Array, small_float

# Type of PTX -> that of TTIR, and the bits of each of the two.
_PAIRS = {"e4m3x2": ("f8E4M3FN", 8), "e5m2x2": ("f8E5M2", 8), "e2m1x2": ("f4E2M1FN", 4)}
_EXPONENTS = "ue8m0x2"  # of which an element is a power of two, from 2^-127
_NO_POWER = 255


def converts_pair(modifiers: list[str], target: str, source: str) -> bool:
    """Whether a conversion is one of these, with modifiers that are executed as they are written."""
    if target == _EXPONENTS:
        return source == "f32" and modifiers in (["rz"], ["rp"], ["rz", "satfinite"], ["rp", "satfinite"])
    if target in _PAIRS:
        return source in ("f32", "f16x2") and modifiers == ["rn", "satfinite"]
    return target == "f16x2" and source in _PAIRS and modifiers == ["rn"]


def to_pair(target: str, modifiers: list[str], high: Array, low: Array) -> Array:
    """Two floats as one word, the first in its upper half.

    Without a number for it a NaN is the largest; of the powers of two it has one of its own.
    """
    if target == _EXPONENTS:
        upper, lower = (_exponent(value, modifiers).astype(np.uint16) for value in (high, low))
        return upper << np.uint16(8) | lower
    name, bits = _PAIRS[target]
    small = small_float(name)
    codes = (small.encode(value) for value in (high, low))
    if name == "f4E2M1FN":
        codes = (np.where(np.isnan(value), 7, code) for value, code in zip((high, low), codes, strict=True))
    upper, lower = (code.astype(np.uint16) for code in codes)
    return (upper << np.uint16(bits) | lower).astype(np.uint16 if bits == 8 else np.uint8)


def from_pair(source: str, word: Array) -> tuple[Array, Array]:
    """The two floats of a word, that of its upper half first."""
    name, bits = _PAIRS[source]
    mask = (1 << bits) - 1
    return small_float(name).decode(word >> bits & mask), small_float(name).decode(word & mask)


def _exponent(value: Array, modifiers: list[str]) -> Array:
    """The code of a power of two next to a size, towards 0 or (rp) from there."""
    fraction, exponent = np.frexp(np.abs(value).astype(np.float64))
    power = exponent - 1 + (("rp" in modifiers) & (fraction > 0.5))  # fraction is 0.5 of a power of two
    code = np.clip(np.where(fraction == 0, 0, power + 127), 0, 254)
    beyond = np.isnan(value) | (np.isinf(value) & ("satfinite" not in modifiers))
    return np.where(beyond, _NO_POWER, np.where(np.isinf(value), 254, code))
