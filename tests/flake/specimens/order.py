"""A test that fails after another one of its file, through a module global; and neighbours that do no harm."""

from __future__ import annotations

import random

import pytest

_cache: dict[str, float] = {}


def test_harmless():
    assert random.random() < 2


def test_polluter():
    _cache["scale"] = 3.0


def test_other():
    assert not set()


def test_victim():
    assert 2 * _cache.get("scale", 1.0) == 2


class TestDraws:
    @pytest.fixture(scope="session")
    def drawn(self):
        return random.random()

    def test_fixture_is_drawn_anew(self, drawn):
        assert drawn > 0.25


@pytest.mark.parametrize("n", [1, 2])
def test_parametrized(n):
    assert n < 3


def test_skipped():
    pytest.skip("no such device")


@pytest.fixture
def broken():
    raise RuntimeError("the fixture is broken")


def test_error(broken):
    pass
