"""Oracle: the float64 truth of a case, how far a correct op may be off, and where it has no derivative."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from retrograd.check import extreme_values, kinks, tolerance
from retrograd.check import inputs as make
from retrograd.check.layouts import without_strides
from retrograd.check.op_runner import OpRunner
from retrograd.check.outputs import as_real, real_dtype
from retrograd.check.own_mistakes import may_refuse
from retrograd.check.reference import (
    DerivativeOrder,
    ExactRun,
    NotApplicable,
    Reference,
    Results,
    detached,
    first_order,
)
from retrograd.check.rounded_runs import rounded_runs
from retrograd.check.rounding import Float64
from retrograd.check.rounding_errors import Tf32Factors
from retrograd.check.schema import Case
from retrograd.errors import SpecError


@dataclass(frozen=True)
class Spread:
    """What random rounding changes, by name: `sigma` of each element, `scales` of whole tensors (from 1).

    `sums` has the sigma of `kinks.sums`, `lost` where a number of float64 is none in any of the runs, `unsure` where
    what is finite in float64 is not in some of them, or the other way round.
    """

    sigma: dict[str, torch.Tensor]
    scales: dict[str, float]
    sums: dict[str, torch.Tensor]
    lost: dict[str, torch.Tensor]
    unsure: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Truth:
    """float64 values and attainable errors by tensor name; None for a gradient the reference has not.

    Attributes:
        want: the values.
        floor: the attainable errors without the spread of random rounding, so never larger than `tol`. What is within
            it is within `tol`, and most of what is right is: the runs behind `tol` are made for what is not.
        stored: the dtypes of results by name, where they are known.
        eager: the reference run in the op's own precision, as float64.
        peak: the largest number met on the way (of cases with values other than ordinary ones).
        switches: the operators in it that may have a kink; none where all that they decide cancels.
        terms: the sizes of what adds up to each gradient.
        spread: root of the mean square of what random rounding changes, in as many runs as asked for.
        runs: how many `tol` rests on.
    """

    want: Results
    floor: dict[str, torch.Tensor]
    stored: dict[str, str]
    eager: Results
    peak: float
    switches: frozenset[str]
    terms: dict[str, torch.Tensor]
    spread: Callable[[int], Spread]
    runs: int

    @cached_property
    def tol(self) -> dict[str, torch.Tensor]:
        """The attainable errors."""
        sigma = self._spread.sigma
        return {n: tolerance.tolerance(least, sigma[n]) if n in sigma else least for n, least in self.floor.items()}

    def lost(self, name: str) -> torch.Tensor:
        """Where the reference gives a number in float64 and none in any of its randomly rounded runs: it is chance.

        Scores of 1e38 swallow the logarithm of their count, and whatever rounds them makes 0 or infinity of the
        difference.
        """
        return self._spread.lost[name]

    def unsure(self, name: str) -> torch.Tensor:
        """Where rounding decides whether a result of the reference is a number: the logarithm of 0 give or take."""
        return self._spread.unsure[name]

    @cached_property
    def _spread(self) -> Spread:
        return self.spread(self.runs)

    def scale_tolerance(self, name: str, dtype: torch.dtype, unit_inside: float, off: float) -> float:
        """How far from 1 the scale of a whole tensor may be that is stored in a dtype; less where `off` is within it.

        As with `floor`, the runs behind the spread are made where the cheap terms do not allow what is `off`.
        """
        want, eager = self.want[name], self.eager.get(name)
        assert want is not None
        own = tolerance.scale(eager, want) if eager is not None else math.nan
        least = tolerance.scale_tolerance(0.0, own, want, dtype, unit_inside)
        if off <= least:
            return least
        return tolerance.scale_tolerance(self._spread.scales.get(name, 0.0), own, want, dtype, unit_inside)

    def sum_tolerance(self, name: str, dim: int, dtype: str, *, spread: bool = True) -> torch.Tensor:
        """How far the sum of a gradient over a dimension may be off, rounding of its elements apart.

        Without its `spread` it is less, and takes no randomly rounded runs.
        """
        label, want, eager = kinks.summed(name, dim), self.want[name], self.eager.get(name)
        assert want is not None
        error = None if eager is None else (eager - want).sum(dim).abs()
        least = tolerance.floor(want.sum(dim), error, dtype)
        return tolerance.tolerance(least, self._spread.sums[label]) if spread else least

    def allowing(self, name: str, left: torch.Tensor | None) -> Truth:
        """The truth with a wider floor of one tensor."""
        return self if left is None else replace(self, floor=self.floor | {name: self.floor[name] + left})

    @cached_property
    def power(self) -> float:
        """Smallest relative error, uniform over a tensor, that would be seen in each of the tensors."""
        worst = 0.0
        for name, want in self.want.items():
            if want is not None and bool((want != 0).any()):
                shares = (self.tol[name] / want.abs())[(want != 0) & want.isfinite()]
                worst = max(worst, float(shares.min()) if shares.numel() else 0.0)
        return worst


def truth_of(
    reference: Reference, runs: int, order: DerivativeOrder = first_order, known: ExactRun | None = None
) -> Truth:
    """The truth by a reference at its case, with a tolerance from `runs` randomly rounded runs.

    Args:
        reference: what is right.
        runs: how many `tol` rests on.
        order: what is computed from the outputs.
        known: what exactly this reference gives in float64; it runs where that is None.

    Raises:
        NotApplicable: the reference refuses the case.
    """
    case = reference.case
    try:
        plain, exact = known or _exact(reference, order)
    except (SpecError, NotApplicable):
        raise
    except Exception as error:
        raise NotApplicable.by(error) from error
    if order is first_order:
        reference.note_exact(plain)
    reference = replace(reference, matrices=plain.matrices, elements=plain.elements)
    eager, stored = _eager(reference, order)
    floor: dict[str, torch.Tensor] = {}
    unit, _ = tolerance.units(case.dtype, reference.spec.compute)
    unit = max(unit, tolerance.TF32) if reference.tf32 else unit
    inputs = reference.inputs()
    stored |= _stored_inputs(inputs)
    terms = term_sizes(reference, exact if order is first_order else None, inputs)
    for name, want in exact.items():
        if want is not None:
            own = eager.get(name)
            error = None if own is None else (own - want).abs()
            least = tolerance.floor(want, error, stored.get(name, case.dtype))
            floor[name] = least + tolerance.cancelled(want, error, unit, terms.get(name))
        elif name in terms:  # no gradient is one of zeros
            floor[name] = tolerance.cancelled(torch.zeros_like(terms[name]), None, unit, terms[name])

    switches = frozenset(plain.switches)
    switches = frozenset() if kinks.cancel(switches, reference) else switches
    spreads = _Spreads(reference, order, exact, bool(switches))
    return Truth(exact, floor, stored, eager, plain.peak, switches, terms, spreads, runs)


def _exact(reference: Reference, order: DerivativeOrder) -> ExactRun:
    """The mode of a run in float64, and its results."""
    # What adding up meets is asked of finite extremes alone.
    finite = any(value not in extreme_values.UNTRACKED for _, value in reference.case.values)
    mode = reference.exactly(track=finite) if order is first_order else Float64(track=finite)
    return mode, detached(reference.run(torch.float64, mode, order))


def _stored_inputs(inputs: dict[str, Any]) -> dict[str, str]:
    """The dtypes that gradients are stored in, by name: those of their inputs."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    return {
        f"{order} {name}": str(value.dtype).removeprefix("torch.")
        for name, value in tensors.items()
        for order in ("grad", "second")
    }


