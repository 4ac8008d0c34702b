"""Alarms: what is beyond the cheap terms of a tolerance, and whether it is also beyond those that take runs.

The cheapest is asked first, and each allows no more than all do together: what one of them allows needs no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from retrograd.check import cancellation, cumulative, tolerance
from retrograd.check.op_runner import OpRunner
from retrograd.check.oracle import Oracle, Truth
from retrograd.check.reference import DerivativeOrder, Results, first_order
from retrograd.check.schema import Case
from retrograd.check.tensor_comparison import TensorComparison, compare_stored


@dataclass(frozen=True)
class AlarmResult:
    """A comparison, the truth it rests on, what is to be said of that, and the error that a sum is allowed."""

    result: TensorComparison
    truth: Truth
    remark: str = ""
    tol: torch.Tensor | None = None

    @property
    def says_nothing(self) -> bool:
        """Whether most elements may be off by more than their size, and that is why they are allowed."""
        return self.tol is not None and tolerance.no_digit_left(self.tol, self.result.truth)


@dataclass
class Alarms:
    """Compares tensors of an op with the truth where the terms without a spread do not allow what it gave.

    Attributes:
        runner, oracle: of the op in one dtype.
        confirming: randomly rounded runs with which an alarm is confirmed, one number after the other.
        told: by tensor, the worst excess of the stage so far: what is no worse is counted unconfirmed, but never shown.
        sought: the one tensor that is asked of, as a finding names it, while its smallest case is looked for.
    """

    runner: OpRunner
    oracle: Oracle
    confirming: tuple[int, ...] = tolerance.CONFIRMING
    told: Mapping[str, float] = field(default_factory=dict)
    sought: str = ""
    _sums: dict[Any, cumulative.CumulativeSum | None] = field(default_factory=dict)
    _ends: dict[Any, dict[Any, Results]] = field(default_factory=dict)
    _cancelled: cancellation.Cancellations = field(default_factory=cancellation.Cancellations)

    def allowed(
        self, case: Case, name: str, got: torch.Tensor, want: torch.Tensor, truth: Truth,
        order: DerivativeOrder = first_order,
    ) -> AlarmResult | None:  # fmt: skip
        """The comparison with what already allows a tensor; None if that takes all that its tolerance rests on."""
        kind = truth.stored.get(name, case.dtype)
        result = compare_stored(got, want, truth.floor[name], kind)
        if not result.wrong:
            return AlarmResult(result, truth)
        first_grad = order is first_order and name.startswith("grad ")
        # Beyond that nothing is judged as a sum, so this must not be either.
        known = self._sums.get((name, case.params)) if first_grad and result.worst < tolerance.BEYOND_NOISE else None
        if known:
            wider = known.widened(self.runner.reference(case), truth, truth.floor)
            result = compare_stored(got, want, wider.floor[name], kind)
            if not result.wrong:
                return AlarmResult(result, wider, _as_sum(name), wider.floor[name])
        return None

    def confirmed(
        self, case: Case, name: str, got: torch.Tensor, want: torch.Tensor, truth: Truth,
        order: DerivativeOrder = first_order,
    ) -> AlarmResult:  # fmt: skip
        """The comparison with more runs the nearer an alarm is to chance."""
        if (allowed := self.allowed(case, name, got, want, truth, order)) is not None:
            return allowed
        kind = truth.stored.get(name, case.dtype)
        result = compare_stored(got, want, truth.tol[name], kind)
        first_grad, left = order is first_order and name.startswith("grad "), None
        if result.wrong and first_grad:
            left = self._cancelled.left(self.runner.reference(case), truth, name)
            truth = truth.allowing(name, left)
            result = compare_stored(got, want, truth.tol[name], kind)
        if 1 < result.worst < tolerance.BEYOND_NOISE and first_grad:
            wider = self._as_a_sum(case, name, truth)
            added_up = wider and compare_stored(got, want, wider.tol[name], kind)
            if wider and added_up and not added_up.wrong:
                return AlarmResult(added_up, wider, _as_sum(name))
        apart = order is first_order and self._right_with_exact_factors(case, name, want, truth, result)
        if apart:
            truth = self.oracle.truth(case, self.oracle.noise_runs, apart=True).allowing(name, left)
            result = compare_stored(got, want, truth.tol[name], kind)
        for runs in self.confirming:
            if max(1.0, self.told.get(name, 0.0)) < result.worst < tolerance.BEYOND_NOISE:
                truth = self.oracle.truth(case, runs, order, apart=apart).allowing(name, left)
                result = compare_stored(got, want, truth.tol[name], kind)
        return AlarmResult(result, truth, _in_tf32(case, name) if apart and not result.wrong else "")

    def _right_with_exact_factors(
        self, case: Case, name: str, want: torch.Tensor, truth: Truth, result: TensorComparison
    ) -> bool:
        """Whether every element that is out is right where the op's kernels multiply float32 as it is.

        Then its formula is right, and the question is what tf32 may leave of it: two computations of one product may
        differ there as the runs of a pair that stay apart do, which is more than most formulas show. What is lost
        otherwise, as by a factor that is cast to bfloat16, stays.
        """
        if not result.wrong or (run := self.runner.with_exact_factors(case)) is None:
            return False
        exact = run.tensors.get(name)
        if exact is None or exact.shape != want.shape:
            return False
        # Where products cancel in the formula alone, float32's own error is nearly all that is allowed.
        plain = self.oracle.without_tf32(case).tol[name]
        limit = (tolerance.WITHOUT_TF32 * truth.tol[name]).maximum(plain).minimum(truth.tol[name])
        again = compare_stored(exact.to(want.device), want, limit, truth.stored.get(name, case.dtype))
        return not bool(((again.ratio > 1) & (result.ratio > 1)).any())

    def _as_a_sum(self, case: Case, name: str, truth: Truth) -> Truth | None:
        """The truth that allows what cancels in a gradient that is a cumulative sum; None if it is none."""
        key = name, case.params
        if key not in self._sums:
            base = self.runner.reference(self.runner.base.but(params=case.params))
            self._sums[key] = cumulative.find(base, name, self._ends.setdefault(case.params, {}))
        known = self._sums[key]
        return known and known.widened(self.runner.reference(case), truth, truth.tol)


def _in_tf32(case: Case, name: str) -> str:
    at = case.text() or "the given inputs"
    return f"{name} is off at {at} by what tf32 leaves of products that are computed twice; with float32's it is right"


def _as_sum(name: str) -> str:
    """Of no case, so that a stage says it once: a gate's gradient was one of 22 lines for as many cases."""
    return f"{name} is judged as the cumulative sum that it is by the reference"
