"""Literals of constants and names of parameters as a person writes them: 0.9 for 0.899999976, p['Dense_1']['bias']."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable
from functools import cache
from math import isclose, isfinite, prod

from retrograd.core.wording import count, shortened
from retrograd.graph.form import Form

_FLOAT = re.compile(r"-?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?\Z")
# Names that XLA, MLIR and FX give parameters by their number.
_NUMBERED = re.compile(r"(?:p|param|parameter|arg|Arg|iterArg|primals|tangents|arg_tuple)_?[0-9._]*\Z")
_SUFFIX = re.compile(r"\.[0-9]+\Z")
_LONGEST_NAME = 300
_MANGLED = re.compile(
    r"([A-Za-z][A-Za-z0-9]*(?:_[a-z0-9]+)*?)((?:__[A-Za-z](?:[A-Za-z0-9/~.]|_(?!_))*+__|_[0-9]+_|_[a-z]+)*?"
    r"(?:__[A-Za-z](?:[A-Za-z0-9/~.]|_(?!_))*+__|_[0-9]+_)(?:_[a-z]+)?)"
)
_KEY = re.compile(r"__([A-Za-z](?:[A-Za-z0-9/~.]|_(?!_))*+)__|_([0-9]+)_|_([a-z]+)")
# Part of a path: layers[2], Block_2, layers_2 of Dynamo.
_PART = re.compile(r"[A-Za-z]\w*?\[[0-9]+\]|(?<=')\w+(?=')|[a-z]+_[0-9]+(?=_)")
_LONG = re.compile(r"(?<![\w.])-?[0-9]+\.[0-9]{12,}(?:e[+-]?[0-9]+)?(?![\w.])")
_OP_NAME = re.compile(r'op_name="([^"]++)"')
_ITEM = re.compile(r"[^\s{},]+")
_BITS = re.compile(r"0x(?:[0-9A-F]{4}|[0-9A-F]{8}|[0-9A-F]{16})\Z")  # -inf in StableHLO
_HEX = re.compile(r'"0x(?:[0-9A-Fa-f]{2})*+"')
_CODES = {
    "f16": "e", "f32": "f", "f64": "d", "s8": "b", "s16": "h", "s32": "i", "s64": "q", "u8": "B", "u16": "H",
    "u32": "I", "u64": "Q", "pred": "?",
}  # fmt: skip
_LOSS = re.compile(r"aten\.(?:(?:smooth_l1|huber|mse|soft_margin|nll)_loss|binary_cross_entropy)")
_REDUCTION = re.compile(r"[(,] ?([012])(?=[,)])")  # the first whole number of the arguments
_REDUCTIONS = ("none", "mean", "sum")
_WIDEST_NUMBER = 20
_FEW_DIGITS = 4  # that a person writes
_ROUNDING = {"f32[]": 2.0**-22, "f64[]": 2.0**-51}  # of four operations
_FORMATS = {"f16": "<e", "f32": "<f", "f64": "<d"}


def shown(shape: str, literal: str, widest: int) -> str:
    """The literal of a constant: a scalar as short as its dtype tells it apart, an array shortened."""
    dtype = shape.partition("[")[0]
    if shape.endswith("[]") and dtype in _FORMATS and _BITS.match(literal):
        literal = repr(struct.unpack(_FORMATS[dtype].replace("<", ">"), bytes.fromhex(literal[2:]))[0])
    if shape.endswith("[]") and dtype in _FORMATS and _FLOAT.match(literal):
        return _shortest(float(literal), _bits(_FORMATS[dtype]))
    if shape.endswith("[]") and dtype == "bf16" and _FLOAT.match(literal):
        return _shortest(float(literal), _bfloat16)
    return shortened(literal, widest)


def changed(shape: str, before: str, after: str, widest: int) -> tuple[str, str]:
    """Two literals of a constant, as `shown`, and as people wrote them where arithmetic in its precision rounded.

    0.2 * 0.15 in float32 is 0.030000001, told as 0.03, unless that is what the other one is told as.
    """
    exact = shown(shape, before, widest), shown(shape, after, widest)
    near = tuple(_near(shape, text) for text in exact)
    return exact if near[0] == near[1] else (near[0], near[1])


def _near(shape: str, text: str) -> str:
    """The number of few digits that a scalar is within the rounding of a few operations; else as it is."""
    error = _ROUNDING.get(shape)
    if error is None or not _FLOAT.match(text) or not isfinite(value := float(text)):
        return text
    few = float(f"{value:.{_FEW_DIGITS}g}")
    return repr(few).removesuffix(".0") if few != value and isclose(few, value, rel_tol=error) else text


def same_in(dtype: str, x: float, y: float) -> bool:
    """Are two numbers the same one in a floating dtype?"""
    bits = _bfloat16 if dtype == "bf16" else _bits(_FORMATS[dtype]) if dtype in _FORMATS else None
    try:
        return bits is not None and bits(x) == bits(y)
    except OverflowError:
        return False


def array_change(shape: str, before: str, after: str) -> str:
    """Where two literals of an array differ: "2 of 24 numbers, first at [3,2]: 0.5 -> 1.5"; "" if unreadable."""
    sides = [_numbers(shape, literal) for literal in (before, after)]
    size = prod(dims := [int(n) for n in shape[shape.index("[") + 1 : -1].split(",") if n])
    if not dims or [len(side) for side in sides] != [size, size]:
        return ""
    differing = [k for k, (x, y) in enumerate(zip(*sides, strict=True)) if x != y]
    if not differing:
        return ""
    first, place = differing[0], list[int]()
    for dim in reversed(dims):
        first, index = divmod(first, dim)
        place.insert(0, index)
    scalar = f"{shape.partition('[')[0]}[]"
    x, y = (shown(scalar, side[differing[0]], _WIDEST_NUMBER) for side in sides)
    return f"{len(differing)} of {count(size, 'number')}, first at [{','.join(map(str, place))}]: {x} -> {y}"


def _numbers(shape: str, literal: str) -> list[str]:
    """The numbers of an array in order, as text; StableHLO writes the bytes of large ones."""
    if not literal.startswith('"0x'):
        return _ITEM.findall(literal)
    code = _CODES.get(shape.partition("[")[0])
    data = bytes.fromhex(literal[3:].rstrip('"')) if _HEX.fullmatch(literal) else b""
    if code is None or len(data) % struct.calcsize(code):
        return []
    return [repr(number) for (number,) in struct.iter_unpack(f"<{code}", data)]


def _bits(format: str) -> Callable[[float], bytes]:
    return lambda value: struct.pack(format, value)


def _bfloat16(value: float) -> bytes:
    """The upper half of a float32, rounded to nearest even."""
    (whole,) = struct.unpack("<I", struct.pack("<f", value))
    return struct.pack("<I", (whole + 0x7FFF + (whole >> 16 & 1)) >> 16)


def _shortest(value: float, bits: Callable[[float], bytes]) -> str:
    try:
        texts = (f"{value:.{digits}g}" for digits in range(1, 18))
        number = next(float(text) for text in texts if bits(float(text)) == bits(value))
        return repr(number).removesuffix(".0")
    except (OverflowError, StopIteration):
        return repr(value)


def parameter_name(form: Form, node: int) -> str:
    """What the program calls a parameter: p['Dense_1']['kernel']; "" if the text says no more than its number.

    JAX puts the path of an argument into its metadata, torch_xla an operation, of which it names the type as well.
    """
    ins = form.origins[node]
    if (match := _OP_NAME.search(ins.metadata)) and "op_type=" not in ins.metadata:
        return match[1].replace("\\'", "'")
    return "" if _NUMBERED.match(ins.name) else _path(_SUFFIX.sub("", ins.name))


@cache
def _path(name: str) -> str:
    """A path in a pytree as the program has it: JAX writes p['Dense_1']['bias'] as p__Dense_1____bias__."""
    match = _MANGLED.fullmatch(name) if ("__" in name or name.endswith("_")) and len(name) < _LONGEST_NAME else None
    parts = [("", "", match[1]), *_KEY.findall(match[2])] if match else []
    return (
        "".join(f"['{key}']" if key else f"[{index}]" if index else f".{text}" for key, index, text in parts)[1:]
        or name
    )


def added_part(names: Iterable[str], others: Iterable[str]) -> str:
    """What a layer is called whose parameters these are: the first part of their paths that all have, and no other."""
    parts = [_PART.findall(name.replace("_modules", "")) for name in names]
    known = {part for name in others for part in _PART.findall(name.replace("_modules", ""))}
    return next((p for p in (parts or [[]])[0] if p not in known and all(p in own for own in parts)), "")


def rounded(text: str) -> str:
    """A text with the numbers that arithmetic made long as people write them: 0.1 for 0.09999999999999998.

    So are those that were rounded to float32 on the way: 0.8 for 0.7999999970197678.
    """
    return _LONG.sub(lambda m: _few(float(m[0])), text)


def _few(value: float) -> str:
    few = f"{value:.{_FEW_DIGITS}g}"
    return few if isclose(float(few), value, rel_tol=_ROUNDING["f32[]"]) else f"{value:.12g}"


def reduction(operation: str, before: str, after: str) -> str:
    """How a loss is reduced, in words, where that changed: ATen has it as a number, and does not print the mean."""
    if not _LOSS.match(operation):
        return ""
    names = [_REDUCTIONS[int(m[1])] if (m := _REDUCTION.search(text)) else "mean" for text in (before, after)]
    return f" (reduction {names[0]} -> {names[1]})" if names[0] != names[1] else ""
