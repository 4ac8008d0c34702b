"""Logs of TORCH_TRACE, one a rank: what each compilation is made of, read from its messages."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from retrograd.compat import torch_trace
from retrograd.errors import GraphError
from retrograd.graph import brackets
from retrograd.graph.compilations.schema import Compilation
from retrograd.graph.ir import Graph
from retrograd.graph.readers import files, fx_text
from retrograd.graph.readers.torch_trace import Message, messages, stage_of
from retrograd.graph.source_lines import short

_RANK = re.compile(r"rank_([0-9]+)_")
_CACHE = re.compile(r"(\w+)_cache_(hit|miss|bypass)")


@dataclass
class LoggedCompilation:
    """One compilation in the making: its row, its graphs by stage, and the tensors that went in by their source."""

    row: dict[str, Any]
    graphs: dict[str, Graph] = field(default_factory=dict[str, Graph])
    tensors: dict[str, str] = field(default_factory=dict[str, str])
    collectives: list[str] = field(default_factory=list[str])

    def compilation(self) -> Compilation:
        """The row as it is kept."""
        return Compilation(**self.row, graphs=tuple(f"{stage} {len(graph)}" for stage, graph in self.graphs.items()))


class RankLog:
    """The compilations of one rank by compile id, in order; `notes` say what could not be read."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self.rank = str(path), rank
        self.compiled: dict[str, LoggedCompilation] = {}
        self.notes: list[str] = []
        self._files: dict[int, str] = {}
        self._described: dict[tuple[Any, Any], str] = {}
        try:
            for message in messages(files.text_of(path, files.MAX_BYTES), self.path):
                try:
                    self._hear(message)
                except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                    text = f"this message is not as torch writes it ({type(error).__name__} {error})"
                    raise brackets.error(self.path, message.line - 1, text) from None
        except GraphError as error:
            if not self.compiled:
                raise
            self.notes.append(f"read up to {error}")  # a rank that was killed writes half a message

    def _hear(self, message: Message) -> None:
        about, payload, line = message
        if "str" in about:
            name, number = about["str"]
            self._files[number] = name
        if about.get("frame_id") is None:
            self._event(payload) if "chromium_event" in about else None
            return
        number = torch_trace.compile_id(about)
        own = self.compiled.setdefault(number, LoggedCompilation({"rank": self.rank, "id": number}))
        if stage := stage_of(about):
            stage += " 2" if stage in own.graphs else ""  # of the backward
            try:
                own.graphs[stage] = fx_text.parse(payload, self.path, line)
            except GraphError as error:
                self.notes.append(f"the {stage} graph of [{number}] cannot be read: {error}")
        self._start(own, about.get("dynamo_start"))
        self._tensor(own, about)
        self._artifact(own, torch_trace.artifact(about), payload)
        self._metrics(own, about.get("compilation_metrics"))
        self._event(payload) if "chromium_event" in about else None

    def _start(self, own: LoggedCompilation, start: Any) -> None:
        if start and start.get("stack"):
            frame = start["stack"][-1]
            own.row["where"] = short((self._files.get(frame.get("filename"), ""), frame.get("line", 0)))
            own.row["function"] = frame.get("name", "")

    def _tensor(self, own: LoggedCompilation, about: dict[str, Any]) -> None:
        """A tensor is described by one message and named by the next."""
        if described := about.get("describe_tensor"):
            facts = [f"{str(described['dtype']).removeprefix('torch.')}{described['size']}"]
            facts += [f"strides {described.get('stride')}", str(described.get("device"))]
            facts += ["requires grad"] if described.get("requires_grad") else []
            self._described[described.get("describer_id"), described.get("id")] = ", ".join(facts)
        if source := about.get("describe_source"):
            own.tensors[str(source["source"])] = self._described.get((source.get("describer_id"), source.get("id")), "")

    def _artifact(self, own: LoggedCompilation, name: str, payload: str) -> None:
        if name == "recompile_reasons":
            own.row["reason"] = torch_trace.reason(payload)
        elif name == "dynamo_graph_break_reason":
            own.row["breaks"] = (*own.row.get("breaks", ()), _break(payload))
        elif name == "inductor_collective_schedule":
            own.collectives += [str(name) for name in json.loads(payload or "[]")]
        elif answered := _CACHE.fullmatch(name):
            own.row["caches"] = (*own.row.get("caches", ()), " ".join(answered.groups()))

    def _metrics(self, own: LoggedCompilation, metrics: Any) -> None:
        if not metrics:
            return
        own.row["guards"] = metrics.get("guard_count") or 0
        own.row["seconds"] = torch_trace.seconds(metrics)
        failures = [metrics.get("fail_type"), metrics.get("fail_reason"), metrics.get("cudagraph_skip_reason")]
        own.row["failure"] = ": ".join(" ".join(str(text).split()) for text in failures if text)

    def _event(self, payload: str) -> None:
        """A recording of a CUDA graph, which says itself of which compilation."""
        if torch_trace.RECORDING not in payload:
            return
        try:
            event = json.loads(payload)
        except json.JSONDecodeError:
            return
        own = self.compiled.get(str(cast(dict[str, Any], event.get("args") or {}).get("compile_id")))
        if own and event.get("name") == torch_trace.RECORDING and event.get("ph") == "B":
            own.row["recordings"] = own.row.get("recordings", 0) + 1


def _break(payload: str) -> str:
    """Where and why a graph broke, in one line."""
    lines = [line.strip() for line in payload.splitlines() if line.strip()]
    where = next((line.rpartition(" at ")[2] for line in lines if line.startswith("Graph break in user code")), "")
    why = next((line.partition(": ")[2] for line in lines if line.startswith("Graph Break Reason")), "")
    head, colon, number = where.rpartition(":")
    at = short((head, int(number))) if colon and number.isdigit() else where
    return ": ".join(filter(None, [at, why])) or (lines[0] if lines else "")


def rank_of(path: Path, otherwise: int) -> int:
    """The rank that torch put into the name of a log."""
    match = _RANK.search(path.name)
    return int(match[1]) if match else otherwise
