"""Edits of real dumps (`mechanical_edits.py`): never the same, and harmless ones always. Each day another part of them."""

from __future__ import annotations

import time
from importlib.util import find_spec

import pytest
from mechanical_edits import DUMPS, edits, original, run

from retrograd.graph.readers import hlo_attributes

STEP = 257  # of some 30,000 edits
TODAY = int(time.time() // 86_400)


@pytest.mark.parametrize("dump", DUMPS)
def test_edits_of_today(dump: str) -> None:
    if ".mlir" in dump and find_spec("jaxlib") is None:
        pytest.skip("StableHLO is read by jaxlib")
    number = TODAY + DUMPS.index(dump)
    tally = run(dump, STEP, number % STEP, harmless_too=number % 3 == 0)
    assert tally.wrong == [], f"python tests/graph/mechanical_edits.py {dump!r} {STEP} {number % STEP}"


def test_a_reader_that_drops_an_attribute_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hlo_attributes._HARMLESS, "dimensions", "a reader that forgets them")
    original.cache_clear()
    wrong = run("trust/attr_cp.hlo.gz").wrong + run("trust/mlp.hlo.txt.gz", 7).wrong
    original.cache_clear()
    assert wrong
    assert all("dimensions" in line for line in wrong)


def test_every_kind_of_edit_is_made() -> None:
    kinds = {
        edit.kind.partition(" ")[0] for dump in ("trust/mlp_drop1.hlo.txt.gz", "fx/1_bw.txt.gz") for edit in edits(dump)
    }
    assert kinds == {"header", "attribute", "without", "called", "shape", "dtype", "layout", "constant", "operation",
                     "exchange", "operand", "removal", "argument"}  # fmt: skip