def term_sizes(
    reference: Reference, exact: Results | None, inputs: dict[str, Any] | None = None
) -> dict[str, torch.Tensor]:
    """The size of what adds up to each gradient, that of grad_out * out / x: by element where x has out's shape."""
    inputs, gs = inputs or reference.inputs(), reference.grad_outs()
    known = [t for name, t in (exact or {}).items() if t is not None and not name.startswith("grad ")]
    outs = known if len(known) == len(gs) else [as_real(out) for out in reference.outputs().inexact.values()]
    products = [(as_real(g).double() * out).abs() for g, out in zip(gs, outs, strict=True)]
    whole = [_size(p) for p in products]
    total = sum(whole, torch.zeros((), dtype=torch.float64))
    sizes = {}
    # Where functions level off at huge values, what cancels there is as large as at ordinary ones.
    ordinary = reference.ordinary() if reference.case.values else {}
    for name in make.differentiable(reference.spec, inputs):
        label, value = f"grad {name}", inputs[name]
        altered = name in ordinary and not torch.equal(ordinary[name], value)  # mostly one input is
        for x in (as_real(v).double().abs() for v in ((ordinary[name], value) if altered else (value,))):
            alike = [p if p.shape == x.shape else size for p, size in zip(products, whole, strict=True)]
            each = (sum(alike) / x).nan_to_num_(0.0, 0.0, 0.0)
            every = torch.maximum(each, (total / _size(x)).nan_to_num_(0.0, 0.0, 0.0))
            sizes[label] = torch.maximum(sizes[label], every) if label in sizes else every
        if exact is not None:  # of the outputs and their gradients, so nothing asks for more
            continue
        sizes[f"second {name}"] = (4 * sizes[label] / x).nan_to_num(0.0, 0.0, 0.0)  # 4 sigma of its random u
        for i, out in enumerate(outs):
            per_x = out.abs() / x if out.shape == x.shape else _size(out) / _size(x).expand_as(out)
            label = f"second grad_out {i}"
            sizes[label] = sizes.get(label, 0.0) + 4 * per_x.nan_to_num(0.0, 0.0, 0.0)
    return sizes


