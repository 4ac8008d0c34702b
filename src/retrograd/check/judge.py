"""Judge: findings from what the op gave and the truth, and whether two runs of it gave the same."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from retrograd.check import kinks, tolerance
from retrograd.check.alarms import Alarms
from retrograd.check.layouts import REPEATING
from retrograd.check.levels import repeats_for_noise
from retrograd.check.op_runner import OpRun, OpRunner, same_bits
from retrograd.check.oracle import Oracle, Truth
from retrograd.check.own_mistakes import may_refuse
from retrograd.check.reference import DerivativeOrder, Results, first_order
from retrograd.check.schema import Case, Finding
from retrograd.check.tensor_comparison import (
    LazyProfile,
    TensorComparison,
    compare_stored,
    first_index,
    missing_or_misshapen,
    profile,
    without,
)
from retrograd.errors import UndecidedError


@dataclass
class Judge:
    """Compares runs of an op with the oracle's truth, and with each other.

    Attributes:
        runner, oracle: of the op in one dtype.
        remarks: what was let pass in the present case, in words.
        doubts: what nobody can tell there, in words.
        worst: by tensor, of what the present stage has judged.
        compared: names of what it has held against the truth.
        alarms: confirms what is out.
    """

    runner: OpRunner
    oracle: Oracle
    remarks: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)
    compared: dict[str, None] = field(default_factory=dict)
    _noisy: bool | None = None

    def __post_init__(self) -> None:
        self.alarms = Alarms(self.runner, self.oracle)

    def begin_case(self, told: Sequence[Finding] = ()) -> None:
        """Forget what was let pass in the case before; `told` are the worst of the stage's faults so far."""
        self.remarks.clear()
        self.doubts.clear()
        self.alarms.told = {f.tensor: f.excess or 0.0 for f in told if f.kind == "wrong-value"}

    def against_truth(
        self,
        case: Case,
        run: OpRun,
        excused: dict[str, torch.Tensor] | None = None,
        order: DerivativeOrder = first_order,
        noise_runs: int | None = None,
    ) -> tuple[list[Finding], list[LazyProfile]]:
        """Compare a run with the truth; an alarm is confirmed with many more noise runs before it counts.

        `excused` has masks of elements that do not count; `order` is what the run's results are; `noise_runs` the
        number of noise runs before an alarm, if not the level's.
        """
        truth = self.oracle.truth(case, noise_runs, order)
        findings, profiles = list[Finding](), list[LazyProfile]()
        ordinary = order is first_order and not case.values
        for name, got in {**run.outs, **run.grads}.items():
            want, least = truth.want.get(name), truth.floor.get(name)
            if want is None and got is not None and least is not None and bool((got.detach().abs() <= least).all()):
                continue  # no gradient is one of zeros, and what is left of terms that cancel
            if got is None or want is None or got.shape != want.shape:
                findings += missing_or_misshapen(case, name, got, want)
                continue
            mask, right = None if excused is None else excused.get(name), want
            if not case.values and not tolerance.moderate(want, got.dtype):
                mask = self._undefined(case, name, got, want)
            got, want = (got, want) if mask is None else without(mask, got, want)
            self.compared |= dict.fromkeys([name] * bool(got.numel()))
            comparison, used = compare_stored(got, want, truth.floor[name], truth.stored.get(name, case.dtype)), truth
            if comparison.wrong:
                got, want = self._without_unsure(case, name, got, want, order)
                comparison, used = self._confirmed(case, name, got, want, truth, order)
            if comparison.wrong and self._by_luck(case, name, right, used):
                continue
            if got.numel() and comparison.worst > self.worst.get(name, -1.0):  # only the worst of a stage is drawn
                self.worst[name] = comparison.worst
                draw = partial(profile, name, got, want, comparison, case)
                profiles.append(LazyProfile(name, comparison.worst, draw))
            if comparison.wrong:
                remark = self._at_kinks(case, name, got, truth.tol[name], comparison) if order is first_order else ""
                if not remark:
                    factor = self._scale(case, name, got, want, truth) if ordinary and self._little(comparison) else []
                    findings += factor or self._value(case, name, comparison, used)
                    continue
                self.remarks.append(remark)
            elif ordinary:
                findings += self._scale(case, name, got, want, truth)
            if order is first_order and name.startswith("grad ") and truth.switches:
                findings += self.sums(case, name, got, want, used.floor[name])
        return findings + self._exact(case, run), profiles

    def _confirmed(
        self, case: Case, name: str, got: torch.Tensor, want: torch.Tensor, truth: Truth, order: DerivativeOrder
    ) -> tuple[TensorComparison, Truth]:
        confirmed = self.alarms.confirmed(case, name, got, want, truth, order)
        self.remarks += [confirmed.remark] * bool(confirmed.remark)
        return confirmed.result, confirmed.truth

    def _little(self, comparison: TensorComparison) -> bool:
        return comparison.worst <= tolerance.ALGORITHM and self.runner.spec.algorithm_error is None

    def _value(self, case: Case, name: str, comparison: TensorComparison, truth: Truth) -> list[Finding]:
        """The finding for values that are out, if nothing explains them."""
        explained = self.another_algorithm(case, name, comparison.worst)
        return [] if explained else [_wrong_value(case, name, comparison, truth)]

    def _by_luck(self, case: Case, name: str, want: torch.Tensor, truth: Truth) -> bool:
        """Whether repeated rows made a matrix singular, and float64 alone has a result: rounding may make it any."""
        repeats = any(layout in REPEATING for _, layout in case.layouts)
        finite = want.isfinite()  # elsewhere even float64 has none
        if not repeats or not tolerance.no_digit_left(truth.tol[name][finite], want[finite]):
            return False
        self.remarks.append(f"{name} not judged at {case.text()}: one rounding changes it by more than its size")
        return True

    def another_algorithm(self, case: Case, name: str, worst: float) -> bool:
        """Whether an excess is within what the op states of its algorithm, or so small that nobody can tell."""
        stated = self.runner.spec.algorithm_error
        if stated is not None:
            return worst <= stated
        text = f"{name} is {worst:.2g} times the attainable error off at {case.text() or 'the given inputs'}"
        if worst <= tolerance.ALGORITHM and case.values:  # extreme values are there for what breaks
            self.remarks.append(f"{text} in {case.dtype}")
        elif worst <= tolerance.ALGORITHM:
            self.doubts.append(
                f"{text} in {case.dtype}: a small mistake, or another algorithm than the reference's; if it is one, "
                f"state its constant, algorithm_error={math.ceil(worst)}, else mend it"
            )
        else:
            return False
        return True

    def sums(self, case: Case, name: str, got: torch.Tensor, want: torch.Tensor, tol: torch.Tensor) -> list[Finding]:
        """The finding for a gradient that shares out at a kink what is not there, or less: see `kinks.sums`.

        Each of its elements may be between the one-sided derivatives. Only elements further off than `tol`, which holds
        no spread of random rounding, count.
        """
        findings = self._sums(case, name, got, want, tol)
        if not findings or (run := self.runner.with_exact_factors(case)) is None:
            return findings
        exact = run.tensors.get(name)
        if exact is None or self._sums(case, name, exact.to(want.device), want, tol):
            return findings
        return self._sums(case, name, got, want, tol, apart=True)  # as of a single element, see alarms.py

    def _sums(
        self, case: Case, name: str, got: torch.Tensor, want: torch.Tensor, tol: torch.Tensor, *, apart: bool = False
    ) -> list[Finding]:
        value = got.detach().double()
        off = torch.where(value.isfinite() & want.isfinite(), value - want, 0.0)
        beyond = off.abs() > tol
        if not bool(beyond.any()):
            return []
        off, stored = torch.where(beyond, off, 0.0), tolerance.unit(got.dtype) * (value.abs() + want.abs())
        for dim in (dim for dim in range(got.ndim) if got.shape[dim] > 1):  # of one element the sum is that element
            total = off.sum(dim).abs()
            allowed = torch.where(beyond, stored, tol).nan_to_num(math.inf, math.inf).sum(dim)
            wider = allowed + self.oracle.truth(case).sum_tolerance(name, dim, case.dtype, spread=False)
            if not bool((total > tolerance.ALGORITHM * wider).any()):
                continue
            for runs in (self.oracle.noise_runs, *self.alarms.confirming):
                truth = self.oracle.truth(case, runs, apart=apart)
                wider = allowed + truth.sum_tolerance(name, dim, case.dtype)
                ratio = (total / wider).nan_to_num(0.0)
                if not bool((ratio > tolerance.ALGORITHM).any()):
                    break
            else:
                ratio = ratio * self._agreed(case, kinks.summed(name, dim), wider)
                if bool((ratio > tolerance.ALGORITHM).any()):
                    return [_wrong_sum(case, name, dim, value, want, ratio)]
        return []

    def _agreed(self, case: Case, label: str, allowed: torch.Tensor) -> torch.Tensor:
        """Where all sides of a kink agree on a sum to within what is allowed; nowhere if they cannot be had."""
        interval = None
        with may_refuse():  # points beside the case
            interval = self.oracle.interval(case)
        if interval is None or label not in interval.at:
            return torch.zeros_like(allowed)
        apart = interval.high[label] - interval.low[label]
        return (~interval.at[label] & (apart <= allowed + 2 * interval.drift[label])).to(allowed)

    def _scale(self, case: Case, name: str, got: torch.Tensor, want: torch.Tensor, truth: Truth) -> list[Finding]:
        """The finding for a tensor whose elements are all off by one factor, each by little beside its own rounding.

        Another algorithm has errors of its own, and no factor that all elements share.
        """
        sizes = want.abs()
        normal = sizes >= torch.finfo(got.dtype).tiny  # below it a dtype has few digits, or none
        if name in truth.terms:  # what float64 leaves of terms that cancel has none either
            normal &= sizes > tolerance.ZERO * truth.terms[name]
        if not bool(normal.all()):
            want, got = torch.where(normal, want, 0.0), torch.where(normal, got.detach(), torch.zeros_like(got))
        factor = tolerance.scale(got, want)
        inside, _ = tolerance.units(case.dtype, self.runner.spec.compute)
        inside = max(inside, tolerance.TF32) if self.runner.tf32 else inside
        off = abs(factor - 1)
        least = truth.scale_tolerance(name, got.dtype, inside, off) if off > 2**-12 else 1.0
        if not off > least:
            return []
        message = (
            f"{name} is {factor:.4g} times what it should be, over all of its {got.numel()} elements: rounding leaves "
            f"{least:.1e} of that, though each element alone may be rounding, or nearly so"
        )
        excess = off / least
        return [Finding.of("wrong-scale", message, case, tensor=name, got=factor, want=1.0, excess=excess)]

    def _exact(self, case: Case, run: OpRun) -> list[Finding]:
        """Findings for whole numbers and truth values, which are right or wrong; not where rounding decides them."""
        findings = list[Finding]()
        if not run.exact or case.values:
            return findings
        reference = self.runner.reference(case)
        exact = reference.outputs().exact
        for name, got in run.exact.items():
            want = exact.get(name)
            if want is None or want.shape != got.shape:
                findings += missing_or_misshapen(case, name, got, want)
                continue
            self.compared[name] = None
            off = got != want.to(got.device)
            if bool(off.any()):
                for other in reference.rounded_exactly(name):
                    off &= (other == want).to(off.device)
            if bool(off.any()):
                index = first_index(off)
                a, b, count = float(got[index]), float(want[index]), int(off.sum())
                message = f"{name}{list(index)} is {a:g}, expected {b:g} ({count} of {off.numel()} elements are out)"
                more = dict(index=index, got=a, want=b, wrong=count, total=off.numel())
                findings.append(Finding.of("wrong-value", message, case, name, **more))
        return findings

    def _at_kinks(
        self, case: Case, name: str, got: torch.Tensor, tol: torch.Tensor, comparison: TensorComparison
    ) -> str:
        """A remark if every element that is out is at a kink or jump, and between what its sides give; else ""."""
        if not got.numel() or not self.oracle.truth(case).switches:
            return ""
        for apart in (False, True):
            interval = None
            with may_refuse():  # points beside the case: then it stays with the tolerance
                interval = self.oracle.interval(case, apart=apart)
            if interval is None or name not in interval.at:
                return ""
            accepted = interval.at[name] & (interval.outside(name, got) <= tol)
            if bool(accepted[comparison.ratio > 1].all()):
                break
            if not bool(interval.at[name][comparison.ratio > 1].all()):
                return ""
        else:
            return ""
        places, sides = "kinks", "both one-sided derivatives"
        if not name.startswith("grad "):
            places, sides = "jumps", "the values of both sides"
        return (
            f"{comparison.wrong} of {got.numel()} elements of {name} are at {places} of the forward, such as "
            f"{list(comparison.index)} at {case.text() or 'the given inputs'}; there {sides} are accepted"
        )

    def _undefined(self, case: Case, name: str, got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
        """Where the reference makes NaN of ordinary values and the op something else: nobody can say what is right.

        Raises:
            UndecidedError: most of the tensor is such, at the ordinary case.
        """
        at = case.text() or "the given inputs"
        if case == self.runner.base and 2 * int(want.isnan().sum()) > want.numel():
            raise UndecidedError(
                f"the reference of {self.runner.spec.name} makes NaN in {name} at {at}; "
                "narrow the inputs (low=, high=, sizes=) or mend the reference"
            )
        repeats = any(layout in REPEATING for _, layout in case.layouts)  # equal rows make a matrix singular
        mask = (~want.isfinite() if repeats else want.isnan()) | want.isfinite() & tolerance.overflows(want, got.dtype)
        mask = mask & (got.detach() != want) & ~(got.isnan() & want.isnan())
        if count := int(mask.sum()):
            self.remarks.append(
                f"{count} elements of {name} not judged at {at}: the reference is beyond what {got.dtype} has"
            )
        return mask

    def _without_unsure(
        self, case: Case, name: str, got: torch.Tensor, want: torch.Tensor, order: DerivativeOrder
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both, equal where one has a number and the other none, and rounding decides which."""
        mask = numberless = got.detach().isfinite() != want.isfinite()
        if not bool(numberless.any()):
            return got, want
        for runs in (self.oracle.noise_runs, *self.alarms.confirming):
            mask = numberless & self.oracle.truth(case, runs, order).unsure(name)
            if bool(mask[numberless].all()):
                break
        if count := int(mask.sum()):
            self.remarks.append(
                f"{count} elements of {name} not judged at {case.text() or 'the given inputs'}: one rounding of the "
                "reference's own formula decides whether they are numbers"
            )
        return without(mask, got, want)

    def noisy(self, case: Case) -> bool:
        """Whether the op differs from itself run to run on this case, once per verify; so it does if it says so."""
        if self._noisy is None:
            first = self.runner.run(case)
            again = (self.runner.run(case) for _ in range(repeats_for_noise(self.runner.device)))
            promised = self.runner.spec.deterministic is False
            self._noisy = promised or any(run.first_difference(first) for run in again)
        return self._noisy

    def changed(self, case: Case, got: OpRun, want: OpRun) -> str:
        """Name of a tensor that is not what it is in `want`, a run of the same case, by more than the op promises.

        Any bit counts if it promises its bits; without a reference also where repeats show no noise. Elsewhere bits
        are no evidence, however many repeats had the same: atomics meet in another order on another stream, or when
        another process has the GPU. Then the truth decides, if the op is right at all.
        """
        name = got.first_difference(want)
        if not name or self.runner.spec.deterministic:
            return name
        if self.runner.spec.reference is None:
            return "" if self.noisy(case) else name
        if self.against_truth(case, want)[0]:
            return self.clearly_changed(got.tensors, want.tensors)
        findings, _ = self.against_truth(case, got)
        return findings[0].tensor if findings else ""

    def clearly_changed(
        self, got: Results, want: Results, added: Mapping[str, tuple[float, float]] | None = None
    ) -> str:
        """Name of a tensor that is another where there is no truth to ask: by any bit if the op promises its bits.

        Else in the first half of its digits, which the order of a sum does not reach and other data does. Of a tensor
        that was added up `added` has the size of what was, and of what terms that had cancelled may leave.
        """
        for name, a in got.items():
            b = want.get(name)
            if same_bits(a, b):
                continue
            largest, left = (added or {}).get(name, (0.0, 0.0))
            promised = self.runner.spec.deterministic and name not in (added or {})
            if promised or a is None or b is None or a.shape != b.shape:
                return name
            slack = tolerance.half_the_digits(self.runner.dtype, b, largest, left)
            if not bool(((a - b).abs() <= slack).logical_or(a.isnan() & b.isnan()).all()):
                return name
        return ""


def _wrong_sum(
    case: Case, name: str, dim: int, value: torch.Tensor, want: torch.Tensor, ratio: torch.Tensor
) -> Finding:
    """The finding for the sum of a gradient over a dimension that is furthest out."""
    sums = TensorComparison(ratio, value.sum(dim), want.sum(dim), float(ratio.max()))
    at = list(sums.index) if sums.index else ""
    message = (
        f"{kinks.summed(name, dim)}{at} is {sums.got:.6g}, expected {sums.want:.6g}: at a kink each element may "
        "be what either side has, but both sides have this sum, as where equal maxima share a gradient"
    )
    return sums.finding("beyond-kink", message, case, name)


def _wrong_value(case: Case, name: str, comparison: TensorComparison, truth: Truth) -> Finding:
    """The finding for a tensor with elements out of tolerance, by its worst one."""
    least, tol = (float(bound[name][comparison.index]) for bound in (truth.floor, truth.tol))
    terms = tolerance.terms(comparison.want, least, tol, case.dtype)
    return comparison.finding("wrong-value", comparison.text(name), case, name, terms=terms)
