"""OpRunner: runs an op on cases, forward and backward, and draws what goes in, a grad_out for each output too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from retrograd.check import cpu_kernels, extreme_values, kink_search
from retrograd.check import inputs as make
from retrograd.check.constraints import constrained, project
from retrograd.check.layouts import lay_out, repeat_values, without_strides
from retrograd.check.outputs import Outputs, as_real, real_dtype
from retrograd.check.own_mistakes import calls_theirs, may_refuse
from retrograd.check.reference import (
    Batching,
    ExactRun,
    OpRaised,
    Reference,
    ReferenceForward,
    detached,
    first_order,
    grads_of,
)
from retrograd.check.schema import Case
from retrograd.check.seeds import derive
from retrograd.check.spec import OpSpec
from retrograd.errors import (
    InterpreterError,
    MissingExtraError,
    RetrogradError,
    SpecError,
    UnsupportedOperationError,
)

_KEPT = 8  # cases whose values are kept: a case is run some ten times in a row


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether two tensors are equal bit for bit (NaN equals NaN, +0 is not -0 only where a sign can matter)."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


class DrawsRandomNumbers(Exception):
    """The first forward of an op moved torch's generators, and its description says nothing of it."""


@dataclass
class OpRun:
    """One forward and backward: results by name ("out" or "out0".., "grad x"), and what went in.

    The results named by `complex` are there as real numbers; `exact` are the outputs that have no gradient.
    """

    outs: dict[str, torch.Tensor]
    grads: dict[str, torch.Tensor | None]
    inputs: dict[str, Any]
    grad_outs: list[torch.Tensor]
    exact: dict[str, torch.Tensor] = field(default_factory=dict)
    complex: frozenset[str] = frozenset()

    @property
    def tensors(self) -> dict[str, torch.Tensor | None]:
        """Outputs and gradients together."""
        return {**self.outs, **self.exact, **self.grads}

    def copy(self) -> OpRun:
        """The same results in memory of their own; inputs and grad_outs are shared."""
        outs = {k: t.clone() for k, t in self.outs.items()}
        grads = {k: None if t is None else t.clone() for k, t in self.grads.items()}
        exact = {k: t.clone() for k, t in self.exact.items()}
        return OpRun(outs, grads, self.inputs, self.grad_outs, exact)

    def first_difference(self, other: OpRun) -> str:
        """Name of the first tensor whose bits differ from the other run's; "" if none."""
        return next((k for k, v in self.tensors.items() if not same_bits(v, other.tensors.get(k))), "")


