"""A test that fails after another one of its file, through a module global; and neighbours that do no harm."""

from __future__ import annotations

import random

_cache: dict[str, float] = {}


def test_harmless():
    assert random.random() < 2


def test_polluter():
    _cache["scale"] = 3.0


def test_other():
    assert not set()


def test_victim():
    assert 2 * _cache.get("scale", 1.0) == 2
