"""Runs the op and its reference on cases, and keeps what was computed: the one thing every stage works with."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from retrograd.check import inputs as make
from retrograd.check import kinks, tolerance, values
from retrograd.check.compare import Comparison, compare, profile
from retrograd.check.layouts import REPEATING, lay_out, repeat_values
from retrograd.check.rounding import Float64
from retrograd.check.seeds import derive
from retrograd.check.spec import OpSpec
from retrograd.check.truth import (
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
from retrograd.errors import SpecError
from retrograd.record import Case, Finding, Profile


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


# Runs that show whether an op differs from itself, on a CPU and on a GPU, where few runs in a hundred may do.
_RUNS = (20, 100)


@dataclass(frozen=True)
class Budget:
    """How much of everything a level does."""

    noise_runs: int
    repeats: int
    draws: int
    shapes: int


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
BUDGETS = {"quick": Budget(6, 20, 1, 9), "full": Budget(8, 60, 3, 40)}


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether two tensors are equal bit for bit (NaN equals NaN, +0 is not -0 only where a sign can matter)."""
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _said(error: Exception) -> str:
    """Kind and text of an error, without the colours that compilers write for terminals."""
    return f"{type(error).__name__}: {_COLOUR.sub('', str(error)).strip()}"


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
        except Exception as error:
            raise OpRaised(f"the backward raised {_said(error)}") from error
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
    _truths: dict[Any, Truth] = field(default_factory=dict)
    _grad_outs: dict[Any, list[torch.Tensor]] = field(default_factory=dict)
    _placed: dict[Any, torch.Tensor] = field(default_factory=dict)
    _hulls: dict[Any, kinks.Hull] = field(default_factory=dict)
    _noisy: bool | None = None
    remarks: list[str] = field(default_factory=list)

    @property
    def base(self) -> Case:
        """The ordinary case."""
        return make.base_case(self.spec, self.dtype)

    def cases(self, wanted: Sequence[Case]) -> list[Case]:
        """The cases to run: those a stage wants, or the one the user named."""
        return [self.override] if self.override else list(wanted)

    def inputs(self, case: Case) -> dict[str, Any]:
        """Fresh inputs of a case, by name."""
        made = make.materialise(self.spec, case, self.seed, self.device)
        for name, held in case.values:
            if held == values.KINK and self.spec.reference is not None:
                key = (self._key(case), name)
                if key not in self._placed:
                    self._placed[key] = kinks.place(self, self._key(case).but(values=()), name)
                made[name] = lay_out(self._placed[key].clone(), case.layout(name))
        return made

    def differentiable(self, inputs: dict[str, Any]) -> list[str]:
        """Names of the inputs a gradient is asked for."""
        return make.differentiable(self.spec, inputs)

    def hull(self, case: Case) -> kinks.Hull:
        """The interval of right gradients at a case and which elements are at a kink."""
        key = self._key(case)
        if key not in self._hulls:
            self._hulls[key] = kinks.hull(self, key)
        return self._hulls[key]

    def _key(self, case: Case) -> Any:
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
        inputs = self.inputs(self._key(case))
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

    def grad_outs(self, case: Case) -> list[torch.Tensor]:
        """grad_out per floating output: noise plus half of the normalised output, so that projections count."""
        key = self._key(case).but(values=())  # a huge or lost value asks the same of the backward
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

    def set_grad_outs(self, case: Case, given: list[torch.Tensor]) -> None:
        """Use these instead of generated ones for a case."""
        self._grad_outs[self._key(case).but(values=())] = [g.detach() for g in given]

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
        except Exception as error:
            raise OpRaised(f"the forward raised {_said(error)}") from error
        return as_tuple(result, self.spec, "`fn`")

    def open(
        self,
        case: Case,
        *,
        inputs: dict[str, Any] | None = None,
        grad_outs: list[torch.Tensor] | None = None,
        only: Sequence[str] | None = None,
    ) -> Graph:
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
        key = (self._key(case), count, order)
        if key not in self._truths:
            self._truths[key] = make_truth(self, case, count, order)
        return self._truths[key]

    def noisy(self, case: Case) -> bool:
        """Whether the op differs from itself run to run on this case, once per verify; so it does if it says so."""
        if self._noisy is None:
            runs = _RUNS[torch.device(self.device).type == "cuda"]
            first = self.run(case)
            self._noisy = self.spec.deterministic is False or any(self.run(case).same_bits(first) for _ in range(runs))
        return self._noisy

    def another(self, stage: str, case: Case, got: Trial, want: Trial) -> str:
        """Name of a tensor that is not what it is in `want`, a run of the same case, by more than the op promises.

        Any bit counts if it promises its bits; without a reference also where repeats show no noise. Elsewhere bits are
        no evidence, however many repeats had the same: atomics meet in another order on another stream, or when another
        process has the GPU. Then the truth decides, if the op is right at all.
        """
        name = got.same_bits(want)
        if not name or self.spec.deterministic:
            return name
        if self.spec.reference is None:
            return "" if self.noisy(case) else name
        if self.judge(stage, case, want)[0]:
            return self.apart(got.tensors, want.tensors)
        findings, _ = self.judge(stage, case, got)
        return findings[0].tensor if findings else ""

    def apart(self, got: Results, want: Results) -> str:
        """Name of a tensor that is another where there is no truth to ask: by any bit if the op promises its bits.

        Else in the first half of its digits, which the order of a sum does not reach and other data does.
        """
        for name, a in got.items():
            b = want.get(name)
            if same_bits(a, b):
                continue
            if self.spec.deterministic or a is None or b is None or a.shape != b.shape:
                return name
            slack = tolerance.UNIT[self.dtype] ** 0.5 * b.abs().nan_to_num(0.0).max()
            if not bool(((a - b).abs() <= slack).logical_or(a.isnan() & b.isnan()).all()):
                return name
        return ""

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
    ) -> tuple[list[Finding], list[Profile]]:
        """Compare a trial with the truth; an alarm is confirmed with many more noise runs before it counts.

        `excused` has masks of elements that do not count; `order` is what the trial's results are; `runs` the
        number of noise runs before an alarm, if not the level's.
        """
        truth = self.truth(case, runs, order)
        findings: list[Finding] = []
        profiles: list[Profile] = []
        for name, got in trial.tensors.items():
            want = truth.want.get(name)
            if got is None or want is None or got.shape != want.shape:
                findings += self._misfit(stage, case, name, got, want)
                continue
            if excused and name in excused:
                got = torch.where(excused[name], want.to(got.dtype), got.detach())
                want = torch.where(excused[name], got.double(), want)
            found = compare(got, want, truth.tol[name])
            if 1 < found.worst < 1e4:
                found = compare(got, want, self.truth(case, tolerance.CONFIRM_RUNS, order).tol[name])
            if got.numel():
                profiles.append(profile(name, got, want, found, case))
            if found.wrong and order is first_order and (at := self._at_kinks(case, name, got, truth.tol[name], found)):
                self.remarks.append(at)
            elif found.wrong:
                findings.append(self._wrong_value(stage, case, name, got, found))
        return findings, profiles

    def _misfit(
        self, stage: str, case: Case, name: str, got: torch.Tensor | None, want: torch.Tensor | None
    ) -> list[Finding]:
        """The finding for a tensor that is there on one side only (all zeros count as nothing), or of another shape."""
        if got is not None and want is not None:
            what = f"{name} has shape {tuple(got.shape)}, expected {tuple(want.shape)}"
            return [self.finding(stage, "shape", what, case, tensor=name)]
        there = want if got is None else got
        if there is None or not bool(there.ne(0).any()):
            return []
        what = f"{name} is None, the reference has a gradient" if got is None else f"{name} should be zero"
        return [self.finding(stage, "missing-gradient", what, case, tensor=name)]

    def _wrong_value(self, stage: str, case: Case, name: str, got: torch.Tensor, found: Comparison) -> Finding:
        """The finding for a tensor with elements out of tolerance, by its worst one."""
        what = (
            f"{name}{list(found.index)} is {found.got:.6g}, expected {found.want:.6g}: "
            f"{found.worst:.3g} times the attainable error ({found.wrong} of {got.numel()} elements are out)"
        )
        more = dict(got=found.got, want=found.want, excess=found.worst, wrong=found.wrong, total=got.numel())
        return self.finding(stage, "wrong-value", what, case, tensor=name, index=found.index, **more)

    def _at_kinks(self, case: Case, name: str, got: torch.Tensor, tol: torch.Tensor, found: Comparison) -> str:
        """A remark if every element that is out is at a kink, and between the one-sided derivatives; else ""."""
        if not name.startswith("grad ") or not got.numel():
            return ""
        try:
            hull = self.hull(case)
        except Exception:  # the reference refuses points beside the case: then it stays with the tolerance
            return ""
        wrong = found.ratio > 1
        if not bool((hull.at[name] & (hull.outside(name, got) <= tol))[wrong].all()):
            return ""
        return (
            f"{found.wrong} of {got.numel()} elements of {name} are at kinks of the forward, such as "
            f"{list(found.index)} at {case.text() or 'the given inputs'}; there both one-sided derivatives are accepted"
        )
