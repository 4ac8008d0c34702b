"""What the garbage collector looks at while an op is verified."""

from __future__ import annotations

import gc

import pytest

from retrograd.check import heap


class Thing:
    """An object that the collector knows."""


@pytest.fixture(autouse=True)
def nothing_is_aside() -> None:
    gc.unfreeze()


def known(thing: Thing) -> bool:
    return any(one is thing for one in heap.objects())


def test_what_there_was_is_set_aside_and_comes_back():
    before = Thing()
    with heap.set_aside():
        after = Thing()
        assert not any(one is before for one in gc.get_objects())
        assert known(before)
        assert known(after)
        assert not any(one is before for one in gc.get_objects())  # still aside
    assert gc.get_freeze_count() == 0
    assert any(one is before for one in gc.get_objects())


def test_it_comes_back_after_an_error():
    with pytest.raises(ValueError, match="wrong"), heap.set_aside():
        raise ValueError("wrong")
    assert gc.get_freeze_count() == 0


def test_what_somebody_else_has_set_aside_stays_there():
    gc.freeze()
    count = gc.get_freeze_count()
    with heap.set_aside():
        assert gc.get_freeze_count() == count
    assert gc.get_freeze_count() == count
    gc.unfreeze()


@pytest.mark.parametrize("first", [700, 50_000, 0])
def test_new_objects_are_looked_at_more_seldom_and_by_nobody_who_switched_it_off(first):
    before = gc.get_threshold()
    gc.set_threshold(first, 10, 10)
    try:
        with heap.set_aside():
            assert gc.get_threshold() == (max(first, 10_000) if first else 0, 10, 10)
        assert gc.get_threshold() == (first, 10, 10)
    finally:
        gc.set_threshold(*before)
