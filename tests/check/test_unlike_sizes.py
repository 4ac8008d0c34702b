"""Sizes all beyond a block and unlike each other: where a few programs share tiles with a remainder."""

from __future__ import annotations

import pytest

import retrograd as rg

shared_tiles = pytest.importorskip("shared_tiles", reason="needs Triton")


@pytest.mark.parametrize("level", ["quick", "full"])
def test_tiles_that_programs_share_race_only_where_no_size_is_alike(level):
    report = rg.verify(shared_tiles.scale(atomic=False), level=level, only=["contract", "races", "oracle", "shapes"])
    assert ("shapes", "race") in {(f.stage, f.kind) for f in report.findings}
    assert {f.stage for f in report.findings} == {"shapes"}


def test_tiles_that_are_shared_by_atomics_are_left_alone():
    assert rg.verify(shared_tiles.scale(atomic=True), level="quick", only=["contract", "races", "oracle", "shapes"])
