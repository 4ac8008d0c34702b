"""Events of TensorBoard: scalars and histograms that steps of a run, or runs of days and commits, add up to curves."""

# Classes that protobuf makes at run time.
# pyright: basic, reportAttributeAccessIssue=false

from __future__ import annotations

import datetime
import os
from itertools import groupby
from pathlib import Path
from typing import Any

from retrograd.core.document import Events, Histogram, Scalar
from retrograd.core.system_errors import as_usage_error
from retrograd.errors import MissingExtraError


def write_events(events: Events, folder: str | os.PathLike[str]) -> None:
    """Append to the events in a folder.

    Raises:
        MissingExtraError: tensorboard is not installed.
        UsageError: the folder cannot be written.
    """
    writer = _writer(folder)
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    start = _seconds(events.started)
    for step, values in groupby(sorted(events.values, key=lambda value: value.step), lambda value: value.step):
        summary = Summary(value=[_summary(value) for value in values])
        writer.add_event(Event(wall_time=start + step * events.seconds, step=step, summary=summary))
    writer.close()


def _writer(folder: str | os.PathLike[str]) -> Any:
    try:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("tensorboard"):
            raise
        raise MissingExtraError("tensorboard", "tensorboard", "writing events of TensorBoard") from None
    with as_usage_error(f"cannot write events to {os.fspath(folder)!r}"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        return EventFileWriter(os.fspath(folder))


def _summary(value: Scalar | Histogram) -> Any:
    from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

    if isinstance(value, Scalar):
        return Summary.Value(tag=value.tag, simple_value=value.value)
    histogram = HistogramProto(
        min=value.low,
        max=value.high,
        num=sum(value.counts),
        sum=value.total,
        sum_squares=value.squares,
        bucket_limit=[min(limit, 1e308) for limit in value.limits],
        bucket=list(map(float, value.counts)),
    )
    return Summary.Value(tag=value.tag, histo=histogram)


def _seconds(started: str) -> float:
    """A date in ISO form as seconds since 1970; 0 for that of a record that was made by hand."""
    try:
        return datetime.datetime.fromisoformat(started).timestamp()
    except ValueError:
        return 0.0
