"""torch.compile: the graphs that AOTAutograd makes, guard reasons and seconds, from torch's structured trace.

The trace is what TORCH_TRACE writes and tlparse reads. It needs no change of the user's code, holds forward and
backward for every backend that goes through AOTAutograd, also where torch's caches answer, and what compiled autograd
traced. Wrapping AOTAutograd's compilers instead would see nothing when a cache answers, and would switch caches off.

Every private name is in this file. `start` sends a message through the trace and refuses if it does not come back.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

from retrograd.errors import GraphError, UsageError
from retrograd.graph.source_lines import is_library
from retrograd.graph.watching.events import Compiled, Event

_LOGGER = "torch.__trace"
_GRAPHS = {
    "aot_forward_graph": "forward",
    "aot_backward_graph": "backward",
    "aot_inference_graph": "inference",
    "compiled_autograd_graph": "autograd",
}
_TRACED = "dynamo_output_graph"  # what a backend without AOTAutograd gets
_METRICS = {"compilation_metrics": ("forward", "inference", "traced"), "bwd_compilation_metrics": ("backward",)}
_PROBE = "retrograd_graph_watch"
_FRAME = re.compile(r"Line: (\d+), Name: (.*), Filename: (.*)\Z")


class _Listener(logging.Handler):
    def __init__(self, hear: Callable[[logging.LogRecord], None]) -> None:
        super().__init__(logging.DEBUG)
        self.emit = hear  # type: ignore[method-assign]


class Compile:
    """Listens to the structured trace while it is started."""

    name = "compile"
    tells = True

    def __init__(self) -> None:
        self._listener = _Listener(self._hear)
        self._mutex = threading.Lock()
        self._made: list[Compiled] = []
        self._open: dict[str, list[Compiled]] = {}  # by compile id, until its seconds are known
        self._traced: dict[str, str] = {}
        self._reasons: dict[str, str] = {}
        self._tell: Callable[[Compiled], Any] = lambda compiled: None
        self._probed = ""

    def version(self) -> str:
        """torch's version."""
        return str(sys.modules["torch"].__version__)

    def start(self, tell: Callable[[Compiled], Any]) -> None:
        """Listen; UsageError without torch, GraphError if this torch does not send what is listened to."""
        if "torch" not in sys.modules:
            raise UsageError(
                "`backend` is 'compile', but torch is not imported; import it before retrograd.graph.watch"
            )
        self._tell = tell
        logging.getLogger(_LOGGER).addHandler(self._listener)
        try:
            self._probe()
        except Exception:
            self.stop()
            raise

    def stop(self) -> None:
        """Listen no more."""
        logging.getLogger(_LOGGER).removeHandler(self._listener)

    def drain(self) -> list[Event]:
        """The graphs compiled since the last call."""
        with self._mutex:
            made, self._made = self._made, []
        return list(made)

    def _hear(self, record: logging.LogRecord) -> None:
        """One message of the trace. What `tell` raises ends the compilation, before the graph runs."""
        data = getattr(record, "metadata", None)
        if not isinstance(data, dict):
            return
        payload = getattr(record, "payload", None)
        for kind, role in _GRAPHS.items():
            if kind in data and payload:
                self._graph(_id(data), role, str(payload))
        if _TRACED in data and payload:
            self._traced[_id(data)] = str(payload)
        for kind, roles in _METRICS.items():
            if kind in data:
                self._measured(_id(data), roles, data[kind])
        if "artifact" in data:
            self._artifact(_id(data), data["artifact"], payload)

    def _probe(self) -> None:
        sender = getattr(getattr(sys.modules["torch"], "_logging", None), "trace_structured", None)
        about = {"name": _PROBE, "encoding": "string"}
        # Twice: at the first message torch's own handler may take itself off the list, and the next one is skipped.
        for _ in range(2 if sender is not None else 0):
            sender("artifact", metadata_fn=lambda: about, payload_fn=lambda: _PROBE, expect_trace_id=False)
        if self._probed != _PROBE:
            raise GraphError(
                f"torch {self.version()} has no structured trace that can be listened to "
                f"(torch._logging.trace_structured and the logger {_LOGGER!r}); retrograd.graph.watch knows torch 2.11 "
                "to 2.13. Graphs that were written to files can be compared with `retrograd graph diff` all the same"
            )

    def _artifact(self, number: str, about: Any, payload: Any) -> None:
        name = about.get("name") if isinstance(about, dict) else None
        if name == _PROBE:
            self._probed = str(payload)
        elif name == "recompile_reasons":
            self._reasons[number] = _reason(payload)

    def _graph(self, number: str, role: str, text: str, tell: bool = True) -> Compiled:
        frame = number.rpartition("/")[0]
        # Each capture of compiled autograd has a number of its own, but stands for the one before.
        family = role if role == "autograd" else f"{role} {frame}"
        made = Compiled(role, "fx", text, f"[{number}]", family, reason=self._reasons.get(number, ""))
        with self._mutex:
            self._made.append(made)
            self._open.setdefault(number, []).append(made)
        if tell:
            self._tell(made)
        return made

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
                graph.seconds = _seconds(metrics)


def _id(data: dict[str, Any]) -> str:
    """The compile id of a message, as torch writes it: "0/1", "!2/0/1" under compiled autograd."""
    head = f"!{data['compiled_autograd_id']}/" if data.get("compiled_autograd_id") is not None else ""
    return f"{head}{data.get('frame_id', '-')}/{data.get('frame_compile_id', '-')}"


def _seconds(metrics: dict[str, Any]) -> float | None:
    if metrics.get("duration_us") is not None:
        return float(metrics["duration_us"]) / 1e6
    return metrics.get("entire_frame_compile_time_s")


def _reason(payload: Any) -> str:
    """The guard that failed of the entry used last: torch lists one of each older entry too, every time anew."""
    import json

    try:
        found = json.loads(payload) if isinstance(payload, str) else payload
    except json.JSONDecodeError:
        found = payload
    lines = [" ".join(str(line).split()) for line in (found if isinstance(found, list) else [found])]
    older = f" (and {len(lines) - 1} older entries did not fit)" if len(lines) > 1 else ""
    return f"{lines[0]}{older}" if lines else ""


def _user_line(stack: Any) -> str:
    """The innermost line of a stack that is not a framework's: "train.py:19"."""
    frames = [found for entry in stack or () if (found := _FRAME.match(str(entry)))]
    for found in reversed(frames):
        if not is_library(found[3]) and not found[3].startswith("<"):
            return f"{found[3].rpartition('/')[2]}:{found[1]}"
    return ""
