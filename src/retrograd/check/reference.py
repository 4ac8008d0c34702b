"""Reference of an op at one case: what it gives in any precision, with exact or randomly rounded operators."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from retrograd.check import extreme_values, tolerance
from retrograd.check import inputs as make
from retrograd.check.as_written import as_noted
from retrograd.check.callable_state import without_traces
from retrograd.check.constraints import project
from retrograd.check.contractions import EinsumAsMatrices
from retrograd.check.last_run import LastRun
from retrograd.check.layouts import REPEATING
from retrograd.check.outputs import Outputs, as_real, inexact, like, promoted, real_dtype
from retrograd.check.own_mistakes import calls_theirs, is_own_mistake, may_refuse
from retrograd.check.rounding import Float64
from retrograd.check.schema import Case
from retrograd.check.seeds import derive
from retrograd.check.spec import OpSpec
from retrograd.compat import triton_toolchain
from retrograd.compat.torch_dispatch import without_modes
from retrograd.compat.triton_source import line_refused
from retrograd.errors import SpecError, UndecidedError

_ROUNDED = 8  # randomly rounded runs that show which whole numbers hang on rounding
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")

Results = dict[str, torch.Tensor | None]
ExactRun = tuple[Float64, Results]  # the mode of a run of first derivatives, and what it gave
# What is computed from the outputs on: called with the case, the seed, outputs by name, differentiable inputs by name,
# a gradient for each output, and how many runs all of these hold along a first dimension (0: one, without it); gives
# results by name, of the op or of its reference.
DerivativeOrder = Callable[
    [Case, int, dict[str, torch.Tensor], dict[str, torch.Tensor], list[torch.Tensor], int], Results
]


class OpRaised(Exception):
    """The op under test raised, on a case its reference accepts."""

    @classmethod
    def by(cls, phase: str, error: Exception) -> OpRaised:
        """Kind and text of an error, without the colours of terminals; a mistake of the checker itself is raised.

        An error without a text, as of a plain assert, has the line that raised it.

        Raises:
            UndecidedError: the error says that no kernel of Triton's can run here, which is not the op's.
        """
        if is_own_mistake(error):
            raise error
        if missing := triton_toolchain.failure(error):
            raise UndecidedError(
                f"Triton cannot run any kernel here, so nothing is said of the op: {missing} (it needs a driver of a "
                "GPU that torch sees too, and a C compiler, gcc or clang; `retrograd env` says what is installed)"
            ) from error
        # Of Triton: a function that a kernel calls has the reason, the kernel a place without one.
        while type(error).__name__ == type(error.__cause__).__name__ == "CompilationError":
            error = error.__cause__  # type: ignore[assignment]
        text = _COLOUR.sub("", str(error)).strip()
        *code, reason = text.splitlines() or [""]
        if type(error).__name__ == "CompilationError":  # which quotes the code first
            if code and (place := line_refused(error)):
                code[0] = f"at {place}:"
            text = "\n".join([reason, *code])
        elif not text and (frames := traceback.extract_tb(error.__traceback__)):
            text = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}"
        return cls(f"the {phase} raised {type(error).__name__}: {text}")


class NotApplicable(Exception):
    """The case means nothing for this op: the reference itself refuses it."""

    @classmethod
    def by(cls, error: Exception, reference: str = "the reference") -> NotApplicable:
        """Kind and text of what a reference has raised; what is a mistake of the checker itself is raised as it is."""
        if is_own_mistake(error):
            raise error
        return cls(f"{reference} raises {type(error).__name__}: {error}")


def grads_of(
    outs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], gs: Sequence[torch.Tensor], create_graph: bool = False
) -> list[torch.Tensor | None]:
    """Gradients of the leaves; None where none of the outputs depends on one."""
    pairs = [(o, g) for o, g in zip(outs, gs, strict=True) if o.requires_grad]
    if not pairs or not leaves:
        return [None] * len(leaves)
    roots, cotangents = zip(*pairs, strict=True)
    more = dict(allow_unused=True, retain_graph=True, create_graph=create_graph)
    try:
        return list(torch.autograd.grad(roots, leaves, cotangents, **more))  # type: ignore[arg-type]
    except RuntimeError:  # so torch.utils.checkpoint with use_reentrant=True, which asks for .backward() instead
        if create_graph or not all(leaf.is_leaf for leaf in leaves):
            raise
    return _accumulated(roots, leaves, cotangents)


def _accumulated(
    roots: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], gs: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """The gradients by `.backward()`; what the leaves had before they keep."""
    kept = [leaf.grad for leaf in leaves]
    try:
        for leaf in leaves:
            leaf.grad = None
        torch.autograd.backward(roots, gs, retain_graph=True)
        return [leaf.grad for leaf in leaves]
    finally:
        for leaf, grad in zip(leaves, kept, strict=True):
            leaf.grad = grad


def directions(
    case: Case, seed: int, label: str, tensors: Mapping[str, torch.Tensor], runs: int = 0
) -> dict[str, torch.Tensor]:
    """Fixed random numbers like each tensor, the same for an op, its reference and each of the `runs` of a batch."""
    drawn: dict[str, torch.Tensor] = {}
    with without_modes():
        for name, t in tensors.items():
            generator = torch.Generator().manual_seed(derive(seed, label, name))
            shape = as_real(t).shape
            numbers = torch.randn(shape[1:] if runs else shape, generator=generator, dtype=torch.float64).expand(shape)
            drawn[name] = like(numbers.to(real_dtype(make.torch_dtype(case.dtype))), t).to(t.device)
    return drawn


def first_order(
    case: Case, seed: int, outs: dict[str, torch.Tensor], leaves: dict[str, torch.Tensor], gs: list[torch.Tensor],
    runs: int = 0,
) -> Results:  # fmt: skip
    """Outputs and gradients: what a truth holds unless something else is asked for."""
    del case, seed, runs
    grads = grads_of(list(outs.values()), list(leaves.values()), gs)
    return {**outs, **{f"grad {n}": g for n, g in zip(leaves, grads, strict=True)}}


def detached(results: Results) -> Results:
    """The same numbers, from which no gradient flows."""
    return {name: None if t is None else t.detach() for name, t in results.items()}


def gradient_of(name: str) -> DerivativeOrder:
    """Of `first_order` the gradient of one input alone: what the others take is not computed."""
    return lambda case, seed, outs, leaves, gs, runs: first_order(case, seed, outs, {name: leaves[name]}, gs, runs)


@dataclass
class Batching:
    """What is known of a reference: whether several runs can be made at once, and more; shared by the cases of an op.

    Attributes:
        allowed: nothing speaks against it.
        refused: orders of derivatives for which it cannot be.
        checked: of parameters, sizes and orders at which such runs gave what each gives alone, the elements of a run.
        unchanged: parameters and sizes at which a run in float64 has shown that its mode changes nothing, and what else
            that has noted. It shows that of others where runs can be made at once: then none asks what its inputs hold.
        cancelling: of parameters, whether all that the reference decides cancels (`kinks.cancel`).
    """

    allowed: bool = False
    refused: set[DerivativeOrder] = field(default_factory=set)
    checked: dict[Any, int] = field(default_factory=dict)
    unchanged: dict[Any, Float64] = field(default_factory=dict)
    cancelling: dict[Any, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class ReferenceForward:
    """A forward of a reference whose backward has not run: the mode it ran in, what went in, what came out."""

    mode: Float64 | None
    inputs: dict[str, Any]
    names: list[str]
    outputs: Outputs


@dataclass(frozen=True)
class Reference:
    """The reference of an op at one case.

    Attributes:
        spec: of the op, with a reference.
        case: whose layouts matter only where they repeat values.
        seed, device: of the random rounding.
        inputs: makes fresh inputs by name, as a reference may change them.
        ordinary: makes them without the extreme values of the case.
        grad_outs: makes a fresh gradient for each floating or complex output.
        tf32: whether the op multiplies float32 matrices in tf32.
        matrices: whether the reference multiplies any. Where it has none (a recurrence, step by step), the op's are
            among its elementwise products, and nobody can tell which.
        apart: of randomly rounded runs in tf32, as in `Float64`.
        elements: what all its operators make together in a run; 0 where that is not known.
        batching: whether several runs can be made at once.
    """

    spec: OpSpec
    case: Case
    seed: int
    device: str
    inputs: Callable[[], dict[str, Any]]
    ordinary: Callable[[], dict[str, Any]]
    grad_outs: Callable[[], list[torch.Tensor]]
    tf32: bool = False
    matrices: bool = True
    apart: bool = False
    elements: int = 0
    batching: Batching = field(default_factory=Batching)

    @property
    def _ordinary_key(self) -> Any:
        """Parameters and sizes; None where whole numbers may be others than at the ordinary case."""
        floats = {"grad_out", *(name for name, tensor in self.spec.tensors.items() if tensor.floating)}
        altered = [name for name, extreme in self.case.values if extreme != extreme_values.KINK]
        altered += [name for name, layout in self.case.layouts if layout in REPEATING]
        return (self.case.params, self.case.sizes) if floats.issuperset(altered) and not self.case.draw else None

    def note_exact(self, mode: Float64) -> None:
        """Note what a run of first derivatives in float64 shows of such runs."""
        if not mode.changes and self._ordinary_key is not None:
            self.batching.unchanged[self._ordinary_key] = mode

    def exactly(self, *, track: bool = False) -> Float64:
        """The mode of a further run of first derivatives in float64.

        Nothing is asked of it that inputs decide, but which numbers adding up meets if it is to `track` them.
        """
        at_once = self.batching.allowed and (self.case.params, self.case.sizes, first_order) in self.batching.checked
        known = self.batching.unchanged.get(self._ordinary_key) if at_once else None
        return Float64(track=track) if known is None else as_noted(known, track=track)

    @calls_theirs
    def call(self, inputs: dict[str, Any]) -> Outputs:
        """What it returns for these inputs."""
        assert self.spec.reference is not None
        with EinsumAsMatrices() if self.tf32 else contextlib.nullcontext():
            returned = self.spec.reference(*inputs.values(), **dict(self.case.params))
        return Outputs.of(returned, self.spec, "reference")

    def without_traces(self) -> contextlib.AbstractContextManager[None]:
        """Keep nothing of a call in what the reference is made of; entered before any mode."""
        assert self.spec.reference is not None
        return without_traces(self.spec.reference)

    def outputs(self, mode: Float64 | None = None) -> Outputs:
        """Outputs in float64; NotApplicable if the reference refuses the case."""
        inputs = self.inputs()
        for name, value in inputs.items():
            if inexact(value):
                inputs[name] = value.to(promoted(value.dtype, torch.float64))
        try:
            with self.without_traces(), torch.no_grad(), mode or Float64():
                return self.call(inputs)
        except (SpecError, UndecidedError):
            raise
        except Exception as error:
            raise NotApplicable.by(error) from error

    def own_outputs(self) -> Outputs | None:
        """Outputs where inputs have their own dtypes; None where PyTorch has no kernel for them."""
        inputs = self.inputs()
        for name in make.differentiable(self.spec, inputs):
            inputs[name].requires_grad_()
        with may_refuse(), self.without_traces():  # "not implemented for 'Half'"
            return self.call(inputs)
        return None

    def rounded_exactly(self, name: str) -> Iterator[torch.Tensor]:
        """An output of whole numbers in the op's own precision and in randomly rounded runs: what rounding decides."""
        own = self.own_outputs()
        if own is not None and name in own.exact:
            yield own.exact[name]
        unit, accumulate = tolerance.units(self.case.dtype, self.spec.compute)
        for k in range(_ROUNDED):
            unit_k, accumulate_k = tolerance.KINK * unit, tolerance.KINK * accumulate
            mode = Float64(unit_k, accumulate_k, derive(self.seed, "exact", k), self.device)
            yield self.outputs(mode).exact[name]

    def run(
        self,
        dtype: torch.dtype,
        mode: Float64 | None = None,
        order: DerivativeOrder = first_order,
        shift: dict[str, torch.Tensor] | None = None,
    ) -> Results:
        """What `order` makes of the reference with inputs in `dtype`, moved by `shift` where that names them."""
        gs = self.grad_outs()  # drawn by a forward, which may write to what the other one keeps for its backward
        return self.results(self.forward(dtype, mode, shift), gs, dtype, order)

    def forward(
        self, dtype: torch.dtype, mode: Float64 | None = None, shift: dict[str, torch.Tensor] | None = None
    ) -> ReferenceForward:
        """The first half of `run`."""
        inputs = self.inputs()
        names = make.differentiable(self.spec, inputs)
        for name, value in inputs.items():
            if inexact(value):
                # What is wider by its spec stays so in the op's own precision.
                value = value.contiguous().to(promoted(value.dtype, dtype))
                value = value + shift[name] if shift is not None and name in shift else value
                if mode is not None and mode.unit and mode.inputs:
                    value = value * (1 + mode.unit * mode.noise(value))
                inputs[name] = value.detach().requires_grad_(name in names)
        # Fused attention hides its softmax from the mode, the composite form does not. The run in the op's own
        # precision keeps what PyTorch would choose: the fused form cancels differently (one key: dq is not quite 0).
        backend = contextlib.nullcontext() if mode is None else sdpa_kernel(SDPBackend.MATH)
        with self.without_traces(), backend, mode or contextlib.nullcontext():
            return ReferenceForward(mode, inputs, names, self.call(inputs))

    def results(
        self, forward: ReferenceForward, grad_outs: list[torch.Tensor], dtype: torch.dtype, order: DerivativeOrder
    ) -> Results:
        """The second half of `run`."""
        mode, inputs, names = forward.mode, forward.inputs, forward.names
        # Fresh memory: how grad_out is laid out is no part of the truth, and some backwards refuse an offset.
        wider = (g.to(torch.promote_types(g.dtype, dtype)) for g in grad_outs)
        gs = [g.clone(memory_format=torch.contiguous_format) for g in wider]
        if mode is not None and mode.grad_outs:
            gs = [g * (1 + mode.unit * mode.noise(g)) for g in gs]
        with mode or contextlib.nullcontext():
            results = order(self.case, self.seed, forward.outputs.inexact, {n: inputs[n] for n in names}, gs, 0)
        for name in names:
            if (grad := results.get(f"grad {name}")) is not None:
                results[f"grad {name}"] = project(self.spec, name, grad, inputs[name])
        return {name: None if t is None else as_real(t) for name, t in results.items()}

    def rounding(
        self, unit: float, accumulate: float, seed: int, *, inputs: bool = True, grad_outs: bool = False, runs: int = 1,
        last: LastRun | None = None,
    ) -> Float64:  # fmt: skip
        """The mode of a randomly rounded run, or of several at once; arguments as in `Float64`."""
        return Float64(
            unit, accumulate, seed, self.device, tolerance.TF32 if self.tf32 else 0.0,
            inputs=inputs, grad_outs=grad_outs, elementwise=not self.matrices, runs=runs, last=last,
            apart=self.apart,
        )  # fmt: skip

    def rounded(
        self, unit: float, accumulate: float, seed: int, order: DerivativeOrder = first_order,
        *, inputs: bool = True, grad_outs: bool = False, last: LastRun | None = None,
    ) -> Results:  # fmt: skip
        """`run` in float64 with random rounding; arguments as in `Float64`.

        Inputs stay exact where the reference refuses what comes of rounding them, as at the edge of their range.
        """
        for round_inputs in (True, False) if inputs else (False,):
            try:
                mode = self.rounding(unit, accumulate, seed, inputs=round_inputs, grad_outs=grad_outs, last=last)
                last = None  # of what comes before an error
                return self.run(torch.float64, mode, order)
            except Exception as error:
                if not round_inputs or is_own_mistake(error):
                    raise
        raise AssertionError("unreachable")
