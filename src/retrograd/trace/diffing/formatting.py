"""Operators and tensors as text for people."""

from __future__ import annotations

from collections.abc import Sequence

from retrograd.trace.diffing.schema import Row, Seen, Side, Tensor
from retrograd.trace.diffing.verdicts import Judged
from retrograd.trace.schema import Op, Stats, Trace

_MOST_TENSORS = 8  # of one operator: an optimizer's may have thousands


def tensor(t: Stats) -> str:
    """ "float32 [8, 16] cpu, rms 0.98, -3.1 to 2.9, 2 NaN"."""
    said = [f"{t.dtype} {list(t.shape)} {t.device}"]
    if t.rms is not None:
        said.append(f"rms {t.rms:.7g}")
    if t.low is not None and t.high is not None:
        said.append(f"{t.low:.7g} to {t.high:.7g}")
    said += [f"{n} {name}" for n, name in ((t.nan, "NaN"), (t.inf, "Inf")) if n]
    return ", ".join(said)


def seen(op: Op, inputs: Sequence[bool] = (), outputs: Sequence[bool] = ()) -> Seen:
    """An operator with its first tensors; `inputs` and `outputs` say which of them differ."""
    return Seen(
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


def _tensors(all_of_them: Sequence[Stats], differ: Sequence[bool]) -> tuple[Tensor, ...]:
    marks = [*differ, *[False] * (len(all_of_them) - len(differ))]
    # What differs is shown before what does not fit.
    chosen = sorted(range(len(all_of_them)), key=lambda k: not marks[k])[:_MOST_TENSORS]
    return tuple(Tensor(tensor(all_of_them[k]), marks[k], k) for k in sorted(chosen))


def row(found: Judged) -> Row:
    """A pair as a row of the neighbourhood."""
    a, b = found.pair.a, found.pair.b
    return Row(
        found.status,
        seen(a, found.inputs, found.outputs) if a else None,
        seen(b, found.inputs, found.outputs) if b else None,
    )


def side(trace: Trace, title: str) -> Side:
    """What a run is called, and how large it is."""
    devices = sorted({t.device for op in trace.ops for t in op.outputs})
    return Side(
        title,
        len(trace.ops),
        len({op.step for op in trace.ops}),
        trace.level,
        trace.rank,
        tuple(devices),
        tuple(sorted(trace.meta.items())),
    )
