"""The text of a graph as frameworks give it -> the common form, its key, what it differs in from another."""

from __future__ import annotations

from dataclasses import dataclass

from retrograd.errors import GraphError
from retrograd.graph.ir import Graph
from retrograd.graph.keys import strict_key, text_key
from retrograd.graph.record import Diff


@dataclass(frozen=True)
class Known:
    """A graph with its key. `graph` is None, and `problem` says why, where the text cannot be read."""

    key: str
    level: str
    graph: Graph | None = None
    problem: str = ""


def parse(text: str, format: str, source: str = "") -> Graph:
    """The graph of a text.

    Args:
        text: as the framework printed it.
        format: "hlo", "stablehlo" or "fx".
        source: for messages.

    Raises:
        GraphError: the text is no graph of this format.
    """
    from retrograd.graph import readers

    return readers.parse(text, format, source)


def known(text: str, format: str, source: str = "") -> Known:
    """The graph and its key; for a text that no reader can read the key of the text, and why."""
    if not text:
        return Known("", "live", problem="the framework gave no text of this graph")
    try:
        graph = parse(text, format, source)
        return Known(strict_key(graph), "strict", graph)
    except GraphError as error:
        return Known(text_key(text), "text", problem=f"compared by its text alone: {error}")


def compare(a: Graph, b: Graph) -> Diff:
    """What changed from one graph to the other."""
    from retrograd import graph

    return graph.diff(a, b)
