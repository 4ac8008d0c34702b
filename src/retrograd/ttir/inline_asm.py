"""Inline assembly on elements: the PTX instructions without memory and jumps, as NumPy functions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from retrograd.ttir.element_types import Array, ElementType, from_bits, round_bf16, to_bits
from retrograd.ttir.libdevice import _byte_perm, _high, _leading_zeros, _reverse_bits

Compute = Callable[..., Any]
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_INSTRUCTION = re.compile(r"(?:@(!?)(\S+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.S)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s|]+")
# Waiting and hints, which change no value; fences are for whoever orders accesses.
NO_VALUE = frozenset({"griddepcontrol", "fence", "membar", "bar", "barrier", "nanosleep", "prefetch", "createpolicy"})
_DECLARED = re.compile(r"\.reg\s+\.\w+\s+([^;]+);")
_CLOCK = re.compile(r"%(?:globaltimer|clock)(?:64|_lo|_hi)?\b")
_NOW = itertools.count(1)  # clocks are read, by all launches: each look is later than those before
_TICK = 1 << 10  # nanoseconds and cycles between two looks, so that a kernel that waits for a millisecond ends soon
_FENCE = re.compile(r"\b(?:fence\.(?!proxy)(?:\w+\.)*(?:gpu|sys)|membar\.(?:gl|sys))\b")
_KIND = re.compile(r"[busf](?:8|16|32|64)|bf16|b?f16x2|pred")
_BITS = {"h": 16, "r": 32, "f": 32, "l": 64, "d": 64, "b": 8, "c": 8}


def inline_asm(text: str, constraints: str, packed: int) -> Callable[..., Any] | str:
    """A function of (operands, their types, types of the results) for a piece of assembly.

    Args:
        text: as TTIR has it, line breaks as \\0A.
        constraints: "=r,=r,r".
        packed: how many elements of each operand one run takes.

    Returns:
        The function, or why there is none, in words.
    """
    plain = plain_text(text)
    body = re.sub(r"(^|[;{\s])\{(?![^;{}]*\}\s*[,;])|\}(?=\s*(?:$|;|\}|[a-z@.{]))", r"\1 ", plain)
    declared = {word.split("<")[0] for names in _DECLARED.findall(plain) for word in re.split(r"[,\s]+", names)}
    program: list[tuple[str, str, str, list[str]]] = []
    for statement in body.split(";"):
        statement = " ".join(statement.split())
        if not statement or statement.startswith(".reg"):
            continue
        match = _INSTRUCTION.match(statement)
        name = match[3].split(".")[0] if match else ""
        if match is None or (
            name not in _TABLE and name not in NO_VALUE and name not in ("mov", "setp", "selp", "cvt")
        ):
            return f"its instruction {statement!r}"
        if name not in NO_VALUE and not _is_known(match[3].split(".")):
            return f"its instruction {statement!r}"
        operands = _OPERAND.findall(match[4])
        unknown = [w for w in operands if w[0] == "%" and w not in declared and w != "%smid" and not _CLOCK.match(w)]
        if unknown:
            return f"the register {unknown[0]}"
        if name not in NO_VALUE:
            program.append((match[1] or "", match[2] or "", match[3], operands))
    slots = [word.strip("=&+ ") for word in constraints.split(",") if not word.startswith("~")]
    outputs = sum(word.strip().startswith("=") for word in constraints.split(","))

    def compute(
        operands: Sequence[Array], sources: Sequence[ElementType], targets: Sequence[ElementType],
        extents: Sequence[int] | None = None,
    ) -> Any:  # fmt: skip
        shape = np.broadcast_shapes(*(x.shape for x in operands)) if operands else (1,)
        if packed > 1 and extents is not None:
            # Neighbours are whatever a thread holds; which they are makes no difference to elements.
            shape = (shape[0], *extents)
        registers: dict[str, Array] = {}
        filled = outputs
        for operand, source in zip(operands, sources, strict=True):
            for content in _registers(operand, source, shape, packed, slots[filled] if filled < len(slots) else "r"):
                registers[f"${filled}"] = content
                filled += 1
        _execute(program, registers)
        return _results(registers, targets, shape, packed, slots)

    return compute


def _is_known(words: list[str]) -> bool:
    """Whether the types of an instruction are known, and nothing is clamped; of a conversion to tf32 its rounding."""
    if "relu" in words or "satfinite" in words:
        return False
    if words[0] == "cvt" and words[-2:] == ["tf32", "f32"]:
        return words[1:-2] in (["rna"], ["rn"], ["rz"])
    return all(_KIND.fullmatch(kind) for kind in words[-2 if words[0] == "cvt" else -1 :])


def reads_clock(text: str) -> bool:
    """Whether a piece of assembly asks for the time."""
    return bool(_CLOCK.search(plain_text(text)))


def fences(text: str) -> bool:
    """Whether a piece of assembly has a fence that other programs hear of."""
    return bool(_FENCE.search(plain_text(text)))


def plain_text(text: str) -> str:
    """Assembly as it was written, from TTIR's text of it, without comments."""
    written = re.sub(r"\\([0-9A-F]{2})", lambda code: chr(int(code[1], 16)), text).replace("\\\\", "\\")
    return _COMMENT.sub(" ", written)


