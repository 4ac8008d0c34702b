"""Instructions of PTX without memory and jumps, on registers that are NumPy arrays of unsigned integers."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from retrograd.ttir.asm_small_floats import converts_pair, from_pair, to_pair
from retrograd.ttir.element_types import Array, round_bf16
from retrograd.ttir.libdevice import _byte_perm, _high, _leading_zeros, _reverse_bits

Compute = Callable[..., Any]
OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s|]+")
# Waiting and hints, which change no value; fences are for whoever orders accesses.
NO_VALUE = frozenset({"griddepcontrol", "fence", "membar", "bar", "barrier", "nanosleep", "prefetch", "createpolicy"})
CLOCK = re.compile(r"%(?:globaltimer|clock)(?:64|_lo|_hi)?\b")
_NOW = itertools.count(1)  # clocks are read, by all launches: each look is later than those before
_TICK = 1 << 10  # nanoseconds and cycles between two looks, so that a kernel that waits for a millisecond ends soon
_TO_WHOLE = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_COMPARED = {
    "eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "lo": np.less,
    "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal, "neu": np.not_equal,
    "ne": lambda a, b: (a < b) | (a > b),  # false for NaN, as all but those that end in u
    "equ": lambda a, b: ~((a < b) | (a > b)),
}  # fmt: skip
# Of instructions: what comes between name and type, beside roundings and flushing of what has any.
_MODIFIERS = {
    **dict.fromkeys(("mul", "mad"), ("lo", "hi", "wide")),
    **dict.fromkeys(("max", "min"), ("NaN", "xorsign", "abs")), "shf": ("l", "r", "wrap", "clamp"),
}  # fmt: skip
_SMALLEST = {"f32": np.float32(2.0**-126), "f16": np.float32(2.0**-14)}  # below are subnormal numbers
_KIND = re.compile(r"[busf](?:8|16|32|64)|bf16|b?f16x2|pred")


def is_known(words: list[str]) -> bool:
    """Whether an instruction without memory or jump is executed as it is written, with each of its modifiers."""
    name, modifiers, kinds = words[0], words[1:-1], words[-1:]
    if name in NO_VALUE:
        return True
    if name == "cvt":
        modifiers, kinds = words[1:-2], words[-2:]
        if kinds == ["tf32", "f32"]:
            return modifiers in (["rna"], ["rn"], ["rz"])
        if converts_pair(modifiers, *kinds):
            return True
        narrows = kinds[0] != kinds[1] and kinds[0][0] in "fb" and kinds[1][0] in "fb"
        allowed = {"rn", "ftz", "sat", *(() if narrows else _TO_WHOLE)}
    elif name == "setp":
        # A second condition that is joined to the first one would be passed over.
        return len(words) in (3, 4) and words[1] in _COMPARED and words[2:-1] in ([], ["ftz"]) and _is_kind(words[-1])
    elif ("abs" in modifiers) != ("xorsign" in modifiers):
        return False  # of three values
    else:
        allowed = {"rn", "ftz", "approx", "full", *_MODIFIERS.get(name, ())}
    known = name in _TABLE or name in ("cvt", "mov", "selp")
    return known and set(modifiers) <= allowed and all(map(_is_kind, kinds))


def _is_kind(word: str) -> bool:
    return _KIND.fullmatch(word) is not None


def execute_instruction(words: list[str], operands: list[str], registers: dict[str, Array]) -> None:
    """One instruction without memory or jump, on whole registers."""
    name, kind = words[0], words[-1]
    target, sources = operands[0], operands[1:]
    if name == "mov":
        _move(kind, target, sources[0], registers)
    elif name == "setp":
        a, b = (_flushed(words, kind, _read(word, kind, registers)) for word in sources[-2:])
        registers[target] = _COMPARED[words[1]](a, b)
    elif name == "selp":
        a, b = (register_bits(word, kind, registers) for word in sources[:2])
        registers[target] = np.where(registers[sources[2]].astype(bool), a, b)
    elif name == "cvt":
        _convert(words, target, sources, registers)
    elif kind in ("f16x2", "bf16x2"):
        _pairwise(words, target, sources, registers)
    else:
        values = [_flushed(words, kind, _read(word, _source_kind(words), registers)) for word in sources]
        result = _flushed(words, kind, _TABLE[name](words, *values))
        registers[target] = _unread(result, _wide(kind) if "wide" in words else kind)


def _flushed(words: list[str], kind: str, values: Array) -> Array:
    """Floats of which subnormal ones are zeros of their sign, if an instruction says so."""
    if "ftz" not in words or kind not in _SMALLEST:
        return values
    return np.where(np.abs(values) < _SMALLEST[kind], np.copysign(np.float32(0), values), values)


def _source_kind(words: list[str]) -> str:
    return "b32" if words[0] in ("prmt", "lop3") else words[-1]


def _wide(kind: str) -> str:
    return f"{kind[0]}{2 * int(kind[1:])}"


def _move(kind: str, target: str, source: str, registers: dict[str, Array]) -> None:
    if target.startswith("{"):
        names = OPERAND.findall(target[1:-1])
        word = register_bits(source, kind, registers)
        bits = 8 * word.dtype.itemsize // len(names)
        for i, name in enumerate(names):
            registers[name] = (word >> word.dtype.type(bits * i)).astype(f"u{bits // 8}")
    elif source.startswith("{"):
        names = OPERAND.findall(source[1:-1])
        wide = np.dtype(f"u{int(kind[1:]) // 8}")
        parts = [registers[name].astype(wide) for name in names]
        bits = 8 * wide.itemsize // len(names)
        registers[target] = sum((p << wide.type(bits * i) for i, p in enumerate(parts)), start=np.zeros(1, wide))
    else:
        registers[target] = register_bits(source, kind, registers)


def _pairwise(words: list[str], target: str, sources: list[str], registers: dict[str, Array]) -> None:
    """An instruction on the two 16-bit floats of each register."""
    kind = words[-1].removesuffix("x2")
    halves = []
    for shift in (0, 16):
        bits = [register_bits(word, "b32", registers) >> np.uint32(shift) for word in sources]
        values = [_flushed(words, kind, _float16(half, kind)) for half in bits]
        halves.append(_bits16(_flushed(words, kind, _TABLE[words[0]](words, *values)), kind).astype(np.uint32))
    registers[target] = halves[0] | (halves[1] << np.uint32(16))


def _float16(bits: Array, kind: str) -> Array:
    low = (bits & 0xFFFF).astype(np.uint16)
    return low.view(np.float16).astype(np.float32) if kind == "f16" else (low.astype("u4") << 16).view(np.float32)


def _bits16(values: Array, kind: str) -> Array:
    if kind == "f16":
        return values.astype(np.float16).view(np.uint16)
    return (round_bf16(values).view(np.uint32) >> 16).astype(np.uint16)


def _convert(words: list[str], target: str, sources: list[str], registers: dict[str, Array]) -> None:
    to, source = words[-2], words[-1]
    if converts_pair(words[1:-2], to, source):
        if to == "f16x2":
            halves = from_pair(source, register_bits(sources[0], "b16", registers))
            high, low = (_bits16(value, "f16").astype(np.uint32) for value in halves)
            registers[target] = low | (high << np.uint32(16))
        else:
            registers[target] = to_pair(to, words[1:-2], *_two(sources, source, registers))
        return
    if to in ("f16x2", "bf16x2"):
        high, low = (_bits16(_read(word, source, registers), to[:-2]).astype(np.uint32) for word in sources)
        registers[target] = low | (high << np.uint32(16))
        return
    value = _flushed(words, source, _read(sources[0], source, registers))
    if to == "tf32":
        registers[target] = _tf32(np.ascontiguousarray(value).view(np.uint32), words[1])
        return
    if to[0] in "us" and value.dtype.kind == "f":
        value = next((_TO_WHOLE[word] for word in words if word in _TO_WHOLE), np.trunc)(value.astype(np.float64))
        bounds = np.iinfo(_dtype(to))
        value = np.clip(np.nan_to_num(value), bounds.min, bounds.max)
    elif to == source and value.dtype.kind == "f":
        value = next((_TO_WHOLE[word] for word in words if word in _TO_WHOLE), lambda v: v)(value)
    registers[target] = _unread(value if "sat" not in words else np.clip(value, 0, 1), to)


def _two(sources: list[str], kind: str, registers: dict[str, Array]) -> list[Array]:
    """Two floats, of two registers or of the halves of one, the upper one first."""
    if kind != "f16x2":
        return [_read(word, kind, registers) for word in sources]
    word = register_bits(sources[0], "b32", registers)
    return [_float16(word >> np.uint32(shift), "f16") for shift in (16, 0)]


def _tf32(bits: Array, rounding: str) -> Array:
    """Bits of float32 to 10 bits of mantissa: towards 0, or to the nearest, of two the even or (rna) the further."""
    even = np.uint32((1 << 12) - 1) + (bits >> np.uint32(13) & np.uint32(1))
    more = {"rz": np.uint32(0), "rn": even, "rna": np.uint32(1 << 12)}[rounding]
    finite = bits & np.uint32(0x7F800000) != 0x7F800000
    return np.where(finite, (bits + more) & np.uint32(0xFFFFE000), bits)


def _dtype(kind: str) -> np.dtype[Any]:
    return np.dtype(f"{ {'s': 'i', 'f': 'f'}.get(kind[0], 'u') }{int(kind[1:]) // 8}")


def register_bits(word: str, kind: str, registers: dict[str, Array]) -> Array:
    """Bits of a register or a number."""
    if word in registers:
        return registers[word]
    size = int(re.sub(r"\D", "", kind.removesuffix("x2")) or 32) * (2 if kind.endswith("x2") else 1)
    if CLOCK.match(word):
        now = next(_NOW) * _TICK
        return np.array([(now >> 32 if word.endswith("_hi") else now) & ((1 << size) - 1)], f"u{size // 8}")
    if word == "%smid" or word.startswith("$"):  # as if all programs were on the same multiprocessor
        return np.zeros(1, f"u{size // 8}")
    if re.match(r"0[fF][0-9a-fA-F]{8}$", word):
        return np.array([int(word[2:], 16)], np.uint32)
    if kind.startswith("f") and not word.lower().startswith("0x"):
        return np.array([float(word)], f"f{size // 8}").view(f"u{size // 8}")
    return np.array([int(word.rstrip("uU"), 0) & ((1 << size) - 1)], f"u{size // 8}")


def _read(word: str, kind: str, registers: dict[str, Array]) -> Array:
    """Value of a register or a number as a type of PTX."""
    bits = register_bits(word, kind, registers)
    if kind in ("f16", "bf16"):
        return _float16(bits, kind)
    if kind == "pred":
        return bits.astype(bool)
    dtype = _dtype(kind)
    return np.ascontiguousarray(bits).astype(f"u{dtype.itemsize}", copy=False).view(dtype)


def _unread(values: Array, kind: str) -> Array:
    """Bits of a value."""
    if kind in ("f16", "bf16"):
        return _bits16(values, kind)
    if kind == "pred" or values.dtype == np.bool_:
        return values
    dtype = _dtype(kind)
    return np.ascontiguousarray(values).astype(dtype, copy=False).view(f"u{dtype.itemsize}")


def _mul(words: list[str], a: Array, b: Array) -> Array:
    if "wide" in words:
        dtype = _dtype(_wide(words[-1]))
        return a.astype(dtype) * b.astype(dtype)
    if "hi" in words:
        return _high(a.dtype.kind == "u")(a, b)
    return a * b


def _lop3(words: list[str], a: Array, b: Array, c: Array, table: Array) -> Array:
    result = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), np.uint32)
    for i in range(8):
        if int(table[0]) >> i & 1:
            terms = (a if i & 4 else ~a, b if i & 2 else ~b, c if i & 1 else ~c)
            result |= terms[0] & terms[1] & terms[2]
    return result


def _extreme(of_numbers: Compute, with_nan: Compute) -> Callable[..., Array]:
    def extreme(words: list[str], a: Array, b: Array) -> Array:
        compute = with_nan if "NaN" in words else of_numbers
        if "xorsign" not in words:
            return compute(a, b)
        result = compute(np.abs(a), np.abs(b))
        return np.where(np.signbit(a) ^ np.signbit(b), -result, result)

    return extreme


def _funnel(words: list[str], low: Array, high: Array, amount: Array) -> Array:
    """shf: 32 bits out of 64 that are shifted, by at most 32 or, wrapping, by the rest of a division by that."""
    both = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
    by = (amount & np.uint32(31) if "wrap" in words else np.minimum(amount, np.uint32(32))).astype(np.uint64)
    moved = both << by >> np.uint64(32) if "l" in words else both >> by
    return moved.astype(np.uint32)


def _shift_by(compute: Compute) -> Callable[..., Array]:
    def shift(words: list[str], a: Array, b: Array) -> Array:
        bits = 8 * a.dtype.itemsize
        amount = b.astype(f"u{b.dtype.itemsize}")
        result = compute(a, np.minimum(amount, bits - 1).astype(a.dtype))
        return result if a.dtype.kind == "i" else np.where(amount < bits, result, a.dtype.type(0))

    return shift


_LEFT = _shift_by(np.left_shift)


def _lowest(count: Array, like: Array) -> Array:
    """A word with so many ones, the lowest bits."""
    return ~_LEFT([], np.full(1, ~like.dtype.type(0)), count & 255)


def _extract_field(words: list[str], a: Array, start: Array, length: Array) -> Array:
    """bfe: so many bits of a value from a place on, what lies beyond being its sign, or 0 of unsigned ones."""
    ones = _lowest(length, a)
    field = _shift_by(np.right_shift)([], a, start & 255) & ones
    last = np.minimum((start & 255) + (length & 255) - 1, 8 * a.dtype.itemsize - 1)
    negative = (length & 255 != 0) & (a.dtype.kind == "i") & (a >> last.astype(a.dtype) & 1 != 0)
    return np.where(negative, field | ~ones, field)


def _insert_field(words: list[str], a: Array, b: Array, start: Array, length: Array) -> Array:
    """bfi: the lowest bits of the first value in place of so many of the second one from a place on."""
    mask = _LEFT([], _lowest(length, b), start & 255)
    return _LEFT([], a, start & 255) & mask | b & ~mask


def _plain(compute: Compute) -> Callable[..., Array]:
    return lambda words, *values: compute(*values)


def _fused(words: list[str], a: Array, b: Array, c: Array) -> Array:
    if "hi" in words or "wide" in words:
        return _mul(words, a, b) + c
    return a * b + c if a.dtype.kind != "f" else (a.astype(np.float64) * b + c).astype(a.dtype)


_TABLE: dict[str, Callable[..., Array]] = {
    "bfe": _extract_field, "bfi": _insert_field, "copysign": _plain(lambda a, b: np.copysign(b, a)), "shf": _funnel,
    "abs": _plain(np.abs), "add": _plain(np.add), "and": _plain(np.bitwise_and), "brev": _plain(_reverse_bits),
    "clz": _plain(_leading_zeros), "cos": _plain(np.cos), "div": _plain(lambda a, b: a / b if a.dtype.kind == "f" else
    a // b), "ex2": _plain(np.exp2), "fma": _fused, "lg2": _plain(np.log2), "lop3": _lop3, "mad": _fused,
    "max": _extreme(np.fmax, np.maximum), "min": _extreme(np.fmin, np.minimum), "mul": _mul,
    "neg": _plain(np.negative), "not": _plain(np.invert), "or": _plain(np.bitwise_or),
    "popc": _plain(np.bitwise_count), "prmt": lambda words, a, b, s: _byte_perm(a.view("i4"), b.view("i4"), s),
    "rcp": _plain(lambda x: 1 / x), "rem": _plain(np.fmod), "rsqrt": _plain(lambda x: 1 / np.sqrt(x)),
    "shl": _LEFT, "shr": _shift_by(np.right_shift), "sin": _plain(np.sin),
    "sqrt": _plain(np.sqrt), "sub": _plain(np.subtract), "tanh": _plain(np.tanh), "xor": _plain(np.bitwise_xor),
}  # fmt: skip
