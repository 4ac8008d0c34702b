"""Operators of a trace as scalars and histograms of TensorBoard over the steps of the run."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

from retrograd.report.events import Events, seconds
from retrograd.trace.diffing.identity import base_name
from retrograd.trace.filters import Listing
from retrograd.trace.schema import Exponents, Op, Stats


def to_tensorboard(record: Listing, folder: str | os.PathLike[str]) -> None:
    """Append the first result of each operator to the events in `folder`, at the step it belongs to.

    Tags are `<phase>/<module>/<operator>/<what>`, the second call of an operator in a module `<operator>.1` and so on;
    scalars `rms`, `largest` (magnitude of the finite elements), `nan`, `inf`, `subnormal` and `zero` (shares of all
    elements). Histograms, where exponents were counted: `values`, in buckets from one power of two to the next, and
    `exponents`, of the magnitudes' powers of two. Results without statistics are left out.

    Raises:
        MissingExtraError: tensorboard is not installed.
        UsageError: the folder cannot be written.
    """
    events = Events(folder)
    from tensorboard.compat.proto.summary_pb2 import Summary

    start = seconds(record.meta.get("start", ""))
    by_step: dict[int, list[object]] = {}
    for step, tag, stats in results(record.ops):
        values = by_step.setdefault(step, [])
        values += [Summary.Value(tag=f"{tag}/{what}", simple_value=number) for what, number in _numbers(stats)]
        values += [Summary.Value(tag=f"{tag}/{what}", histo=histogram) for what, histogram in _histograms(stats)]
    for step, values in sorted(by_step.items()):
        events.add(values, step, start + step)
    events.close()


def results(ops: tuple[Op, ...]) -> Iterator[tuple[int, str, Stats]]:
    """Step, tag and first result of each operator that has one."""
    calls: Counter[tuple[int, str]] = Counter()
    for op in ops:
        name = f"{op.phase}/{f'{op.module}/' if op.module else ''}{base_name(op.name)}"
        number = calls[op.step, name]
        calls[op.step, name] += 1
        if op.outputs:
            yield op.step, f"{name}{f'.{number}' if number else ''}", op.outputs[0]


def _numbers(stats: Stats) -> Iterator[tuple[str, float]]:
    count = 1
    for size in stats.shape:
        count *= size
    if stats.rms is not None and stats.low is not None and stats.high is not None:
        yield "rms", stats.rms
        yield "largest", max(abs(stats.low), abs(stats.high))
    for what in ("nan", "inf", "subnormal", "zero"):
        number = getattr(stats, what)
        if number is not None and count:
            yield what, number / count


def _histograms(stats: Stats) -> Iterator[tuple[str, object]]:
    from tensorboard.compat.proto.summary_pb2 import HistogramProto

    found = stats.exponents
    if found is None or stats.low is None or stats.high is None or stats.rms is None:
        return
    limits, counts = buckets(found, stats.zero or 0)
    total = sum(counts)
    # Their sum is not known: a trace has no mean. No view of TensorBoard shows it.
    yield (
        "values",
        HistogramProto(
            min=stats.low,
            max=stats.high,
            num=total,
            sum_squares=stats.rms**2 * total,
            bucket_limit=limits,
            bucket=counts,
        ),
    )
    if found:
        both = [(k, a + b) for k, (a, b) in enumerate(zip(found.positive, found.negative, strict=True), found.least)]
        yield "exponents", HistogramProto(
            min=found.least, max=found.greatest + 1, num=sum(n for _, n in both), sum=sum(k * n for k, n in both),
            sum_squares=sum(k * k * n for k, n in both), bucket_limit=[k + 1 for k, _ in both],
            bucket=[n for _, n in both],
        )  # fmt: skip


def buckets(found: Exponents, zero: int) -> tuple[list[float], list[int]]:
    """Upper limits, ascending, and counts: negative numbers, zeros, positive numbers."""
    below = _filled(found.negative, found.least)
    above = _filled(found.positive, found.least)
    rows = [(-_edge(k), n) for k, n in reversed(below)]
    if zero or (below and above):
        rows.append((_edge(above[0][0]) if above else 0.0, zero))
    rows += [(_edge(k + 1), n) for k, n in above]
    return [limit for limit, _ in rows], [n for _, n in rows]


def _filled(counts: tuple[int, ...], least: int) -> list[tuple[int, int]]:
    """Exponents with counts, from the first that is not 0 to the last."""
    at = [k for k, n in enumerate(counts) if n]
    return [(least + k, counts[k]) for k in range(at[0], at[-1] + 1)] if at else []


def _edge(exponent: int) -> float:
    """Where a bucket begins; the least is open, and what is in it is no zero."""
    return 2.0**exponent if exponent > -127 else 5e-324
