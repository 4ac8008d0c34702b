"""Runs of a reference in float64 that no mode would change, as another has shown: torch runs them alone, or nearly."""

from __future__ import annotations

from typing import Any

import torch

from retrograd.check.operators import ADDING, about
from retrograd.check.rounding import Float64


class AsWritten(Float64):
    """A run in float64 of what no mode would change: torch runs it alone, where a mode takes 5 us an operator of 9."""

    def __enter__(self) -> AsWritten:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class Summing(Float64):
    """Such a run of which it is asked which numbers adding up meets: nothing else of an operator is looked at."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(value, torch.Tensor) and value.is_complex() for value in args):
            return super().__torch_dispatch__(func, types, args, kwargs)
        out = func(*args, **(kwargs or {}))
        if (name := about(func).name) in ADDING:
            self._note_peak(func, name, args, kwargs or {}, out)
        return out


def as_noted(noted: Float64, *, track: bool = False) -> Float64:
    """The mode of a run of the operators that another had, which has noted what they are; `track` as of `Float64`."""
    mode = Summing(track=True) if track else AsWritten()
    mode.matrices, mode.switches, mode.elements = noted.matrices, noted.switches, noted.elements
    return mode
