"""Loads that decide whether a loop goes on, by which programs may wait for each other.

A `while` that walks over tiles loads what it multiplies, and ends by its own count whatever that is: in turns the
grouped product of Triton's tutorial took four times as long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from retrograd.ttir.ir import Block, Function, Module, Operation, SsaValue

_BODIES = ("scf.if", "scf.for", "scf.while")


class _Dependences:
    """What each value of a function depends on, by slots, and the operations that make them."""

    def __init__(self, function: Function) -> None:
        self.of: dict[int, set[int]] = {}
        self.makers: dict[int, Operation] = {}
        self.calls: dict[int, str] = {}
        self.conditions: set[int] = set()
        labels = {block.label: block for block in function.body.blocks}
        for block in function.body.blocks:
            self._block(block, labels)

    def _add(self, targets: Sequence[SsaValue], sources: Sequence[SsaValue], also: Sequence[SsaValue] = ()) -> None:
        """Each target depends on the source at its place, and on all of `also`."""
        for target, source in zip(targets, sources, strict=True):
            self.of.setdefault(target.slot, set()).update([source.slot, *(value.slot for value in also)])

    def _block(self, block: Block, labels: dict[str, Block]) -> None:
        for operation in block.operations:
            if operation.name in _BODIES:
                self._structured(operation)
                continue
            for result in operation.results:
                self.of.setdefault(result.slot, set()).update(value.slot for value in operation.operands)
                if operation.name == "tt.call":
                    self.calls[result.slot] = operation.callee
                else:
                    self.makers[result.slot] = operation
            for label, values in operation.successors:
                self._add(labels[label].arguments, values, operation.operands)

    def _structured(self, operation: Operation) -> None:
        for region in operation.regions:
            for block in region.blocks:
                self._block(block, {})
        ends = [_handed(region.entry) for region in operation.regions]
        if operation.name == "scf.if":
            for end in ends:
                self._add(operation.results, end, operation.operands)
        elif operation.name == "scf.for":
            bounds, body = operation.operands[:3], operation.regions[0].entry
            for sources in (operation.operands[3:], ends[0]):
                self._add(body.arguments[1:], sources, bounds)
                self._add(operation.results, sources, bounds)
            self._add(body.arguments[:1], bounds[:1], bounds)
        else:
            (condition, *handed), back = ends
            self.conditions.add(condition.slot)
            before, after = (region.entry for region in operation.regions)
            for sources in (operation.operands, back):
                self._add(before.arguments, sources)
            for targets in (after.arguments, operation.results):
                self._add(targets, handed, [condition])

    def reached(self, slots: set[int]) -> set[int]:
        """Slots that some depend on, these included."""
        reached, ahead = set(slots), [*slots]
        while ahead:
            new = self.of.get(ahead.pop(), set()) - reached
            reached |= new
            ahead += new
        return reached


def _handed(block: Block) -> Sequence[SsaValue]:
    """What the end of a region hands on; TTIR leaves the end out where that is nothing."""
    last = block.operations[-1] if block.operations else None
    return last.operands if last is not None and last.name in ("scf.yield", "scf.condition") else ()


def deciding(module: Module) -> set[int]:
    """Ids of the operations whose results may decide whether a loop goes on."""
    every = {name: _Dependences(function) for name, function in module.functions.items()}

    def inside(name: str) -> Iterator[int]:
        """All operations of a function and of those that it calls."""
        yield from map(id, every[name].makers.values())
        for callee in every[name].calls.values():
            yield from inside(callee)

    decide = set[int]()
    for dependences in every.values():
        for slot in dependences.reached(dependences.conditions):
            if slot in dependences.calls:
                decide.update(inside(dependences.calls[slot]))
            elif slot in dependences.makers:
                decide.add(id(dependences.makers[slot]))
    return decide
