"""Lines of tl.device_print: prefix, place and number as a GPU's `printf` writes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from retrograd.ttir.element_types import Array, ElementType, element_type
from retrograd.ttir.ir import Operation

_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_SIGNS = re.compile(r"isSigned = array<i32: ([-\d, ]+)>")


def quoted(operation: Operation) -> str:
    """The first text in quotes of an operation, "" where it has none."""
    return (_STRING.findall(operation.text) or [""])[0]


def printed_lines(operation: Operation) -> Callable[[Any, list[Array]], Iterator[str]]:
    """What a tt.print writes, given a program's place in the grid and its values, of one operand after another."""
    prefix, is_hex = quoted(operation), "hex = true" in operation.text
    types = [operand.type for operand in operation.operands]
    signs = _SIGNS.search(operation.text)
    signed = [sign.strip() != "0" for sign in signs[1].split(",")] if signs else [True] * len(types)
    kinds = [element_type("ptr" if type_.pointee else type_.element) for type_ in types]
    formats = [_number_format(kind, is_hex, sign) for kind, sign in zip(kinds, signed, strict=True)]

    def lines(program: Any, values: list[Array]) -> Iterator[str]:
        if not values:
            yield f"pid {program}{prefix}"
        for number, (value, type_, text) in enumerate(zip(values, types, formats, strict=True)):
            label = f"(operand {number}) " if len(values) > 1 else ""
            widths = [len(str(extent - 1)) for extent in type_.shape]
            for index, element in np.ndenumerate(np.broadcast_to(value, type_.shape)):
                place = ", ".join(f"{at:{width}}" for at, width in zip(index, widths, strict=True))
                yield f"pid {program} idx ({place}){prefix}{label}{text(element)}"

    return lines


def _number_format(kind: ElementType, is_hex: bool, signed: bool) -> Callable[[Any], str]:
    if kind.is_float:
        return (lambda element: float(element).hex()) if is_hex else "{:f}".format
    mask = (1 << kind.bits) - 1
    if kind.name == "ptr":
        return lambda element: f"0x{int(element) & mask:x}"
    if is_hex:
        return lambda element: f"0x{int(element) & mask:0{max(kind.bits // 4, 1)}x}"
    return lambda element: str(int(element) if signed else int(element) & mask)
