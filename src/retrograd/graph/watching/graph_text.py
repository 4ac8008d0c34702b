"""Graph texts of frameworks: the graph, its key, and its differences from another."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike

from retrograd.errors import GraphError
from retrograd.graph.ir import Graph
from retrograd.graph.keys import strict_key, text_key
from retrograd.graph.schema import Diff


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

    return readers.parse(text, source, format)[0]


def of_file(path: str | PathLike[str]) -> list[tuple[str, Graph]]:
    """The graphs of a file, each with its text.

    Raises:
        GraphError: the file is no graph.
    """
    from retrograd.graph.readers import files, formats

    whole = files.text_of(path, files.MAX_BYTES)
    return list(formats.pieces(whole, str(path)))


def known(text: str, format: str, source: str = "") -> Known:
    """The graph and its key; for a text that no reader can read the key of the text, and why."""
    if not text:
        return Known("", "live", problem="the framework gave no text of this graph")
    try:
        graph = parse(text, format, source)
        return Known(strict_key(graph), "strict", graph)
    except GraphError as error:
        return Known(text_key(text), "text", problem=f"compared by its text alone: {error}")


def compare(a: Graph, b: Graph, pictured: bool = False) -> Diff:
    """What changed from one graph to the other; `pictured` with the neighbourhood of the causes, for pages."""
    from retrograd.graph.diffing.compare import compare as diff

    return diff(a, b, pictured)
