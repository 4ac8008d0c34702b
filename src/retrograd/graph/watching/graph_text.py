"""Graph texts of frameworks: the graph and its key, the graphs of a file, and texts packed for files and stores."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from retrograd.errors import GraphError
from retrograd.graph import readers, undecided
from retrograd.graph.canonical import forms
from retrograd.graph.ir import Graph
from retrograd.graph.keys import compiled_key, strict_key, text_key
from retrograd.graph.readers import files, folders, formats
from retrograd.graph.schema import Cause


@dataclass(frozen=True)
class Known:
    """A graph with its key, equal for graphs that are the same, and `computes`, equal for those that compute the same.

    `graph` is None, and `problem` says why, where the text cannot be read. `unknown` says what the text leaves out:
    then equal keys prove nothing (`level` "undecided").
    """

    key: str
    level: str
    graph: Graph | None = None
    problem: str = ""
    computes: str = ""
    unknown: tuple[Cause, ...] = ()


def known(text: str, format: str, source: str = "") -> Known:
    """The graph and its key; for a text that no reader can read the key of the text, and why."""
    if not text:
        return Known("", "live", problem="the framework gave no text of this graph")
    try:
        graph = readers.parse(text, source, format)[0]
        folded = forms(graph)
        unknown = tuple(undecided.causes(graph, folded))
        level = "undecided" if unknown else "strict"
        return Known(compiled_key(graph, folded), level, graph, "", strict_key(graph, folded), unknown)
    except GraphError as error:
        key = text_key(text)
        return Known(key, "text", problem=f"compared by its text alone: {error}", computes=key)


def of_file(path: str | PathLike[str]) -> Iterator[tuple[str, str, Graph]]:
    """The graphs of a file or of a folder of dumps, each with its name and text; GraphError if there is none.

    The name is the file's ("#2" for its second graph), in a folder that of module and stage.
    """
    listed = folders.files(Path(path)) if Path(path).is_dir() else [(Path(path).name, Path(path))]
    for name, file in listed:
        for text, graph in formats.pieces(files.text_of(file, files.MAX_BYTES), str(file)):
            yield name + (f"#{graph.ordinal}" if graph.ordinal else ""), text, graph


def packed(text: str) -> str:
    """A text, compressed, as JSON and stores take it: graphs of a step may have megabytes."""
    return base64.b64encode(zlib.compress(text.encode("utf-8", "surrogatepass"), 9)).decode()


def unpacked(value: str) -> str:
    """The text again; ValueError or zlib.error if it is damaged."""
    return zlib.decompress(base64.b64decode(value)).decode("utf-8", "surrogatepass")
