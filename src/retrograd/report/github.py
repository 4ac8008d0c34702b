"""The report as workflow commands of GitHub Actions: an annotation for each finding and for what cannot be decided."""

from __future__ import annotations

from retrograd.check.schema import Report
from retrograd.report import wording


def to_github(report: Report) -> str:
    """One line an annotation, then a notice with the verdict; a finding is an error, no decision a warning."""
    lines: list[str] = []
    for finding in report.findings:
        parts = [finding.what, finding.looks_like and f"looks like: {finding.looks_like}", finding.where, finding.repro]
        lines.append(command("error", f"{report.target}: {finding.stage}", "\n".join(filter(None, parts))))
    for stage in report.stages:
        if stage.status == "undecided":
            lines.append(command("warning", f"{report.target}: {stage.id}", stage.reason))
    done = sum(stage.status in ("passed", "failed") for stage in report.stages)
    said = f"{wording.verdict(report.verdict)}: {done} of {len(report.stages)} stages ran to their end"
    lines.append(command("notice", f"retrograd verify {report.target}", said))
    return "\n".join(lines) + "\n"


def command(kind: str, title: str, text: str, **properties: str) -> str:
    """One workflow command; `properties` are file and line."""
    said = ",".join(
        f"{name}={_escaped(value, property=True)}" for name, value in ({**properties, "title": title}).items()
    )
    return f"::{kind} {said}::{_escaped(text)}"


def _escaped(text: str, *, property: bool = False) -> str:
    for char, code in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A"), *(((":", "%3A"), (",", "%2C")) if property else ())):
        text = text.replace(char, code)
    return text
