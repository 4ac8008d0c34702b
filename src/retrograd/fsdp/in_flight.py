"""Reductions in flight: what they read and write while they may still run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from retrograd.compat.fsdp2.foreach_reduce import ReduceCall


@dataclass
class InFlight:
    """Buffers and events of reductions that may still run, so that no memory is given back under a running kernel."""

    handle: Any  # torch.cuda, or torch.cpu
    inputs: list[tuple[Any, Any]] = field(default_factory=list)  # each with the event after which it is free
    _held: list[Any] = field(default_factory=list)
    _events: dict[Any, Any] = field(default_factory=dict)

    def join(self, calls: list[ReduceCall], grads: list[torch.Tensor]) -> Any:
        """Order the current stream after those on which gradients were made; the current stream."""
        stream = self.handle.current_stream()
        apart = [call for call in calls if call.stream != stream]
        for call in apart:
            if call.event is None:
                stream.wait_stream(call.stream)
            else:
                stream.wait_event(call.event)
        if apart and grads[0].device.type != "cpu":
            for grad in grads:  # made on another stream, whose allocator must not reuse it before copy-in
                grad.record_stream(stream)
        return stream

    def make_room(self, most: int) -> None:
        """Wait until fewer than `most` inputs are being reduced: what FSDP2 does before each of its reductions."""
        while self.inputs and len(self.inputs) >= most:
            _, event = self.inputs.pop(0)
            if event is not None:
                self.handle.current_stream().wait_event(event)

    def follow(self, stream: Any, event: Any) -> None:
        """Wait at the end for a reduction whose buffers FSDP2 keeps.

        FSDP2 waits too, but for the last event of a stream, which may since be that of a group that is held.
        """
        if stream is not None:
            self._events[stream] = event

    def add(self, result: dict[str, Any]) -> None:
        """Keep what a reduction still reads or writes."""
        self.inputs.append((result["reduce_scatter_input"], result["reduce_scatter_event"]))
        if result["all_reduce_input"] is not None:
            self._held.append((result["all_reduce_input"], result["all_reduce_event"]))
        # 2.11 and 2.12 do not say which stream came last; waiting for every event is right as well.
        self._events[result.get("post_reduce_stream", len(self._events))] = result["post_reduce_event"]

    def wait(self) -> None:
        """Order the current stream after everything in flight, then let go of it."""
        if not self.inputs and not self._held and not self._events:
            return
        stream = self.handle.current_stream()
        ended = [event for _, event in (*self.inputs, *self._held)]
        for event in (*ended, *self._events.values()):
            if event is not None:
                stream.wait_event(event)
        self.inputs.clear()
        self._held.clear()
        self._events.clear()
