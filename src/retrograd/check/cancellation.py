"""Cancellation in the reference's backward, of numbers that are equal there by chance and that others compute twice.

A softmax of one score less what was chosen is 1 - 1 = 0 in a reference that has one score. An implementation that
computes the share a second time, from its own product and its own sum, has two numbers, each with an error of its own.
"""

from __future__ import annotations

from typing import Any

import torch

from retrograd.check import tolerance
from retrograd.check.oracle import Truth
from retrograd.check.own_mistakes import may_refuse
from retrograd.check.reference import Reference, Results, first_order
from retrograd.check.rounding import Float64, about

_SUMS = {"add", "add_", "sub", "sub_"}
# The gradient that goes in, less what the whole row adds up.
_LESS_THEIR_SUM = {"_softmax_backward_data", "_log_softmax_backward_data"}


# Of the size of numbers that cancel: small, so that all that follows is linear in it, and above what float64 leaves.
_STEP = tolerance.first_half("float64")


class _Apart(Float64):
    """A run in which the backward has, where numbers cancel, a step of their size instead of 0, to either side."""

    backward = False

    def _dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = about(func).name
        # In place, the first of them is overwritten.
        terms = self._terms(name, args, kwargs) if self.backward else None
        out = super()._dispatch(func, args, kwargs)
        if terms is None or terms.shape != out.shape:
            return out
        apart = torch.where(out.abs() <= tolerance.ZERO * terms, _STEP * terms * self.noise(out).sign(), out)
        return out.copy_(apart) if name.endswith("_") else apart

    def _terms(self, name: str, args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
        """The size of what an operator adds up; None for any other."""
        if name in _LESS_THEIR_SUM:
            return args[0].abs()
        if name not in _SUMS or not all(isinstance(t, torch.Tensor) and t.dtype == torch.float64 for t in args[:2]):
            return None
        return args[0].abs() + (kwargs.get("alpha", 1) * args[1]).abs()


def left(reference: Reference, truth: Truth, name: str) -> torch.Tensor:
    """What is allowed where a gradient is 0 by what cancels in the backward: an error of what did."""
    mode, want = _Apart(), truth.want[name]
    assert want is not None

    def order(*args: Any) -> Results:
        mode.backward = True
        return first_order(*args)

    apart = None
    with may_refuse():  # the rest of the backward, such numbers
        apart = reference.run(torch.float64, mode, order).get(name)
    if apart is None:
        return torch.zeros_like(want)
    terms = ((apart - want).abs() / _STEP).nan_to_num(0.0, 0.0, 0.0)
    terms = terms.amax(-1, keepdim=True).expand_as(want) if want.ndim and want.numel() else terms
    unit, _ = tolerance.units(reference.case.dtype, reference.spec.compute)
    unit = max(unit, tolerance.TF32) if reference.tf32 else unit
    return torch.where(terms > 0, tolerance.cancelled(want, None, unit, terms), 0.0)
