"""Inline assembly that loads from memory and jumps: each lane at its own instruction, others in between."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from retrograd.ttir.element_types import Array, element_type, from_bits, to_bits
from retrograd.ttir.frames import Again, Frame, Step, Walk
from retrograd.ttir.inline_asm import execute_instruction, plain_text
from retrograd.ttir.ir import Operation
from retrograd.ttir.operations import attributes, refused
from retrograd.ttir.steps import Compiling

_LOAD = re.compile(r"ld\.(?P<words>[\w.]*?)\.?[bus](?P<bits>\d+)$")
_LABEL = re.compile(r"(\w+):\s*(.*)$", re.S)
_INSTRUCTION = re.compile(r"(?:@(!?)(\S+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.S)
_OPERAND = re.compile(r"\[[^\]]*\]|[^,\s]+")
_ORDERS = ("relaxed", "acquire", "volatile")


def loads(operation: Operation) -> bool:
    """Whether a piece of assembly loads from memory."""
    return bool(re.search(r"\bld\.", operation.text))


def _program(operation: Operation) -> tuple[list[tuple[str, str, str, list[str]]], dict[str, int]]:
    """Instructions (negated, predicate, name, operands), and where labels stand."""
    text = re.findall(r'"((?:[^"\\]|\\.)*)"', operation.text)[0]
    program: list[tuple[str, str, str, list[str]]] = []
    labels: dict[str, int] = {}
    for statement in plain_text(text).replace("{", " ").replace("}", " ").split(";"):
        rest = " ".join(statement.split())
        while match := _LABEL.match(rest):
            labels[match[1]], rest = len(program), match[2]
        if not rest or rest.startswith(".reg"):
            continue
        instruction = _INSTRUCTION.match(rest)
        if instruction is None:
            raise refused(operation, f"inline assembly, its instruction {rest!r}")
        program.append((instruction[1] or "", instruction[2] or "", instruction[3], _OPERAND.findall(instruction[4])))
    return program, labels


class _Assembly:
    """A piece of assembly on single elements that loads, and may wait in a loop for what is there."""

    def __init__(self, compiler: Compiling, operation: Operation) -> None:
        if attributes(operation)["packed_element"] != "1":
            raise refused(operation, "inline assembly that loads for several elements at once")
        self.operation = operation
        self.program, self.labels = _program(operation)
        self.slots, self.results = compiler.slots(operation.operands), compiler.slots(operation.results)
        self.sources = [element_type(value.type.element) for value in operation.operands]
        self.targets = [element_type(value.type.element) for value in operation.results]
        self.accesses: dict[int, Any] = {}
        for number, (_, _, name, operands) in enumerate(self.program):
            match = _LOAD.match(name)
            if match is not None:
                order = next((word for word in _ORDERS if word in match["words"].split(".")), "")
                register = int(operands[1].strip("[]$ ")) - len(self.results)
                kind = element_type(f"i{match['bits']}")
                order = order.replace("volatile", "relaxed")
                self.accesses[number] = compiler.asm_access(operation, register, kind, order)

    def walk(self, frame: Frame) -> Walk:
        """Lanes at the earliest instruction go on, until all have come to the end."""
        shape = (len(frame.programs), *self.operation.results[0].type.shape)
        registers = self._filled(frame, shape)
        at_lane, end = np.zeros(shape, np.int64), len(self.program)
        while (at_lane < end).any():
            at = int(at_lane[at_lane < end].min())
            lanes = at_lane == at
            negated, predicate, name, operands = self.program[at]
            holds = lanes & (registers[predicate].astype(bool) ^ bool(negated)) if predicate else lanes
            at_lane[lanes] = at + 1
            if name.split(".")[0] == "bra":
                at_lane[holds] = self.labels[operands[0]]
                if self.labels[operands[0]] <= at and holds.any():
                    frame.launch.spend(self.operation.place)
                    yield Again(self.operation.place, False)
                continue
            if at in self.accesses:
                yield self.accesses[at]
            self._execute(at, frame, registers, holds)
        for i, (slot, target) in enumerate(zip(self.results, self.targets, strict=True)):
            bits = np.ascontiguousarray(registers[f"${i}"].astype(f"u{target.size}"))
            frame.registers[slot] = from_bits(bits, target)

    def run(self, frame: Frame) -> None:
        """The same where nobody else acts in between."""
        for _ in self.walk(frame):
            pass

    def _filled(self, frame: Frame, shape: tuple[int, ...]) -> dict[str, Array]:
        registers = {f"${i}": np.zeros(shape, f"u{target.size}") for i, target in enumerate(self.targets)}
        for i, (slot, source) in enumerate(zip(self.slots, self.sources, strict=True)):
            registers[f"${i + len(self.results)}"] = np.broadcast_to(to_bits(frame.registers[slot], source), shape)
        return registers

    def _execute(self, at: int, frame: Frame, registers: dict[str, Array], lanes: Array) -> None:
        _, _, name, operands = self.program[at]
        if at in self.accesses:
            addresses = registers[operands[1].strip("[] ")].view(np.int64)
            values, _ = frame.launch.memory.load(self.accesses[at], frame.programs, addresses, lanes, None)
            _put(registers, operands[0], to_bits(values, self.accesses[at].kind), lanes)
            return
        before = dict(registers)
        execute_instruction(name.split("."), operands, registers)
        new = registers[operands[0]]
        registers.clear()
        registers.update(before)
        _put(registers, operands[0], np.broadcast_to(new, lanes.shape), lanes)


def asm_with_loads(compiler: Compiling, operation: Operation) -> Step:
    """A step for assembly that loads from memory."""
    assembly = _Assembly(compiler, operation)
    return Step(assembly.run, assembly.walk)


def _put(registers: dict[str, Array], name: str, values: Array, lanes: Array) -> None:
    old = registers.get(name)
    registers[name] = np.where(lanes, values, np.zeros(1, values.dtype) if old is None else old.astype(values.dtype))
