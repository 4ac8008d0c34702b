"""Every record leads to its document by its exact schema, and each format shows what the document holds."""

from __future__ import annotations

from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path

import fake_report as fake
import pytest

from retrograd import report as reports
from retrograd.core import document as doc
from retrograd.errors import UsageError
from retrograd.graph.watching.schema import Watched, WatchReport
from retrograd.report import github, html, text
from retrograd.report.tensorboard import write_events


@pytest.mark.parametrize("schema", reports._RECORDS)
def test_a_schema_leads_to_the_record_that_has_it_and_to_its_words(schema: str) -> None:
    module, _, name = reports._RECORDS[schema].partition(":")
    record = getattr(import_module(module), name)
    assert next(f.default for f in fields(record) if f.name == "schema") == schema
    assert callable(reports._messages(record).document)


def test_a_schema_that_is_quoted_in_a_record_is_not_that_of_the_record() -> None:
    quoting = replace(fake.report("proved"), notes=('"schema": "retrograd.flake/1"',))
    assert reports.read(quoting.to_json()).notes == quoting.notes


def test_json_without_a_known_schema_is_refused() -> None:
    with pytest.raises(UsageError, match="schema 'other/1'"):
        reports.read('{"schema": "other/1"}')


def test_a_watched_run_has_a_page_and_shows_itself_in_a_notebook(tmp_path: Path) -> None:
    fine = Watched(0, "forward", "jit(f)", 0, "k" * 16, instructions=12, parameters=2, outputs=1)
    extra = replace(fine, number=1, step=3, expected=False, against=0, reason="shape [4, 3] is new")
    record = WatchReport(("compile",), 4, 1, None, (fine, extra), ())
    reports.write(record, tmp_path / "w.html", tmp_path / "w.json", tmp_path / "w.txt")
    page = (tmp_path / "w.html").read_text()
    assert "1 too many" in page
    assert "shape [4, 3] is new" in page
    assert reports.load(tmp_path / "w.json") == record
    assert (tmp_path / "w.txt").read_text() == record.text() + "\n"
    assert "shape [4, 3] is new" in (record._repr_html_() or "")


CARDS = tuple(doc.Card(f"card {k}", (doc.Fact("why", f"because {k}"), doc.Fact("empty", ""))) for k in range(7))
HEADER = doc.Header("finding", "<b>head</b>", ("a fact",), "WORD")
DOCUMENT = doc.Document(
    "title",
    text=(
        doc.TextLine("first \x1b[31m[bold]", "bold"),
        doc.Table(("name", "count"), (("a long name " * 9, "1"), ("b", "20")), numbers=(-1,)),
        doc.Table((), ((doc.Cell("pass", "green"), "text " * 40),), fold=(1,)),
    ),
    page=(
        HEADER,
        doc.Section("Cards", CARDS),
        doc.Section("Table", (doc.Table(("k", "n"), (("x\ny", doc.Cell(bar=25.0)),), numbers=(1,)),)),
        doc.Paragraphs(("point",), "points"),
    ),
    brief=(HEADER, *CARDS),
    annotations=(doc.Annotation("error", "t: a", "100 %", "a.py:3"), doc.Annotation("notice", "t", "done")),
)


def test_text_neither_cuts_names_nor_lets_them_command_the_terminal() -> None:
    lines = text.to_text(DOCUMENT, width=60).splitlines()
    assert lines[0] == "first \\x1b[31m[bold]"
    assert lines[2].startswith("a long name " * 9)
    assert [line[-2:] for line in lines[2:4]] == [" 1", "20"]
    assert max(map(len, lines[4:])) <= 60


def test_a_page_escapes_and_leaves_out_what_is_empty() -> None:
    page = html.to_html(DOCUMENT, '{"a": "</script>"}')
    assert "&lt;b&gt;head&lt;/b&gt;" in page
    assert "empty" not in page.lower()
    assert "x<br>y" in page
    assert "width: 25.0%" in page
    assert page.count("</script>") == 1


def test_a_notebook_has_five_cards_and_counts_the_others() -> None:
    fragment = html.to_notebook(DOCUMENT)
    assert fragment.count("<h3>") == 5
    assert "2 more causes" in fragment


def test_annotations_are_one_line_each() -> None:
    first, second = github.to_github(DOCUMENT).splitlines()
    assert first == "::error file=a.py,line=3,title=t%3A a::100 %25"
    assert second == "::notice title=t::done"


def test_a_record_without_numbers_has_no_events(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="takes a report of `retrograd verify`"):
        reports.to_tensorboard(WatchReport((), 0, None, None, (), ()), tmp_path)  # type: ignore[arg-type]


def test_events_stand_at_their_steps(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard (extra tensorboard)")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    values = [doc.Scalar(2, "late", 1.0), doc.Scalar(0, "early", 3.0)]
    write_events(doc.Events("2026-11-21T06:00:00", values, seconds=10.0), tmp_path)
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    (early,), (late,) = accumulator.Scalars("early"), accumulator.Scalars("late")
    assert (early.step, late.step) == (0, 2)
    assert late.wall_time - early.wall_time == 20.0
