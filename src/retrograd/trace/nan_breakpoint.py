"""Breakpoint at the operator that made the first NaN or Inf, with its tensors at hand."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from retrograd.errors import UsageError
from retrograd.trace.nan_reasons import writes_infinity
from retrograd.trace.schema import Op, Stats
from retrograd.trace.source_lines import frames_to_user

if TYPE_CHECKING:
    import torch

_KINDS = {"nan": frozenset({"nan"}), "inf": frozenset({"inf"}), "bad": frozenset({"nan", "inf"})}


@dataclass(frozen=True)
class Stop:
    """The operator at which a run was stopped.

    Attributes:
        op: its record in the trace.
        inputs: its input tensors. One that it wrote into holds what it wrote.
        outputs: the tensors it returned or wrote into.
    """

    op: Op
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]


def stop_kinds(breakpoint_on: str | None) -> frozenset[str]:
    """Which values stop a run.

    Raises:
        UsageError: not "nan", "inf", "bad" or None.
    """
    if breakpoint_on is None:
        return frozenset()
    if breakpoint_on not in _KINDS:
        raise UsageError(
            f"`breakpoint_on` is {breakpoint_on!r}, expected one of {', '.join(map(repr, _KINDS))}, or None"
        )
    return _KINDS[breakpoint_on]


class InfinityMasks:
    """Tells infinities of masks from others, operator by operator, as `trace nan` does for a whole trace."""

    def __init__(self) -> None:
        self._mask_storages: set[int] = set()  # storages, which the views of a mask share

    def stops(self, op: Op, kinds: frozenset[str]) -> bool:
        """Whether an operator made a bad value of these kinds that is not part of a mask; called for each in turn."""
        if any(s.nan for s in op.outputs):
            return "nan" in kinds or ("inf" in kinds and any(s.inf for s in op.outputs))
        infinite = [s for s in op.outputs if s.inf]
        if infinite and (writes_infinity(op) or any(self._is_mask(s) for s in op.inputs)):
            self._mask_storages.update(s.storage for s in infinite if s.storage >= 0)
            return False
        return bool(infinite) and "inf" in kinds

    def _is_mask(self, stats: Stats) -> bool:
        # One that came in has nothing but zeros between its infinities.
        return (
            bool(stats.inf) and not stats.nan and (stats.storage in self._mask_storages or stats.low == stats.high == 0)
        )


def open_debugger(stop: Stop) -> None:
    """Open the debugger of `breakpoint()` with `op`, `inputs` and `outputs` as local names; `up` leads outwards."""
    op, inputs, outputs = stop.op, stop.inputs, stop.outputs
    away = frames_to_user(sys._getframe())
    origin = f"{op.name}{f' at {op.place}' if op.place else ''}{f', inside {op.inside}' if op.inside else ''}"
    line = f", `up {away}` is the line that asked for it" if away else ""
    sys.stderr.write(f"retrograd: NaN or Inf from {origin}; here are `op`, `inputs` and `outputs`{line}\n")
    breakpoint()
    del op, inputs, outputs  # something has to follow, or the debugger stops at a return
