"""Comparison of two traces: causes of divergence in words; what follows from them is counted."""

# What people pass is checked, whatever the hints say.
# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from retrograd.env import run_conditions
from retrograd.errors import UsageError
from retrograd.trace.debug_mode_log import is_log
from retrograd.trace.diffing.causes import CauseCollector, float_dtypes, notes
from retrograd.trace.diffing.compiled_runs import compare_values
from retrograd.trace.diffing.divergence_reasons import RunConditions
from retrograd.trace.diffing.logged_runs import compare_logs
from retrograd.trace.diffing.matching import match
from retrograd.trace.diffing.schema import TraceDiff
from retrograd.trace.diffing.shards import assemble
from retrograd.trace.diffing.summaries import side
from retrograd.trace.diffing.taken_gradients import alike
from retrograd.trace.diffing.verdicts import PairJudge
from retrograd.trace.schema import NOT_SEEN, Trace

MODES = ("bitwise", "attainable")

Source = Trace | str | os.PathLike[str]


def diff(a: Source, b: Source | Sequence[Source], level: str | None = None) -> TraceDiff:
    """Name the first operator at which two runs differ by themselves, and why; what follows from it is counted.

    Operators are aligned first, so runs may differ in them: patience and Myers' algorithm over name, module, phase,
    arguments and sizes, then over less and less of these. An operator is a cause if its inputs are the same on both
    sides and its outputs are not; or if only one side has it; or if an input differs that no recorded operator made.

    Args:
        a, b: each a `Trace`, or a file that a recorder wrote; or two logs of `DebugMode.save_logs`, torch 2.15
            (`diffing.logged_runs`). As `b` also those of several ranks, whose shards are put together by module
            (`diffing.shards`) and compared with `a`, the same program on one device.
        level: "bitwise": each bit counts. "attainable": what rounding explains does not (see `diffing.error_bounds`
            for the bound). None takes "bitwise" where both ran on the same kind of device in the same dtypes, otherwise
            "attainable".

    Returns:
        Causes in the order of the run, the neighbourhood of the first, counts. True if nothing differs.

    Raises:
        TraceError: a file is no trace, or damaged.
        UsageError: a file cannot be read, a trace is empty, or `level` is wrong or was not recorded.
    """
    if logs := _logs(a, b):
        if level is not None:
            raise UsageError(
                f"`level` is {level!r}, but logs of DebugMode hold a number a tensor at most: expected None"
            )
        return compare_logs(*logs)
    trace_a, title_a = _loaded(a, "A")
    if isinstance(b, Sequence) and not isinstance(b, str):
        return _compare_ranks(trace_a, [_loaded(source, "B") for source in b], level, title_a)
    trace_b, title_b = _loaded(b, "B")
    return compare(trace_a, trace_b, level, (title_a, title_b))


def _logs(a: Source, b: Source | Sequence[Source]) -> tuple[Path, Path] | None:
    """Both files, if they are logs of DebugMode; they can be compared with each other alone."""
    several = list(b) if isinstance(b, Sequence) and not isinstance(b, str) else [b]
    paths = [Path(source) for source in (a, *several) if isinstance(source, (str, os.PathLike))]
    logs = [path for path in paths if is_log(path)]
    if not logs:
        return None
    if len(logs) != 2 or len(several) != 1:
        others = "another" if len(several) == 1 else f"{len(several)} of `b`"
        raise UsageError(
            f"{logs[0].name!r} is a log of DebugMode: expected two of them, `a` and `b`, got {others} beside it"
        )
    return logs[0], logs[1]


def _compare_ranks(a: Trace, ranks: Sequence[tuple[Trace, str]], level: str | None, title: str) -> TraceDiff:
    if level == "bitwise":
        raise UsageError(
            "`level` is 'bitwise', but shards are known by their statistics: expected 'attainable' or None"
        )
    both = assemble(a, [trace for trace, _ in ranks])
    title_b = f"{len(ranks)} ranks, {ranks[0][1]} the first"
    # What compiled code hid has no counterpart, and a note tells: values of single shards are in no whole run.
    compiled = {trace.meta.get("compiled", "") for trace in (a, *(t for t, _ in ranks))} - {""}
    hidden = [f"compiled: {text}" for text in sorted(compiled)]
    whole, ranked = (
        replace(t, meta={k: t.meta[k] for k in t.meta if k != "compiled"}) for t in (both.reference, both.trace)
    )
    result = compare(whole, ranked, "attainable", (title, title_b))
    causes = tuple(both.told(cause) for cause in result.causes)
    return replace(result, causes=causes, notes=(*both.notes(), *hidden, *result.notes))


