import io

import fake_report as fake
import pytest
from rich.console import Console

from retrograd.check.messages import case_text
from retrograd.check.schema import Report, StageResult
from retrograd.errors import UndecidedError
from retrograd.report import document, show
from retrograd.report import text as renderer


def to_text(report: Report, width: int = 120) -> str:
    return renderer.to_text(document(report), width)


@pytest.mark.parametrize("width", [20, 60, 80, 200])
def test_what_where_case_and_repro_are_never_wrapped(width: int) -> None:
    lines = to_text(fake.report(), width).splitlines()
    for text in (fake.WHAT, fake.WHERE, case_text(fake.CASE), fake.REPRO):
        assert any(line.endswith(text) for line in lines), text


def test_evidence_says_how_far() -> None:
    text = to_text(fake.report(), 80)
    assert "grad_x[0, 1, 6]: got 1.25, want nan, 940x attainable, 3 of 42 elements wrong" in text


@pytest.mark.parametrize("width", [80, 140])
def test_each_stage_has_mark_cost_and_power(width: int) -> None:
    text = to_text(fake.report(), width)
    row = next(line for line in text.splitlines() if line.startswith("FAIL"))
    assert "oracle" in row
    assert "24 cases" in row
    assert "96 runs" in row
    assert "1.50 s" in row
    for part in (
        "catches relative errors from 3e-6",
        "needs a GPU",
        "the reference makes NaN",
        "note: a note",
    ):
        assert part in text
    assert "exact" in text
    assert "x was rescaled [a]" in text


def test_stage_table_fits_80_columns() -> None:
    table = to_text(fake.report(), 80).split("Finding 1")[0]
    assert max(map(len, table.splitlines())) <= 80


@pytest.mark.parametrize(
    ("verdict", "headline"), [("proved", "PROVED"), ("finding", "FINDING"), ("undecided", "CANNOT DECIDE")]
)
def test_the_verdict_is_the_last_line(verdict: str, headline: str) -> None:
    assert to_text(fake.report(verdict)).splitlines()[-1].startswith(f"{headline} in 1 min 05 s")


def test_colour_only_if_the_console_has_it() -> None:
    assert "\x1b" not in to_text(fake.report())
    out = io.StringIO()
    show(fake.report(), Console(file=out, force_terminal=True, color_system="standard", width=80))
    assert "\x1b" in out.getvalue()


def test_a_report_without_stages_renders() -> None:
    empty = Report("x", "undecided", "full", 0, (), "cpu", ())
    assert "CANNOT DECIDE" in to_text(empty)


def test_a_reason_of_several_stages_is_told_once() -> None:
    why = "Triton cannot run any kernel here"
    stages = [StageResult(name, "title", "undecided", reason=why) for name in ("contract", "oracle")]
    stages += [
        StageResult("shapes", "title", "undecided", reason="something else"),
        StageResult("nan", "title", "passed"),
    ]
    report = Report("x", "undecided", "quick", 0, ("float32",), "cpu", tuple(stages))
    text = " ".join(to_text(report, 200).split())
    assert text.count(why) == 1
    assert "for the same reason as contract" in text
    assert "something else" in text
    with pytest.raises(UndecidedError) as error:
        report.raise_if_failed()
    assert str(error.value).count(why) == 1
    assert [a.title for a in document(report).annotations if a.level == "warning"] == ["x: contract", "x: shapes"]
