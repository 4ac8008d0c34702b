"""Structured trace of torch.compile, which TORCH_TRACE writes and tlparse reads: its messages. Loads no torch."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from typing import Any

from retrograd.compat.registry import part

_LOGGER = "torch.__trace"
# Messages with the text of a graph, and what the graph is.
GRAPHS = {
    "aot_forward_graph": "forward",
    "aot_backward_graph": "backward",
    "aot_inference_graph": "inference",
    "compiled_autograd_graph": "autograd",
}
TRACED = "dynamo_output_graph"  # the graph that a backend without AOTAutograd gets
# The same in a log, with those before and after.
STAGES = {TRACED: "traced", "aot_joint_graph": "joint", **GRAPHS, "inductor_post_grad_graph": "post-grad"}
METRICS = {"compilation_metrics": ("forward", "inference", "traced"), "bwd_compilation_metrics": ("backward",)}
RECORDING = "CUDAGraphNode.record"  # the event of a recording of a CUDA graph
_PROBE = "retrograd_graph_watch"


class Listener(logging.Handler):
    """Calls `hear` with the metadata and the payload of each message.

    Args:
        hear: what it raises ends the compilation, before the graph runs.
    """

    def __init__(self, hear: Callable[[dict[str, Any], Any], None]) -> None:
        super().__init__(logging.DEBUG)
        self._hear = hear

    def emit(self, record: logging.LogRecord) -> None:
        metadata = getattr(record, "metadata", None)
        if isinstance(metadata, dict):
            self._hear(metadata, getattr(record, "payload", None))

    def start(self) -> None:
        logging.getLogger(_LOGGER).addHandler(self)

    def stop(self) -> None:
        logging.getLogger(_LOGGER).removeHandler(self)


def compile_id(metadata: dict[str, Any]) -> str:
    """The compile id of a message, as torch writes it: "0/1", "!2/0/1" under compiled autograd."""
    head = f"!{metadata['compiled_autograd_id']}/" if metadata.get("compiled_autograd_id") is not None else ""
    return f"{head}{metadata.get('frame_id', '-')}/{metadata.get('frame_compile_id', '-')}"


def seconds(metrics: dict[str, Any]) -> float | None:
    """How long a compilation took."""
    if metrics.get("duration_us") is not None:
        return float(metrics["duration_us"]) / 1e6
    return metrics.get("entire_frame_compile_time_s")


def artifact(metadata: dict[str, Any]) -> str:
    """The name of the artifact that a message brings; "" if it is of another kind."""
    about = metadata.get("artifact")
    return str(about.get("name")) if isinstance(about, dict) else ""


def reason(payload: Any) -> str:
    """The guard that failed of the entry used last: torch lists one of each older entry too, every time anew."""
    try:
        reasons = json.loads(payload) if isinstance(payload, str) else payload
    except json.JSONDecodeError:
        reasons = payload.splitlines()
    lines = [" ".join(str(line).split()) for line in (reasons if isinstance(reasons, list) else [reasons])]
    older = f" (and {len(lines) - 1} older entries did not fit)" if len(lines) > 1 else ""
    return f"{lines[0]}{older}" if lines else ""


@part(
    "torch.compile.trace",
    "hears of the graphs that torch.compile makes",
    "graphs that were written to files can be compared with `retrograd graph diff` all the same",
    names=("torch._logging.trace_structured", f"logger {_LOGGER}", *GRAPHS, TRACED, *METRICS),
    refuses=True,
)
def PART() -> str:
    """Send a message and listen. Twice: torch's own handler may take itself off at the first, which skips the next."""
    heard: list[Any] = []
    listener = Listener(lambda metadata, payload: heard.append((metadata.get("artifact"), payload)))
    listener.start()
    about = {"name": _PROBE, "encoding": "string"}
    try:
        send = sys.modules["torch"]._logging.trace_structured
        for _ in range(2):
            send("artifact", metadata_fn=lambda: about, payload_fn=lambda: _PROBE, expect_trace_id=False)
    finally:
        listener.stop()
    return "" if (about, _PROBE) in heard else "has no structured trace that can be listened to"
