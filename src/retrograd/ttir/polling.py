"""`tl.atomic_poll` of Triton 3.9: a program looks at flags until each has the value it waits for, or time is up."""

from __future__ import annotations

import numpy as np

from retrograd.ttir.frames import Again, EndlessLoopError, Frame, Step, Walk
from retrograd.ttir.ir import Operation
from retrograd.ttir.steps import Compiling, complain, order_and_scope

_LOOK = 1 << 10  # nanoseconds that a look at flags takes


def atomic_poll(compiler: Compiling, operation: Operation) -> Step:
    """A step of relaxed looks; where the operation acquires, what it finds is loaded once more in that order."""
    order, scope = order_and_scope(operation)
    relaxed = compiler.access(operation, "load", "poll", "relaxed", scope)
    ordered = compiler.access(operation, "load", "poll", order, scope)
    relaxed.in_loop = ordered.in_loop = relaxed.decides = True
    address, expected, *rest = compiler.slots(operation.operands)
    result, place = compiler.slot(operation.results[0]), operation.place

    def walk(frame: Frame) -> Walk:
        registers, memory = frame.registers, frame.launch.memory
        memory.registers, memory.unknown = registers, None
        shape = np.broadcast_shapes(registers[address].shape, registers[expected].shape, (len(frame.programs),))
        budget = int(registers[rest[0]].reshape(-1)[0]) if rest else None
        met, spent, seen = np.zeros(shape, bool), 0, None
        while True:
            yield relaxed
            values, undefined = memory.load(relaxed, frame.programs, registers[address], ~met, None)
            complain(frame, undefined, place, "the value polled")
            now = ~met & (values == registers[expected])
            if now.any():
                memory.load(ordered, frame.programs, registers[address], now, None)
                met = met | now
            spent += _LOOK
            if met.all() or (budget is not None and spent >= budget):
                break
            frame.launch.spend(place)
            memory.version += budget is not None  # who waits for a time does not wait for others
            yield Again(place, same=budget is None and seen is not None and np.array_equal(seen, values))
            seen = values
        registers[result] = met

    def run(frame: Frame) -> None:
        for stopped in walk(frame):
            if isinstance(stopped, Again) and stopped.same:
                why = "its program waits here for what no other will do"
                raise EndlessLoopError(frame.launch.memory.kernel, place, why)

    return Step(run, walk)
