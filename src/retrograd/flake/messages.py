"""Messages about tests that fail sometimes: as a document, how to see a failure again, and notes."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from retrograd.core import document as doc
from retrograd.core.wording import count, duration, some
from retrograd.flake import classify
from retrograd.flake.history import Period
from retrograd.flake.plan import FlakeOptions, FlakeTarget
from retrograd.flake.schema import KINDS, Flake, FlakeReport, Kind, Rate, Reason, Run, Tail

VERDICTS = {"steady": "NO FLAKE SEEN", "flaky": "FLAKY", "broken": "FAILS EVERY TIME", "undecided": "CANNOT DECIDE"}
_TONES: dict[str, doc.Tone] = {"steady": "proved", "flaky": "finding", "broken": "finding", "undecided": "undecided"}
# Of a failure's message: comparisons print whole arrays after the line that counts.
_LINES = 8
# Margins are drawn between 1e-6 and 1e3 of the tolerance, as decades; what is beyond stands at the ends.
_LEAST, _GREATEST = -6.0, 3.0


def document(report: FlakeReport | Flake, everything: bool = True) -> doc.Document:
    """The report, or what is known of one test."""
    flakes = report.flakes if isinstance(report, FlakeReport) else (report,)
    started = report.started if isinstance(report, FlakeReport) else ""
    brief = [part for flake in flakes for part in (_header(flake), doc.Card(facts=tuple(facts(flake))))]
    page: list[doc.PagePart] = []
    for flake in flakes:
        cards = [doc.Card(facts=tuple(facts(flake)))]
        if spec := margins_chart([(run.outcome, m.worst) for run in flake.runs for m in run.margins]):
            chart = doc.Chart("How near to the tolerance", "Comparisons by error over tolerance and outcome", spec)
            cards.append(doc.Card(parts=(chart,)))
        page += [_header(flake, started), doc.Section("", tuple(cards))]
    if isinstance(report, FlakeReport):
        page.append(doc.environment(report.command, {"time": duration(report.seconds), **report.environment}))
    lines = [line for flake in flakes for line in _text(flake)]
    if isinstance(report, FlakeReport):
        lines.append(doc.TextLine(f"{count(len(flakes), 'test')} in {duration(report.seconds)}"))
    title = f"retrograd flake: {', '.join(flake.target for flake in flakes)}"
    return doc.Document(title, tuple(lines), tuple(page), tuple(brief))


def _header(flake: Flake, started: str = "") -> doc.Header:
    facts = (f"{len(flake.runs)} runs", *filter(None, [started]))
    return doc.Header(_TONES[flake.verdict], flake.target, (" \u00b7 ".join(facts),), VERDICTS[flake.verdict])


def _text(flake: Flake) -> Iterator[doc.TextLine]:
    yield doc.TextLine(f"retrograd flake {flake.target}", "bold")
    yield doc.TextLine(f"{VERDICTS[flake.verdict]} in {len(flake.runs)} runs", doc.STYLES[_TONES[flake.verdict]])
    yield from doc.labelled(facts(flake), width=11)
    yield doc.TextLine()


def facts(flake: Flake) -> list[doc.Fact]:
    pairs = [("rate", rate_text(flake.rate, flake.counting))]
    if flake.tail is not None and flake.verdict != "broken":
        pairs.append(("margins", tail_text(flake.tail)))
    pairs += [("kind", KINDS[kind]) for kind in flake.kinds]
    pairs += [("reason", f"{reason.kind}: {reason.text}") for reason in flake.reasons]
    if flake.verdict != "broken":
        pairs.append(("smallest n", shows_text(flake)))
    if len(flake.settings) > 1:
        pairs += [(name or "as it is", rate_text(rate, flake.counting)) for name, rate in flake.settings]
    pairs.append(("seeds", some([str(seed) for seed in flake.failing_seeds], 12)))
    lines = flake.message.splitlines()
    cut = [*lines[:_LINES], "..."] if len(lines) > _LINES else lines
    pairs.append(("failure", "\n".join(line for line in cut if line.strip())))
    pairs += [("repro", line) for line in flake.repro]
    pairs += [("note", note) for note in flake.notes]
    return [doc.Fact(label, text, "pre" if label in ("repro", "failure") else "") for label, text in pairs if text]


def history(periods: Sequence[Period]) -> Iterator[doc.TextLine | doc.Table]:
    """Rates by day and commit, a table a test."""
    for target, setting in dict.fromkeys((p.target, p.setting) for p in periods):
        yield doc.TextLine(f"{target} {setting}".rstrip(), "bold")
        rows = tuple(_period(p) for p in periods if (p.target, p.setting) == (target, setting))
        yield doc.Table(("  day", "commit", "seeds", "failures", "rate, 95 %"), rows, numbers=(2, 3), fold=(4,))
        yield doc.TextLine()
    if not periods:
        yield doc.TextLine("the history has no such test")


def _period(period: Period) -> tuple[str, ...]:
    rate = period.rate
    revision = period.revision or ("no commit" if period.day else "")
    share = f"{percent(rate.share)} [{percent(rate.low)} to {percent(rate.high)}]"
    return f"  {period.day or 'all days'}", revision, str(rate.runs), str(rate.failures), share


def percent(value: float) -> str:
    """A probability for reading: 9.1 %, 0.031 %, 0 %."""
    shown = f"{100 * value:.2g}"
    return f"{100 * value:.0f} %" if value >= 0.1 else f"{shown if 'e' not in shown else f'{100 * value:.1e}'} %"


def rate_text(rate: Rate, counting: str = "seeds") -> str:
    """Count, share and interval; of processes only the first run counts."""
    if not rate.runs:
        return "no runs"
    text = f"{rate.failures} of {rate.runs} {counting} fail"
    if not rate.failures:
        # The one-sided bound is the well-known 3 / n; the two-sided interval would be wider for nothing.
        return f"{text}: the probability is below {percent(1 - (1 - rate.level) ** (1 / rate.runs))} ({rate.level:.0%})"
    return f"{text}: {percent(rate.share)} [{percent(rate.low)} to {percent(rate.high)}, {rate.level:.0%}]"


def tail_text(tail: Tail) -> str:
    """What the margins say about rarer failures."""
    if not tail.supported:
        return f"cannot be extrapolated: {tail.reason}"
    if tail.shows is None:
        text = f"less than {percent(tail.high)}"
    else:
        low = percent(tail.low) if tail.low else "less"
        text = f"{percent(tail.probability)} [{low} to {percent(tail.high)}, {tail.level:.0%}]"
    grown = f"errors that spread as in these {tail.runs} runs exceed the tolerance in"
    return f"{grown} {text} of all runs; jumps, as at kinks, not counted"


def shows_text(flake: Flake) -> str:
    """How many runs are needed to see it."""
    n, few, many = flake.shows
    if n is not None:
        singular, plural = ("process", "processes") if flake.counting == "processes" else ("run", "runs")
        text = f"1 {singular} fails" if n == 1 else f"{n} {plural} fail at least once"
        return f"{text} with 95 % ({few} to {'more' if many is None else many} by the interval)"
    shows = flake.tail and flake.tail.shows
    return f"{shows} runs would fail at least once with 95 %, by the margins" if shows is not None else ""


def margins_chart(margins: Sequence[tuple[str, float]]) -> dict[str, Any] | None:
    """How many comparisons were how near to their tolerance, by outcome of the run; None if none has a margin."""
    if not any(margin > 0 for _, margin in margins):
        return None
    tenths = Counter(
        (math.floor(10 * min(max(math.log10(m), _LEAST), _GREATEST)) if m > 0 else round(10 * _LEAST), outcome)
        for outcome, m in margins
    )
    values = [
        {"from": k / 10, "to": (k + 1) / 10, "run": "passed" if outcome == "passed" else "failed", "comparisons": n}
        for (k, outcome), n in sorted(tenths.items())
    ]
    x = {
        "field": "from",
        "type": "quantitative",
        "bin": "binned",
        "title": "log10 of error / tolerance: right of 0 it fails",
    }
    colour = {
        "field": "run",
        "type": "nominal",
        "scale": {"domain": ["passed", "failed"], "range": ["#6a9fcb", "#b3202c"]},
        "legend": {"title": "run"},
    }
    bars = {
        "mark": "bar",
        "encoding": {
            "x": x,
            "x2": {"field": "to"},
            "y": {
                "aggregate": "sum",
                "field": "comparisons",
                "title": "comparisons",
                "axis": {"tickMinStep": 1, "format": "d"},
            },
            "color": colour,
        },
    }
    limit = {"mark": {"type": "rule", "color": "currentColor"}, "encoding": {"x": {"datum": 0}}}
    return {"width": 480, "height": 180, "data": {"values": values}, "layer": [bars, limit]}


def repro(
    target: FlakeTarget, failed: Sequence[Run], kinds: Sequence[Kind], reasons: Sequence[Reason]
) -> tuple[str, ...]:
    """Commands that show the failure again: by this tool, and by pytest with the same seed."""
    ordered = [run for run in failed if run.stage == "order" and run.before]
    shown = min(ordered, key=lambda run: len(run.before)) if ordered and "order" in kinds else failed[0]
    words = shlex.split(shown.setting)
    threads = next((word.removeprefix("threads=") for word in words if word.startswith("threads=")), "")
    variables = [shlex.quote(word) for word in words if not word.startswith("threads=")]
    if any(reason.kind == "hash" for reason in reasons):
        variables.append(f"PYTHONHASHSEED={shown.hash_seed}")
    name = shlex.quote(_beside(target, target.item) if target.item else target.argument)
    plan = ["--threads", threads] if threads else []
    if "order" in kinds and not shown.before:
        # It is the runs before it that matter: the same seeds up to this one.
        plan += [f"--seed {max(shown.seed - shown.place, 0)} --seeds {shown.place + 1} --repeats 1"]
    else:
        plan += [f"--seed {shown.seed} --seeds 1"] + (["--repeats 20"] if "run" in kinds else [])
    if shown.fill == "nan":
        plan = [f"--seed {shown.seed} --seeds 1"]
    again = " ".join([*_set(variables), "retrograd flake", name, *plan, "--no-history"])
    if not target.is_test or ("order" in kinds and not shown.before):
        return (again,)
    variables += [f"OMP_NUM_THREADS={threads}"] if threads else []
    before = [shlex.quote(_beside(target, other)) for other in shown.before]
    test = " ".join([*_set(variables), "python -m pytest", *before, name, f"--retrograd-flake-seed {shown.seed}"])
    return (test,) if before else (again, test)


def _set(variables: Sequence[str]) -> list[str]:
    """By env, since a quoted word such as 'A=b c' is no assignment to a shell."""
    return ["env", *variables] if variables else []


def _beside(target: FlakeTarget, item: str) -> str:
    """A test of the target's file as it is named from here; its node id is relative to pytest's root."""
    file = target.argument.partition("::")[0]
    return f"{file}::{item.partition('::')[2]}" if file.endswith(".py") else item


def notes(runs: Sequence[Run], settings: FlakeOptions, target: FlakeTarget | None) -> list[str]:
    """What a reader should know beside the rate."""
    main = classify.main_runs(runs)
    sentences: list[str] = []
    if classify.self_seeded(main):
        seeds = len(classify.by_seed(main))
        sentences.append(
            f"what is compared is the same to the bit for {seeds} seeds: the test seeds itself or draws nothing after "
            "its import, so other data were not tried"
        )
    elif target and not any(run.margins for run in main):
        sentences.append(
            "the test compares nothing that can be measured (torch, numpy, retrograd), so no margins are known"
        )
    everything = classify.counted(run for run in runs if run.stage == "seeds")
    if not any(run.failed for run in everything) and classify.mixed(everything, "bits"):
        sentences.append("what is compared differs to the bit between runs of one seed, and all of them passed")
    skipped = sum(run.outcome == "skipped" for run in runs)
    if skipped:
        sentences.append(f"{skipped} runs were skipped and do not count")
    if target is None:
        return sentences
    untried: list[str] = [] if settings.threads else ["threads (--threads 1,2)"]
    untried += [] if settings.env else ["variables (--env NAME=a,b)"]
    untried += [] if settings.orders or not target.is_test else ["other tests first (--order 3)"]
    if untried:
        sentences.append(f"not tried: {', '.join(untried)}")
    return sentences
