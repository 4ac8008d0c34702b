"""Literals of constants and names of parameters as a person writes them: 0.9 for 0.899999976, p['Dense_1']['bias']."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

from retrograd.core.wording import shortened
from retrograd.graph.form import Form
from retrograd.graph.ir import Graph

_FLOAT = re.compile(r"-?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?\Z")
# Names that XLA, MLIR and FX give parameters by their number.
_NUMBERED = re.compile(r"(?:p|param|parameter|arg|Arg|iterArg|primals|tangents|arg_tuple)_?[0-9._]*\Z")
_SUFFIX = re.compile(r"\.[0-9]+\Z")
_FORMATS = {"f16": "<e", "f32": "<f", "f64": "<d"}


def shown(shape: str, literal: str, widest: int) -> str:
    """The literal of a constant: a scalar as short as its dtype tells it apart, an array shortened."""
    dtype = shape.partition("[")[0]
    if shape.endswith("[]") and dtype in _FORMATS and _FLOAT.match(literal):
        return _shortest(float(literal), _bits(_FORMATS[dtype]))
    if shape.endswith("[]") and dtype == "bf16" and _FLOAT.match(literal):
        return _shortest(float(literal), _bfloat16)
    return shortened(literal, widest)


def _bits(format: str) -> Callable[[float], bytes]:
    return lambda value: struct.pack(format, value)


def _bfloat16(value: float) -> bytes:
    """The upper half of a float32, rounded to nearest even."""
    (whole,) = struct.unpack("<I", struct.pack("<f", value))
    return struct.pack("<I", (whole + 0x7FFF + (whole >> 16 & 1)) >> 16)


def _shortest(value: float, bits: Callable[[float], bytes]) -> str:
    try:
        texts = (f"{value:.{digits}g}" for digits in range(1, 18))
        return next(text for text in texts if bits(float(text)) == bits(value))
    except (OverflowError, StopIteration):
        return repr(value)


def parameter_name(graph: Graph, form: Form, node: int) -> str:
    """What the program calls a parameter of the entry: p['Dense_1']['kernel']; "" if the text does not say."""
    place = graph.where(form.origins[node])
    # JAX puts the path of an argument there; torch_xla an operation, of which it names the kind as well.
    return place.op.replace("\\'", "'") if place.op and not place.kind else argument_name(form, node)


def argument_name(form: Form, node: int) -> str:
    """The name of a parameter without numbers that a trace appends; "" if it says no more than its number."""
    name = form.origins[node].name
    return "" if _NUMBERED.match(name) else _SUFFIX.sub("", name)
