"""torch.compile: the graphs that AOTAutograd makes, guard reasons and seconds, from torch's structured trace.

The trace is what TORCH_TRACE writes and tlparse reads. It needs no change of the user's code, holds forward and
backward for every backend that goes through AOTAutograd, also where torch's caches answer, and what compiled autograd
traced. Wrapping AOTAutograd's compilers instead would see nothing when a cache answers, and would switch caches off.
"""

# pyright: basic

from __future__ import annotations

import re
import threading
from typing import Any

from retrograd.compat import torch_trace
from retrograd.graph.source_lines import short, user_frame
from retrograd.graph.watching.events import Compiled, Event, WatchBackend

_FRAME = re.compile(r"Line: (\d+), Name: (.*), Filename: (.*)\Z")


class Compile(WatchBackend):
    """Listens to the structured trace while it is started."""

    name = "compile"
    module = "torch"
    part = torch_trace.PART

    def __init__(self) -> None:
        self._listener = torch_trace.Listener(self._hear)
        self._mutex = threading.Lock()
        self._made: list[Compiled] = []
        self._open: dict[str, list[Compiled]] = {}  # by compile id, until its seconds are known
        self._traced: dict[str, str] = {}
        self._reasons: dict[str, str] = {}

    def _hook(self) -> None:
        self._listener.start()

    def stop(self) -> None:
        """Listen no more."""
        self._listener.stop()

    def drain(self) -> list[Event]:
        """The graphs compiled since the last call."""
        with self._mutex:
            compiled, self._made = self._made, []
        return list(compiled)

    def _hear(self, metadata: dict[str, Any], payload: Any) -> None:
        """One message of the trace. What `tell` raises ends the compilation, before the graph runs."""
        number = torch_trace.compile_id(metadata)
        for kind, role in torch_trace.GRAPHS.items():
            if kind in metadata and payload:
                self._graph(number, role, str(payload))
        if torch_trace.TRACED in metadata and payload:
            self._traced[number] = str(payload)
        for kind, roles in torch_trace.METRICS.items():
            if kind in metadata:
                self._measured(number, roles, metadata[kind])
        if torch_trace.artifact(metadata) == "recompile_reasons":
            self._reasons[number] = torch_trace.reason(payload)

    def _graph(self, number: str, role: str, text: str, tell: bool = True) -> Compiled:
        frame = number.rpartition("/")[0]
        # Each capture of compiled autograd has a number of its own, but stands for the one before.
        family = role if role == "autograd" else f"{role} {frame}"
        compiled = Compiled(role, "fx", text, f"[{number}]", family, reason=self._reasons.get(number, ""))
        with self._mutex:
            self._made.append(compiled)
            self._open.setdefault(number, []).append(compiled)
        if tell:
            self._tell(compiled)
        return compiled

    def _measured(self, number: str, roles: tuple[str, ...], metrics: Any) -> None:
        graphs = self._open.get(number, [])
        if not graphs and "forward" in roles and number in self._traced:
            graphs = [self._graph(number, "traced", self._traced[number], tell=False)]
        self._traced.pop(number, None)
        where = _user_line(metrics.get("stack_trace"))
        for graph in graphs:
            if where and "forward" in roles:
                graph.name = f"[{number}] {where}"
            if graph.role in roles and graph.seconds is None:
                graph.seconds = torch_trace.seconds(metrics)


def _user_line(stack: Any) -> str:
    """The innermost line of a stack that is not a framework's: "train.py:19"."""
    frames = [(match[3], int(match[1])) for entry in stack or () if (match := _FRAME.match(str(entry)))]
    return short(user_frame([frame for frame in reversed(frames) if not frame[0].startswith("<")], library=False))
