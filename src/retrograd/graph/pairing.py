"""Pairing of graphs: two of one stage of compilation, two of one program at two stages, or several by their names."""

from __future__ import annotations

from os import fspath
from pathlib import Path

from retrograd.core.wording import count
from retrograd.graph import messages
from retrograd.graph.canonical import forms
from retrograd.graph.diffing import across
from retrograd.graph.diffing.compare import compare, side
from retrograd.graph.ir import Graph
from retrograd.graph.keys import compiled_key
from retrograd.graph.readers import as_hlo
from retrograd.graph.schema import Cause, Diff, GraphPair, Pairs
from retrograd.graph.sources import Source, named, only

_ADVICE = "compare graphs of one stage to see whether they compute the same; this table says what became of which"


def diff(a: Graph, b: Graph) -> Diff:
    """Compare two graphs; of two stages of compilation, unless they are equal, by the table of what became of what."""
    if {a.format, b.format} == {"hlo", "stablehlo"}:
        a, b = _translated(a, b), _translated(b, a)
    stages = across.stages(a, b)
    if stages is None:
        return compare(a, b)
    of_a, of_b = forms(a), forms(b)
    if compiled_key(a, of_a) == compiled_key(b, of_b):
        return compare(a, b)
    unknown = Cause("not_told", f"A is {stages[0]}, B is {stages[1]}: whether they compute the same", advice=_ADVICE)
    return Diff(side(a, of_a), side(b, of_b), (), unknown=(unknown,), passes=across.rows(a, b))


def _translated(graph: Graph, other: Graph) -> Graph:
    """StableHLO as HLO, with the devices of its module where the other text says for how many it is."""
    if graph.format != "stablehlo":
        return graph
    translated = as_hlo(graph)
    for key, name in (("num_partitions", "num_partitions"), ("replica_count", "num_replicas")):
        if key in other.header and name in graph.header:
            translated.header[key] = graph.header[name]
    return translated


def diff_of(a: Source, b: Source) -> Diff | Pairs:
    """Compare what two sources hold: a graph with a graph, several graphs each with the one of its name.

    Raises:
        GraphError: a file is damaged or no graph.
        UsageError: one of them holds one graph, the other several.
    """
    left, right = (dict(named(source)) for source in (a, b))
    folders = all(not isinstance(source, Graph) and Path(source).is_dir() for source in (a, b))
    if folders or (len(left) > 1 and len(right) > 1):
        return _pairs(_title(a), _title(b), left, right)
    return diff(only(list(left.values()), a), only(list(right.values()), b))


def pairs_of(a: Source, b: Source) -> Pairs:
    """The same, of sources with one graph too."""
    return _pairs(_title(a), _title(b), *(dict(named(source)) for source in (a, b)))


def _title(source: Source) -> str:
    return source.title if isinstance(source, Graph) else fspath(source)


def _pairs(a: str, b: str, left: dict[str, Graph], right: dict[str, Graph]) -> Pairs:
    pairs: list[GraphPair] = []
    for name in dict.fromkeys([*left, *right]):
        if name in left and name in right:
            told = diff(left[name], right[name])
            pairs.append(
                GraphPair(name, told.verdict, messages.verdict(told), None if told.verdict == "same" else told)
            )
        elif name in left:
            pairs.append(GraphPair(name, "only in A", f"only in A: {count(len(left[name]), 'instruction')}"))
        else:
            pairs.append(GraphPair(name, "only in B", f"only in B: {count(len(right[name]), 'instruction')}"))
    return Pairs(a, b, tuple(pairs))
