"""Sources of graphs: a graph, a file, `-` for stdin, or `FILE#3` for graph 3 of a file that holds several."""

from __future__ import annotations

import sys
from os import PathLike, fspath
from pathlib import Path
from typing import TypeAlias

from retrograd.errors import UsageError
from retrograd.graph.ir import Graph
from retrograd.graph.readers import parse, read
from retrograd.graph.readers.files import MAX_BYTES, text_of

Source: TypeAlias = Graph | str | PathLike[str]


def load(source: Source) -> list[Graph]:
    """The graphs of a source, at least one; UsageError if it has none of that number, GraphError if it is damaged."""
    if isinstance(source, Graph):
        return [source]
    path, number = _split(fspath(source))
    graphs = parse(text_of("stdin", MAX_BYTES, sys.stdin.buffer), "stdin") if path == "-" else read(path)
    if number is None:
        return graphs
    if number >= len(graphs):
        has = f"graphs 0 to {len(graphs) - 1}" if len(graphs) > 1 else "one graph, number 0"
        raise UsageError(f"'{path}#{number}' names graph {number}, but {path} holds {has}")
    return [graphs[number]]


def only_graph(source: Source) -> Graph:
    """The graph of a source that holds one; UsageError says how to name one of several."""
    graphs = load(source)
    if len(graphs) > 1 and not isinstance(source, Graph):
        name = fspath(source)
        raise UsageError(
            f"{name!r} holds {len(graphs)} graphs; name one of them, from {name}#0 to {name}#{len(graphs) - 1} "
            f"(`retrograd graph ls {name}` lists them)"
        )
    return graphs[0]


def _split(source: str) -> tuple[str, int | None]:
    """Path and number. A file whose own name ends in #3 is meant before graph 3 of another."""
    path, mark, number = source.rpartition("#")
    if not mark or not number.isascii() or not number.isdigit() or Path(source).exists():
        return source, None
    return path, int(number)
