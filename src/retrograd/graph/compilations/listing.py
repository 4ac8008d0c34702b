"""Listing of what ranks compiled, and of the first place where each parts from the lowest one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path

from retrograd.core.wording import count, some
from retrograd.errors import UsageError
from retrograd.graph.compilations.rank_logs import LoggedCompilation, RankLog, rank_of
from retrograd.graph.compilations.schema import Compilations
from retrograd.graph.diffing.compare import compare
from retrograd.graph.ir import Graph
from retrograd.graph.schema import Cause

_ADVICE = (
    "ranks that compile different graphs wait for each other in collectives: give them batches of one shape, and no "
    "branch on the rank"
)
_MOST = 3  # causes of one graph


def compilations(paths: Sequence[str | PathLike[str]]) -> Compilations:
    """What logs of TORCH_TRACE, or folders with one a rank, tell of a run.

    Raises:
        GraphError: a file cannot be read or is no such log.
        UsageError: there is no log.
    """
    files = [log for path in map(Path, paths) for log in (sorted(path.glob("*.log*")) if path.is_dir() else [path])]
    if not files:
        raise UsageError(f"there is no log in {', '.join(map(str, paths))}; expected dedicated_log_torch_trace_*.log")
    logs = sorted((RankLog(path, rank_of(path, k)) for k, path in enumerate(files)), key=lambda log: log.rank)
    partings = [cause for log in logs[1:] for cause in _partings(logs[0], log)]
    causes = [cause for cause in partings if cause.kind != "not_told"]
    rows = [own.compilation() for log in logs for own in log.compiled.values()]
    notes = [f"rank {log.rank}: {note}" for log in logs for note in log.notes]
    notes += [f"cannot be told: {cause.what}" for cause in partings if cause.kind == "not_told"]
    ranks = tuple(log.rank for log in logs)
    return Compilations(tuple(log.path for log in logs), ranks, tuple(rows), tuple(causes), tuple(notes))


def _partings(first: RankLog, other: RankLog) -> Iterator[Cause]:
    """Where a rank parts from the first one: in what both compile, then in what one alone does."""
    head = f"rank {first.rank} and rank {other.rank} part"
    for number, mine in first.compiled.items():
        theirs = other.compiled.get(number)
        if theirs is None:
            continue
        parted = f"{head} at [{number}]"
        causes = [*_tensors(parted, mine, theirs), *_sequences(parted, mine, theirs)]
        # Where other tensors go in, other graphs follow.
        yield from causes or _graphs(parted, mine, theirs)
    for mine, theirs in ((first, other), (other, first)):
        alone = [number for number in mine.compiled if number not in theirs.compiled]
        if alone:
            row = mine.compiled[alone[0]].row
            ids = some([f"[{number}]" for number in alone], 4)
            why = f": {row['reason']}" if row.get("reason") else ""
            text = f"{head}: only rank {mine.rank} compiles {ids}{why}"
            yield Cause("instruction_inserted", text, row.get("where", ""), _ADVICE)


def _tensors(head: str, mine: LoggedCompilation, theirs: LoggedCompilation) -> Iterator[Cause]:
    both = [name for name in mine.tensors if name in theirs.tensors]
    differ = [name for name in both if mine.tensors[name] != theirs.tensors[name]]
    if differ:
        text = f"{head}: {differ[0]} is {mine.tensors[differ[0]]} -> {theirs.tensors[differ[0]]}"
        more = f" and {count(len(differ) - 1, 'more tensor')}" if len(differ) > 1 else ""
        yield Cause("shape_changed", text + more, mine.row.get("where", ""), _ADVICE, count=len(differ))


def _sequences(head: str, mine: LoggedCompilation, theirs: LoggedCompilation) -> Iterator[Cause]:
    sequences = [_collectives(own) for own in (mine, theirs)]
    if sequences[0] != sequences[1]:
        shown = [some(sequence, 4) or "none" for sequence in sequences]
        text = f"{head}: collectives {shown[0]} -> {shown[1]}"
        yield Cause("collective_reordered", text, mine.row.get("where", ""), _ADVICE)


def _graphs(head: str, mine: LoggedCompilation, theirs: LoggedCompilation) -> Iterator[Cause]:
    """The causes of the first stage that differs: those behind it follow from it."""
    for stage, graph in mine.graphs.items():
        if stage not in theirs.graphs:
            continue
        diff = compare(graph, theirs.graphs[stage], pictured=False)
        for cause in (diff.causes or diff.unknown)[:_MOST]:
            yield replace(cause, what=f"{head}, {stage} graph: {cause.what}")
        if diff.causes:
            return


def _collectives(own: LoggedCompilation) -> list[str]:
    """The collectives that inductor put in order, else those of the graphs."""
    if own.collectives:
        return own.collectives
    return [
        text
        for stage in ("forward", "inference", "backward")
        if (graph := own.graphs.get(stage))
        for text in _of(graph)
    ]


def _of(graph: Graph) -> Iterator[str]:
    for ins in graph.main.instructions:
        if "c10d" in ins.opcode and "wait_tensor" not in ins.opcode:
            yield f"{ins.opcode.removeprefix('_c10d_functional.').removesuffix('.default')} {ins.shape}"
