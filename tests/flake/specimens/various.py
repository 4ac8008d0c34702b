"""Tests of each form that pytest knows: each is run anew, with fixtures of its own."""

from __future__ import annotations

import random
import unittest

import pytest


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


class TestOld(unittest.TestCase):
    """A class of unittest, whose instance is made anew for each run."""

    def setUp(self):
        self.seen = getattr(self, "seen", 0) + 1

    def test_own_instance(self):
        assert self.seen == 1