def _size(t: torch.Tensor) -> torch.Tensor:
    """Root of the mean square of what is finite."""
    return t.nan_to_num(0.0, 0.0, 0.0).square().sum().div(max(t.numel(), 1)).sqrt()


class _Spreads:
    """Spreads of random rounding, called with the runs they rest on: those of fewer are among those of more."""

    def __init__(self, reference: Reference, order: DerivativeOrder, exact: Results, switches: bool) -> None:
        self._reference, self._order, self._switches = reference, order, switches
        self._results = exact
        self._exact = {name: t for name, t in exact.items() if t is not None}
        self._known: dict[int, Spread] = {}
        self._done = 0

    def _begin(self) -> None:
        """Have nothing added up; most spreads are never asked for."""
        # Without a kink nobody asks for sums.
        self._exact_sums = kinks.sums(self._results) if self._switches else {}
        self._squares = {name: torch.zeros_like(t) for name, t in self._exact.items()}
        self._scales = dict.fromkeys(self._squares, 0.0)
        self._sums = {name: torch.zeros_like(t) for name, t in self._exact_sums.items()}
        self._lost = {name: t.isfinite() for name, t in self._exact.items()}
        self._unsure = {name: torch.zeros_like(t, dtype=torch.bool) for name, t in self._exact.items()}

    def __call__(self, runs: int) -> Spread:
        if runs not in self._known and runs < self._done:
            return _Spreads(self._reference, self._order, self._results, self._switches)(runs)
        for edge in (*(n for n in tolerance.CONFIRMING if self._done < n < runs), runs):
            self._add(edge)
        return self._known[runs]

    def _add(self, runs: int) -> None:
        """More runs, until there are so many."""
        if runs in self._known:
            return
        if not self._done:
            self._begin()
        reference = self._reference
        unit, accumulate = tolerance.units(reference.case.dtype, reference.spec.compute)
        try:
            numbers = range(self._done, runs)
            for results in rounded_runs(reference, self._results, unit, accumulate, numbers, self._order):
                self._add_runs(results)
        except Exception as error:
            raise NotApplicable.by(error, "the reference, rounded,") from error
        self._done, count = runs, max(runs, 1)
        self._known[runs] = Spread(
            {name: (total / count).sqrt() for name, total in self._squares.items()},
            {name: math.sqrt(total / count) for name, total in self._scales.items()},
            {name: (total / count).sqrt() for name, total in self._sums.items()},
            {name: lost & bool(runs) for name, lost in self._lost.items()},
            {name: unsure.clone() for name, unsure in self._unsure.items()},
        )

    def _add_runs(self, runs: Results) -> None:
        for name, want in self._exact.items():
            t = runs.get(name)
            if t is None:
                self._lost[name] &= False
                continue
            squares = (t.detach() - want).square_()
            total = squares.sum(0)
            if math.isfinite(float(total.sum())):  # so is every number in either
                self._lost[name] &= False
            else:
                finite = t.isfinite()
                self._lost[name] &= ~finite.any(0)
                self._unsure[name] |= (finite != want.isfinite()).any(0)
                total = squares.nan_to_num_(0.0).sum(0)
            self._squares[name] += total
            off = tolerance.scales(t.detach(), want) - 1
            self._scales[name] += float(off.square().nan_to_num_(0.0).sum())
        for name, t in kinks.sums(runs, 1).items() if self._switches else ():
            self._sums[name] += (t - self._exact_sums[name]).square_().nan_to_num_(0.0).sum(0)


