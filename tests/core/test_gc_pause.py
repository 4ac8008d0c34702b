"""Pauses of the garbage collector, and what it looks at meanwhile."""

from __future__ import annotations

import gc
import weakref

import pytest

from retrograd.core import gc_pause


class Thing:
    """An object that the collector knows."""


@pytest.fixture(autouse=True)
def nothing_is_frozen() -> None:
    gc.unfreeze()


def known(thing: Thing) -> bool:
    return any(one is thing for one in gc_pause.objects())


def test_what_there_was_is_frozen_and_comes_back():
    before = Thing()
    with gc_pause.frozen():
        after = Thing()
        assert not any(one is before for one in gc.get_objects())
        assert known(before)
        assert known(after)
        assert not any(one is before for one in gc.get_objects())  # still frozen
    assert gc.get_freeze_count() == 0
    assert any(one is before for one in gc.get_objects())


def test_it_comes_back_after_an_error():
    with pytest.raises(ValueError, match="wrong"), gc_pause.frozen():
        raise ValueError("wrong")
    assert gc.get_freeze_count() == 0


def test_what_somebody_else_froze_stays_frozen():
    before = Thing()
    gc.freeze()
    # The objects are asked for, not gc.get_freeze_count(): other threads drop some of the millions that are frozen.
    with gc_pause.frozen():
        after = Thing()
        assert not any(one is before for one in gc.get_objects())
    seen = gc.get_objects()
    assert not any(one is before for one in seen)
    assert any(one is after for one in seen)  # nothing was frozen on top
    gc.unfreeze()


@pytest.mark.parametrize("first", [700, 50_000, 0])
def test_new_objects_are_looked_at_more_seldom_and_by_nobody_who_switched_it_off(first):
    before = gc.get_threshold()
    gc.set_threshold(first, 10, 10)
    try:
        with gc_pause.frozen():
            assert gc.get_threshold() == (max(first, 10_000) if first else 0, 10, 10)
        assert gc.get_threshold() == (first, 10, 10)
    finally:
        gc.set_threshold(*before)


@pytest.mark.parametrize("age", [False, True])
def test_no_collection_while_it_is_paused_and_as_before_afterwards(age):
    with gc_pause.paused(age=age):
        assert not gc.isenabled()
        made = [Thing() for _ in range(50)]
    assert gc.isenabled()
    young = {id(thing) for thing in gc.get_objects(generation=0)}
    assert all(id(thing) not in young for thing in made) is age
    gc.disable()
    try:
        with gc_pause.paused(age=age):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(ValueError, match="wrong"), gc_pause.paused():
        raise ValueError("wrong")
    assert gc.isenabled()


def test_a_cycle_made_meanwhile_is_gone_afterwards():
    """Graphs of autograd are few objects that hold much."""
    with gc_pause.frozen():
        thing = Thing()
        thing.itself = thing
        alive = weakref.ref(thing)
        del thing
    assert alive() is None
