"""Formats of graph texts: detection, and the graphs of a text, which may hold many modules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from retrograd.errors import GraphError, UsageError
from retrograd.graph import brackets
from retrograd.graph.ir import Graph
from retrograd.graph.keys import text_key
from retrograd.graph.readers import fx_text, hlo, stablehlo

FORMATS = ("hlo", "stablehlo", "fx", "torch_xla")
_MARKS = re.compile(
    r"^[ \t]*+(?:(?P<torch_xla>TensorsGraphInfo:|## BEGIN_GRAPH)|(?P<hlo>HloModule\b)|(?P<ir>IR \{)"
    r"|(?P<stablehlo>(?:builtin\.)?module\b[^\n=]*+\{|module\b|func\.func\b|#\w++ ?=|\"builtin\.module\")"
    r"|(?P<dot>digraph\b)|(?P<html><(?i:!doctype|html|head|body)\b))"
    r"|(?P<fx>\bclass \w+\([\w.]*Module\):|\bdef forward\()",
    re.MULTILINE,
)
# What a file has to say about itself within this many characters. A torch_xla block begins with Python frames.
_SHOWN = 1 << 20


def detect(text: str, source: str = "", begins: int = 1) -> str:
    """The format of a text that begins at line `begins`, by its first telling line; GraphError if it has none."""
    match = _MARKS.search(text, 0, _SHOWN)
    kind = match.lastgroup if match else None
    if kind in FORMATS:
        return kind
    line = begins + (text.count("\n", 0, match.start()) if match else 0)
    reasons = {
        "ir": "this is torch_xla's IR, which has no shapes of parameters; record it with XLA_SAVE_TENSORS_FMT=hlo",
        "dot": "this is a drawing (dot), not the graph's text; record it with XLA_SAVE_TENSORS_FMT=hlo",
        "html": "this is a web page; save the raw text of the dump",
    }
    reason = reasons.get(
        kind or "", "this is no graph; expected `HloModule`, `module`, `class GraphModule` or a save-file"
    )
    first = next((shown for shown in brackets.lines(text[:_SHOWN]) if shown.strip()), "")
    if not first:
        reason = "the text is empty; expected HLO, StableHLO or FX text"
    raise brackets.error(source or "the text", line, reason, first)


def parse(text: str, source: str = "", format: str | None = None) -> list[Graph]:
    """The graphs of a text; see `read`. `source` is the name that messages and graphs carry."""
    if format is not None and format not in FORMATS:
        raise UsageError(f"format={format!r} is none of {', '.join(FORMATS)}; leave it out to find out")
    kind = format or detect(text, source)
    graphs = [graph for _, graph in pieces(text, source, kind)]
    if not graphs:
        raise GraphError(f"{source or 'the text'}, line 1: there is no {kind} graph in it; the file may be cut off")
    return graphs


def pieces(text: str, source: str = "", format: str | None = None) -> Iterator[tuple[str, Graph]]:
    """Each graph of a text with the part of the text that it is; see `read`."""
    for ordinal, (piece, first, settle) in enumerate(_SPLIT[format or detect(text, source)](text, source)):
        graph = settle(piece, first)
        graph.digest = text_key(piece)
        graph.source, graph.ordinal = source, ordinal
        yield piece, graph


# A piece of the text, the number of its first line, and what reads it.
_Piece = tuple[str, int, Callable[[str, int], Graph]]
_Reader = Callable[[str, str, int], Graph]


def _hlo(text: str, source: str) -> Iterator[_Piece]:
    starts: list[int] = []
    at = text.find("HloModule")  # twenty times as fast as an expression: 5 ms for 45,000 instructions
    while at >= 0:
        start = text.rfind("\n", 0, at) + 1
        if not text[start:at].strip():
            starts.append(start)
        end = text.find("\n", at)
        at = text.find("HloModule", end) if end >= 0 else -1
    if not starts or text[: starts[0]].strip():
        starts = [0, *starts]  # the reader says what is wrong with the beginning
    return _parts(text, starts, lambda piece, first: hlo.parse(piece, source, first))


def _fx(text: str, source: str) -> Iterator[_Piece]:
    return _parts(text, fx_text.starts(text), lambda piece, first: fx_text.parse(piece, source, first))


def _stablehlo(text: str, source: str) -> Iterator[_Piece]:
    return _parts(text, [0], lambda piece, first: stablehlo.parse(piece, source, first))


def _parts(text: str, starts: list[int], reader: Callable[[str, int], Graph]) -> Iterator[_Piece]:
    first, last = 1, 0
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        first += text.count("\n", last, start)
        last = start
        yield text[start:end], first, reader


def _torch_xla(text: str, source: str) -> Iterator[_Piece]:
    from retrograd.graph.readers import torch_xla

    for block in torch_xla.blocks(text, source):
        kind = detect(block.body, source, block.first)
        reader = {"hlo": hlo.parse, "stablehlo": stablehlo.parse}.get(kind)
        if reader is None:
            raise brackets.error(
                source or "the text", block.first, f"a save-file holds HLO or StableHLO, this is {kind}"
            )

        def settle(piece: str, first: int, reader: _Reader = reader, block: torch_xla.SaveFileBlock = block) -> Graph:
            graph = reader(piece, source, first)
            graph.key, graph.frames, graph.block = block.key, block.frames, block.name
            return graph

        yield block.body, block.first, settle


_SPLIT: dict[str, Callable[[str, str], Iterator[_Piece]]] = {
    "hlo": _hlo,
    "stablehlo": _stablehlo,
    "fx": _fx,
    "torch_xla": _torch_xla,
}
