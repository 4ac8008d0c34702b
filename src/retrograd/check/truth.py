"""The float64 truth of a case: what the reference gives, how far a correct op may be off, what its precision does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from retrograd.check import inputs as make
from retrograd.check import tolerance
from retrograd.check.rounding import Float64
from retrograd.check.seeds import derive
from retrograd.errors import SpecError, UndecidedError
from retrograd.record import Case

if TYPE_CHECKING:
    from retrograd.check.workbench import Workbench


class OpRaised(Exception):
    """The op under test raised, on a case its reference accepts."""


class NotApplicable(Exception):
    """The case means nothing for this op: the reference itself refuses it."""


def out_names(n: int) -> list[str]:
    """ "out" for a single output, else "out0", "out1"..."""
    return ["out"] if n == 1 else [f"out{i}" for i in range(n)]


@dataclass(frozen=True)
class Truth:
    """float64 values and attainable errors by tensor name; None for a gradient the reference has not.

    `eager` is the reference run in the op's own precision, as float64; `peak` the largest number met on the way.
    """

    want: dict[str, torch.Tensor | None]
    tol: dict[str, torch.Tensor]
    eager: dict[str, torch.Tensor | None]
    peak: float

    def power(self) -> float:
        """Smallest relative error, uniform over a tensor, that would be seen in each of the tensors."""
        worst = 0.0
        for name, want in self.want.items():
            if want is not None and bool((want != 0).any()):
                worst = max(worst, float((self.tol[name] / want.abs())[want != 0].min()))
        return worst


def make_truth(bench: Workbench, case: Case, count: int) -> Truth:
    """The truth of a case from `count` noise runs; NotApplicable if the reference refuses it.

    Raises:
        UndecidedError: the reference makes NaN of ordinary values.
    """
    try:
        plain = Float64()
        outs, grads = bench.reference_grad(case, torch.float64, plain)
    except (SpecError, NotApplicable):
        raise
    except Exception as error:
        raise NotApplicable(f"the reference raises {type(error).__name__}: {error}") from error
    names = make.differentiable(bench.spec, bench.inputs(bench._key(case)))
    labels = [*out_names(len(outs)), *(f"grad {n}" for n in names)]
    center = [None if t is None else t.detach() for t in (*outs, *grads)]
    if not case.values and any(t is not None and bool(t.isnan().any()) for t in center):
        bad = next(k for k, t in zip(labels, center, strict=True) if t is not None and bool(t.isnan().any()))
        raise UndecidedError(
            f"the reference of {bench.spec.name} makes NaN in {bad} at {case.text() or 'the given inputs'}; "
            "narrow the inputs (low=, high=, sizes=) or mend the reference"
        )
    unit, accumulate = tolerance.units(bench.dtype, bench.spec.compute)
    squares = [None if t is None else torch.zeros_like(t) for t in center]
    for k in range(count):
        mode = Float64(unit, accumulate, derive(bench.seed, "noise", k, count), bench.device)
        noisy_outs, noisy_grads = bench.reference_grad(case, torch.float64, mode)
        for total, t, c in zip(squares, (*noisy_outs, *noisy_grads), center, strict=True):
            if total is not None and t is not None and c is not None:
                total += (t.detach() - c).square().nan_to_num(0.0)
    eager = _eager(bench, case)
    want: dict[str, torch.Tensor | None] = {}
    tol: dict[str, torch.Tensor] = {}
    for i, label in enumerate(labels):
        c, total = center[i], squares[i]
        want[label] = c
        if c is not None and total is not None:
            e = eager[i] if eager is not None else None
            error = None if e is None else (e.detach().double() - c).abs()
            tol[label] = tolerance.tolerance(c, (total / max(count, 1)).sqrt(), error, bench.dtype)
    same = [None] * len(labels) if eager is None else [None if t is None else t.detach().double() for t in eager]
    return Truth(want, tol, dict(zip(labels, same, strict=True)), plain.peak)


def _eager(bench: Workbench, case: Case) -> list[torch.Tensor | None] | None:
    """The reference in the op's own precision; None where PyTorch has no kernel for it."""
    width = bench.spec.compute if bench.spec.compute and bench.dtype in ("float16", "bfloat16") else bench.dtype
    try:
        outs, grads = bench.reference_grad(case, make.torch_dtype(width))
    except Exception:  # "not implemented for 'Half'": the spread alone must do
        return None
    return [*outs, *grads]
