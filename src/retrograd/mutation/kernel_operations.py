"""Operations of a kernel's TTIR, changed one at a time: what Triton's frontend made, whatever wrote it.

An operation is known by its kernel, its name, and how many of that name the kernel has before it: a kernel has a text
for each of its specialisations.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from retrograd.compat import triton_source
from retrograd.mutation.edits import Edit
from retrograd.ttir.kept_texts import EDITS

_KERNEL = re.compile(r"tt\.func public @(\w+)")
# %5 = arith.addf %3, %4 fastmath<...> : tensor<...> loc(#loc)
_OPERATION = re.compile(r"^(?P<head>\s*(?:%\w+(?::\d+)? = )?)(?P<name>(?:arith|math|tt)\.\w+)(?P<rest>[ (].*)$")
_OPERANDS = re.compile(r"%\w+(?:#\d+)?(?:, %\w+(?:#\d+)?)*")
_LOCATION = re.compile(r" loc\(.*?\)$")
_EXCHANGED = {
    "arith.addf": ("arithmetic", "arith.subf"), "arith.subf": ("arithmetic", "arith.addf"),
    "arith.mulf": ("arithmetic", "arith.addf"), "arith.divf": ("arithmetic", "arith.mulf"),
    "arith.maxnumf": ("function", "arith.minnumf"), "arith.minnumf": ("function", "arith.maxnumf"),
    "arith.addi": ("arithmetic", "arith.subi"), "math.exp": ("function", "math.exp2"),
    "math.exp2": ("function", "math.exp"), "arith.andi": ("arithmetic", "arith.ori"),
}  # fmt: skip
_EDGES = {
    "slt": "sle",
    "sle": "slt",
    "sgt": "sge",
    "sge": "sgt",
    "olt": "ole",
    "ole": "olt",
    "ogt": "oge",
    "oge": "ogt",
}
_CONSTANT = re.compile(r"(dense<|arith\.constant )(-?[\d.]+e[+-]\d+)")


def _operations(text: str) -> Iterator[tuple[int, str, str]]:
    """Line number, key and line of each operation of a text."""
    kernel = _KERNEL.search(text)
    count = Counter[str]()
    for number, line in enumerate(text.splitlines()):
        if kernel and (operation := _OPERATION.match(line)):
            name = operation["name"]
            yield number, f"{kernel[1]} {name} {count[name]}", line
            count[name] += 1


def _changes(line: str) -> Iterator[tuple[str, str]]:
    """Operators and what each makes of a line."""
    operation = _OPERATION.match(line)
    assert operation is not None
    head, name, rest = operation["head"], operation["name"], operation["rest"]
    if name in _EXCHANGED:
        operator, other = _EXCHANGED[name]
        yield operator, f"{head}{other}{rest}"
    operands = _OPERANDS.search(rest)
    names = operands[0].split(", ") if operands else []

    def with_operands(*others: str) -> str:
        return f"{head}{name}{rest.replace(operands[0], ', '.join(others), 1)}" if operands else line

    if name in ("arith.addf", "arith.mulf", "arith.subf", "arith.divf", "arith.addi") and len(names) == 2:
        yield "variable", with_operands(names[0], names[0])
        yield "variable", with_operands(names[1], names[1])
    if name == "arith.select" and len(names) == 3:
        yield "mask turned", with_operands(names[0], names[2], names[1])
    if name in ("arith.cmpi", "arith.cmpf"):
        for edge, other in _EDGES.items():
            if rest.startswith(f" {edge},"):
                yield "comparison edge", f"{head}{name} {other},{rest[len(edge) + 2 :]}"
    masked = {"tt.load": 2, "tt.store": 3}.get(name, 9)
    if len(names) >= masked:
        yield "mask= dropped", with_operands(*names[: masked - 1])
    if name == "arith.constant" and (value := _CONSTANT.search(line)):
        yield "constant", line.replace(value[0], f"{value[1]}{float(value[2]) + 1:.6e}", 1)


@dataclass
class KernelOperations:
    """The kernels of an op, as functions that are mutated.

    Attributes:
        kernels: Triton's functions.
        listed: keys and lines of operations that may be changed.
    """

    kernels: list[Any]
    listed: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    kind, name, file, line = "ttir", "TTIR", "", 1

    def note(self, text: str) -> str:
        """Take down the operations of a text, which stays as it is."""
        known = {key for key, _ in self.listed}
        self.listed += [(key, line) for _, key, line in _operations(text) if key not in known and any(_changes(line))]
        return text

    @property
    def source(self) -> str:
        """The operations, one a line, without their places."""
        return "".join(f"{key.split()[0]}: {_LOCATION.sub('', line).strip()}\n" for key, line in self.listed)

    def edits(self) -> list[Edit]:
        """Every change of every operation."""
        edits, begin = [], 0
        for number, (key, line) in enumerate(self.listed):
            kernel, shown = key.split()[0], _LOCATION.sub("", line).strip()
            length = len(f"{kernel}: {shown}")
            for operator, changed in _changes(line):
                text = f"{kernel}: {_LOCATION.sub('', changed).strip()}"
                edits.append(Edit(operator, begin, begin + length, text, number))
            begin += length + 1
        return edits

    def replace(self, edit: Edit, others: Any = ()) -> None:
        """Make this change from now on; one of no operator makes none."""
        EDITS.clear()
        if edit.operator:
            key, line = self.listed[edit.line]
            kernel = key.split()[0]
            place = next(
                n for n, (operator, changed) in enumerate(_changes(line))
                if operator == edit.operator and f"{kernel}: {_LOCATION.sub('', changed).strip()}" == edit.text
            )  # fmt: skip
            EDITS.append(lambda text: _edited(text, key, place))
        triton_source.forget(self.kernels)


def _edited(text: str, key: str, place: int) -> str:
    lines = text.splitlines()
    for number, other, line in _operations(text):
        if other == key:
            changes = list(_changes(line))
            # Another specialisation may have less to change, as a load without a mask.
            if place < len(changes):
                lines[number] = changes[place][1]
    return "\n".join(lines) + "\n"
