"""`show()`: one call draws what people rather look at than read: every record has it."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import fake_report as fake
import pytest
from every_page import _records

RECORDS = dict(_records())
# What is to be seen where: the tolerance, a kink, the tail of a flake, the roofline, ranges of a trace.
DRAWN = {
    "verify": "Error over attainable error across grad_x",
    "kink": "Right is -1 to 1, got 3",
    "flake": "Comparisons by error over tolerance and outcome",
    "bench-norm": "GB/s by provider, forward and backward, beside a device copy",
    "trace": "2^-16 to 2^15",
}


def _record(name: str) -> Any:
    if name != "kink":
        return RECORDS[name]
    found = dataclasses.replace(fake.finding(), stage="kinks", kind="beyond-kink", got=3.0, between=(-1.0, 1.0))
    stage = dataclasses.replace(fake.report().stages[1], id="kinks", findings=(found,), profiles=())
    return dataclasses.replace(fake.report(), stages=(stage,))


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a notebook's kernel is given to display."""
    shown: list[str] = []
    display = SimpleNamespace(HTML=str, display=shown.append)
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell, display=display))
    return shown


@pytest.mark.parametrize("name", DRAWN)
def test_in_a_notebook_it_is_drawn(name: str, cells: list[str]) -> None:
    pytest.importorskip("vl_convert", reason="charts need vl-convert-python (extra html)")
    _record(name).show()
    (html,) = cells
    assert DRAWN[name] in html
    assert html.count('class="verdict') == html.count("<h1>") == 1
    assert html.count(fake.WHAT) <= 1
    assert "<svg" in html
    assert "<script" not in html


def test_what_is_no_kink_has_no_picture_of_one(cells: list[str]) -> None:
    stage = dataclasses.replace(fake.report().stages[1], profiles=())
    dataclasses.replace(fake.report(), stages=(stage,)).show()
    assert "<svg" not in cells[0]


@pytest.mark.parametrize("name", sorted(set(RECORDS) - {"graph-check"}))
def test_every_record_has_it(name: str, cells: list[str]) -> None:
    RECORDS[name].show()
    assert "verdict" in cells[0]