@dataclass
class ForwardPass:
    """A forward that waits for its backward, which may run more than once."""

    results: Outputs
    inputs: dict[str, Any]
    names: list[str]
    grad_outs: list[torch.Tensor]
    spec: OpSpec
    points: dict[str, torch.Tensor]  # where inputs with a constraint were: they may be changed before the backward

    @property
    def outs(self) -> list[torch.Tensor]:
        """The outputs that may have a gradient."""
        return list(self.results.inexact.values())

    def backward(self, root: int | None = None) -> OpRun:
        """The backward from all outputs, or from the one with index `root`; OpRaised if it raises."""
        used = slice(None) if root is None else slice(root, root + 1)
        leaves = [self.inputs[n] for n in self.names]
        try:
            # Some ask in their backward alone for the GPU of a tensor, as for the number of its multiprocessors.
            grads = cpu_kernels.asked(self.spec.fn, lambda: grads_of(self.outs[used], leaves, self.grad_outs[used]))
        except (InterpreterError, UnsupportedOperationError):
            raise
        except Exception as error:
            raise OpRaised.by("backward", error) from error
        return OpRun(
            {k: as_real(v.detach()) for k, v in self.results.inexact.items()},
            {f"grad {n}": None if g is None else self._real(n, g) for n, g in zip(self.names, grads, strict=True)},
            self.inputs,
            self.grad_outs,
            dict(self.results.exact),
            frozenset(
                [n for n, t in self.results.inexact.items() if t.is_complex()]
                + [f"grad {n}" for n in self.names if self.inputs[n].is_complex()]
            ),
        )

    def _real(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        """What counts of a gradient, as real numbers."""
        every_row = grad if grad.layout == torch.strided else grad.to_dense()  # embeddings may give some rows alone
        return as_real(project(self.spec, name, every_row, self.points.get(name, every_row)))


@dataclass
class OpRunner:
    """The op in one dtype, on one device; values that were drawn are kept.

    Attributes:
        spec, dtype, seed, device: what runs, and where.
        calls: counts its forwards.
        gradients: names of the gradients that there were in the present stage.
        uncompared: kinds of outputs by name that are no tensors.
        judged: its cases that came to a result.
        batching: of its reference.
    """

    spec: OpSpec
    dtype: str
    seed: int
    device: str
    calls: int = 0
    gradients: dict[str, None] = field(default_factory=dict)
    uncompared: dict[str, str] = field(default_factory=dict)
    judged: list[Case] = field(default_factory=list)
    batching: Batching = field(default_factory=lambda: Batching(allowed=True))
    _drawn: dict[Case, dict[str, Any]] = field(default_factory=dict)
    _at_kinks: dict[tuple[Case, str], torch.Tensor] = field(default_factory=dict)
    _grad_outs: dict[Case, list[torch.Tensor]] = field(default_factory=dict)
    _named: dict[Any, Outputs] = field(default_factory=dict)
    _dtypes: dict[Any, list[torch.dtype]] = field(default_factory=dict)  # of the op's outputs, by the case's parameters
    _exact: dict[Case, ExactRun] = field(default_factory=dict)  # one at most
    _tf32: bool = False
    _settled: bool = False  # whether it is known if tensors are said to be on a GPU

    @cached_property
    def base(self) -> Case:
        """The ordinary case."""
        return make.base_case(self.spec, self.dtype)

    def inputs(self, case: Case) -> dict[str, Any]:
        """Fresh inputs of a case, by name."""
        inputs = make.place(self._draw(case.but(layouts=())), case, self.device)
        for name, values in case.values:
            if values == extreme_values.KINK and self.spec.reference is not None:
                key = (without_strides(case), name)
                if key not in self._at_kinks:
                    self._at_kinks[key] = kink_search.place(self.reference(key[0].but(values=())), name)
                inputs[name] = lay_out(self._at_kinks[key].clone(), case.layout(name))
        return inputs

    def _draw(self, case: Case) -> dict[str, Any]:
        if case in self._drawn:
            return self._drawn[case]
        drawn = make.draw(self.spec, case, self.seed)
        if self.spec.tensor_specs is None and not all(map(make.repeatable, drawn.values())):
            return drawn
        if len(self._drawn) >= _KEPT:
            del self._drawn[next(iter(self._drawn))]
        self._drawn[case] = drawn
        return drawn

    def differentiable(self, case: Case) -> list[str]:
        """Names of the inputs a gradient is asked for."""
        return make.differentiable(self.spec, self.inputs(case))

    @property
    def tf32(self) -> bool:
        """Whether kernels of the op have multiplied float32 matrices in tf32, in which factors have 11 bits."""
        self._tf32 = self._tf32 or (self.dtype == "float32" and cpu_kernels.tf32())
        return self._tf32

    def with_exact_factors(self, case: Case) -> OpRun | None:
        """A run on the CPU whose kernels multiply float32 as it is, not rounded to tf32; None where there is none."""
        if not self.tf32 or self.spec.random:
            return None
        on_cpu = self.device == "cpu"
        runner = self if on_cpu else OpRunner(self.spec, self.dtype, self.seed, "cpu")
        try:
            with nullcontext() if on_cpu else cpu_kernels.executed("cpu"), cpu_kernels.exact_factors() as possible:
                return runner.run(case) if possible else None
        except (OpRaised, RetrogradError):
            return None

    def reference(self, case: Case) -> Reference:
        """The reference at a case; it gets the values without their strides."""
        plain = without_strides(case)
        inputs, ordinary = (partial(self.inputs, values) for values in (plain, plain.but(values=())))
        grad_outs = partial(self.grad_outs, case)
        return Reference(
            self.spec, case, self.seed, self.device, inputs, ordinary, grad_outs, self.tf32, batching=self.batching
        )

    def exact_run(self, case: Case) -> ExactRun | None:
        """What the reference gave in float64 when the grad_out of a case was drawn, once; None where it is not kept."""
        self.grad_outs(case)
        return self._exact.pop(without_strides(case), None)

    def grad_outs(self, case: Case) -> list[torch.Tensor]:
        """grad_out per floating output: noise plus half of the normalised output, so that projections count."""
        key = without_strides(case).but(values=())  # a huge or lost value asks the same of the backward
        if key not in self._grad_outs:
            forward = self._reference_forward(key)
            outs = self._outputs(key) if forward is None else forward.outputs
            self._named[case.params] = outs.detached()
            self._grad_outs[key] = [self._draw_grad_out(key, i, out) for i, out in enumerate(outs.inexact.values())]
            if forward is not None:
                self._finish(key, forward)
        layout, drawn = case.layout("grad_out"), self._grad_outs[key]
        dtypes = self._dtypes.get(case.params, [g.dtype for g in drawn])
        return [lay_out(_widened(g, dtype).clone(), layout) for g, dtype in zip(drawn, dtypes, strict=True)]

    def _reference_forward(self, case: Case) -> ReferenceForward | None:
        """The forward of the reference in float64; None where there is no such thing."""
        if self.spec.reference is None:
            return None
        with may_refuse():  # it writes to its inputs, which it must not where a gradient is asked for; or refuses them
            reference = self.reference(case)
            return reference.forward(torch.float64, reference.exactly())
        return None

    def _outputs(self, case: Case) -> Outputs:
        """Outputs in float64, without a reference those of the op."""
        return self.reference(case).outputs() if self.spec.reference else self.call(case, self.inputs(case))

    def _finish(self, case: Case, forward: ReferenceForward) -> None:
        """Keep the truth of a case, before the op runs: that may write what the backward of the reference reads."""
        assert forward.mode is not None
        self._exact.clear()
        with may_refuse():  # who asks for the truth is told
            results = self.reference(case).results(forward, self._grad_outs[case], torch.float64, first_order)
            self._exact[case] = forward.mode, detached(results)

    def _draw_grad_out(self, case: Case, number: int, out: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(derive(self.seed, "grad_out", number, case.draw))
        out = out.detach()
        wide = out.to("cpu", torch.promote_types(out.dtype, torch.float64))
        wide = torch.where(wide.isfinite(), wide, 0.0)
        size = wide.abs().square().mean().sqrt().clamp_min(1e-30) if wide.numel() else 1.0
        g = torch.randn(out.shape, generator=generator, dtype=wide.dtype) + 0.5 * (wide / size)
        dtype = make.torch_dtype(self.dtype)
        g = g.to(dtype.to_complex() if wide.is_complex() else real_dtype(dtype)).to(out.device)
        return repeat_values(g, case.layout("grad_out"))

    def call(self, case: Case, inputs: dict[str, Any]) -> Outputs:
        """All outputs of the op, under the names that the reference has for them; OpRaised if it raises.

        DrawsRandomNumbers if the first call draws and the description does not say whether the op does.
        """
        self.calls += 1
        first = self.calls == 1 and self.spec.random is None
        before = self._generators() if first else []
        try:
            result = self._result(case, inputs)
        except (InterpreterError, MissingExtraError, UnsupportedOperationError):
            raise  # it says nothing about the op
        except Exception as error:
            raise OpRaised.by("forward", error) from error
        if any(not torch.equal(b, state) for b, state in zip(before, self._generators() if first else [], strict=True)):
            raise DrawsRandomNumbers
        try:
            outputs = Outputs.of(result, self.spec, "fn")
        except SpecError as error:
            if self.calls == 1 or self.spec.reference is None:  # later it is no mistake of the description
                raise
            raise OpRaised(str(error)) from error
        return outputs.named_as(self._named[case.params]) if case.params in self._named else outputs

    @calls_theirs
    def _result(self, case: Case, inputs: dict[str, Any]) -> Any:
        """What the op returns. One that refuses its first case is asked once more, its tensors said to be on a GPU."""
        params = dict(case.params)
        return cpu_kernels.asked(self.spec.fn, lambda: self.spec.fn(*inputs.values(), **params), again=self.calls == 1)

    def _generators(self) -> list[torch.Tensor]:
        """States of torch's generators, of the CPU and of a GPU that the op runs on."""
        place = torch.device(self.device)
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(place)] if place.type == "cuda" else [])]

    def forward(
        self, case: Case, *, inputs: dict[str, Any] | None = None, grad_outs: list[torch.Tensor] | None = None,
        only: Sequence[str] | None = None,
    ) -> ForwardPass:  # fmt: skip
        """A forward whose backward has not run; OpRaised if it raises or has other shapes than the reference.

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
        points = {n: inputs[n].detach().clone() for n in names if n in constrained(self.spec)}
        results = self.call(case, inputs)
        outs = results.inexact.values()
        got, want = [tuple(o.shape) for o in outs], [tuple(g.shape) for g in gs]
        if got != want:
            raise OpRaised(f"outputs have other shapes than the reference gives: {got} instead of {want}")
        self.uncompared |= results.other
        if any(o.requires_grad and o.numel() for o in outs):
            self.gradients |= {f"grad {name}": None for name in names}
        if (dtypes := [o.dtype for o in outs]) != self._dtypes.get(case.params):
            self._dtypes[case.params] = dtypes
            gs = self.grad_outs(case) if grad_outs is None else gs
        gs = [g.to(o.dtype) if o.dtype != g.dtype else g for o, g in zip(outs, gs, strict=True)]
        return ForwardPass(results, inputs, names, gs, self.spec, points)

    def run(
        self,
        case: Case,
        *,
        grad_outs: list[torch.Tensor] | None = None,
        only: Sequence[str] | None = None,
        between: Callable[[dict[str, Any]], None] | None = None,
        root: int | None = None,
    ) -> OpRun:
        """One forward and backward of the op.

        Args:
            case: what to run.
            grad_outs, only: as in `forward`.
            between: called with the inputs after the forward.
            root: index of the only output that is used; the others get no gradient at all.
        """
        forward = self.forward(case, grad_outs=grad_outs, only=only)
        if between is not None:
            between(forward.inputs)
        run = forward.backward(root)
        if self._settled or between is not None:
            return run
        self._settled = True
        return self._on_devices(partial(self.run, case, grad_outs=grad_outs, only=only, root=root)) or run

    def _on_devices(self, again: Callable[[], OpRun]) -> OpRun | None:
        """The first run once more, of an op that plans by the type of its tensors' device, as for those on a GPU.

        One program that does all (`sm_count = 132 if x.device.type == "cuda" else 1`) races with none.
        """
        if not cpu_kernels.looks_at_types(self.spec.fn) or not cpu_kernels.ask_for_devices(self.spec.fn):
            return None
        try:
            return again()
        except OpRaised:  # of what is not there, as streams of its own
            cpu_kernels.no_devices(self.spec.fn)
            return None


def _widened(g: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A grad_out in the dtype that autograd gives it, that of the output, if all of its values are left as they are.

    Where autograd itself converts one the op gets a copy: of other strides, and which nobody looks at afterwards.
    """
    return g.to(dtype) if torch.promote_types(g.dtype, dtype) == dtype else g
