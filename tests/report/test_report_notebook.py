"""Records show themselves in a notebook: the verdict, the findings and how to see them again, and nothing that runs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_report import report

from retrograd import graph, trace
from retrograd.flake.schema import Flake, FlakeReport, Rate
from retrograd.trace import Op, Stats, Trace
from retrograd.trace.bisecting.schema import Bisection, Culprit

DUMPS = Path(__file__).resolve().parent.parent / "graph" / "data" / "xla"


class _Page(HTMLParser):
    """Text, tags and attributes of a fragment; complains of what is left open."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.open, self.text, self.attributes = [], [], [], []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.open.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)


def shown(record):
    html = record._repr_html_()
    page = _Page(html.replace("<br>", ""))
    assert "script" not in page.tags
    assert not [value for name, value in page.attributes if name in ("src", "href")]
    return html, " ".join(" ".join(page.text).split())


def test_a_finding_says_what_where_and_how_to_see_it_again():
    found = report()
    _, text = shown(found)
    assert "FINDING" in text
    for finding in found.findings:
        assert finding.what in text
        assert finding.repro in text
    for stage in found.stages:
        assert stage.title in text


def test_more_findings_than_fit_are_counted():
    found = report()
    stage = next(s for s in found.stages if s.findings)
    many = replace(stage, findings=stage.findings[:1] * 7)
    html, text = shown(replace(found, stages=(many,)))
    assert html.count("<h3>") == 5
    assert "2 more findings" in text


def test_text_of_an_op_is_no_markup():
    html, _ = shown(replace(report(), target="<img src=x onerror=alert(1)>"))
    assert "<img" not in html


def test_a_comparison_of_graphs_says_the_causes():
    diff = graph.diff(DUMPS / "base_step1.hlo.txt.gz", DUMPS / "stray_step2.hlo.txt.gz")
    _, text = shown(diff)
    assert "Different" in text
    assert diff.causes[0].what in text
    assert diff.causes[0].advice in text


@pytest.mark.parametrize("name", ["same", "unique", "follow"])
def test_other_graph_records_show_themselves(name):
    file = DUMPS / "base_step1.hlo.txt.gz"
    record = {
        "same": lambda: graph.diff(file, file),
        "unique": lambda: graph.unique([file, file]),
        "follow": lambda: graph.follow(file, "p0"),
    }[name]()
    _, text = shown(record)
    assert {"same": "Same", "unique": "1", "follow": "p0"}[name].lower() in text.lower()


def _op(index: int, held: int, **more: Any) -> Op:
    known = dict(step=0, phase="forward", module="fc", node="", place="m.py:3", code="y = <x>.exp()", arguments="")
    given, made = (Stats(n, (2,), "float32", "cpu", 0.0, 99.0, digest=n and held, **more) for n in (0, 1))
    return Op(index=index, name="aten.exp.default", inputs=(given,), outputs=(made,), **known)


def test_what_is_asked_of_traces_shows_itself():
    good, other = (Trace([_op(0, held)], "full") for held in (1, 2))
    made = replace(good.ops[0], outputs=(replace(good.ops[0].outputs[0], inf=1),))
    html, text = shown(trace.provenance(Trace([made], "full")))
    assert "Inf in step 0, made in the forward by aten.exp.default in module fc" in text
    assert "exp overflows float32" in text
    assert "y = &lt;x&gt;.exp()" in html
    assert "no NaN and no Inf in 1 operator" in shown(trace.provenance(good))[1]
    html, text = shown(trace.diff(good, other))
    assert "different: first at operator 0" in text
    assert "m.py:3, module fc, forward, step 0" in text
    assert 'class="verdict finding"' in html
    assert 'class="verdict proved"' in shown(trace.diff(good, good))[0]
    culprit = Culprit("aten.sum.default", "fc", "forward", 0.01, 0.2, place="m.py:3")
    _, text = shown(Bisection("m.py:step", "found", "float64", "operator", 1e-3, 0.5, 1e-4, 0.0, "loss", (culprit,)))
    assert "1 operator in float64: error 0.5 -> 0.0001" in text
    assert "aten.sum.default" in text


def test_flakes_show_themselves():
    flake = Flake("tests/test_x.py::test_y", "undecided", Rate(0, 0, 0.0, 1.0, 0.95), notes=("skipped",))
    _, alone = shown(flake)
    _, inside = shown(FlakeReport((flake,)))
    assert "tests/test_x.py::test_y" in alone
    assert alone == inside


def test_without_jinja2_a_notebook_shows_text():
    code = (
        "import sys; sys.modules['jinja2'] = None; sys.path.insert(0, sys.argv[1])\n"
        "from fake_report import report; print(report()._repr_html_())"
    )
    done = subprocess.run([sys.executable, "-c", code, Path(__file__).parent], capture_output=True, text=True)
    assert done.stdout.strip() == "None", done.stderr


def test_show_puts_the_charts_below_the_cell(monkeypatch):
    cells = []
    shell = SimpleNamespace(kernel=object())
    fake = SimpleNamespace(HTML=str, display=cells.append)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell, display=fake))
    report().show()
    (html,) = cells
    assert "Error profiles" in html
    assert html.count("<svg") > report()._repr_html_().count("<svg")
    assert "<script" not in html
    graph.diff(DUMPS / "base_step1.hlo.txt.gz", DUMPS / "stray_step2.hlo.txt.gz").show()  # has none
    assert len(cells) == 2


@pytest.mark.parametrize("browser", [True, False])
def test_show_opens_a_page_in_a_terminal_and_prints_text_where_there_is_no_browser(
    browser, monkeypatch, capsys, tmp_path
):
    pages = []
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    monkeypatch.setattr("tempfile.mkdtemp", lambda prefix: str(tmp_path))
    monkeypatch.setattr("webbrowser.open", lambda address: pages.append(address) or browser)
    report().show()
    assert pages == [(tmp_path / "report.html").as_uri()]
    assert "Error profiles" in (tmp_path / "report.html").read_text()
    printed = capsys.readouterr().out
    assert printed == "" if browser else printed.endswith(f"page: {tmp_path / 'report.html'}\n")
