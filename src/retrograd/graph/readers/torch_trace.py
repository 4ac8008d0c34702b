"""Logs of TORCH_TRACE, the raw files that tlparse reads: their messages, and the graphs among them.

V1124 13:31:15.712000 204 torch/_functorch/graph_compile.py:1797] {"aot_joint_graph": {}, "frame_id": 0, ...}
        class joint(torch.nn.Module):
            def forward(self, primals, tangents):
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from retrograd.compat.torch_trace import STAGES, artifact, compile_id
from retrograd.graph import brackets

_HEAD = re.compile(r"[VIWEC][0-9]{4} [0-9:.]++ ++[0-9]++ [^\]\n]*+\] (?=\{)")


class Message(NamedTuple):
    """What a message says of itself, its payload, and the line of the file in which the payload begins."""

    about: dict[str, Any]
    payload: str
    line: int


class TracedGraph(NamedTuple):
    """A graph of a log: "[0/1] forward", its FX text, and the line in which that begins."""

    name: str
    body: str
    line: int


def messages(text: str, source: str = "") -> Iterator[Message]:
    """The messages in order; GraphError where a line is no message and belongs to none."""
    lines = brackets.lines(text)
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if not line.strip():
            continue
        head = _HEAD.match(line)
        try:
            about = json.loads(line[head.end() :]) if head else None
        except (ValueError, RecursionError):  # numbers of thousands of digits are ValueErrors, too
            about = None
        if not isinstance(about, dict):
            message = "this is no message of TORCH_TRACE; the log may be damaged or cut off"
            raise brackets.error(source or "the log", at, message, line)
        start = at
        while at < len(lines) and lines[at].startswith("\t"):
            at += 1
        yield Message(about, "\n".join(payload[1:] for payload in lines[start:at]), start + 1)


def stage_of(about: dict[str, Any]) -> str:
    """The stage of the graph that a message brings; "" if it brings none."""
    kinds = {*about, artifact(about)}
    return next((stage for kind, stage in STAGES.items() if kind in kinds), "")


def graphs(text: str, source: str = "") -> Iterator[TracedGraph]:
    """The graphs of a log in order; a second one of a name has its number behind it."""
    names: Counter[str] = Counter()
    for about, payload, line in messages(text, source):
        stage = stage_of(about)
        if stage and payload.strip():
            name = f"[{compile_id(about)}] {stage}"
            names[name] += 1
            yield TracedGraph(f"{name} {names[name]}" if names[name] > 1 else name, payload, line)
