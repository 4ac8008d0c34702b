"""What CI systems read: JUnit XML and the workflow commands of GitHub."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from xml.etree import ElementTree as Xml

import fake_report as fake
import pytest
from click.testing import CliRunner

from retrograd.cli import main
from retrograd.errors import UsageError
from retrograd.flake.schema import FlakeReport
from retrograd.report import check_paths, document, to_github, together, write
from retrograd.report.junit import to_junit


def test_junit_has_a_case_a_stage(tmp_path: Path) -> None:
    report = fake.report()
    write(report, tmp_path / "r.xml")
    suite = Xml.parse(tmp_path / "r.xml").getroot()[0]
    assert [case.get("name") for case in suite] == [stage.id for stage in report.stages]
    assert {key: suite.get(key) for key in ("tests", "failures", "errors", "skipped")} == dict(
        tests="4", failures="1", errors="1", skipped="1"
    )
    failure = suite.find("testcase/failure")
    assert failure is not None
    assert failure.get("message") == fake.WHAT
    assert fake.REPRO in (failure.text or "")


def test_junit_of_a_proof_has_no_failure() -> None:
    suite = Xml.fromstring(to_junit(document(fake.report("proved")).suite).partition("\n")[2])
    assert suite.find(".//failure") is None


def test_junit_of_what_xml_cannot_hold() -> None:
    found = fake.finding()
    object.__setattr__(found, "what", "a\x00b\x1b[31m\ud800")
    report = fake.report()
    object.__setattr__(report.stages[1], "findings", (found,))
    failure = Xml.fromstring(to_junit(document(report).suite).partition("\n")[2].encode()).find(".//failure")
    assert failure is not None
    assert failure.get("message") == "a?b?[31m?"


def test_github_writes_one_line_an_annotation() -> None:
    lines = to_github(fake.report()).splitlines()
    assert [line.split("::")[1].split()[0] for line in lines] == ["error", "warning", "notice"]
    assert lines[0].startswith("::error title=my/file.py%3Arms_norm%3A oracle::")
    assert "%0A" in lines[0]
    assert lines[2].endswith("FINDING: 2 of 4 stages ran to their end")


def test_sarif_has_a_result_a_remark_and_rules_that_they_name() -> None:
    accepted = dataclasses.replace(fake.finding(), accepted="known")
    stage = dataclasses.replace(fake.report().stages[1], findings=(fake.finding(),), accepted=(accepted,))
    report = dataclasses.replace(fake.report(), stages=(stage, *fake.report().stages[2:]), place="my/a file.py:12")
    log = json.loads(together([report, fake.report("proved")], ".sarif"))
    assert (log["version"], len(log["runs"])) == ("2.1.0", 1)
    [run] = log["runs"]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert len(set(rules)) == len(rules)
    assert [(r["ruleId"], r["level"]) for r in run["results"]] == [
        ("oracle/value", "error"), ("oracle/value", "note"), ("nan/undecided", "warning"), ("nan/undecided", "warning"),
    ]  # fmt: skip
    for result in run["results"]:
        assert rules[result["ruleIndex"]] == result["ruleId"]
        assert result["message"]["text"]
        [where] = result["locations"]
        assert where["physicalLocation"]["region"]["startLine"] >= 1
    # Of a run either every result or none has suppressions; an empty list says that it has none.
    assert [len(result["suppressions"]) for result in run["results"]] == [0, 1, 0, 0]
    first, *_, last = (r["locations"][0]["physicalLocation"] for r in run["results"])
    assert first == {"artifactLocation": {"uri": "my/a%20file.py"}, "region": {"startLine": 12}}
    assert last == {"artifactLocation": {"uri": "my/file.py"}, "region": {"startLine": 1}}


@pytest.mark.parametrize(
    ("verdicts", "word"),
    [(["proved"], "proved"), (["proved", "undecided"], "cannot decide"), (["undecided", "finding"], "finding")],
)
def test_a_badge_has_the_worst_verdict(verdicts: list[str], word: str) -> None:
    badge = Xml.fromstring(together(list(map(fake.report, verdicts)), ".svg"))
    assert badge.get("aria-label") == f"retrograd: {word}"
    assert [text.text for text in badge.iter("{http://www.w3.org/2000/svg}text")] == ["retrograd", word]


def test_what_has_no_verdict_or_no_remarks_is_refused(tmp_path: Path) -> None:
    for name in ("r.sarif", "r.svg"):
        with pytest.raises(UsageError, match=r"only `verify`, `codegen`, `graph diff`"):
            check_paths(tmp_path / name, of=FlakeReport)


def test_a_report_of_a_flake_has_no_junit(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"only `verify` has JUnit XML"):
        check_paths(tmp_path / "r.xml", of=FlakeReport)


def test_help_names_sarif_where_it_is_written_alone():
    for command, named in (
        ("mutate", True),
        ("run-kernel", True),
        ("codegen", True),
        ("verify", True),
        ("flake", False),
    ):
        help_text = CliRunner().invoke(main, [command, "--help"]).output
        assert (".sarif" in help_text) is named, command
