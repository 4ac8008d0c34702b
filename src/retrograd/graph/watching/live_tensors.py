"""torch_xla's report of live tensors, read and compared: the cheapest way to the cause of a new graph."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from retrograd.graph.keys import text_key
from retrograd.graph.source_lines import short, user_frame

# "Tensor: id=7, shape=f32[8,16]{1,0}, device=CPU:0, ir_nodes=12": GetLiveTensorsReport of torch_xla.
_TENSOR = re.compile(r"Tensor: id=(\d+), shape=(.*?), device=(\S+), ir_nodes=(\d+)\s*\Z")
_FRAME = re.compile(r"\s+(.*) \((.*):(\d+)\)\s*\Z")
_LAYOUT = re.compile(r"\{[^{}]*\}")
_MOST = 8  # tensors named one by one


@dataclass(frozen=True)
class Live:
    """A tensor that is alive at a cut: shape, how many nodes the graph has that computes it, the user's line."""

    shape: str
    nodes: int
    where: str = ""

    def __str__(self) -> str:
        return f"{self.shape} of {self.nodes} nodes" + (f", made at {self.where}" if self.where else "")


def read(report: str) -> tuple[Live, ...]:
    """The tensors of a report, in its order; the text of their graphs is skipped."""
    tensors: list[Live] = []
    frames: list[tuple[str, int]] = []
    at: re.Match[str] | None = None
    listing = False
    for line in report.splitlines():
        begins = _TENSOR.match(line)
        if begins:
            tensors += [_live(at, frames)] if at else []
            at, frames, listing = begins, [], False
        elif line.startswith("Python Frames:"):
            listing = True
        elif listing and (frame := _FRAME.match(line)):
            frames.append((frame[2], int(frame[3])))
        else:
            listing = False
    return (*tensors, *([_live(at, frames)] if at else []))


def _live(match: re.Match[str], frames: Sequence[tuple[str, int]]) -> Live:
    return Live(_LAYOUT.sub("", match[2]), int(match[4]), short(user_frame(frames)))


def digest(tensors: Iterable[Live]) -> str:
    """The same for the same tensors, in whatever order: torch_xla lists them by address."""
    return text_key("\n".join(sorted(f"{t.shape} {t.nodes}" for t in tensors)))


def difference(before: Sequence[Live], now: Sequence[Live], step: int) -> tuple[str, ...]:
    """Sentences: which tensors are alive now that were not at the cut of `step`, and the reverse."""
    old, new = (Counter((t.shape, t.where) for t in ts) for ts in (before, now))
    lines = [*_named(now, new - old, f"alive at this cut, not at that of step {step}")]
    return (*lines, *_named(before, old - new, f"alive at the cut of step {step}, not at this one"))


def _named(tensors: Sequence[Live], extra: Counter[tuple[str, str]], state: str) -> list[str]:
    lines: list[str] = []
    left = Counter(extra)
    for tensor in tensors:
        if left[tensor.shape, tensor.where] > 0:
            left[tensor.shape, tensor.where] -= 1
            lines.append(f"tensor {tensor} is {state}")
    more = len(lines) - _MOST
    return lines[:_MOST] + ([f"{more} more tensors are {state}"] if more > 0 else [])
