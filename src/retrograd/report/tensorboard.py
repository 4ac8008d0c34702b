"""The report as events of TensorBoard: scalars and histograms that runs of days and commits add up to curves."""

from __future__ import annotations

import itertools
import os

from retrograd.check.schema import Profile, Report, StageResult
from retrograd.errors import UsageError
from retrograd.report.events import Events, seconds


def to_tensorboard(report: Report, folder: str | os.PathLike[str], step: int = 0) -> None:
    """Append the report to the events in `folder` as one step.

    Scalars `<target>/<stage>/seconds`, `/findings` and `/power` (relative error) of every stage that ran, and
    `<target>/<stage>/<tensor>/worst`, error over attainable error; histograms `.../ulp` of distances to the correctly
    rounded result.

    Raises:
        MissingExtraError: tensorboard is not installed.
        UsageError: the folder cannot be written, or `step` is negative.
    """
    if step < 0:
        raise UsageError(f"`step` is {step}, expected 0 or more")
    events = Events(folder)
    values = [value for stage in report.stages for value in _of_stage(report.target, stage)]
    events.add(values, step, seconds(report.started))
    events.close()


def _of_stage(target: str, stage: StageResult) -> list[object]:
    from tensorboard.compat.proto.summary_pb2 import Summary

    if stage.status == "skipped":
        return []
    tag = f"{target}/{stage.id}"
    numbers = {f"{tag}/seconds": stage.seconds, f"{tag}/findings": float(len(stage.findings))}
    if stage.power is not None:
        numbers[f"{tag}/power"] = stage.power
    values: list[object] = []
    for profile in stage.profiles:
        numbers[f"{tag}/{profile.tensor}/worst"] = profile.worst
        values.append(Summary.Value(tag=f"{tag}/{profile.tensor}/ulp", histo=_histogram(profile)))
    return [*(Summary.Value(tag=name, simple_value=number) for name, number in numbers.items()), *values]


def _histogram(profile: Profile) -> object:
    """Counts over ULP distances; a bin stands at its lower edge, the last one is open."""
    from tensorboard.compat.proto.summary_pb2 import HistogramProto

    edges, counts = profile.ulp_edges, profile.ulp_counts
    limits = [*(upper for _, upper in itertools.pairwise(edges)), float("inf")][: len(counts)]
    filled = [edge for edge, count in zip(edges, counts, strict=False) if count] or [0.0]
    total = sum(edge * count for edge, count in zip(edges, counts, strict=False))
    squares = sum(edge * edge * count for edge, count in zip(edges, counts, strict=False))
    return HistogramProto(
        min=filled[0], max=filled[-1], num=sum(counts), sum=total, sum_squares=squares,
        bucket_limit=[min(limit, 1e308) for limit in limits], bucket=list(map(float, counts)),
    )  # fmt: skip
