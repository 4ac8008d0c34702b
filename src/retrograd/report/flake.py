"""A flake report for a terminal, and the words that it shares with the page."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from retrograd.flake.schema import KINDS, Flake, FlakeReport, Rate, Tail
from retrograd.report import wording

VERDICTS = {"steady": "NO FLAKE SEEN", "flaky": "FLAKY", "broken": "FAILS EVERY TIME", "undecided": "CANNOT DECIDE"}
# Of a failure's message: comparisons print whole arrays after the line that counts.
_LINES = 8
_STYLES = {"steady": "bold green", "flaky": "bold red", "broken": "bold red", "undecided": "bold yellow"}


def percent(value: float) -> str:
    """A probability for reading: 9.1 %, 0.031 %, 0 %."""
    shown = f"{100 * value:.2g}"
    return f"{100 * value:.0f} %" if value >= 0.1 else f"{shown if 'e' not in shown else f'{100 * value:.1e}'} %"


def rate_text(rate: Rate, counting: str = "seeds") -> str:
    """Count, share and interval; of processes only the first run counts."""
    if not rate.runs:
        return "no runs"
    said = f"{rate.failures} of {rate.runs} {counting} fail"
    if not rate.failures:
        # The one-sided bound is the well-known 3 / n; the two-sided interval would be wider for nothing.
        return f"{said}: the probability is below {percent(1 - (1 - rate.level) ** (1 / rate.runs))} ({rate.level:.0%})"
    return f"{said}: {percent(rate.share)} [{percent(rate.low)} to {percent(rate.high)}, {rate.level:.0%}]"


def tail_text(tail: Tail) -> str:
    """What the margins say about rarer failures."""
    if not tail.supported:
        return f"cannot be extrapolated: {tail.reason}"
    if tail.shows is None:
        said = f"less than {percent(tail.high)}"
    else:
        low = percent(tail.low) if tail.low else "less"
        said = f"{percent(tail.probability)} [{low} to {percent(tail.high)}, {tail.level:.0%}]"
    grown = f"errors that spread as in these {tail.runs} runs exceed the tolerance in"
    return f"{grown} {said} of all runs; jumps, as at kinks, not counted"


def shows_text(flake: Flake) -> str:
    """How many runs are needed to see it."""
    n, few, many = flake.shows
    if n is not None:
        most = f"{many}" if many is not None else "more"
        noun = "process" if flake.counting == "processes" else "run"
        said = f"1 {noun} fails" if n == 1 else f"{n} {noun}{'es' if noun == 'process' else 's'} fail at least once"
        return f"{said} with 95 % ({few} to {most} by the interval)"
    tail = flake.tail
    if tail is None or tail.shows is None:
        return ""
    return f"{tail.shows} runs would fail at least once with 95 %, by the margins"


def rows(flake: Flake) -> list[tuple[str, str]]:
    """Label and text of everything that is said about one test, empty ones left out."""
    found = [("rate", rate_text(flake.rate, flake.counting))]
    if flake.tail is not None and flake.verdict != "broken":
        found.append(("margins", tail_text(flake.tail)))
    found += [("kind", KINDS[kind]) for kind in flake.kinds]
    found += [("reason", f"{reason.kind}: {reason.text}") for reason in flake.reasons]
    if flake.verdict != "broken":
        found.append(("smallest n", shows_text(flake)))
    if len(flake.settings) > 1:
        found += [(name or "as it is", rate_text(rate, flake.counting)) for name, rate in flake.settings]
    if flake.failing_seeds:
        more = f" and {len(flake.failing_seeds) - 12} more" if len(flake.failing_seeds) > 12 else ""
        found.append(("seeds", f"{', '.join(map(str, flake.failing_seeds[:12]))}{more}"))
    lines = flake.message.splitlines()
    cut = [*lines[:_LINES], "..."] if len(lines) > _LINES else lines
    found.append(("failure", "\n".join(line for line in cut if line.strip())))
    found += [("repro", line) for line in flake.repro]
    found += [("note", note) for note in flake.notes]
    return [(label, text) for label, text in found if text]


def render(report: FlakeReport, console: Console) -> None:
    """Print the report; nothing that a person may want to copy is cut."""
    for flake in report.flakes:
        _line(console, f"retrograd flake {flake.target}", "bold")
        _line(console, f"{VERDICTS[flake.verdict]} in {len(flake.runs)} runs", _STYLES[flake.verdict])
        last = ""
        for label, text in rows(flake):
            for at, part in enumerate(text.splitlines()):
                _line(console, f"  {label if at == 0 and label != last else '':<10} {part}".rstrip())
            last = label
        _line(console)
    _line(
        console,
        f"{len(report.flakes)} test{'s' if len(report.flakes) != 1 else ''} in {wording.duration(report.seconds)}",
    )


def to_text(report: FlakeReport, width: int = 120) -> str:
    """The report as plain text without colour."""
    out = StringIO()
    render(report, Console(file=out, width=width, color_system=None, force_terminal=False))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def render_history(periods: Sequence[Any], console: Console) -> None:
    """Print rates by day and commit, a table a test."""
    for target, setting in dict.fromkeys((p.target, p.setting) for p in periods):
        _line(console, f"{target} {setting}".rstrip(), "bold")
        table = Table.grid(padding=(0, 2, 0, 0))
        for _ in range(2):
            table.add_column(no_wrap=True)
        for _ in range(2):
            table.add_column(no_wrap=True, justify="right")
        table.add_column(overflow="fold")
        table.add_row("  day", "commit", "seeds", "failures", "rate, 95 %")
        for p in periods:
            if (p.target, p.setting) == (target, setting):
                r = p.rate
                cells = [
                    p.day or "all days",
                    p.revision or ("no commit" if p.day else ""),
                    str(r.runs),
                    str(r.failures),
                ]
                share = f"{percent(r.share)} [{percent(r.low)} to {percent(r.high)}]"
                table.add_row(*(Text(cell) for cell in (f"  {cells[0]}", *cells[1:], share)))
        console.print(table)
        _line(console)
    if not periods:
        _line(console, "the history has no such test")


def _line(console: Console, text: str = "", style: str = "") -> None:
    # A Text object, because names such as `x[bold]` would be read as markup in a plain string.
    console.print(Text(text, style=style), soft_wrap=True)
