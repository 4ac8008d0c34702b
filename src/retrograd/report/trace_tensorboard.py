"""Operators of a trace as scalars of TensorBoard over the steps of the run."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

from retrograd.report.events import Events, seconds
from retrograd.trace.listing import Listing
from retrograd.trace.reasons import base
from retrograd.trace.record import Op, Stats


def to_tensorboard(record: Listing, folder: str | os.PathLike[str]) -> None:
    """Append the first result of each operator to the events in `folder`, at the step it belongs to.

    Tags are `<phase>/<module>/<operator>/<what>`, the second call of an operator in a module `<operator>.1` and so on;
    scalars `rms`, `largest` (magnitude of the finite elements), `nan`, `inf`, `subnormal` and `zero` (shares of all
    elements). Results without statistics are left out.

    Raises:
        MissingExtraError: tensorboard is not installed.
        UsageError: the folder cannot be written.
    """
    events = Events(folder)
    from tensorboard.compat.proto.summary_pb2 import Summary

    start = seconds(record.meta.get("start", ""))
    by_step: dict[int, list[object]] = {}
    for step, tag, value in scalars(record.ops):
        by_step.setdefault(step, []).append(Summary.Value(tag=tag, simple_value=value))
    for step, values in sorted(by_step.items()):
        events.add(values, step, start + step)
    events.close()


def scalars(ops: tuple[Op, ...]) -> Iterator[tuple[int, str, float]]:
    """Step, tag and value of everything that is shown."""
    calls: Counter[tuple[int, str]] = Counter()
    for op in ops:
        name = f"{op.phase}/{f'{op.module}/' if op.module else ''}{base(op)}"
        number = calls[op.step, name]
        calls[op.step, name] += 1
        if op.outputs:
            for what, value in _numbers(op.outputs[0]):
                yield op.step, f"{name}{f'.{number}' if number else ''}/{what}", value


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
