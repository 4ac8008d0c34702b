import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import fake_report as fake
import pytest

from retrograd.check import charts, messages
from retrograd.check.schema import Report
from retrograd.core.document import Chart
from retrograd.report import document, html, write


class _Page(HTMLParser):
    """Collects the attributes and the embedded record of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str]] = []
        self.scripts: list[str] = []
        self.inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.inside = tag == "script"

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.scripts.append(data)


@pytest.fixture(scope="module")
def page() -> str:
    pytest.importorskip("vl_convert", reason="charts need vl-convert-python (extra html)")
    return html.to_html(document(fake.report()), fake.report().to_json())


def test_page_loads_nothing(page: str) -> None:
    read = _Page()
    read.feed(page)
    assert not [a for a in read.attributes if a[1] in ("src", "href", "xlink:href", "data", "action")]
    assert not re.search(r"https?://|@import|url\(", page)
    assert [a[2] for a in read.attributes if a[0] == "script" and a[1] == "type"] == ["application/json"]


def test_record_is_embedded_whole(page: str) -> None:
    read = _Page()
    read.feed(page)
    assert len(read.scripts) == 1
    assert Report.from_json(read.scripts[0]).to_json() == fake.report().to_json()
    assert json.loads(read.scripts[0])["stages"][1]["findings"][0]["what"] == fake.WHAT


def test_page_shows_verdict_findings_stages_and_environment(page: str) -> None:
    visible = page.split("<script", maxsplit=1)[0]
    for text in (
        "FINDING",
        "my/file.py:rms_norm",
        fake.WHERE,
        "--only oracle",
        "needs a GPU",
        "&lt;none&gt;",
        "12 sigma: random rounding of the formula",
        "width: 90.0%",
        "first seen",
        "700 of 768",
    ):
        assert text in visible, text
    assert "</script>" not in visible
    assert visible.count("<svg") == 2
    assert "prefers-color-scheme: dark" in visible


def test_without_the_package_that_draws_grids_are_plain_pictures_and_bars_tables(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    write(fake.report(), tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    picture = page.split("<svg")[1].split("</svg>")[0]
    assert 'aria-label="Error over attainable error across grad_x"' in picture
    assert picture.count("<rect") == 6
    assert "10 to 100: WRONG" in picture
    table = page.split("Distance to the correctly rounded result</figcaption>")[1].split("</table>")[0]
    assert re.findall(r"<th scope=\"row\">(.*?)</th><td>(\d+)</td>", table.replace("\n", "")) == [
        ("0 to 1", "30"), ("1 to 2", "9"), ("2 to 4", "0"), ("4 or more", "3"),
    ]  # fmt: skip


def test_failed_stages_are_drawn_before_the_oracle() -> None:
    base = fake.report("proved")
    stages = (
        base.stage("oracle"),
        fake.StageResult("late", "t", "failed", profiles=(fake.profile("grad_b"),)),
    )
    chosen = messages.profiles(base.__class__(**{**vars(base), "stages": stages}))
    assert [stage.id for stage, _ in chosen] == ["late", "oracle"]


@pytest.mark.parametrize(
    ("ratio", "wrong"), [(0.0, False), (1.0, False), (1.0001, True), (1e9, True), (float("nan"), True)]
)
def test_bands_change_at_one(ratio: float, wrong: bool) -> None:
    assert ("WRONG" in charts.band(ratio)) is wrong


def test_heat_map_covers_the_tensor_once() -> None:
    chart = charts.heat_map(fake.profile())
    json.dumps(chart, allow_nan=False)
    cells = chart["data"]["values"]
    assert sum((c["x1"] - c["x0"]) * (c["y1"] - c["y0"]) for c in cells) == pytest.approx(6 * 7)
    assert len(cells) == 3 + 3  # equal neighbours are merged


def test_histogram_labels_end_open() -> None:
    values = charts.ulp_histogram(fake.profile())["data"]["values"]
    assert [v["bin"] for v in values] == ["0 to 1", "1 to 2", "2 to 4", "4 or more"]
    assert [v["count"] for v in values] == [30, 9, 0, 3]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,)])
def test_odd_shapes_are_drawn(shape: tuple[int, ...]) -> None:
    pytest.importorskip("vl_convert", reason="charts need vl-convert-python (extra html)")
    odd = fake.Profile("g", fake.CASE, shape, ((2.0,),), (0.0,), (1,), 2.0)
    assert "<svg" in html.svg(Chart("c", "l", charts.heat_map(odd)))
    assert "<svg" in html.svg(Chart("c", "l", charts.ulp_histogram(odd)))


def test_breakdown_is_left_out_where_nothing_is_known() -> None:
    found = fake.finding()
    assert [round(share) for _, _, share in messages.shares(found)] == [90, 10, 0]
    assert messages.shares(replace(found, terms=())) == []
    assert messages.shares(replace(found, terms=(("sigma", float("inf")),))) == []


def test_before_and_after_show_what_differs() -> None:
    rows = {name: (before, after) for name, before, after in messages.before_after(fake.finding())}
    assert rows == {
        "M...": ("16", "2x3"),
        "N": ("48", "7"),
        "x": ("1e4", "plain"),
        "elements wrong": ("700 of 768", "3 of 42"),
        "error": ("1210x attainable", "940x attainable"),
    }
    assert messages.before_after(replace(fake.finding(), first=None)) == []
