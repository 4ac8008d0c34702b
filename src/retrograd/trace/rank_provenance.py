"""Provenance of a NaN over the ranks of a job: on which it was made, how it came to the others. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from retrograd.errors import UsageError
from retrograd.trace.nan_history import MADE, RECEIVED, is_collective
from retrograd.trace.nan_provenance import Provenance, provenance
from retrograd.trace.schema import Trace


def rank_provenance(traces: Sequence[Trace], **options: Any) -> Provenance:
    """The first NaN or Inf of a job, from the traces of its ranks.

    Args:
        traces: one a rank.
        options: of `provenance`.

    Returns:
        That of the rank that made it; notes say how it came to the others.

    Raises:
        UsageError: two traces are of one rank.
    """
    by_rank = {trace.rank: trace for trace in traces}
    if len(by_rank) < len(traces):
        raise UsageError(f"{len(traces)} traces are of ranks {', '.join(map(str, by_rank))}, expected one of each rank")
    answers = {rank: provenance(trace, **options) for rank, trace in sorted(by_rank.items())}
    bad = {rank: answer for rank, answer in answers.items() if answer.op is not None}
    if not bad:
        return replace(next(iter(answers.values())), ranks=tuple(answers))
    own = {rank: answer for rank, answer in bad.items() if answer.origin != RECEIVED}
    rank = min(own or bad, key=lambda r: _when(by_rank[r], bad[r]))
    answer = bad[rank]
    size = max(int(trace.meta.get("ranks", "1")) for trace in traces)
    if not own and len(traces) >= size > 1:
        text = "no rank gave it a NaN or Inf: the sum over ranks is larger than the dtype can hold"
        answer = replace(answer, origin=MADE, reason=text)
    notes = [*answer.notes, *_spread(rank, bad)]
    if not own and len(traces) < size:
        notes.append(f"traces of {len(traces)} of {size} ranks were read; the rank that made it is not among them")
    return replace(answer, ranks=tuple(answers), notes=tuple(notes))


def _when(trace: Trace, answer: Provenance) -> tuple[int, int]:
    """The step, and how many collectives the rank had issued: what ranks have in common of time."""
    op = answer.op
    assert op is not None
    return op.step, sum(is_collective(other) for other in trace.ops[: op.index])


def _spread(origin: int, bad: dict[int, Provenance]) -> list[str]:
    notes: list[str] = []
    for rank, answer in bad.items():
        op = answer.op
        if rank == origin or op is None:
            continue
        if answer.origin == RECEIVED:
            module = f" in {op.belonging}" if op.belonging else ""
            notes.append(f"rank {rank} received it in step {op.step} by {op.name}{module}")
        else:
            notes.append(
                f"rank {rank} made one itself in step {op.step}, by {op.name}{f' ({op.place})' if op.place else ''}"
            )
    return notes
