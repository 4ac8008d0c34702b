"""Tickets: results of atomics that say only where a program stores, and what; it waits for nobody then."""

from __future__ import annotations

from collections.abc import Iterable

from retrograd.ttir.ir import Block, Module
from retrograd.ttir.operations import ELEMENTWISE
from retrograd.ttir.shaping import SHAPING
from retrograd.ttir.storage import MemoryAccess

_DRAWS = "tt.atomic_rmw"
_COMPUTES = frozenset({*ELEMENTWISE, *SHAPING, "tt.store"})
# By which programs may wait for each other; inline assembly may touch memory.
_WAITS = frozenset(
    {"tt.atomic_cas", "tt.atomic_poll", "tt.atomic_load", "tt.atomic_store", "tt.elementwise_inline_asm"}
)


def only_stored(module: Module, accesses: Iterable[MemoryAccess]) -> bool:
    """Whether no result of an atomic decides a way, a loop, a load or another atomic, as far as that can be followed.

    A place in a list that each program takes by counting up is such a result. Programs can then run all at once, one
    step after the other, which is an order of theirs: nothing is read that depends on it, nor from where anything is
    stored, by which a result could come back.
    """
    stored, read = set[int | None](), set[int | None]()
    for access in accesses:
        (stored if access.does == "store" else read).update(access.arguments or (None,))
    if None in stored | read or stored & read:
        return False
    for function in module.functions.values():
        tickets: set[int] = set()
        if not all(_stored_in(block, tickets) for block in function.body.blocks):
            return False
    return True


def _stored_in(block: Block, tickets: set[int]) -> bool:
    """The same of a block; `tickets` are slots of such results around it, to which it adds its own."""
    for operation in block.operations:
        drawn = not tickets.isdisjoint(value.slot for value in operation.operands)
        passed = not tickets.isdisjoint(value.slot for _, values in operation.successors for value in values)
        if passed or operation.name in _WAITS or (drawn and operation.name not in _COMPUTES):
            return False
        if drawn or operation.name == _DRAWS:
            tickets.update(value.slot for value in operation.results)
        if not all(_stored_in(inner, tickets) for region in operation.regions for inner in region.blocks):
            return False
    return True
