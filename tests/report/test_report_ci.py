"""What CI systems read: JUnit XML and the workflow commands of GitHub."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as Xml

import fake_report as fake
import pytest

from retrograd.errors import UsageError
from retrograd.flake.schema import FlakeReport
from retrograd.report import check_paths, document, to_github, write
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


def test_a_report_of_a_flake_has_no_junit(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"only `verify` has JUnit XML"):
        check_paths(tmp_path / "r.xml", of=FlakeReport)
