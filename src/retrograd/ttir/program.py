"""Compilation of a kernel's TTIR into steps that NumPy executes, and what is known of its accesses beforehand."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from retrograd.core import gc_pause
from retrograd.ttir.asm_memory import asm_with_memory, touches_memory
from retrograd.ttir.computing import computing
from retrograd.ttir.control_flow import branch, call, conditional_loop, counted_loop, run_blocks
from retrograd.ttir.element_types import Array, ElementType, element_type
from retrograd.ttir.exact_addresses import ExactAddresses, Note
from retrograd.ttir.frames import Code, Frame, LaunchState, Step
from retrograd.ttir.inline_asm import fences, reads_clock
from retrograd.ttir.ir import Block, Function, Module, Operation, OperationRegion, SsaValue
from retrograd.ttir.operations import ELEMENTWISE, Compute, refused
from retrograd.ttir.parser import parse
from retrograd.ttir.polling import atomic_poll
from retrograd.ttir.races import OrderedRaces
from retrograd.ttir.shaping import SHAPING, constant, map_elements, reduction, scan
from retrograd.ttir.spinning import deciding
from retrograd.ttir.steps import IGNORED, STEPS, defined_only
from retrograd.ttir.storage import MemoryAccess
from retrograd.ttir.taint import rule_of
from retrograd.ttir.tickets import only_stored

_ANY = -1  # a pointer that comes from memory
_DECIDES = {"scf.if": 1, "scf.for": 3, "scf.condition": 1, "cf.cond_br": 1}  # by so many of their first operands
_ROUNDS = 1_000_000  # of loops in a function of elements
_NOBODY = np.zeros(1, np.int64)
_ALIGNED = " {tt.divisibility = 16 : i32}"  # of an argument
_STEPS = {**STEPS, "tt.atomic_poll": atomic_poll}
# What is seen by others than memory, or depends on where that lies.
_SHOWS = frozenset({"tt.print", "tt.ptr_to_int", "tt.int_to_ptr"})
_ENDS = frozenset({"tt.return", "scf.yield", "scf.condition", "cf.br", "cf.cond_br", "tt.reduce.return",
                   "tt.scan.return", "tt.map_elementwise.return"})  # fmt: skip


@dataclass(eq=False)
class NumpyKernel:
    """A kernel, compiled for NumPy.

    Attributes:
        name: of its function.
        arguments: values of the function's arguments.
        blocks: its code.
        registers: how many slots a frame has.
        constants: slot -> value that all programs have.
        accesses: all loads, stores and atomics.
        waits: whether a program can learn of another: a result of an atomic decides more than what it stores where.
        largest: elements of its largest tensor.
        bound: size of its largest whole number.
        repeats: whether it does the same again where arguments and memory are the same, wherever that lies.
    """

    name: str
    arguments: list[SsaValue]
    blocks: list[Code]
    registers: int
    constants: dict[int, Array]
    accesses: list[MemoryAccess]
    waits: bool
    largest: int
    bound: int
    repeats: bool

    @functools.cached_property
    def read(self) -> frozenset[int]:
        """Numbers of the arguments from which it loads, or which it updates atomically."""
        return frozenset(n for a in self.accesses if a.does != "store" for n in a.arguments or ())

    @functools.cached_property
    def updates(self) -> bool:
        """Whether any access is atomic."""
        return any(access.does == "atomic" or access.is_atomic for access in self.accesses)


def compile_text(text: str) -> NumpyKernel:
    """Compile TTIR.

    Args:
        text: a module with one public function, printed with locations.

    Raises:
        RetrogradError: it cannot be parsed.
        UnsupportedOperationError: it has an operation that cannot be executed; names it and its line.
    """
    # How arguments are aligned decides which instructions a GPU has, not what they compute.
    return _compiled(text.replace(_ALIGNED, ""))


@functools.lru_cache(256)
def _compiled(text: str) -> NumpyKernel:
    with gc_pause.paused():
        exact = ExactAddresses(lambda note: Compiler(parse(text), note=note).kernel())
        return Compiler(parse(text), exact).kernel()


class Compiler:
    def __init__(self, module: Module, exact: ExactAddresses | None = None, note: Note | None = None) -> None:
        self._module, self._exact, self._note = module, exact, note
        self._offset = 0
        self._registers = 0
        self._constants: dict[int, Array] = {}
        self._accesses: list[tuple[MemoryAccess, int]] = []
        self._flows: list[tuple[int, int]] = []
        self._sources: dict[int, set[int]] = {}
        self.used: set[int] = set()
        self._loops = 0
        self._largest = 1
        self._repeats = True
        self._deciding = deciding(module)

    def kernel(self) -> NumpyKernel:
        function = self._module.kernel
        for number, argument in enumerate(function.arguments):
            if argument.type.element == "ptr":
                self._sources[argument.slot] = {number}
        blocks = self.function(function)
        self._settle()
        accesses = [access for access, _ in self._accesses]
        waits = any(a.operation in ("cas", "poll") or (a.does == "atomic" and a.result in self.used) for a in accesses)
        repeats = self._repeats and all(a.arguments is not None and a.kind.name != "ptr" for a in accesses)
        whole = (int(np.abs(v.astype(np.float64)).max()) for v in self._constants.values() if v.dtype.kind == "i")
        return NumpyKernel(
            function.name, function.arguments, blocks, self._registers, self._constants, accesses,
            waits and not only_stored(self._module, accesses), self._largest, max(whole, default=1), repeats,
        )  # fmt: skip

    def slot(self, value: SsaValue) -> int:
        return value.slot + self._offset

    def slots(self, values: Sequence[SsaValue]) -> list[int]:
        return [value.slot + self._offset for value in values]

    def function(self, function: Function) -> list[Code]:
        self._offset, outer = self._registers, self._offset
        self._registers += function.slots
        blocks = self._blocks(function.body)
        self._offset = outer
        return blocks

    def _blocks(self, region: OperationRegion) -> list[Code]:
        """The blocks of a region that branch to each other."""
        labels = {block.label: number for number, block in enumerate(region.blocks)}
        blocks = [self._block(block, labels) for block in region.blocks]
        for code in blocks:
            for target, sources in code.successors:
                self.flow(sources, blocks[target].arguments)
        _spread_live(blocks, [self._defined(block) for block in region.blocks])
        return blocks

    def region(self, region: OperationRegion) -> Code:
        if len(region.blocks) > 1:
            raise refused(region.blocks[0].operations[-1], "a branch inside of structured control flow")
        return self._block(region.entry, {})

    def _block(self, block: Block, labels: dict[str, int]) -> Code:
        code = Code(self.slots(block.arguments))
        for operation in block.operations:
            for value in operation.results:
                self._largest = max(self._largest, value.type.elements)
            self.used.update(self.slots(operation.operands))
            if operation.name in _DECIDES:
                code.steps.append(defined_only(self, operation, _DECIDES[operation.name]))
            if operation.name in _ENDS:
                code.last, code.place = operation.name, operation.place
                code.operands = self.slots(operation.operands)
                code.successors = [(labels[label], self.slots(values)) for label, values in operation.successors]
            elif (step := self._step(operation)) is not None:
                code.steps.append(step)
        code.live = frozenset(self._free(block))
        code.runs = [step.run for step in code.steps]
        return code

    def _defined(self, block: Block) -> set[int]:
        values = [*block.arguments, *(value for operation in block.operations for value in operation.results)]
        return {value.slot + self._offset for value in values}

    def _free(self, block: Block) -> set[int]:
        """Slots that a block uses and does not define."""
        free: set[int] = set()
        for operation in block.operations:
            free.update(self.slots(operation.operands))
            for _, values in operation.successors:
                free.update(self.slots(values))
            for region in operation.regions:
                for inner in region.blocks:
                    free |= self._free(inner)
        return free - self._defined(block)

    def flow(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._flows += zip(sources, targets, strict=True)

    def _step(self, operation: Operation) -> Step | None:
        name = operation.name
        assembly = name == "tt.elementwise_inline_asm"
        shows = name in _SHOWS or (assembly and (touches_memory(operation) or reads_clock(operation.text)))
        self._repeats = self._repeats and not shows
        if name == "arith.constant":
            self._constants[self.slot(operation.results[0])] = constant(operation)
            return None
        if name in IGNORED:
            return None
        if name in _STEPS:
            return _STEPS[name](self, operation)
        if operation.regions or name == "tt.call":
            return self._structured(operation)
        if assembly and touches_memory(operation):
            return asm_with_memory(self, operation)
        builder = ELEMENTWISE.get(name) or SHAPING.get(name)
        if builder is None:
            raise refused(operation, "it is not known")
        for operand in operation.operands:
            leads_on = operation.results[0].type.element == "ptr" or name == "tt.ptr_to_int"
            if operand.type.element == "ptr" and leads_on:
                self.flow([self.slot(operand)], [self.slot(operation.results[0])])
        if name == "tt.int_to_ptr":
            self._sources.setdefault(self.slot(operation.results[0]), set()).add(_ANY)
        plain = self._plain(operation, builder(operation))
        return self._assembly(operation, plain) if assembly else plain

    def _plain(self, operation: Operation, compute: Compute) -> Step:
        """A step that computes results from operands."""
        sources, targets = tuple(self.slots(operation.operands)), tuple(self.slots(operation.results))
        if self._note is not None and len(targets) == 1:
            self._note(operation, sources, targets[0], compute)
        return computing(sources, targets, compute, rule_of(operation, compute))

    def _structured(self, operation: Operation) -> Step:
        """Control flow, calls, and operations that have a function as a region."""
        name, place = operation.name, operation.place
        operands, results = self.slots(operation.operands), self.slots(operation.results)
        if name == "tt.call":
            callee = self._module.functions[operation.callee]
            blocks = self.function(callee)
            self.flow(operands, blocks[0].arguments)
            for code in blocks:
                if code.last == "tt.return":
                    self.flow(code.operands, results)
            return call(operands, blocks, results)
        if name in _OF_REGION:
            simple, combine = self._combine(operation)
            return self._plain(operation, _OF_REGION[name](operation, simple, combine))
        if name == "scf.if":
            then, *rest = [self.region(region) for region in operation.regions]
            for code in (then, *rest):
                self.flow(code.operands, results)
            return branch(operands[0], then, rest[0] if rest else None, results)
        if name == "scf.for":
            body = self.region(operation.regions[0])
            carried = body.arguments[1:]
            for sources in (operands[3:], body.operands):
                self.flow(sources, carried)
                self.flow(sources, results)
            return counted_loop(operands[:3], operands[3:], body, results, place, "unsigned" in operation.text)
        if name == "scf.while":
            self._loops += 1
            before, after = (self.region(region) for region in operation.regions)
            self._loops -= 1
            self.flow(operands, before.arguments)
            self.flow(after.operands, before.arguments)
            self.flow(before.operands[1:], after.arguments)
            self.flow(before.operands[1:], results)
            return conditional_loop(operands, before, after, results, place)
        raise refused(operation, "it is not known")

    def _assembly(self, operation: Operation, plain: Step) -> Step:
        """Inline assembly: what races know of its fences and loops of its clocks, then its values."""
        fenced, clock = fences(operation.text), reads_clock(operation.text)
        if not fenced and not clock:
            return plain

        def run(frame: Frame) -> None:
            memory = frame.launch.memory
            if fenced and isinstance(memory.races, OrderedRaces):
                memory.races.fence(int(frame.programs[0]))
            memory.version += clock  # a loop that waits for a time does not wait for others
            plain.run(frame)

        return Step(run)

    def _combine(self, operation: Operation) -> tuple[str, Callable[..., Sequence[Array]]]:
        """The function of a reduction's region, and its only operation where that is applied to both arguments."""
        block = operation.regions[0].entry
        if len(operation.regions[0].blocks) > 1 or any(o.regions or o.name == "tt.call" for o in block.operations):
            return "", self._combine_apart(operation.regions[0])
        code = self.region(operation.regions[0])
        slots, results, constants, count = code.arguments, code.operands, self._constants, len(block.arguments)
        size = self._registers  # not `self`, which would keep the module
        first, *more = block.operations
        simple = count == 2 and len(more) == 1 and set(first.operands) == set(block.arguments)
        filled: dict[int, list[Any]] = {}  # registers that hold constants only, by the axes that values have

        def combine(*values: Array) -> Sequence[Array]:
            axes = values[0].ndim
            if axes not in filled:
                filled[axes] = [None] * size
                for slot in range(size):
                    if slot in constants:
                        filled[axes][slot] = constants[slot].reshape((1,) * axes)
            registers = list(filled[axes])
            for slot, value in zip(slots, values, strict=True):
                registers[slot] = value
            code.run(Frame(registers, _NOBODY, {}, None))  # type: ignore[arg-type]
            return [registers[slot] for slot in results]

        return first.name if simple else "", combine

    def _combine_apart(self, region: OperationRegion) -> Callable[..., Sequence[Array]]:
        """The function of a region that branches: each element goes its way, as programs do."""
        blocks = self._blocks(region)
        returned = next(code.operands for code in blocks if not code.successors)
        constants, size = self._constants, self._registers  # not `self`, which would keep the module
        memory: Any = SimpleNamespace(kernel=self._module.kernel.name, races=None, version=0)  # which it does not touch

        def combine(*values: Array) -> Sequence[Array]:
            shape = np.broadcast_shapes(*(x.shape for x in values))
            launch = LaunchState(memory, (1, 1, 1), [*map(constants.get, range(size))], _ROUNDS, print)
            frame = Frame(list(launch.constants), np.zeros(math.prod(shape), np.int64), {}, launch)
            for slot, value in zip(blocks[0].arguments, values, strict=True):
                frame.registers[slot] = np.broadcast_to(value, shape).reshape(-1)
            run_blocks(blocks, frame, returned)
            return [np.broadcast_to(frame.registers[slot], len(frame.programs)).reshape(shape) for slot in returned]

        return combine

    def _settle(self) -> None:
        """Follow pointers from arguments to accesses."""
        sources, changed = self._sources, True
        while changed:
            changed = False
            for a, b in self._flows:
                new = sources.get(a, set()) - sources.get(b, set())
                if new:
                    sources.setdefault(b, set()).update(new)
                    changed = True
        for access, slot in self._accesses:
            numbers = sources.get(slot, {_ANY})
            access.arguments = None if _ANY in numbers else frozenset(numbers)

    def asm_access(
        self, operation: Operation, operand: int | None, kind: ElementType, does: str, order: str, scope: str
    ) -> MemoryAccess:
        """Note an access of inline assembly, through an operand with an address, or by one that it computes."""
        shape, number = operation.results[0].type.shape, len(self._accesses)
        access = MemoryAccess(number, does, "store", operation.place, kind, shape, order, scope, in_loop=True)
        access.decides = True
        self._accesses.append((access, -1 if operand is None else self.slot(operation.operands[operand])))
        return access

    def access(self, operation: Operation, does: str, update: str, order: str, scope: str) -> MemoryAccess:
        """Note an access of memory; the pointer is the first operand."""
        pointer = operation.operands[0].type.pointee
        if pointer is None:
            raise refused(operation, f"an access through a {operation.operands[0].type}")
        kind = element_type(pointer.element)
        result = self.slot(operation.results[0]) if operation.results else -1
        number = len(self._accesses)
        shape = operation.operands[0].type.shape
        access = MemoryAccess(number, does, update, operation.place, kind, shape, order, scope, self._loops > 0, result)
        access.decides = self._loops > 0 and id(operation) in self._deciding
        access.exact, access.address = self._exact, self.slot(operation.operands[0])
        self._accesses.append((access, self.slot(operation.operands[0])))
        return access


_OF_REGION: dict[str, Callable[..., Any]] = {
    "tt.reduce": reduction,
    "tt.scan": scan,
    "tt.map_elementwise": lambda operation, _, combine: map_elements(operation, combine),
}


def _spread_live(blocks: list[Code], defined: list[set[int]]) -> None:
    """Add to each block's live values those of the blocks that may follow it."""
    changed = True
    while changed:
        changed = False
        for code, own in zip(blocks, defined, strict=True):
            live = code.live.union(*(blocks[target].live - own for target, _ in code.successors))
            live = live - own
            changed |= live != code.live
            code.live = live
