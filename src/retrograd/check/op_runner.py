"""Runs the op and its reference on cases, and keeps what was computed: the one thing every stage works with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from retrograd.check import extreme_values, kinks, tolerance
from retrograd.check import inputs as make
from retrograd.check.compare import Sketch, compare, profile
from retrograd.check.layouts import REPEATING, lay_out, repeat_values
from retrograd.check.oracle import (
    NotApplicable,
    OpRaised,
    Order,
    Results,
    Truth,
    first_order,
    grads_of,
    make_truth,
    out_names,
)
from retrograd.check.rounding import Float64
from retrograd.check.schema import Case, Finding
from retrograd.check.seeds import derive
from retrograd.check.spec import OpSpec
from retrograd.check.tensor_findings import at_kinks, misfit, wrong_value
from retrograd.errors import InterpreterError, SpecError


@dataclass
class Trial:
    """One forward and backward: results by name ("out" or "out0".., "grad x"), and what went in."""

    outs: dict[str, torch.Tensor]
    grads: dict[str, torch.Tensor | None]
    inputs: dict[str, Any]
    grad_outs: list[torch.Tensor]

    @property
    def tensors(self) -> dict[str, torch.Tensor | None]:
        """Outputs and gradients together."""
        return {**self.outs, **self.grads}

    def copy(self) -> Trial:
        """The same results in memory of their own; inputs and grad_outs are shared."""
        outs = {k: t.clone() for k, t in self.outs.items()}
        grads = {k: None if t is None else t.clone() for k, t in self.grads.items()}
        return Trial(outs, grads, self.inputs, self.grad_outs)

    def same_bits(self, other: Trial) -> str:
        """Name of the first tensor whose bits differ from the other trial's; "" if none."""
        return next((k for k, v in self.tensors.items() if not same_bits(v, other.tensors.get(k))), "")


@dataclass(frozen=True)
class Budget:
    """How much of everything a level does."""

    noise_runs: int
    repeats: int
    draws: int
    shapes: int


