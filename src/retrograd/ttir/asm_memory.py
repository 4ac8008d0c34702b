"""Inline assembly that loads, stores and jumps: each lane at its own instruction, others in between."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from retrograd.ttir.asm_instructions import NO_VALUE, execute_instruction, is_known, register_bits
from retrograd.ttir.element_types import Array, element_type, from_bits, to_bits
from retrograd.ttir.frames import Again, EndlessLoopError, Frame, Step, Walk
from retrograd.ttir.inline_asm import fences, plain_text
from retrograd.ttir.ir import Operation
from retrograd.ttir.operations import attributes, refused
from retrograd.ttir.races import OrderedRaces
from retrograd.ttir.steps import Compiling

_ACCESS = re.compile(r"(?P<does>ld|st)\.(?P<words>[\w.:]*?)\.?[busf](?P<bits>\d+)$")
_ADDRESS = re.compile(r"\[\s*(?P<register>[$%\w]+)\s*(?:\+\s*(?P<offset>\d+)\s*)?\]$")
_LABEL = re.compile(r"(\w+):\s*(.*)$", re.S)
_INSTRUCTION = re.compile(r"(?:@(!?)(\S+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.S)
_OPERAND = re.compile(r"\[[^\]]*\]|[^,\s]+")
_ORDERS = ("relaxed", "acquire", "release", "volatile")
_NOT_HERE = re.compile(r"shared\S*|local|param|v[248]|mmio|async|bulk")


def touches_memory(operation: Operation) -> bool:
    """Whether a piece of assembly loads from memory or writes to it."""
    return bool(re.search(r"\b(?:ld|st|red|atom)\.", operation.text))


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
    """A piece of assembly on single elements that loads and stores, and may wait in a loop for what is there."""

    def __init__(self, compiler: Compiling, operation: Operation) -> None:
        if attributes(operation)["packed_element"] != "1":
            raise refused(operation, "inline assembly that touches memory for several elements at once")
        self.operation = operation
        self.program, self.labels = _program(operation)
        self.slots, self.results = compiler.slots(operation.operands), compiler.slots(operation.results)
        self.sources = [element_type(value.type.element) for value in operation.operands]
        self.targets = [element_type(value.type.element) for value in operation.results]
        self.accesses: dict[int, Any] = {}
        for number, (_, _, name, operands) in enumerate(self.program):
            if name.split(".")[0] in ("red", "atom"):
                raise refused(operation, f"inline assembly whose {name!r} each thread of a program makes for itself")
            match = _ACCESS.match(name)
            if match is not None:
                self.accesses[number] = self._access(compiler, match, operands)
            elif name.split(".")[0] != "bra" and not is_known(name.split(".")):
                raise refused(operation, f"inline assembly, its instruction {name!r}")

    def _access(self, compiler: Compiling, match: re.Match[str], operands: list[str]) -> tuple[Any, str, int, str]:
        """The access of an instruction, the register with its address, what is added to that, the other operand."""
        words, is_store = match["words"].split("."), match["does"] == "st"
        address = _ADDRESS.match(operands[0 if is_store else 1])
        if address is None or any(_NOT_HERE.fullmatch(word) for word in words):
            raise refused(self.operation, f"inline assembly, its instruction {match.string!r}")
        order = next((word for word in _ORDERS if word in words), "").replace("volatile", "relaxed")
        does = ("atomic" if order else "store") if is_store else "load"
        kind, scope = element_type(f"i{match['bits']}"), "cta" if "cta" in words else "gpu"
        register = address["register"]
        operand = int(register[1:]) - len(self.results) if register.startswith("$") else None
        access = compiler.asm_access(self.operation, operand, kind, does, order, scope)
        return access, register, int(address["offset"] or 0), operands[1 if is_store else 0]

    def walk(self, frame: Frame) -> Walk:
        """Lanes at the earliest instruction go on, until all have come to the end."""
        shape = (len(frame.programs), *self.operation.results[0].type.shape)
        registers = self._filled(frame, shape)
        at_lane, end = np.zeros(shape, np.int64), len(self.program)
        rounds: dict[int, dict[str, Array]] = {}  # by jump: all registers when it was made last
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
                    version = np.array(frame.launch.memory.version)
                    state = {**registers, "at": at_lane.copy(), "version": version}
                    known, rounds[at] = rounds.get(at, {}), state
                    same = known.keys() == state.keys() and all(np.array_equal(known[k], state[k]) for k in state)
                    yield Again(self.operation.place, same)
                continue
            if at in self.accesses:
                yield self.accesses[at][0]
            self._execute(at, frame, registers, holds)
        for i, (slot, target) in enumerate(zip(self.results, self.targets, strict=True)):
            bits = np.ascontiguousarray(registers[f"${i}"].astype(f"u{target.size}"))
            frame.registers[slot] = from_bits(bits, target)

    def run(self, frame: Frame) -> None:
        """The same where nobody else acts in between, or writes what is loaded here."""
        for stopped in self.walk(frame):
            if isinstance(stopped, Again) and stopped.same:
                why = "its program waits here for what no other will do"
                raise EndlessLoopError(frame.launch.memory.kernel, stopped.place, why)

    def _filled(self, frame: Frame, shape: tuple[int, ...]) -> dict[str, Array]:
        registers = {f"${i}": np.zeros(shape, f"u{target.size}") for i, target in enumerate(self.targets)}
        for i, (slot, source) in enumerate(zip(self.slots, self.sources, strict=True)):
            registers[f"${i + len(self.results)}"] = np.broadcast_to(to_bits(frame.registers[slot], source), shape)
        return registers

    def _execute(self, at: int, frame: Frame, registers: dict[str, Array], lanes: Array) -> None:
        _, _, name, operands = self.program[at]
        memory = frame.launch.memory
        if at in self.accesses:
            access, register, offset, value = self.accesses[at]
            memory.unknown = None
            addresses = registers[register].view(np.int64) + offset
            if access.does == "load":
                values, _ = memory.load(access, frame.programs, addresses, lanes, None)
                _put(registers, value, to_bits(values, access.kind), lanes)
                return
            bits = register_bits(value, f"b{8 * access.kind.size}", registers).astype(f"u{access.kind.size}")
            values = np.broadcast_to(from_bits(np.ascontiguousarray(bits), access.kind), lanes.shape)
            if access.does == "store":
                memory.store(access, frame.programs, addresses, values, lanes)
            else:
                memory.atomic(access, frame.programs, addresses, [values], lanes, False)
            return
        if name.split(".")[0] in NO_VALUE:
            if fences(name) and isinstance(memory.races, OrderedRaces):
                memory.races.fence(int(frame.programs[0]))
            return
        before = dict(registers)
        execute_instruction(name.split("."), operands, registers)
        new = registers[operands[0]]
        registers.clear()
        registers.update(before)
        _put(registers, operands[0], np.broadcast_to(new, lanes.shape), lanes)


def asm_with_memory(compiler: Compiling, operation: Operation) -> Step:
    """A step for assembly that loads from memory or writes to it."""
    assembly = _Assembly(compiler, operation)
    return Step(assembly.run, assembly.walk)


def _put(registers: dict[str, Array], name: str, values: Array, lanes: Array) -> None:
    old = registers.get(name)
    registers[name] = np.where(lanes, values, np.zeros(1, values.dtype) if old is None else old.astype(values.dtype))
