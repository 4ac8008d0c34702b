"""Control flow of a compiled kernel: all programs of a path together, or one program in turns with others.

Where a condition differs between programs their frame is split, each part goes its way, and the parts are merged where
the ways meet. A program that runs in turns has a frame of its own; its steps are walked by generators, which stop
before each access to memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from retrograd.ttir.element_types import Array
from retrograd.ttir.frames import Again, Code, EndlessLoopError, Frame, Step, Walk
from retrograd.ttir.ir import SourcePlace


def _choice(condition: Array) -> bool | None:
    """The value that a condition has for all programs; None where it differs."""
    first = bool(condition[0])
    return first if len(condition) == 1 or bool((condition == first).all()) else None


def branch(condition: int, then: Code, otherwise: Code | None, results: list[int]) -> Step:
    """scf.if."""

    def run(frame: Frame) -> None:
        flags = frame.registers[condition]
        choice = _choice(flags)
        if choice is not None:
            chosen = then if choice else otherwise
            if chosen is not None:
                chosen.run(frame)
                frame.copy(chosen.operands, results)
            return
        parts = []
        for index, code in ((np.flatnonzero(flags), then), (np.flatnonzero(~flags), otherwise)):
            if code is not None:
                part = frame.take(index, code.live)
                code.run(part)
                parts.append((index, part, code.operands))
        if results:
            frame.merge(parts, results)

    def walk(frame: Frame) -> Walk:
        chosen = then if frame.registers[condition][0] else otherwise
        if chosen is not None:
            yield from chosen.walk(frame)
            frame.copy(chosen.operands, results)

    return Step(run, walk)


def counted_loop(
    bounds: list[int], initial: list[int], body: Code, results: list[int], place: SourcePlace, unsigned: bool
) -> Step:
    """scf.for: the body's first argument counts, the others are carried."""
    counter, *carried = body.arguments

    def limits(frame: Frame) -> list[Array]:
        values = [frame.registers[slot] for slot in bounds]
        low, high, step = [v.view(f"u{v.dtype.itemsize}") for v in values] if unsigned else values
        if (step <= 0).any() and bool(((step <= 0) & (low < high)).any()):
            raise EndlessLoopError(frame.launch.memory.kernel, place, f"it counts up in steps of {int(step.min())}")
        return [low, high, step]

    def run(frame: Frame) -> None:
        low, high, step = limits(frame)
        frame.copy(initial, carried)
        if len(low) == len(high) == len(step) == 1 or _same(low, high, step):
            now = low[:1]
            while now[0] < high[0]:
                frame.registers[counter] = now if not unsigned else now.view(f"i{now.dtype.itemsize}")
                body.run(frame)
                frame.copy(body.operands, carried)
                frame.launch.count(place)
                now = now + step[:1]
        else:
            _uneven(frame, np.broadcast_arrays(low, high, step), body, place)
        frame.copy(carried, results)

    def walk(frame: Frame) -> Walk:
        low, high, step = limits(frame)
        frame.copy(initial, carried)
        now = low
        while now[0] < high[0]:
            frame.registers[counter] = now
            yield from body.walk(frame)
            frame.copy(body.operands, carried)
            frame.launch.count(place)
            now = now + step
        frame.copy(carried, results)

    return Step(run, walk)


def _same(*values: Array) -> bool:
    return all(len(v) == 1 or bool((v == v[0]).all()) for v in values)


def _uneven(frame: Frame, bounds: Sequence[Array], body: Code, place: SourcePlace) -> None:
    """Rounds of a loop whose bounds differ between programs: those that have ended wait for the others."""
    counter, *carried = body.arguments
    now, high, step = (np.array(b) for b in bounds)
    index = np.flatnonzero(now < high)
    ended = np.flatnonzero(~(now < high))
    parts = [(ended, frame.take(ended, carried), carried)] if len(ended) else []
    active = frame.take(index, {*body.live, *carried})
    now, high, step = now[index], high[index], step[index]
    while len(index):
        active.registers[counter] = now
        body.run(active)
        active.copy(body.operands, carried)
        frame.launch.count(place)
        now = now + step
        more = now < high
        if not more.all():
            stay, leave = np.flatnonzero(more), np.flatnonzero(~more)
            parts.append((index[leave], active.take(leave, carried), carried))
            active = active.take(stay, {*body.live, *carried})
            index, now, high, step = index[stay], now[stay], high[stay], step[stay]
    frame.merge(parts, carried)


def _repeats(frame: Frame, before: Code, after: Code) -> bool:
    """Whether a round that ends leaves all values as they were when it began."""
    pairs = zip(after.operands, before.arguments, strict=True)
    return all(np.array_equal(frame.registers[a], frame.registers[b]) for a, b in pairs)


