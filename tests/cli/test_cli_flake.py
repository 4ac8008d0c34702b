"""`retrograd flake`: verdict as exit code, results on stdout, progress on stderr, history, files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from retrograd.cli import main
from retrograd.flake import examination
from retrograd.flake.schema import Flake, FlakeReport, Margin, Rate, Reason, Run, Tail

TESTS = """
def passes(seed): return 0.01 * (seed % 7 + 1)
def fails_at_two(seed): assert seed != 2, "[bold]two[/bold] </script>"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(TESTS)
    return tmp_path


def flake(*args: str) -> Any:
    return CliRunner().invoke(main, ["flake", *args])


def test_steady_is_0_and_the_next_call_takes_new_seeds(folder: Path) -> None:
    result = flake("mine.py:passes", "--seeds", "3", "--repeats", "1")
    assert result.exit_code == 0
    assert "NO FLAKE SEEN" in result.stdout
    assert "0 of 3 seeds fail: the probability is below 63 %" in result.stdout
    assert "mine.py:passes: seeds: process 1, 3 runs" in result.stderr
    result = flake("mine.py:passes", "--seeds", "2", "--repeats", "1", "--json", "-q")
    assert [run["seed"] for run in json.loads(result.stdout)["flakes"][0]["runs"]] == [3, 4]
    assert result.stderr == ""
    table = flake("--history").stdout
    assert "all days" in table
    assert " 5 " in table
    (_, total) = json.loads(flake("--history", "--json").stdout)
    assert total["rate"]["runs"] == 5


def test_flaky_is_1_with_files_that_can_be_read_again(folder: Path) -> None:
    result = flake("mine.py:fails_at_two", "--seeds", "4", "--no-history", "-o", "a.json", "-o", "a.txt")
    assert result.exit_code == 1
    assert "AssertionError: [bold]two[/bold] </script>" in result.stdout
    assert "repro      retrograd flake mine.py:fails_at_two --seed 2 --seeds 1 --no-history" in result.stdout
    assert not (folder / ".retrograd").exists()
    assert (folder / "a.txt").read_text() in result.stdout.replace("\r", "") + "\n"
    again = CliRunner().invoke(main, ["report", "a.json"])
    assert again.exit_code == 0
    assert again.stdout == result.stdout
    pytest.importorskip("vl_convert", reason="charts need vl-convert-python (extra html)")
    assert CliRunner().invoke(main, ["report", "a.json", "-o", "a.html"]).exit_code == 0
    page = (folder / "a.html").read_text()
    assert page.count("</script>") == 1
    assert "FLAKY" in page


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nowhere.py::test"], "there is no 'nowhere.py' here"),
        ([], "`targets` is empty"),
        (["mine.py:passes", "--seeds", "0"], "`seeds` is 0"),
        (["mine.py:passes", "--threads", "1,x"], "`--threads` has 'x', expected whole numbers such as 1,2"),
        (["mine.py:passes", "--env", "NAME"], "`--env` is 'NAME', expected NAME=a,b"),
        (["mine.py:passes", "-o", "report.pdf"], "must end in one of"),
        (["mine.py:passes", "--seeds", "1", "--db", "nowhere/x"], "cannot be used as a history"),
        (["--history"], "there is no history yet"),
    ],
)
def test_bad_usage_is_2_and_a_sentence(args: list[str], said: str) -> None:
    result = flake(*args)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_history_that_cannot_be_written_in_its_usual_place_is_no_failure(folder: Path) -> None:
    (folder / ".retrograd").write_text("a file is in the way")
    result = flake("mine.py:passes", "--seeds", "1", "--repeats", "1", "-q")
    assert result.exit_code == 0
    assert "the runs were not kept" in result.stderr


def made_up() -> FlakeReport:
    margin = Margin(
        "t.py:3", "torch.testing.assert_close", float("inf"), 0.5, 1, 9, got=float("nan"), want=1.0, index=(2,)
    )
    runs = (Run(0, "passed", margins=(margin,)), Run(1, "failed", message="nan", before=("a", "b"), margins=(margin,)))
    tail = Tail(0.01, 0.001, 0.02, 0.95, 30, True, shows=299)
    return FlakeReport(
        (
            Flake("t.py::a[x]", "flaky", Rate(1, 30, 0.001, 0.17, 0.95), "seeds", ("seed",), tail, (Reason("kink", "why"),), (89, 16, None), ("do it",), runs=runs),
            Flake("t.py::b", "undecided", Rate(0, 0, 0, 1, 0.95), notes=("skipped",)),
            Flake("t.py::c", "steady", Rate(0, 30, 0, 0.12, 0.95), tail=tail, settings=(("", Rate(0, 30, 0, 0.12, 0.95)), ("threads=2", Rate(0, 30, 0, 0.12, 0.95)))),
        ),
        environment={"python": "3"},
    )  # fmt: skip


def test_all_that_a_report_may_hold_survives_json(monkeypatch: pytest.MonkeyPatch) -> None:
    report = made_up()
    text = report.to_json()
    assert FlakeReport.from_json(text).to_json() == text
    assert FlakeReport.from_json(text).flakes[0].runs[1].message == "nan"
    monkeypatch.setattr(examination, "run", lambda *args, **options: report)
    shown = flake("x.py:f", "--no-history").stdout
    for said in (
        "3.3 % [0.1 % to 17 %, 95%]",
        "89 runs fail at least once with 95 % (16 to more by the interval)",
        "kink: why",
        "CANNOT DECIDE",
        "in 1 % [0.1 % to 2 %, 95%] of all runs",
        "299 runs would fail at least once with 95 %, by the margins",
        "threads=2  0 of 30 seeds fail",
    ):
        assert said in shown
    assert report.exit_code == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "schema None"),
        ('{"schema": "retrograd.flake/1"}', "damaged"),
        ('{"schema": "retrograd.flake/2"}', "'retrograd.flake/2'"),
    ],
)
def test_other_files_are_refused(text: str, said: str) -> None:
    from retrograd.errors import UsageError

    with pytest.raises(UsageError, match="(?s).*" + said):
        FlakeReport.from_json(text)
