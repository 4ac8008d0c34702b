"""The plot: a page that loads nothing, a picture, and the points that are drawn."""

from __future__ import annotations

import sys

import pytest

from retrograd.bench import plot
from retrograd.bench.rows import BenchResults, Row
from retrograd.errors import MissingExtraError, UsageError
from retrograd.report import document
from retrograd.report.html import to_html

ROWS = [
    Row(
        "rms_norm",
        f"{m}x{n}",
        "bfloat16",
        provider,
        fwd_ms=ms,
        bwd_ms=2 * ms,
        copy_gb_per_s=4000.0,
        machine={"gpu": "<G>"},
    )
    for m, n in ((32768, 1024), (512, 1024), (4096, 2000), (16384, 16384))
    for provider, ms in (("retrograd", 0.1), ("torch", 0.3))
]


def test_html_is_one_file_without_addresses():
    pytest.importorskip("vl_convert")
    page = to_html(document(BenchResults(tuple(ROWS))), "[]")
    assert "<svg" in page
    assert "http:" not in page
    assert "https:" not in page
    assert "backward" in page
    assert "<G>" not in page  # text from results is escaped
    assert "&lt;G&gt;" in page


def test_without_the_package_that_draws_the_page_has_tables_and_a_picture_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    page = to_html(document(BenchResults(tuple(ROWS))), "[]")
    assert "<svg" not in page
    assert "gb_per_s" in page
    assert "16384x16384" in page
    with pytest.raises(MissingExtraError, match=r"vl-convert-python.*retrograd\[html\]"):
        plot.png(ROWS)


def test_png():
    pytest.importorskip("vl_convert")
    assert plot.png(ROWS).startswith(b"\x89PNG")


def test_of_each_width_the_tallest_shape_is_drawn_and_ragged_widths_are_not():
    points = plot.chart(ROWS)["data"]["values"]
    assert {p["n"] for p in points} == {1024, 16384}
    assert sum(p["provider"] == "retrograd" for p in points) == 4  # two widths, two directions
    assert sum(p["provider"] == "device copy" for p in points) == 4


def test_what_cannot_be_drawn_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match=r"\.html or \.png"):
        plot.check_path(tmp_path / "p.pdf")
    with pytest.raises(UsageError, match="no folder"):
        plot.check_path(tmp_path / "nowhere" / "p.png")
    with pytest.raises(UsageError, match="nothing to draw"):
        plot.chart([Row("rms_norm", "8x2000", "bfloat16", "torch", fwd_ms=1.0)])