def _registers(operand: Array, source: ElementType, shape: tuple[int, ...], packed: int, slot: str) -> list[Array]:
    """Contents of the registers that one run takes of an operand; narrow elements share registers of 32 bits."""
    bits = to_bits(operand, source)
    if packed == 1:
        return [bits.astype(f"u{_BITS.get(slot, 32) // 8}")]
    bits = np.broadcast_to(bits, shape).reshape(shape[0], -1)
    if bits.shape[1] % packed:
        bits = np.repeat(bits, packed, axis=1)  # fewer elements than one run takes: the rest is whatever there is
    bits = bits.reshape(shape[0], -1, packed)
    if source.size >= 4:
        return [bits[..., i] for i in range(packed)]
    each = min(4 // source.size, packed)
    words = []
    for start in range(0, packed, each):
        word = np.zeros(bits.shape[:-1], np.uint32)
        for i in range(each):
            word |= bits[..., start + i].astype(np.uint32) << np.uint32(8 * source.size * i)
        words.append(word)
    return words


def _results(
    registers: dict[str, Array], targets: Sequence[ElementType], shape: tuple[int, ...], packed: int, slots: list[str]
) -> Any:
    results, at = [], 0
    for target in targets:
        unsigned = f"u{target.size}"
        if packed == 1:
            bits = registers.get(f"${at}", np.zeros(1, np.uint32))
            at += 1
            results.append(from_bits(np.ascontiguousarray(bits.astype(unsigned)), target))
            continue
        each = max(min(4 // target.size, packed), 1)
        elements = []
        for _ in range(0, packed, each):
            word = registers[f"${at}"]
            at += 1
            elements += [(word >> word.dtype.type(8 * target.size * i)).astype(unsigned) for i in range(each)]
        bits = np.stack(np.broadcast_arrays(*elements), axis=-1)
        bits = bits.reshape(shape[0], -1)
        bits = bits[:, :: max(bits.shape[1] // int(np.prod(shape[1:])), 1)].reshape(shape)
        results.append(from_bits(np.ascontiguousarray(bits), target))
    return results[0] if len(results) == 1 else tuple(results)


def _execute(program: list[tuple[str, str, str, list[str]]], registers: dict[str, Array]) -> None:
    for negated, predicate, name, operands in program:
        before = {word: registers.get(word) for word in operands[:1]}
        execute_instruction(name.split("."), operands, registers)
        if predicate:
            holds = registers[predicate].astype(bool) ^ bool(negated)
            for word, old in before.items():
                if old is not None:
                    registers[word] = np.where(holds, registers[word], old.astype(registers[word].dtype))


def execute_instruction(words: list[str], operands: list[str], registers: dict[str, Array]) -> None:
    """One instruction without memory or jump, on whole registers."""
    name, kind = words[0], words[-1]
    target, sources = operands[0], operands[1:]
    if name == "mov":
        _move(kind, target, sources[0], registers)
    elif name == "setp":
        order = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
                 "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
                 "equ": np.equal, "neu": np.not_equal}  # fmt: skip
        a, b = (_read(word, kind, registers) for word in sources[-2:])
        registers[target] = order[words[1]](a, b)
    elif name == "selp":
        a, b = (register_bits(word, kind, registers) for word in sources[:2])
        registers[target] = np.where(registers[sources[2]].astype(bool), a, b)
    elif name == "cvt":
        _convert(words, target, sources, registers)
    elif kind in ("f16x2", "bf16x2"):
        _pairwise(words, target, sources, registers)
    else:
        values = [_read(word, _source_kind(words), registers) for word in sources]
        result = _TABLE[name](words, *values)
        registers[target] = _unread(result, _wide(kind) if "wide" in words else kind)


def _source_kind(words: list[str]) -> str:
    return "b32" if words[0] in ("prmt", "lop3") else words[-1]


def _wide(kind: str) -> str:
    return f"{kind[0]}{2 * int(kind[1:])}"


def _move(kind: str, target: str, source: str, registers: dict[str, Array]) -> None:
    if target.startswith("{"):
        names = _OPERAND.findall(target[1:-1])
        word = register_bits(source, kind, registers)
        bits = 8 * word.dtype.itemsize // len(names)
        for i, name in enumerate(names):
            registers[name] = (word >> word.dtype.type(bits * i)).astype(f"u{bits // 8}")
    elif source.startswith("{"):
        names = _OPERAND.findall(source[1:-1])
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
        values = [_float16(register_bits(word, "b32", registers) >> np.uint32(shift), kind) for word in sources]
        halves.append(_bits16(_TABLE[words[0]](words, *values), kind).astype(np.uint32))
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
    if to in ("f16x2", "bf16x2"):
        high, low = (_bits16(_read(word, source, registers), to[:-2]).astype(np.uint32) for word in sources)
        registers[target] = low | (high << np.uint32(16))
        return
    value = _read(sources[0], source, registers)
    if to == "tf32":
        registers[target] = _tf32(np.ascontiguousarray(value).view(np.uint32), words[1])
        return
    if to[0] in "us" and value.dtype.kind == "f":
        rounding = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
        value = next((rounding[word] for word in words if word in rounding), np.trunc)(value.astype(np.float64))
        bounds = np.iinfo(_dtype(to))
        value = np.clip(np.nan_to_num(value), bounds.min, bounds.max)
    elif to == source and value.dtype.kind == "f":
        rounding = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
        value = next((rounding[word] for word in words if word in rounding), lambda v: v)(value)
    registers[target] = _unread(value if "sat" not in words else np.clip(value, 0, 1), to)


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
    if _CLOCK.match(word):
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


def _shift_by(compute: Compute) -> Callable[..., Array]:
    def shift(words: list[str], a: Array, b: Array) -> Array:
        bits = 8 * a.dtype.itemsize
        amount = b.astype(f"u{b.dtype.itemsize}")
        result = compute(a, np.minimum(amount, bits - 1).astype(a.dtype))
        return result if a.dtype.kind == "i" else np.where(amount < bits, result, a.dtype.type(0))

    return shift


def _plain(compute: Compute) -> Callable[..., Array]:
    return lambda words, *values: compute(*values)


def _fused(words: list[str], a: Array, b: Array, c: Array) -> Array:
    if "hi" in words or "wide" in words:
        return _mul(words, a, b) + c
    return a * b + c if a.dtype.kind != "f" else (a.astype(np.float64) * b + c).astype(a.dtype)


_TABLE: dict[str, Callable[..., Array]] = {
    "abs": _plain(np.abs), "add": _plain(np.add), "and": _plain(np.bitwise_and), "brev": _plain(_reverse_bits),
    "clz": _plain(_leading_zeros), "cos": _plain(np.cos), "div": _plain(lambda a, b: a / b if a.dtype.kind == "f" else
    a // b), "ex2": _plain(np.exp2), "fma": _fused, "lg2": _plain(np.log2), "lop3": _lop3, "mad": _fused,
    "max": _plain(lambda a, b: np.fmax(a, b)), "min": _plain(lambda a, b: np.fmin(a, b)), "mul": _mul,
    "neg": _plain(np.negative), "not": _plain(np.invert), "or": _plain(np.bitwise_or),
    "popc": _plain(np.bitwise_count), "prmt": lambda words, a, b, s: _byte_perm(a.view("i4"), b.view("i4"), s),
    "rcp": _plain(lambda x: 1 / x), "rem": _plain(np.fmod), "rsqrt": _plain(lambda x: 1 / np.sqrt(x)),
    "shl": _shift_by(np.left_shift), "shr": _shift_by(np.right_shift), "sin": _plain(np.sin),
    "sqrt": _plain(np.sqrt), "sub": _plain(np.subtract), "tanh": _plain(np.tanh), "xor": _plain(np.bitwise_xor),
}  # fmt: skip
