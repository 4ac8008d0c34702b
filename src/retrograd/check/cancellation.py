"""Cancellation in the reference's backward, of numbers that are equal there by chance and that others compute twice.

A softmax of one score less what was chosen is 1 - 1 = 0 in a reference that has one score. An implementation that
computes the share a second time, from its own product and its own sum, has two numbers, each with an error of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from retrograd.check import tolerance
from retrograd.check.layouts import without_strides
from retrograd.check.oracle import Truth
from retrograd.check.own_mistakes import may_refuse
from retrograd.check.reference import Reference, Results, first_order
from retrograd.check.rounding import Float64, about
from retrograd.check.schema import Case

_SUMS = {"add", "add_", "sub", "sub_"}
# The gradient that goes in, less what the whole row adds up.
_LESS_THEIR_SUM = {"_softmax_backward_data", "_log_softmax_backward_data"}


# Of the size of numbers that cancel: small, so that all that follows is linear in it, and above what float64 leaves.
_STEP = tolerance.first_half("float64")


class _Apart(Float64):
    """A run in which the backward has, where numbers cancel, a step of their size instead of 0, to either side."""

    def _dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = about(func).name
        # In place, the first of them is overwritten.
        terms = self._terms(name, args, kwargs)
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


def results_apart(reference: Reference) -> Results:
    """What the reference gives where numbers that cancel in its backward leave a step; nothing if it refuses those."""
    gs = reference.grad_outs()  # before the forward, see `Reference.run`
    with may_refuse():  # the rest of the backward, such numbers
        forward = replace(reference.forward(torch.float64, reference.exactly()), mode=_Apart())
        return reference.results(forward, gs, torch.float64, first_order)
    return {}


class Cancellations:
    """What cancels in a reference's backward: one run says it of all gradients, whatever strides its inputs have."""

    def __init__(self) -> None:
        self._latest: dict[Case, Results] = {}

    def left(self, reference: Reference, truth: Truth, name: str) -> torch.Tensor:
        """`left` with results of `results_apart`, the latest of which are kept."""
        key = without_strides(reference.case)
        if key not in self._latest:
            self._latest = {key: results_apart(reference)}
        return left(reference, truth, name, self._latest[key])


def left(reference: Reference, truth: Truth, name: str, results: Results) -> torch.Tensor:
    """What is allowed where a gradient is 0 by what cancels in the backward: an error of what did.

    Args:
        reference, truth: at a case.
        name: of the gradient.
        results: of `results_apart`.
    """
    want, apart = truth.want[name], results.get(name)
    assert want is not None
    if apart is None:
        return torch.zeros_like(want)
    terms = ((apart - want).abs() / _STEP).nan_to_num(0.0, 0.0, 0.0)
    terms = terms.amax(-1, keepdim=True).expand_as(want) if want.ndim and want.numel() else terms
    unit, _ = tolerance.units(reference.case.dtype, reference.spec.compute)
    unit = max(unit, tolerance.TF32) if reference.tf32 else unit
    return torch.where(terms > 0, tolerance.cancelled(want, None, unit, terms), 0.0)
