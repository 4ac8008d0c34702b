"""Steps of the operations that touch memory, ask where a program is, or speak to the person who runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from retrograd.ttir.element_types import Array, ElementType
from retrograd.ttir.frames import Frame, Step
from retrograd.ttir.ir import Operation, SourcePlace, SsaValue
from retrograd.ttir.operations import attributes
from retrograd.ttir.printing import printed_lines, quoted
from retrograd.ttir.storage import MemoryAccess

_AXES = {"x": 0, "y": 1, "z": 2}
# What changes nothing here. A launch ends before the next one begins, so that none has to wait for the one ahead.
IGNORED = frozenset({"llvm.intr.assume", "gpu.barrier", "ttg.barrier", "ttg.local_barrier",
                     "tt.grid_dependency_wait", "tt.grid_dependency_launch_dependents"})  # fmt: skip
_MOST_PRINTED = 1 << 14  # lines of one tt.print in one run; a GPU's buffer of 1 MB has some 20,000


class Compiling(Protocol):
    """What steps ask of the compiler of the kernel that they are part of."""

    used: set[int]

    def slot(self, value: SsaValue) -> int: ...
    def slots(self, values: Sequence[SsaValue]) -> list[int]: ...
    def asm_access(
        self, operation: Operation, operand: int | None, kind: ElementType, does: str, order: str, scope: str
    ) -> MemoryAccess: ...
    def access(self, operation: Operation, does: str, update: str, order: str, scope: str) -> MemoryAccess: ...


def defined_only(compiler: Compiling, operation: Operation, count: int) -> Step:
    """A step that notes where memory which nobody has written decides the way a program takes."""
    slots = compiler.slots(operation.operands)[:count]
    place_of, location = operation.place_of, operation.location  # not the operation, which has all of its regions

    def run(frame: Frame) -> None:
        if frame.taint:
            for slot in slots:
                complain(frame, frame.taint.get(slot), place_of(location), "the branch taken")

    return Step(run)


def complain(frame: Frame, mark: Array | None, place: SourcePlace, what_for: str) -> None:
    """Note where memory which nobody has written is used as an address, a mask or to decide."""
    if mark is not None and mark.any():
        rows = np.flatnonzero(mark.reshape(mark.shape[0], -1).any(1))
        frame.launch.memory.decided_by_nothing(place, int(frame.programs[rows[0]]), what_for)


def _prepare(frame: Frame, access: MemoryAccess, address: int, mask: int | None) -> Array | None:
    """Look at the operands of an access, what nobody has written among them, and give its mask."""
    registers, taint, memory = frame.registers, frame.taint, frame.launch.memory
    memory.registers, memory.unknown = registers, None
    allowed = None if mask is None else registers[mask]
    if taint:
        if (mark := taint.get(address)) is not None:
            memory.unknown = mark  # a lane that is masked goes nowhere, whatever its address is
            complain(frame, mark if allowed is None else mark & allowed, access.place, "an address")
        complain(frame, taint.get(mask) if mask is not None else None, access.place, "a mask")
    return allowed


def _load(compiler: Compiling, operation: Operation) -> Step:
    # PTX takes a volatile load for a relaxed atomic one.
    order, scope = "relaxed" if attributes(operation).get("isVolatile") == "true" else "", "gpu"
    if operation.name == "tt.atomic_load":
        order, scope = order_and_scope(operation)
    access = compiler.access(operation, "load", "", order, scope)
    address, *rest = compiler.slots(operation.operands)
    mask, other = (*rest, None, None)[:2]
    result = compiler.slot(operation.results[0])

    def run(frame: Frame) -> None:
        registers, taint = frame.registers, frame.taint
        allowed = _prepare(frame, access, address, mask)
        values, undefined = frame.launch.memory.load(
            access, frame.programs, registers[address], allowed, None if other is None else registers[other]
        )
        registers[result] = values
        if undefined is not None:
            taint[result] = undefined
        elif taint:
            taint.pop(result, None)

    return Step(run, None, access)


def _store(compiler: Compiling, operation: Operation) -> Step:
    access = compiler.access(operation, "store", "", "", "gpu")
    address, value, *rest = compiler.slots(operation.operands)
    mask = rest[0] if rest else None

    def run(frame: Frame) -> None:
        registers, taint = frame.registers, frame.taint
        allowed = _prepare(frame, access, address, mask)
        unknown = taint.get(value) if taint else None
        frame.launch.memory.store(access, frame.programs, registers[address], registers[value], allowed, unknown)

    return Step(run, None, access)


def order_and_scope(operation: Operation) -> tuple[str, str]:
    """The two words that an atomic operation begins with: "acquire" and "gpu"."""
    order, scope = (word.split()[-1] for word in operation.text.split(",")[:2])
    return order, scope


def _atomic(compiler: Compiling, operation: Operation) -> Step:
    if operation.name == "tt.atomic_rmw":
        update, order, scope = (word.strip(" ,") for word in operation.text.split(",")[:3])
    else:
        update, (order, scope) = operation.name.removeprefix("tt.atomic_"), order_and_scope(operation)
    access = compiler.access(operation, "atomic", update, order, scope)
    slots = compiler.slots(operation.operands)
    address, values = slots[0], slots[1:3] if update == "cas" else slots[1:2]
    mask = slots[2] if update != "cas" and len(slots) > 2 else None
    result = compiler.slot(operation.results[0]) if operation.results else None
    used = compiler.used

    def run(frame: Frame) -> None:
        registers, taint = frame.registers, frame.taint
        unknown: Array | None = None
        allowed = _prepare(frame, access, address, mask)
        for mark in (taint[slot] for slot in values if slot in taint):
            unknown = mark if unknown is None else unknown | mark
        operands = [registers[slot] for slot in values]
        old, undefined = frame.launch.memory.atomic(
            access, frame.programs, registers[address], operands, allowed, result in used, unknown
        )
        if result is not None:
            registers[result] = old
            if undefined is not None:
                taint[result] = undefined
            elif taint:
                taint.pop(result, None)

    return Step(run, None, access)


def _program_id(compiler: Compiling, operation: Operation) -> Step:
    axis, result = _AXES[operation.text.split()[0]], compiler.slot(operation.results[0])

    def run(frame: Frame) -> None:
        x, y, _ = frame.launch.grid
        number = frame.programs
        index = number % x if axis == 0 else number // x % y if axis == 1 else number // (x * y)
        frame.registers[result] = index.astype(np.int32)

    return Step(run)


def _program_count(compiler: Compiling, operation: Operation) -> Step:
    axis, result = _AXES[operation.text.split()[0]], compiler.slot(operation.results[0])

    def run(frame: Frame) -> None:
        frame.registers[result] = np.array([frame.launch.grid[axis]], np.int32)

    return Step(run)


def _print(compiler: Compiling, operation: Operation) -> Step:
    slots, lines = compiler.slots(operation.operands), printed_lines(operation)

    def run(frame: Frame) -> None:
        launch, count = frame.launch, 0
        for row, number in enumerate(frame.programs.tolist()):
            values = [frame.registers[slot] for slot in slots]
            elements = [value[row if value.shape[0] > 1 else 0] for value in values]
            for line in lines(launch.memory.program(number), elements):
                if count == _MOST_PRINTED:
                    launch.printed(f"... and more of {operation.place.file}:{operation.place.line}")
                    return
                launch.printed(line)
                count += 1

    return Step(run)


def _assert(compiler: Compiling, operation: Operation) -> Step:
    slot = compiler.slot(operation.operands[0])
    message = quoted(operation)

    def run(frame: Frame) -> None:
        holds = frame.registers[slot]
        if not holds.all():
            fails = ~holds.reshape(holds.shape[0], -1).all(1)
            number = frame.programs[np.flatnonzero(fails)[0] if len(fails) > 1 else 0]
            frame.launch.memory.failed_assertion(operation.place, int(number), message)

    return Step(run)


STEPS: dict[str, Callable[[Compiling, Operation], Step]] = {
    "tt.assert": _assert,
    "tt.atomic_cas": _atomic,
    "tt.atomic_load": _load,
    "tt.atomic_rmw": _atomic,
    "tt.atomic_store": _atomic,
    "tt.get_num_programs": _program_count,
    "tt.get_program_id": _program_id,
    "tt.load": _load,
    "tt.print": _print,
    "tt.store": _store,
}
