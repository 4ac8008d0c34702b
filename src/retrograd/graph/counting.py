"""Counts of distinct graphs: the same files, told apart less and less strictly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from retrograd.graph import keys, undecided
from retrograd.graph.canonical import forms
from retrograd.graph.diffing.compare import side
from retrograd.graph.form import Form
from retrograd.graph.ir import Graph
from retrograd.graph.schema import Level, Side, Unique

_LEVELS: tuple[tuple[str, Callable[[Graph, dict[str, Form]], str]], ...] = (
    ("text", lambda graph, of: graph.digest or keys.names_key(graph)),
    ("names", lambda graph, of: keys.names_key(graph)),
    ("dead code", keys.strict_key),
    ("parameter order", keys.free_key),
)


def count(graphs: Sequence[Graph]) -> Unique:
    """The answer of `retrograd graph unique`: each level's keys, and which graph is which."""
    graph_keys: list[tuple[str, ...]] = []
    sides: list[Side] = []
    known: dict[str, tuple[tuple[str, ...], Side]] = {}
    for graph in graphs:
        # A graph that was built by hand has no digest: nothing says that it is the one before.
        own, same = known.get(graph.digest) or _keys_and_side(graph)
        if graph.digest:
            known[graph.digest] = own, same
        graph_keys.append(own)
        sides.append(replace(same, title=graph.title, name=graph.name, key=graph.key))
    levels = tuple(_level(name, [own[i] for own in graph_keys]) for i, (name, _) in enumerate(_LEVELS))
    return Unique(tuple(g.title for g in graphs), tuple(sides), levels, tuple(g.key for g in graphs))


def _keys_and_side(graph: Graph) -> tuple[tuple[str, ...], Side]:
    of = forms(graph)
    # Where a text leaves something out, only the same text is taken for the same graph.
    own = next((f" {graph.digest or id(graph)}" for _ in undecided.causes(graph, of, "A")), "")
    return tuple(key(graph, of) + own for _, key in _LEVELS), side(graph, of)


def _level(name: str, own: list[str]) -> Level:
    numbers = {key: i for i, key in enumerate(dict.fromkeys(own))}
    return Level(name, len(numbers), tuple(numbers[key] for key in own), tuple(numbers))  # type: ignore[arg-type]
