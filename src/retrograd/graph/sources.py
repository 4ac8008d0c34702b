"""Sources of graphs: a graph, a file, a folder of dumps, `-` for stdin, or `FILE#3` for graph 3 of one with several."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from os import PathLike, fspath
from pathlib import Path
from typing import TypeAlias

from retrograd.errors import UsageError
from retrograd.graph.ir import Graph
from retrograd.graph.readers import folders, parse, read
from retrograd.graph.readers.files import MAX_BYTES, text_of

Source: TypeAlias = Graph | str | PathLike[str]


def load(source: Source) -> list[Graph]:
    """The graphs of a source, at least one; UsageError if it has none of that number, GraphError if it is damaged."""
    if isinstance(source, Graph):
        return [source]
    path, number = _split(fspath(source))
    if Path(path).is_dir():
        graphs = [graph for _, graph in named(path)]
    else:
        graphs = _of_file(path)
    if number is None:
        return graphs
    if number >= len(graphs):
        has = f"graphs 0 to {len(graphs) - 1}" if len(graphs) > 1 else "one graph, number 0"
        raise UsageError(f"'{path}#{number}' names graph {number}, but {path} holds {has}")
    return [graphs[number]]


def named(source: Source) -> Iterator[tuple[str, Graph]]:
    """The graphs of a source, each by the name under which it has its counterpart in another run."""
    path = "" if isinstance(source, Graph) else fspath(source)
    if path and Path(path).is_dir():
        for name, file in folders.files(Path(path)):
            several = list(_counted(_of_file(str(file))))
            for own, graph in several:
                yield (" ".join(filter(None, [name, own])) if len(several) > 1 else name), graph
    else:
        yield from _counted(load(source))


def _counted(graphs: list[Graph]) -> Iterator[tuple[str, Graph]]:
    """The names that a file gives to its graphs, with a number where there are several of one name."""
    seen: Counter[str] = Counter()
    for graph in graphs:
        name = re.sub(r"\.[0-9]+\Z", "", graph.name)
        seen[name] += 1
        yield (f"{name} ({seen[name]})" if seen[name] > 1 else name), graph


def _of_file(path: str) -> list[Graph]:
    return parse(text_of("stdin", MAX_BYTES, sys.stdin.buffer), "stdin") if path == "-" else read(path)


def only_graph(source: Source) -> Graph:
    """The graph of a source that holds one; UsageError says how to name one of several."""
    return only(load(source), source)


def only(graphs: list[Graph], source: Source) -> Graph:
    """The one of these graphs of a source; UsageError says how to name one of several."""
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