_KEPT = 8  # cases whose values are kept
BUDGETS = {"quick": Budget(6, 20, 1, 9), "full": Budget(8, 60, 3, 40)}


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether two tensors are equal bit for bit (NaN equals NaN, +0 is not -0 only where a sign can matter)."""
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


def as_tuple(result: Any, spec: OpSpec, who: str) -> tuple[Any, ...]:
    """The tensors an op returned; SpecError if it returned something else."""
    out = result if isinstance(result, (tuple, list)) else (result,)
    if not out or not all(isinstance(t, torch.Tensor) for t in out):
        kinds = [type(t).__name__ for t in out]
        raise SpecError(f"{who} of {spec.name} returned {kinds}; expected a tensor or a tuple of tensors")
    return tuple(out)


@dataclass
class Graph:
    """A forward that waits for its backward, which may run more than once."""

    outs: list[torch.Tensor]
    inputs: dict[str, Any]
    names: list[str]
    grad_outs: list[torch.Tensor]

    def backward(self, root: int | None = None) -> Trial:
        """The backward from all outputs, or from the one with index `root`; OpRaised if it raises."""
        used = slice(None) if root is None else slice(root, root + 1)
        try:
            grads = grads_of(self.outs[used], [self.inputs[n] for n in self.names], self.grad_outs[used])
        except InterpreterError:
            raise
        except Exception as error:
            raise OpRaised.at("backward", error) from error
        named = dict(zip(out_names(len(self.outs)), self.outs, strict=True))
        return Trial(
            {k: v.detach() for k, v in named.items()},
            {f"grad {n}": g for n, g in zip(self.names, grads, strict=True)},
            self.inputs,
            self.grad_outs,
        )


@dataclass
class Workbench:
    """The op, its reference and everything known about the cases tried so far, for one dtype."""

    spec: OpSpec
    dtype: str
    seed: int
    device: str
    budget: Budget
    level: str
    override: Case | None = None
    runs: int = 0
    _truths: dict[Any, dict[int, Truth]] = field(default_factory=dict)
    _grad_outs: dict[Any, list[torch.Tensor]] = field(default_factory=dict)
    _drawn: dict[Case, dict[str, Any]] = field(default_factory=dict)
    _placed: dict[Any, torch.Tensor] = field(default_factory=dict)
    _hulls: dict[Any, kinks.Hull] = field(default_factory=dict)
    noise: bool | None = None  # whether the op differs from itself, once asked
    remarks: list[str] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)  # by tensor, of what the present stage has judged
    launches: dict[Any, Any] = field(default_factory=dict)  # remembered ones of interpreted kernels
    dtypes: tuple[str, ...] = ()  # all that are verified

    @property
    def interpreted(self) -> bool:
        """Whether the op has run kernels in Triton's interpreter, where one run takes tens of milliseconds."""
        return bool(self.launches)

    @property
    def base(self) -> Case:
        """The ordinary case."""
        return make.base_case(self.spec, self.dtype)

    def cases(self, wanted: Sequence[Case]) -> list[Case]:
        """The cases to run: those a stage wants, or the one the user named."""
        return [self.override] if self.override else list(wanted)

    def inputs(self, case: Case) -> dict[str, Any]:
        """Fresh inputs of a case, by name."""
        made = make.place(self._draw(case.but(layouts=())), case, self.device)
        for name, held in case.values:
            if held == extreme_values.KINK and self.spec.reference is not None:
                key = (self.numbers(case), name)
                if key not in self._placed:
                    self._placed[key] = kinks.place(self, self.numbers(case).but(values=()), name)
                made[name] = lay_out(self._placed[key].clone(), case.layout(name))
        return made

    def _draw(self, case: Case) -> dict[str, Any]:
        """The values of a case, kept for the last few cases: a case is run some ten times."""
        if self.spec.tensor_specs is None:  # a callable may give what an op changes, such as a list
            return make.draw(self.spec, case, self.seed)
        if case not in self._drawn:
            if len(self._drawn) >= _KEPT:
                del self._drawn[next(iter(self._drawn))]
            self._drawn[case] = make.draw(self.spec, case, self.seed)
        return self._drawn[case]

    def differentiable(self, inputs: dict[str, Any]) -> list[str]:
        """Names of the inputs a gradient is asked for."""
        return make.differentiable(self.spec, inputs)

    def hull(self, case: Case) -> kinks.Hull:
        """The interval of right gradients at a case and which elements are at a kink."""
        key = self.numbers(case)
        if key not in self._hulls:
            self._hulls[key] = kinks.hull(self, key)
        return self._hulls[key]

    def numbers(self, case: Case) -> Case:
        """The case without the layouts that leave its numbers as they are: what a truth depends on."""
        return case.but(layouts=tuple((k, v) for k, v in case.layouts if v in REPEATING))

    def _call(self, fn: Callable[..., Any], inputs: dict[str, Any], case: Case) -> Any:
        return fn(*inputs.values(), **dict(case.params))

    def reference_run(
        self,
        case: Case,
        dtype: torch.dtype,
        mode: Float64 | None = None,
        order: Order = first_order,
        shift: dict[str, torch.Tensor] | None = None,
    ) -> Results:
        """What `order` makes of the reference with inputs in `dtype`, moved by `shift` where that names them."""
        spec = self.spec
        assert spec.reference is not None
        inputs = self.inputs(self.numbers(case))
        names = make.differentiable(spec, inputs)
        for name, value in inputs.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value = value.contiguous().to(dtype)
                value = value + shift[name] if shift is not None and name in shift else value
                if mode is not None and mode.unit and mode.inputs:
                    value = value * (1 + mode.unit * mode.noise(value))
                inputs[name] = value.detach().requires_grad_(name in names)
        gs = [g.to(dtype).contiguous() for g in self.grad_outs(case)]
        if mode is not None and mode.grad_outs:
            gs = [g * (1 + mode.unit * mode.noise(g)) for g in gs]
        # Fused attention hides its softmax from the mode, the composite form does not. The run in the op's own
        # precision keeps what PyTorch would choose: the fused form cancels differently (one key: dq is not quite 0).
        backend = contextlib.nullcontext() if mode is None else sdpa_kernel(SDPBackend.MATH)
        with backend, mode or contextlib.nullcontext():
            outs = as_tuple(self._call(spec.reference, inputs, case), spec, "`reference`")
            outs = tuple(o for o in outs if o.is_floating_point())
            return order(self, case, list(outs), {n: inputs[n] for n in names}, gs)

    def rounded_run(
        self, case: Case, unit: float, accumulate: float, seed: int, order: Order = first_order,
        *, inputs: bool = True, grad_outs: bool = False,
    ) -> Results:  # fmt: skip
        """`reference_run` in float64 with random rounding; arguments as in `Float64`.

        Inputs stay exact where the reference refuses what comes of rounding them, as at the edge of their range.
        """
        try:
            mode = Float64(unit, accumulate, seed, self.device, inputs=inputs, grad_outs=grad_outs)
            return self.reference_run(case, torch.float64, mode, order)
        except Exception:
            if not inputs:
                raise
        mode = Float64(unit, accumulate, seed, self.device, inputs=False, grad_outs=grad_outs)
        return self.reference_run(case, torch.float64, mode, order)

    def grad_outs(self, case: Case) -> list[torch.Tensor]:
        """grad_out per floating output: noise plus half of the normalised output, so that projections count."""
        key = self.numbers(case).but(values=())  # a huge or lost value asks the same of the backward
        if key not in self._grad_outs:
            outs = self._forward_shapes(key)
            made = []
            for i, out in enumerate(outs):
                gen = torch.Generator().manual_seed(derive(self.seed, "grad_out", i, key.draw))
                wide = out.detach().to("cpu", torch.float64)
                size = wide.square().mean().sqrt().clamp_min(1e-30) if wide.numel() else 1.0
                g = torch.randn(out.shape, generator=gen, dtype=torch.float64) + 0.5 * (wide / size)
                g = g.nan_to_num(0.0, 0.0, 0.0).to(make.torch_dtype(self.dtype)).to(out.device)
                made.append(repeat_values(g, key.layout("grad_out")))
            self._grad_outs[key] = made
        layout = case.layout("grad_out")
        return [lay_out(g.clone(), layout) for g in self._grad_outs[key]]

    def changed(
        self, case: Case, grad_outs: list[torch.Tensor], reference: Callable[..., Any] | None = None
    ) -> Workbench:
        """This workbench with other grad_outs at a case, given without a layout, and perhaps another reference.

        The inputs stay what they are; no truth that is known here is known there.
        """
        spec = self.spec if reference is None else replace(self.spec, reference=reference)
        other = replace(self, spec=spec, _truths={}, _hulls={}, _grad_outs={})
        other.set_grad_outs(case, grad_outs)
        return other

    def set_grad_outs(self, case: Case, given: list[torch.Tensor]) -> None:
        """Use these instead of generated ones for a case."""
        self._grad_outs[self.numbers(case).but(values=())] = [g.detach() for g in given]

    def _forward_shapes(self, case: Case) -> list[torch.Tensor]:
        inputs = self.inputs(case)
        if self.spec.reference is None:
            return [o for o in self.forward(case, inputs) if o.is_floating_point()]
        for name, value in inputs.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                inputs[name] = value.double()
        try:
            with torch.no_grad(), Float64():
                outs = as_tuple(self._call(self.spec.reference, inputs, case), self.spec, "`reference`")
        except SpecError:
            raise
        except Exception as error:
            raise NotApplicable(f"the reference raises {type(error).__name__}: {error}") from error
        return [o for o in outs if o.is_floating_point()]

    def forward(self, case: Case, inputs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        """Call the op; OpRaised if it raises."""
        self.runs += 1
        try:
            result = self._call(self.spec.fn, inputs, case)
        except InterpreterError:
            raise
        except Exception as error:
            raise OpRaised.at("forward", error) from error
        return as_tuple(result, self.spec, "`fn`")

    def open(
        self, case: Case, *, inputs: dict[str, Any] | None = None, grad_outs: list[torch.Tensor] | None = None,
        only: Sequence[str] | None = None,
    ) -> Graph:  # fmt: skip
        """A forward of the op whose backward has not run; OpRaised if it raises or has other shapes than the reference.

        Args:
            case: what to run.
            inputs: instead of the case's own; the differentiable ones are made to require a gradient.
            grad_outs: instead of the case's own.
            only: names of the inputs that require a gradient; None for all differentiable ones.
        """
        gs = self.grad_outs(case) if grad_outs is None else grad_outs
        inputs = self.inputs(case) if inputs is None else inputs
        names = [n for n in make.differentiable(self.spec, inputs) if only is None or n in only]
        for name in names:
            inputs[name].requires_grad_()
        floats = [o for o in self.forward(case, inputs) if o.is_floating_point()]
        got, want = [tuple(o.shape) for o in floats], [tuple(g.shape) for g in gs]
        if got != want:
            raise OpRaised(f"outputs have shapes {got}, the reference gives {want}")
        gs = [g.to(o.dtype) if o.dtype != g.dtype else g for o, g in zip(floats, gs, strict=True)]
        return Graph(floats, inputs, names, gs)

    def run(
        self,
        case: Case,
        *,
        grad_outs: list[torch.Tensor] | None = None,
        only: Sequence[str] | None = None,
        between: Callable[[dict[str, Any]], None] | None = None,
        root: int | None = None,
    ) -> Trial:
        """One forward and backward of the op.

        Args:
            case: what to run.
            grad_outs, only: as in `open`.
            between: called with the inputs after the forward.
            root: index of the only output that is used; the others get no gradient at all.
        """
        graph = self.open(case, grad_outs=grad_outs, only=only)
        if between is not None:
            between(graph.inputs)
        return graph.backward(root)

    def truth(self, case: Case, noise_runs: int | None = None, order: Order = first_order) -> Truth:
        """The float64 truth of a case with its attainable errors (section "Tolerance" of the docs)."""
        count = self.budget.noise_runs if noise_runs is None else noise_runs
        known = self._truths.setdefault((self.numbers(case), order), {})
        if count not in known:
            other = next(iter(known.values()), None)
            known[count] = replace(other, runs=count) if other else make_truth(self, case, count, order)
        return known[count]

    def finding(self, stage: str, kind: str, what: str, case: Case, **more: Any) -> Finding:
        """A Finding of this workbench."""
        return Finding(stage=stage, kind=kind, what=what, case=case, **more)

    def judge(
        self,
        stage: str,
        case: Case,
        trial: Trial,
        excused: dict[str, torch.Tensor] | None = None,
        order: Order = first_order,
        runs: int | None = None,
    ) -> tuple[list[Finding], list[Sketch]]:
        """Compare a trial with the truth; an alarm is confirmed with many more noise runs before it counts.

        `excused` has masks of elements that do not count; `order` is what the trial's results are; `runs` the
        number of noise runs before an alarm, if not the level's.
        """
        truth = self.truth(case, runs, order)
        findings, profiles = list[Finding](), list[Sketch]()
        for name, got in trial.tensors.items():
            want = truth.want.get(name)
            if got is None or want is None or got.shape != want.shape:
                findings += misfit(self, stage, case, name, got, want)
                continue
            if excused and name in excused:
                got = torch.where(excused[name], want.to(got.dtype), got.detach())
                want = torch.where(excused[name], got.double(), want)
            found = compare(got, want, truth.floor[name])
            if found.wrong:
                found = compare(got, want, truth.tol[name])
            used = truth
            if 1 < found.worst < 1e4:
                used = self.truth(case, tolerance.CONFIRM_RUNS, order)
                found = compare(got, want, used.tol[name])
            if got.numel() and found.worst > self.worst.get(name, -1.0):  # only the worst of a stage is drawn
                self.worst[name] = found.worst
                profiles.append(Sketch(name, found.worst, partial(profile, name, got, want, found, case)))
            if found.wrong and order is first_order and (at := at_kinks(self, case, name, got, truth.tol[name], found)):
                self.remarks.append(at)
            elif found.wrong:
                findings.append(wrong_value(self, stage, case, name, got, found, used))
        return findings, profiles
