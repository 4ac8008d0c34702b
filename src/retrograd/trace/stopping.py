"""Stop at the operator that made the first NaN or Inf, with its tensors at hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from retrograd.errors import UsageError
from retrograd.trace.record import Op

if TYPE_CHECKING:
    import torch

_KINDS = {"nan": frozenset({"nan"}), "inf": frozenset({"inf"}), "bad": frozenset({"nan", "inf"})}


@dataclass(frozen=True)
class Stop:
    """The operator at which a run was stopped.

    Attributes:
        op: what the trace will say of it.
        inputs: the tensors it was given. One that it wrote into holds what it wrote.
        outputs: the tensors it returned or wrote into.
    """

    op: Op
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]


def wanted(breakpoint_on: str | None) -> frozenset[str]:
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


def debugger(stop: Stop) -> None:
    """Open the debugger of `breakpoint()` with `op`, `inputs` and `outputs` as local names; `up` leads outwards."""
    op, inputs, outputs = stop.op, stop.inputs, stop.outputs  # noqa: F841 (for the person at the prompt)
    breakpoint()
