"""Pending operator: what is noted of it while its statistics are not read."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from retrograd.trace.operator_schemas import Attributes, Operator
from retrograd.trace.schema import OTHER
from retrograd.trace.source_lines import Line
from retrograd.trace.value_ids import Value


@dataclass(slots=True, eq=False)
class PendingOp:
    """An operator whose statistics are not read yet; fields as in `Op`."""

    operator: Operator
    step: int
    phase: str = OTHER
    module: str | None = None  # "" is the model itself
    optimizing: bool = False
    node: str = ""
    line: Line | None = None
    inside: Line | None = None
    attributes: Attributes = ()
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    input_tensors: list[torch.Tensor] = field(default_factory=list)  # for a breakpoint; else empty
    kernels: list[str] = field(default_factory=list)
    in_generated_code: bool = False
