"""Formats of graph texts: detection, and the graphs of a text, which may hold many modules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from retrograd.errors import GraphError, UsageError
from retrograd.graph import brackets
from retrograd.graph.ir import Graph
from retrograd.graph.keys import text_key
from retrograd.graph.readers import fx_text, hlo, jaxpr, stablehlo, torch_trace, torch_xla

FORMATS = ("hlo", "stablehlo", "fx", "jaxpr", "torch_xla", "torch_trace")
_MARKS = re.compile(
    r"^[ \t]*+(?:(?P<torch_trace>[VIWEC][0-9]{4} [0-9:.]++ ++[0-9]++ [^\]\n]*+\] \{\")"
    r"|(?P<torch_xla>TensorsGraphInfo:|## BEGIN_GRAPH)|(?P<hlo>HloModule\b)|(?P<ir>IR \{)"
    r"|(?P<stablehlo>(?:builtin\.)?module\b[^\n=]*+\{|module\b|func\.func\b|#\w++ ?=|\"builtin\.module\")"
    r"|(?P<jaxpr>\{ ?lambda\b|let \w+ = \{ ?lambda\b)"
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
    format = format or detect(text, source)
    several = {"torch_xla": _torch_xla, "torch_trace": _torch_trace}.get(format)
    split = several(text, source) if several else _whole(text, source, format)
    for ordinal, (piece, graph) in enumerate(split):
        graph.digest = text_key(piece)
        graph.source, graph.ordinal = source, ordinal
        yield piece, graph


_READERS: dict[str, Callable[[str, str, int], Graph]] = {
    "hlo": hlo.parse,
    "stablehlo": stablehlo.parse,
    "fx": fx_text.parse,
    "jaxpr": jaxpr.parse,
}


def _whole(text: str, source: str, format: str) -> Iterator[tuple[str, Graph]]:
    """The graphs that stand one behind the other, of a text that consists of them."""
    starts = _hlo_starts(text) if format == "hlo" else fx_text.starts(text) if format == "fx" else [0]
    first, last = 1, 0
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        first += text.count("\n", last, start)
        last = start
        piece = text[start:end]
        yield piece, _READERS[format](piece, source, first)


def _hlo_starts(text: str) -> list[int]:
    starts: list[int] = []
    at = text.find("HloModule")  # twenty times as fast as an expression: 5 ms for 45,000 instructions
    while at >= 0:
        start = text.rfind("\n", 0, at) + 1
        if not text[start:at].strip():
            starts.append(start)
        end = text.find("\n", at)
        at = text.find("HloModule", end) if end >= 0 else -1
    # Otherwise the reader says what is wrong with the beginning.
    return starts if starts and not text[: starts[0]].strip() else [0, *starts]


def _torch_xla(text: str, source: str) -> Iterator[tuple[str, Graph]]:
    for block in torch_xla.blocks(text, source):
        kind = detect(block.body, source, block.first)
        if kind not in ("hlo", "stablehlo"):
            message = f"a save-file holds HLO or StableHLO, this is {kind}"
            raise brackets.error(source or "the text", block.first, message)
        graph = _READERS[kind](block.body, source, block.first)
        graph.key, graph.frames, graph.block = block.key, block.frames, block.name
        yield block.body, graph


def _torch_trace(text: str, source: str) -> Iterator[tuple[str, Graph]]:
    for name, body, line in torch_trace.graphs(text, source):
        graph = fx_text.parse(body, source, line)
        graph.name = name
        yield body, graph
