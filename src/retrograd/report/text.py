"""The report for a terminal: one line a stage, a block a finding, the verdict last."""

from __future__ import annotations

from io import StringIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from retrograd.check.schema import Finding, Report, StageResult
from retrograd.report import wording

# From this width on, the power of a stage has a column of its own.
_WIDE = 110

_STATUS_STYLE = {"passed": "green", "failed": "bold red", "skipped": "dim", "undecided": "yellow"}
_VERDICT_STYLE = {"proved": "bold green", "finding": "bold red", "undecided": "bold yellow"}


def render(report: Report, console: Console) -> None:
    """Print the report; nothing that a person may want to copy is wrapped or cut."""
    _header(report, console)
    if report.stages:
        console.print(_stages(report, console.width))
        _line(console)
    for place, finding in enumerate(report.findings, 1):
        _finding(finding, place, len(report.findings), console)
    _notes(report, console)
    _verdict(report, console)


def to_text(report: Report, width: int = 120) -> str:
    """The report as plain text without colour."""
    out = StringIO()
    render(report, Console(file=out, width=width, color_system=None, force_terminal=False))
    # rich pads table rows with blanks, which a file need not keep.
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _line(console: Console, text: str = "", style: str = "") -> None:
    # A Text object, because names such as `x[bold]` would be read as markup in a plain string.
    console.print(Text(text, style=style), soft_wrap=True)


def _header(report: Report, console: Console) -> None:
    _line(console, f"retrograd verify {report.target}", "bold")
    dtypes = ", ".join(report.dtypes)
    _line(console, f"device {report.device} | dtypes {dtypes} | level {report.level} | seed {report.seed}")
    _line(console)


def _stages(report: Report, width: int) -> Table:
    wide = width >= _WIDE
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for _ in ("cases", "runs", "seconds"):
        table.add_column(justify="right", no_wrap=True)
    if wide:
        table.add_column(overflow="fold")
    for stage in report.stages:
        style = _STATUS_STYLE.get(stage.status, "")
        cells = [Text(wording.MARKS.get(stage.status, stage.status), style=style), Text(stage.id, style=style)]
        aside = _aside(stage)
        cells.append(Text(stage.title if wide or not aside else f"{stage.title}\n  {aside}"))
        ran = stage.status != "skipped"
        cells.append(Text(_count(stage.cases, "case") if ran else ""))
        cells.append(Text(_count(stage.runs, "run") if ran else ""))
        cells.append(Text(wording.duration(stage.seconds) if ran else ""))
        table.add_row(*cells, *([Text(aside)] if wide else []))
    return table


def _aside(stage: StageResult) -> str:
    """Why a stage has no result, or what its result is worth."""
    return "; ".join(part for part in (stage.reason, wording.power(stage)) if part)


def _count(value: int, noun: str) -> str:
    # The blank after the singular keeps the column aligned.
    return f"{value} {noun}" + (" " if value == 1 else "s")


def _finding(finding: Finding, place: int, total: int, console: Console) -> None:
    _line(console, f"Finding {place} of {total} [{finding.stage}, {finding.kind}]", "bold red")
    rows = [
        ("what", finding.what),
        ("", wording.evidence(finding)),
        ("like", finding.looks_like),
        ("which", finding.elements),
        ("where", finding.where),
        ("case", wording.case(finding.case)),
        ("repro", finding.repro),
    ]
    for label, value in rows:
        for at, line in enumerate(value.splitlines()):
            _line(console, f"  {label if at == 0 else '':<6} {line}")
    _line(console)


def _notes(report: Report, console: Console) -> None:
    notes = [*report.notes, *(f"{s.id}: {note}" for s in report.stages for note in s.notes)]
    for note in notes:
        _line(console, f"note: {note}")
    if notes:
        _line(console)


def _verdict(report: Report, console: Console) -> None:
    done = sum(s.status in ("passed", "failed") for s in report.stages)
    found = len(report.findings)
    parts = [f"{done} of {len(report.stages)} stages ran to their end"]
    if found:
        parts.insert(0, f"{found} finding{'s' if found > 1 else ''}")
    text = f"{wording.verdict(report.verdict)} in {wording.duration(report.seconds)} ({', '.join(parts)})"
    _line(console, text, _VERDICT_STYLE.get(report.verdict, "bold"))
