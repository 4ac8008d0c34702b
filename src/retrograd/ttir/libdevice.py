"""Functions of the device libraries of NVIDIA and AMD by their symbols, in float64 and rounded to the result's type."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from retrograd.ttir.element_types import Array

Compute = Callable[..., Array]


def special(name: str) -> Compute:
    """A function of torch or torch.special for NumPy arrays; in the dtype of the argument."""

    def compute(*operands: Array) -> Array:
        import torch

        function: Any = getattr(torch.special, name, None) or getattr(torch, name)
        tensors = [torch.from_numpy(np.ascontiguousarray(operand)) for operand in operands]
        return function(*tensors).numpy()

    return compute


def symbol(name: str) -> Compute | None:
    """The function of a symbol such as "__nv_tanhf" or "__ocml_tanh_f32"; None for one that is not in the table.

    The result is in float64, in the integers' own dtype or boolean: the caller knows which type it has.
    """
    plain = name.removeprefix("__nv_")
    if plain.startswith(("__ocml_", "__triton_hip_")):
        plain = plain.removeprefix("__ocml_").removeprefix("__triton_hip_").removesuffix("_f32").removesuffix("_f64")
        plain = _AMD.get(plain, plain)
    for candidate in (plain, plain.removeprefix("fast_").removesuffix("f"), plain.removesuffix("d")):
        if candidate in _FLOATS:
            return _in_float64(_FLOATS[candidate])
        if candidate in _OTHERS:
            return _OTHERS[candidate]
    return _rounding_suffix(plain)


def _in_float64(compute: Compute) -> Compute:
    def wide(*operands: Array) -> Array:
        return compute(*(x.astype(np.float64) if x.dtype.kind == "f" else x for x in operands))

    return wide


def _vector(function: Callable[..., float]) -> Compute:
    return np.vectorize(function, otypes=[np.float64])


def _tgamma(x: float) -> float:
    try:
        return math.gamma(x)
    except ValueError:
        return math.copysign(math.inf, x) if x == 0 else math.nan
    except OverflowError:
        return math.inf


def _bessel(n: Array, x: Array, first: str, second: str) -> Array:
    """Bessel functions of whole order by the recurrence upwards."""
    a, b = special(first)(x), special(second)(x)
    order = np.broadcast_to(n, np.broadcast_shapes(n.shape, x.shape))
    result = np.where(order == 0, a, b)
    for k in range(1, int(order.max(initial=1))):
        a, b = b, 2 * k / x * b - a
        result = np.where(order == k + 1, b, result)
    return result


def _norm(*operands: Array) -> Array:
    largest = np.maximum.reduce(np.broadcast_arrays(*map(np.abs, operands)))
    scale = np.where((largest == 0) | ~np.isfinite(largest), 1, largest)
    return scale * np.sqrt(sum((x / scale) ** 2 for x in operands))


def _round_away(x: Array) -> Array:
    return np.trunc(x + np.copysign(0.49999999999999994, x))


def _fdim(x: Array, y: Array) -> Array:
    return np.where(np.isnan(x) | np.isnan(y), np.nan, np.maximum(x - y, 0))


def _logb(x: Array) -> Array:
    exponent = np.frexp(x)[1] - 1.0
    return np.where(x == 0, -np.inf, np.where(np.isfinite(x), exponent, np.abs(x)))


_FLOATS: dict[str, Compute] = {
    "acos": np.arccos, "acosh": np.arccosh, "asin": np.arcsin, "asinh": np.arcsinh, "atan": np.arctan,
    "atan2": np.arctan2, "atanh": np.arctanh, "cbrt": np.cbrt, "ceil": np.ceil, "copysign": np.copysign,
    "cos": np.cos, "cosh": np.cosh, "cospi": lambda x: np.cos(np.pi * np.fmod(x, 2)),
    "cyl_bessel_i0": special("i0"), "cyl_bessel_i1": special("i1"), "erf": special("erf"), "erfc": special("erfc"),
    "erfcinv": lambda x: -special("ndtri")(x / 2) / np.sqrt(2), "erfcx": special("erfcx"),
    "erfinv": special("erfinv"), "exp": np.exp, "exp10": lambda x: np.power(10.0, x), "exp2": np.exp2,
    "expm1": np.expm1, "fabs": np.abs, "fdim": _fdim, "fdivide": np.divide, "floor": np.floor,
    "fma": lambda a, b, c: a * b + c, "fmax": np.fmax, "fmin": np.fmin, "fmod": np.fmod, "hypot": _norm,
    "j0": special("bessel_j0"), "j1": special("bessel_j1"),
    "jn": lambda n, x: _bessel(n, x, "bessel_j0", "bessel_j1"), "ldexp": np.ldexp, "lgamma": special("gammaln"),
    "log": np.log, "log10": np.log10, "log1p": np.log1p, "log2": np.log2, "logb": _logb, "nearbyint": np.rint,
    "norm3d": _norm, "norm4d": _norm, "normcdf": special("ndtr"), "normcdfinv": special("ndtri"), "pow": np.power,
    "powi": lambda x, n: np.power(x, n.astype(np.float64)), "rcbrt": lambda x: 1 / np.cbrt(x),
    "remainder": lambda x, y: x - y * np.rint(x / y), "rhypot": lambda *x: 1 / _norm(*x), "rint": np.rint,
    "rnorm3d": lambda *x: 1 / _norm(*x), "rnorm4d": lambda *x: 1 / _norm(*x), "round": _round_away,
    "rsqrt": lambda x: 1 / np.sqrt(x), "saturate": lambda x: np.fmin(np.fmax(x, 0), 1), "scalbn": np.ldexp,
    "sin": np.sin, "sinh": np.sinh, "sinpi": lambda x: np.sin(np.pi * np.fmod(x, 2)), "sqrt": np.sqrt, "tan": np.tan,
    "tanh": np.tanh, "tgamma": _vector(_tgamma), "trunc": np.trunc, "y0": special("bessel_y0"),
    "y1": special("bessel_y1"), "yn": lambda n, x: _bessel(n, x, "bessel_y0", "bessel_y1"),
}  # fmt: skip


# What AMD's library calls otherwise.
_AMD = {"i0": "cyl_bessel_i0", "i1": "cyl_bessel_i1", "iabs": "abs", "isfinite": "finitef", "isinf": "isinff",
        "isnan": "isnanf", "pown": "powi", "signbit": "signbitf"}  # fmt: skip


def _unsigned(x: Array) -> Array:
    return x.view(f"u{x.dtype.itemsize}")


def _leading_zeros(x: Array) -> Array:
    bits = 8 * x.dtype.itemsize
    value = _unsigned(x)
    for shift in (1, 2, 4, 8, 16, 32)[: 5 + (bits == 64)]:
        value = value | (value >> value.dtype.type(shift))
    return (bits - np.bitwise_count(value)).astype(np.int32)


def _first_set(x: Array) -> Array:
    value = _unsigned(x)
    lowest = value & (~value + value.dtype.type(1))
    return np.where(value == 0, 0, np.bitwise_count(lowest - (lowest > 0).astype(value.dtype)) + 1).astype(np.int32)


def _reverse_bits(x: Array) -> Array:
    octets = np.ascontiguousarray(x[..., None]).view(np.uint8)[..., ::-1]
    turned = np.packbits(np.unpackbits(octets, axis=-1).reshape(*octets.shape, 8)[..., ::-1], axis=-1)
    return np.ascontiguousarray(turned[..., 0]).view(x.dtype)[..., 0]


def _byte_perm(a: Array, b: Array, selector: Array) -> Array:
    both = _unsigned(a).astype("u8") | (_unsigned(b).astype("u8") << np.uint64(32))
    result = np.zeros(np.broadcast_shapes(both.shape, selector.shape), "u4")
    for i in range(4):
        which = (_unsigned(selector) >> np.uint32(4 * i)) & np.uint32(7)
        octet = (both >> (8 * which).astype("u8")) & np.uint64(0xFF)
        result |= (octet << np.uint64(8 * i)).astype("u4")
    return result.view("i4")


def _high(unsigned: bool) -> Compute:
    def product(a: Array, b: Array) -> Array:
        bits = 8 * a.dtype.itemsize
        x, y = (_unsigned(a), _unsigned(b)) if unsigned else (a, b)
        high = (x.astype(object) * y.astype(object)) >> bits
        return high.astype(x.dtype).view(a.dtype)

    return product


def _low24(unsigned: bool) -> Compute:
    def product(a: Array, b: Array) -> Array:
        x, y = ((v << 8) >> 8 if not unsigned else v & 0xFFFFFF for v in (a, b))
        return x * y

    return product


def _mean(up: bool, unsigned: bool) -> Compute:
    def mean(a: Array, b: Array) -> Array:
        x, y = (_unsigned(a), _unsigned(b)) if unsigned else (a, b)
        return ((x.astype(np.int64) + y + up) >> 1).astype(a.dtype)

    return mean


def _difference(unsigned: bool) -> Compute:
    def sum_of(a: Array, b: Array, c: Array) -> Array:
        x, y = (_unsigned(a), _unsigned(b)) if unsigned else (a, b)
        return (np.abs(x.astype(np.int64) - y) + c).astype(a.dtype)

    return sum_of


def _bits(dtype: str) -> Compute:
    return lambda x: np.ascontiguousarray(x).view(dtype)


_OTHERS: dict[str, Compute] = {
    "abs": np.abs, "llabs": np.abs, "brev": _reverse_bits, "brevll": _reverse_bits, "byte_perm": _byte_perm,
    "clz": _leading_zeros, "clzll": _leading_zeros, "ffs": _first_set, "ffsll": _first_set,
    "popc": lambda x: np.bitwise_count(_unsigned(x)), "popcll": lambda x: np.bitwise_count(_unsigned(x)),
    "double2hiint": lambda x: (x.view("i8") >> 32).astype("i4"), "double2loint": lambda x: x.view("i8").astype("i4"),
    "double_as_longlong": _bits("i8"), "longlong_as_double": _bits("f8"), "float_as_int": _bits("i4"),
    "float_as_uint": _bits("i4"), "int_as_float": _bits("f4"), "uint_as_float": _bits("f4"),
    "hiloint2double": lambda high, low: ((high.astype("i8") << 32) | low.view("u4")).view("f8"),
    "rcp64h": lambda x: 1 / x, "hadd": _mean(False, False), "rhadd": _mean(True, False),
    "uhadd": _mean(False, True), "urhadd": _mean(True, True), "sad": _difference(False), "usad": _difference(True),
    "mul24": _low24(False), "umul24": _low24(True), "mulhi": _high(False), "mul64hi": _high(False),
    "umulhi": _high(True), "umul64hi": _high(True), "ilogb": lambda x: np.frexp(x)[1] - 1,
    "isinf": np.isinf, "isnan": np.isnan, "finite": np.isfinite, "isfinite": np.isfinite, "signbit": np.signbit,
    "nextafter": np.nextafter, "llrint": np.rint, "llround": lambda x: _round_away(x.astype(np.float64)),
}  # fmt: skip
_BY_SUFFIX: dict[str, Compute] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "sqrt": np.sqrt,
    "rcp": lambda x: 1 / x, "rsqrt": lambda x: 1 / np.sqrt(x), "fma": lambda a, b, c: a * b + c,
}  # fmt: skip


def _directed(exact: Array, dtype: np.dtype[Any], mode: str) -> Array:
    """float64 values in a narrower float dtype, rounded to nearest (n), toward zero (z), up (u) or down (d)."""
    near = exact.astype(dtype)
    if mode == "n":
        return near
    back = near.astype(exact.dtype)
    up, down = near.dtype.type(np.inf), near.dtype.type(-np.inf)
    zero = near.dtype.type(0)
    toward = {"u": np.full_like(near, up), "d": np.full_like(near, down), "z": np.full_like(near, zero)}[mode]
    wrong = {"u": back < exact, "d": back > exact, "z": np.abs(back) > np.abs(exact)}[mode]
    return np.where(wrong, np.nextafter(near, toward), near)


def _rounding_suffix(name: str) -> Compute | None:
    """Operations and conversions that end in a mode of rounding: "fadd_rz", "float2int_rn"."""
    stem, _, mode = name.rpartition("_r")
    if mode not in ("n", "z", "u", "d") or not stem:
        return None
    operation = next((_BY_SUFFIX[word] for word in (stem, stem[1:], stem[:-1]) if word in _BY_SUFFIX), None)
    if operation is not None:

        def directed(*operands: Array) -> Array:
            dtype = operands[0].dtype
            wide = np.longdouble if dtype == np.float64 else np.float64
            return _directed(operation(*(x.astype(wide) for x in operands)), dtype, mode)

        return directed
    source, _, target = stem.partition("2")
    if target in ("float", "double"):
        dtype = np.dtype("f4" if target == "float" else "f8")
        return lambda x: _directed((_unsigned(x) if source.startswith("u") else x).astype(np.longdouble), dtype, mode)
    if target not in ("int", "uint", "ll", "ull"):
        return None
    whole = {"n": np.rint, "z": np.trunc, "u": np.ceil, "d": np.floor}[mode]
    dtype = np.dtype({"int": "i4", "uint": "u4", "ll": "i8", "ull": "u8"}[target])

    def convert(x: Array) -> Array:
        bounds = np.iinfo(dtype)
        wide = np.nan_to_num(whole(x.astype(np.longdouble)), nan=0.0)
        return np.clip(wide, bounds.min, bounds.max).astype(dtype).view(f"i{dtype.itemsize}")

    return convert