def _loaded(source: Source, letter: str) -> tuple[Trace, str]:
    if isinstance(source, Trace):
        return source, f"run {letter}"
    if not isinstance(source, (str, os.PathLike)):
        raise UsageError(f"`{letter.lower()}` is {type(source).__name__}, expected a Trace or a file with one")
    from retrograd.trace.store import load

    return load(source), Path(source).name


def compare(a: Trace, b: Trace, level: str | None = None, titles: tuple[str, str] = ("A", "B")) -> TraceDiff:
    """What `retrograd.trace.diff` returns; `titles` are what the runs are called."""
    began = time.perf_counter()
    mode = _mode(a, b, level)
    unseen = [letter for letter, trace in (("A", a), ("B", b)) if trace.meta.get("compiled", "").startswith(NOT_SEEN)]
    if len(unseen) == 1 and level != "bitwise" and mode != "names" and _step_count(a) == _step_count(b):
        return _compare_compiled(a, b, unseen[0], titles)
    judge = PairJudge(mode != "attainable", values=mode != "names")
    verdicts = [judge.judge(pair) for pair in match(*alike(a.ops, b.ops))]
    seeds = a.meta.get("seed", ""), b.meta.get("seed", "")
    conditions = RunConditions(_devices(a) == _devices(b), seeds, tuple(_settings(a, b)))
    collector = CauseCollector(conditions, judge.bitwise, unseen[0] if len(unseen) == 1 else "")
    for k, verdict in enumerate(verdicts):
        collector.add(k, verdict)
    counts = Counter(verdict.status for verdict in verdicts)
    return TraceDiff(
        side(a, titles[0]),
        side(b, titles[1]),
        mode,
        collector.in_order(),
        (*notes(a, b, mode, collector), *conditions.settings),
        counts["same"],
        counts["within"],
        counts["carried"] + collector.late,
        time.perf_counter() - began,
        collector.neighbourhood(verdicts),
    )


def _compare_compiled(a: Trace, b: Trace, letter: str, titles: tuple[str, str]) -> TraceDiff:
    began = time.perf_counter()
    by_values = compare_values(a, b, "B") if letter == "B" else compare_values(b, a, "A")
    settings = tuple(_settings(a, b))
    return TraceDiff(
        side(a, titles[0]),
        side(b, titles[1]),
        "attainable",
        by_values.causes,
        (*by_values.notes, *notes(a, b, "attainable", CauseCollector(RunConditions(False), False)), *settings),
        by_values.same,
        by_values.within,
        seconds=time.perf_counter() - began,
    )


def _step_count(trace: Trace) -> int:
    return len({op.step for op in trace.ops})


def _mode(a: Trace, b: Trace, level: str | None) -> Literal["bitwise", "attainable", "names"]:
    if level is not None and level not in MODES:
        raise UsageError(f"`level` is {level!r}, expected 'bitwise', 'attainable' or None for what fits the runs")
    for name, trace in (("a", a), ("b", b)):
        if not trace.ops:
            raise UsageError(f"`{name}` has no operators; was anything run while it was recorded?")
    if "names" in (a.level, b.level):
        if level is not None:
            raise UsageError(
                f"`level` is {level!r}, but a run was recorded at level 'names', without values; record at 'fast'"
            )
        return "names"
    if level is not None:
        return level  # type: ignore[return-value]
    return "bitwise" if _devices(a) == _devices(b) and _dtypes(a) == _dtypes(b) else "attainable"


def _devices(trace: Trace) -> set[str]:
    return {t.device.partition(":")[0] for op in trace.ops for t in op.outputs}


def _dtypes(trace: Trace) -> set[str]:
    return set[str]().union(*map(float_dtypes, trace.ops))


def _settings(a: Trace, b: Trace) -> Iterable[str]:
    """Flags, variables and versions that may change numbers and in which the runs differ."""
    for row in run_conditions.differences({0: a.conditions, 1: b.conditions}):
        # What differs between the ranks of one run as it should is another processor or number of threads here.
        if row.section in (run_conditions.VERSIONS, run_conditions.FLAGS) or not row.intended:
            yield row.text(lambda runs: f"in {' and '.join('AB'[run] for run in runs)}")