def conditional_loop(initial: list[int], before: Code, after: Code, results: list[int], place: SourcePlace) -> Step:
    """scf.while: `before` ends with the condition and what it hands on, `after` with what goes back."""
    condition, handed = before.operands[0], before.operands[1:]

    def run(frame: Frame) -> None:
        frame.copy(initial, before.arguments)
        index, active, parts = np.arange(len(frame.programs)), frame, []
        live, memory = {*before.live, *after.live}, frame.launch.memory
        while True:
            version = memory.version
            before.run(active)
            choice = _choice(active.registers[condition])
            if choice is False:
                break
            if choice is None:
                flags = np.broadcast_to(active.registers[condition], len(index))
                stay, leave = np.flatnonzero(flags), np.flatnonzero(~flags)
                parts.append((index[leave], active.take(leave, handed), handed))
                active, index = active.take(stay, {*live, *handed}), index[stay]
            active.copy(handed, after.arguments)
            after.run(active)
            if memory.races is None and memory.version == version and _repeats(active, before, after):
                raise EndlessLoopError(memory.kernel, place, "its program waits here for what no other will do")
            active.copy(after.operands, before.arguments)
            frame.launch.spend(place)
        if parts:
            frame.merge([*parts, (index, active, handed)], results)
        else:
            active.copy(handed, results)

    def walk(frame: Frame) -> Walk:
        frame.copy(initial, before.arguments)
        while True:
            yield from before.walk(frame)
            if not frame.registers[condition][0]:
                break
            frame.copy(handed, after.arguments)
            yield from after.walk(frame)
            same = _repeats(frame, before, after)
            frame.copy(after.operands, before.arguments)
            frame.launch.spend(place)
            yield Again(place, same)
        frame.copy(handed, results)

    return Step(run, walk)


def call(arguments: list[int], blocks: list[Code], results: list[int]) -> Step:
    """tt.call, the callee's blocks being compiled for this call."""

    def run(frame: Frame) -> None:
        frame.copy(arguments, blocks[0].arguments)
        run_blocks(blocks, frame, results)

    def walk(frame: Frame) -> Walk:
        frame.copy(arguments, blocks[0].arguments)
        yield from walk_blocks(blocks, frame, results)

    return Step(run, walk)


def run_blocks(blocks: list[Code], frame: Frame, results: Sequence[int] = ()) -> None:
    """A function's blocks: the first one that programs wait at goes on, with all that wait there."""
    if len(blocks) == 1:
        blocks[0].run(frame)
        frame.copy(blocks[0].operands, results)
        return
    waiting: dict[int, list[tuple[Array, Frame]]] = {0: [(np.arange(len(frame.programs)), frame)]}
    returned: list[tuple[Array, Frame, Sequence[int]]] = []
    while waiting:
        number = min(waiting)
        code = blocks[number]
        index, active = _gathered(waiting.pop(number), code)
        code.run(active)
        if not code.successors:
            returned.append((index, active, code.operands))
            continue
        choice = _choice(active.registers[code.operands[0]]) if code.last == "cf.cond_br" else True
        ways: list[tuple[tuple[int, list[int]], Array | None]] = []
        if choice is None:
            flags = active.registers[code.operands[0]]
            ways = [(code.successors[0], np.flatnonzero(flags)), (code.successors[1], np.flatnonzero(~flags))]
        else:
            ways = [(code.successors[0 if choice else 1], None)]
        for (target, sources), chosen in ways:
            if target <= number:
                frame.launch.spend(code.place)
            needed = {*blocks[target].live, *sources}
            part = active if chosen is None else active.take(chosen, needed)
            part.copy(sources, blocks[target].arguments)
            waiting.setdefault(target, []).append((index if chosen is None else index[chosen], part))
    if results:
        frame.merge(returned, results)


def _gathered(parts: list[tuple[Array, Frame]], code: Code) -> tuple[Array, Frame]:
    """Programs that come to a block on different ways, in one frame."""
    if len(parts) == 1:
        return parts[0]
    index = np.concatenate([i for i, _ in parts])
    first = parts[0][1]
    programs = np.concatenate([frame.programs for _, frame in parts])
    joined = Frame(list(first.launch.constants), programs, {}, first.launch)
    starts = np.cumsum([0, *(len(i) for i, _ in parts)])
    slots = [s for s in {*code.live, *code.arguments} if all(f.registers[s] is not None for _, f in parts)]
    ranges = [(np.arange(a, b), f, slots) for (a, b), (_, f) in zip(itertools.pairwise(starts), parts, strict=True)]
    joined.merge(ranges, slots)
    return index, joined


def walk_blocks(blocks: list[Code], frame: Frame, results: Sequence[int] = ()) -> Walk:
    """A function's blocks for one program that runs in turns with others."""
    number = 0
    while True:
        code = blocks[number]
        yield from code.walk(frame)
        if not code.successors:
            frame.copy(code.operands, results)
            return
        taken = 0 if code.last == "cf.br" or frame.registers[code.operands[0]][0] else 1
        target, sources = code.successors[taken]
        frame.copy(sources, blocks[target].arguments)
        if target <= number:
            frame.launch.spend(code.place)
            yield Again(code.place, False)
        number = target