def _eager(reference: Reference, order: DerivativeOrder) -> tuple[Results, dict[str, str]]:
    """The reference in the op's own precision, as float64, and the dtypes that it gave; empty without a kernel."""
    dtype, compute = reference.case.dtype, reference.spec.compute
    wider = bool(compute) and dtype in ("float16", "bfloat16")
    results: Results = {}
    with may_refuse():  # "not implemented for 'Half'": the spread alone must do
        own_dtype = real_dtype(make.torch_dtype(compute if compute and wider else dtype))
        with Tf32Factors(elementwise=not reference.matrices) if reference.tf32 else nullcontext():
            results = reference.run(own_dtype, None, order)
    if not results:
        return {}, {}
    dtypes = {name: t.dtype for name, t in results.items() if t is not None}
    if wider:  # what it computes in is not what it stores
        own = reference.own_outputs()
        dtypes = {name: out.dtype for name, out in own.inexact.items()} if own else {}
    names = {name: str(kind).removeprefix("torch.") for name, kind in dtypes.items()}
    return {name: None if t is None else t.detach().double() for name, t in results.items()}, names


@dataclass
class Oracle:
    """Truths and kinks of the cases tried so far, by the op's reference; `noise_runs` is the level's number of them."""

    runner: OpRunner
    noise_runs: int
    _truths: dict[Any, dict[int, Truth]] = field(default_factory=dict)
    _without_tf32: dict[Case, Truth] = field(default_factory=dict)
    _intervals: dict[tuple[Case, bool], kinks.KinkInterval] = field(default_factory=dict)

    def truth(
        self, case: Case, runs: int | None = None, order: DerivativeOrder = first_order, *, apart: bool = False
    ) -> Truth:
        """The float64 truth of a case with its attainable errors (section "Tolerance" of the docs).

        `apart`: as in `Float64`, of an op that multiplies in tf32.
        """
        count = self.noise_runs if runs is None else runs
        known = self._truths.setdefault((without_strides(case), order, self.runner.tf32, apart), {})
        if count not in known:
            other = next(iter(known.values()), None)
            known[count] = replace(other, runs=count) if other else self._truth(case, count, order, apart)
        return known[count]

    def without_tf32(self, case: Case) -> Truth:
        """The truth of a case with the errors that it has where products of float32 are computed in float32."""
        if (key := without_strides(case)) not in self._without_tf32:
            reference = replace(self.runner.reference(case), tf32=False)
            self._without_tf32[key] = truth_of(reference, self.noise_runs)
        return self._without_tf32[key]

    def _truth(self, case: Case, runs: int, order: DerivativeOrder, apart: bool) -> Truth:
        reference = replace(self.runner.reference(case), apart=apart)
        known = None
        with may_refuse():  # as the run does that is made instead
            known = self.runner.exact_run(case) if order is first_order else None
        return truth_of(reference, runs, order, known)

    def interval(self, case: Case, *, apart: bool = False) -> kinks.KinkInterval:
        """The interval of right results at a case, and which elements are at a kink; `apart` as in `kinks.interval`.

        NotApplicable where the reference refuses what rounding makes of the case, as where an index leaves its range.
        """
        key = without_strides(case), apart
        if key not in self._intervals:
            reference, terms = self.runner.reference(key[0]), self.truth(key[0]).terms
            try:
                self._intervals[key] = kinks.interval(reference, terms, apart=apart)
            except (SpecError, NotApplicable):
                raise
            except Exception as error:
                raise NotApplicable.by(error, "the reference, rounded,") from error
        return self._intervals[key]
