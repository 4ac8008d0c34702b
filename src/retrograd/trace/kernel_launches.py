"""Kernel launches of Triton beside operators, as in an autograd.Function: seen where Triton is asked to run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrograd.trace.value_ids import Value


class KernelOperator:
    """A Triton kernel in the place of an operator."""

    is_launch, silent, random, makes_memory, view = True, False, False, False, ""

    def __init__(self, name: str) -> None:
        self.name = f"triton::{name}"


kernel_operator: Callable[[str], Any] = cache(KernelOperator)  # the kernel of this name, as an operator


def inputs_and_outputs(before: list[Value], after: list[Value]) -> tuple[list[Value], list[Value]]:
    """Inputs and outputs of a launch, from what its tensors held before and after: what changed is an output.

    Memory that nobody had written before is no input if it was written now.
    """
    inputs, outputs = [], []
    for old, new in zip(before, after, strict=False):
        # A level that reads nothing cannot tell; memory that was fresh was made for the result.
        changed = new.fresh if old.row is None or new.row is None else old.row != new.row
        if changed:
            outputs.append(new)
        if not (changed and new.fresh):
            inputs.append(old)
    return inputs, outputs
