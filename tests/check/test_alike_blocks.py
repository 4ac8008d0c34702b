"""Sizes as large as the block of another dimension: where a kernel that asks the wrong one needs a mask."""

from __future__ import annotations

from corpus import HERE, load_module

import retrograd as rg

SPECIMENS = load_module(HERE / "mutants" / "triton_blocks.py")


def test_a_kernel_that_asks_the_right_dimension_is_left_alone():
    assert rg.verify(SPECIMENS.RIGHT, level="quick", only=["contract", "oracle", "shapes", "bounds"])


def test_only_these_sizes_show_the_wrong_one():
    for spec in SPECIMENS.MUTANTS.values():
        report = rg.verify(spec, level="quick", only=["contract", "oracle", "shapes"])
        assert {f.stage for f in report.findings} == {"shapes"}
        assert all("M=64" in f.case.text() or "M=32" in f.case.text() for f in report.findings)
