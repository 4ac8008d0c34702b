"""Exact addresses of accesses: what integer arithmetic of a kernel would give if it never wrapped.

They are computed from the registers of a frame when they are asked for, back to where a value comes from elsewhere: an
argument, memory, a round of a loop, a remainder, a shift or a mask, with which a hash that wraps is brought into range.
Sums and products that wrap and come back, as a + b - b, are right and have the same exact value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from retrograd.ttir.element_types import Array, element_type
from retrograd.ttir.ir import Operation, SourcePlace

_ARITHMETIC: dict[str, Callable[[Array, Array], Array]] = {
    "arith.addi": np.add, "arith.subi": np.subtract, "arith.muli": np.multiply, "arith.shli": np.left_shift,
}  # fmt: skip
_MOVES = frozenset({"tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.splat", "tt.trans"})


@dataclass(frozen=True)
class _Definition:
    """How a slot is made: `exact` of the exact operands and of the slot's own value."""

    operation: Operation
    operands: Sequence[int]
    exact: Callable[..., Array]


Note = Callable[[Operation, Sequence[int], int, Callable[..., Any]], None]


class ExactAddresses:
    """The arithmetic of a kernel that may lead to addresses.

    Args:
        tell: calls a function with each operation of the kernel that has one result, with the slots of its operands,
            that of its result, and what computes it; not before an address is asked for, which few launches do.
    """

    def __init__(self, tell: Callable[[Note], Any]) -> None:
        self._tell = tell
        self._needed: dict[int, list[int]] = {}

    @cached_property
    def _definitions(self) -> dict[int, _Definition]:
        definitions: dict[int, _Definition] = {}

        def note(operation: Operation, operands: Sequence[int], result: int, compute: Callable[..., Any]) -> None:
            if (exact := _exactly(operation, compute)) is not None:
                definitions[result] = _Definition(operation, operands, exact)

        self._tell(note)
        return definitions

    def of(self, slot: int, registers: Sequence[Any]) -> Array:
        """The exact value of a slot."""
        values = self._values(slot, registers)
        return values[slot] if slot in values else registers[slot]

    def first_wrap(self, slot: int, registers: Sequence[Any], row: int) -> tuple[SourcePlace, int, int] | None:
        """Where arithmetic that leads to a slot wraps first, of one program: line, bits, and the exact value."""
        values = self._values(slot, registers)
        for step, value in values.items():
            definition = self._definitions[step]
            bits = element_type(definition.operation.results[0].type.element).bits
            if definition.operation.name in _ARITHMETIC and bits < 64:
                own = value[row if len(value) > 1 else 0]
                beyond = own[(own < -(1 << (bits - 1))) | (own >= 1 << (bits - 1))]
                if beyond.size:
                    return definition.operation.place, bits, int(beyond.flat[0])
        return None

    def _values(self, slot: int, registers: Sequence[Any]) -> dict[int, Array]:
        """Exact values of all that a slot is made of, in the order of the kernel."""
        exact: dict[int, Array] = {}
        for step in self._slice(slot):
            definition = self._definitions[step]
            # A frame of some of the programs has only what is used there.
            if all(registers[operand] is not None for operand in definition.operands):
                operands = [exact.get(o, registers[o]) for o in definition.operands]
                exact[step] = definition.exact(registers[step], *operands)
        return exact

    def _slice(self, slot: int) -> list[int]:
        if slot not in self._needed:
            needed, left = set[int](), [slot]
            while left:
                step = left.pop()
                if step in self._definitions and step not in needed:
                    needed.add(step)
                    left += self._definitions[step].operands
            self._needed[slot] = [step for step in self._definitions if step in needed]
        return self._needed[slot]


def _exactly(operation: Operation, compute: Callable[..., Any]) -> Callable[..., Array] | None:
    """An operation on exact values, called with its own result first; None for what is not followed."""
    name = operation.name
    if name in _ARITHMETIC and operation.results[0].type.element != "i1":
        whole = _ARITHMETIC[name]
        return lambda own, a, b: whole(_wide(a), _wide(b))
    if name == "arith.extsi":
        return lambda own, a: _wide(a)
    if name == "arith.extui":
        # What is not negative is the number that is meant; else only the register knows it.
        return lambda own, a: np.where(a >= 0, _wide(a), own)
    if name in _MOVES:
        return lambda own, a: compute(a)
    if name == "arith.select":
        return lambda own, condition, a, b: compute(condition, _wide(a), _wide(b))
    if name == "tt.addptr":
        pointee = operation.operands[0].type.pointee
        size = 1 if pointee is None else element_type(pointee.element).size
        return lambda own, pointer, offset: pointer + _wide(offset) * size
    return None


def _wide(values: Array) -> Array:
    return values.astype(np.int64)
