"""The report as JUnit XML, as CI systems show it: one test case a stage and dtype set, one failure a finding."""

from __future__ import annotations

import re
from xml.etree import ElementTree as Xml

from retrograd.check.schema import Finding, Report, StageResult
from retrograd.report import wording

# XML 1.0 has no way to write these, not even escaped.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_junit(report: Report) -> str:
    """JUnit XML; a stage that cannot decide is an error, one that did not run is skipped."""
    suite = Xml.Element("testsuite", _counts(report))
    for stage in report.stages:
        suite.append(_case(report, stage))
    root = Xml.Element("testsuites")
    root.append(suite)
    Xml.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + Xml.tostring(root, encoding="unicode") + "\n"


def _counts(report: Report) -> dict[str, str]:
    states = [stage.status for stage in report.stages]
    return {
        "name": _plain(f"retrograd verify {report.target}"),
        "tests": str(len(states)),
        "failures": str(states.count("failed")),
        "errors": str(states.count("undecided")),
        "skipped": str(states.count("skipped")),
        "time": f"{report.seconds:.3f}",
        "timestamp": report.started,
    }


def _case(report: Report, stage: StageResult) -> Xml.Element:
    given = {"classname": _plain(f"retrograd.{report.target}"), "name": stage.id, "time": f"{stage.seconds:.3f}"}
    case = Xml.Element("testcase", given)
    for finding in stage.findings:
        failure = Xml.SubElement(case, "failure", {"type": finding.kind, "message": _plain(finding.what)})
        failure.text = _plain(_details(finding))
    if stage.status == "skipped":
        Xml.SubElement(case, "skipped", {"message": _plain(stage.reason)})
    if stage.status == "undecided":
        Xml.SubElement(case, "error", {"type": "undecided", "message": _plain(stage.reason)})
    if stage.notes:
        Xml.SubElement(case, "system-out").text = _plain("\n".join(stage.notes))
    return case


def _details(finding: Finding) -> str:
    lines = [wording.evidence(finding)]
    labelled = (
        ("looks like", finding.looks_like),
        ("which", finding.elements),
        ("where", finding.where),
        ("case", wording.case(finding.case)),
        ("repro", finding.repro),
    )
    return "\n".join([*filter(None, lines), *(f"{label}: {text}" for label, text in labelled if text)])


def _plain(text: str) -> str:
    return _FORBIDDEN.sub("?", text)
