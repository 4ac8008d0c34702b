"""Summaries of operators, tensors and runs of a comparison, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrograd.trace.diffing.schema import OpSummary, RunSide, Tensor
from retrograd.trace.diffing.verdicts import PairVerdict
from retrograd.trace.schema import Op, Stats, Trace

_MOST_TENSORS = 8  # of one operator: an optimizer's may have thousands


def _tensor_text(t: Stats) -> str:
    """ "float32 [8, 16] cpu, rms 0.98, -3.1 to 2.9, 2 NaN"."""
    parts = [f"{t.dtype} {list(t.shape)} {t.device}"]
    if t.rms is not None:
        parts.append(f"rms {t.rms:.7g}")
    if t.low is not None and t.high is not None:
        parts.append(f"{t.low:.7g} to {t.high:.7g}")
    parts += [f"{n} {name}" for n, name in ((t.nan, "NaN"), (t.inf, "Inf")) if n]
    return ", ".join(parts)


def op_summary(op: Op, inputs: Sequence[bool] = (), outputs: Sequence[bool] = ()) -> OpSummary:
    """An operator with its first tensors; `inputs` and `outputs` say which of them differ."""
    return OpSummary(
        op.index,
        op.step,
        op.phase,
        op.name,
        op.module,
        op.place,
        op.code,
        op.arguments,
        _tensors(op.inputs, inputs),
        _tensors(op.outputs, outputs),
        op.inside,
    )


def _tensors(tensors: Sequence[Stats], differ: Sequence[bool]) -> tuple[Tensor, ...]:
    marks = [*differ, *[False] * (len(tensors) - len(differ))]
    # Tensors that differ take precedence where not all fit.
    chosen = sorted(range(len(tensors)), key=lambda k: not marks[k])[:_MOST_TENSORS]
    return tuple(Tensor(_tensor_text(tensors[k]), marks[k], k) for k in sorted(chosen))


def summaries(verdict: PairVerdict) -> dict[str, Any]:
    """Both operators of a pair by the names of the runs, None where there is none."""
    a, b = verdict.pair.a, verdict.pair.b
    return {
        "a": op_summary(a, verdict.inputs, verdict.outputs) if a else None,
        "b": op_summary(b, verdict.inputs, verdict.outputs) if b else None,
    }


def side(trace: Trace, title: str) -> RunSide:
    """Title and size of a run."""
    devices = sorted({t.device for op in trace.ops for t in op.outputs})
    return RunSide(
        title,
        len(trace.ops),
        len({op.step for op in trace.ops}),
        trace.level,
        trace.rank,
        tuple(devices),
        tuple(sorted(trace.meta.items())),
    )
