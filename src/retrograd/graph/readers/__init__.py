"""Readers: files to graphs, in whatever format.

`read` takes a file, plain or gzip, `parse` a text, `from_fx` an FX graph in memory. Whatever is wrong with a file,
`GraphError` says in which line.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from retrograd.graph.ir import Graph
from retrograd.graph.readers import binary
from retrograd.graph.readers.files import MAX_BYTES, text_of
from retrograd.graph.readers.formats import parse as parse
from retrograd.graph.readers.fx_object import from_fx as from_fx


def read(path: str | PathLike[str], *, format: str | None = None, max_bytes: int = MAX_BYTES) -> list[Graph]:
    """The graphs of a file, plain or gzip: HLO, a save-file of torch_xla, StableHLO or FX.

    Args:
        path: the file.
        format: "hlo", "stablehlo", "fx", "jaxpr", "torch_xla" or "torch_trace"; None finds out.
        max_bytes: how large the text may be once unpacked.

    Returns:
        At least one graph, in the order of the file; `source` is the path as given, `ordinal` which graph it is.

    Raises:
        GraphError: the file is missing, too large, damaged or no graph; it names file and line.
    """
    return parse(text_of(path, max_bytes), str(path), format)


def as_hlo(graph: Graph) -> Graph:
    """The HLO that JAX compiles of a StableHLO graph of a file; the graph itself if there is no such file any more."""
    if graph.block or not Path(graph.source).is_file():
        return graph
    text = binary.text_of(text_of(graph.source, MAX_BYTES).encode(), "stablehlo", graph.source)
    [translated] = parse(text, graph.source, "hlo")
    return translated
