"""The float64 truth of a case: what the reference gives, how far a correct op may be off, what its precision does."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from retrograd.check import inputs as make
from retrograd.check import tolerance
from retrograd.check.rounding import Float64
from retrograd.check.schema import Case
from retrograd.check.seeds import derive
from retrograd.errors import SpecError, UndecidedError

if TYPE_CHECKING:
    from retrograd.check.op_runner import Workbench


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class OpRaised(Exception):
    """The op under test raised, on a case its reference accepts."""

    @classmethod
    def at(cls, phase: str, error: Exception) -> OpRaised:
        """Kind and text of an error, without the colours that compilers write for terminals."""
        return cls(f"the {phase} raised {type(error).__name__}: {_COLOUR.sub('', str(error)).strip()}")


class NotApplicable(Exception):
    """The case means nothing for this op: the reference itself refuses it."""


def out_names(n: int) -> list[str]:
    """ "out" for a single output, else "out0", "out1"..."""
    return ["out"] if n == 1 else [f"out{i}" for i in range(n)]


Results = dict[str, torch.Tensor | None]


@dataclass(frozen=True)
class Truth:
    """float64 values and attainable errors by tensor name; None for a gradient the reference has not.

    Attributes:
        want: the values.
        floor: the attainable errors without the spread of random rounding, so never larger than `tol`. What is within
            it is within `tol`, and most of what is right is: the runs behind `tol` are made for what is not.
        eager: the reference run in the op's own precision, as float64.
        peak: the largest number met on the way (of cases with values other than ordinary ones).
        switches: the operators in it that may have a kink.
        spread: sigma by name from as many runs as asked for.
        runs: how many `tol` rests on.
    """

    want: Results
    floor: dict[str, torch.Tensor]
    eager: Results
    peak: float
    switches: frozenset[str]
    spread: Callable[[int], dict[str, torch.Tensor]]
    runs: int

    @cached_property
    def tol(self) -> dict[str, torch.Tensor]:
        """The attainable errors."""
        spread = self.spread(self.runs)
        return {name: tolerance.tolerance(least, spread[name]) for name, least in self.floor.items()}

    @cached_property
    def power(self) -> float:
        """Smallest relative error, uniform over a tensor, that would be seen in each of the tensors."""
        worst = 0.0
        for name, want in self.want.items():
            if want is not None and bool((want != 0).any()):
                worst = max(worst, float((self.tol[name] / want.abs())[want != 0].min()))
        return worst


Order = Callable[["Workbench", Case, list[torch.Tensor], dict[str, torch.Tensor], list[torch.Tensor]], Results]


def grads_of(
    outs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], gs: Sequence[torch.Tensor], create_graph: bool = False
) -> list[torch.Tensor | None]:
    """Gradients of the leaves; None where none of the outputs depends on one."""
    pairs = [(o, g) for o, g in zip(outs, gs, strict=True) if o.requires_grad]
    if not pairs or not leaves:
        return [None] * len(leaves)
    roots, cotangents = zip(*pairs, strict=True)
    more = dict(allow_unused=True, retain_graph=True, create_graph=create_graph)
    return list(torch.autograd.grad(roots, leaves, cotangents, **more))  # type: ignore[arg-type]


def first_order(
    bench: Workbench, case: Case, outs: list[torch.Tensor], leaves: dict[str, torch.Tensor], gs: list[torch.Tensor]
) -> Results:
    """Outputs and gradients by name, of the op or of its reference: what a truth holds unless something else is asked.

    Args:
        bench, case: which op, which case.
        outs: floating outputs of the forward.
        leaves: differentiable inputs by name.
        gs: a gradient for each output.
    """
    grads = grads_of(outs, list(leaves.values()), gs)
    return dict(zip(out_names(len(outs)), outs, strict=True)) | {
        f"grad {n}": g for n, g in zip(leaves, grads, strict=True)
    }


def make_truth(bench: Workbench, case: Case, count: int, order: Order = first_order) -> Truth:
    """The truth of a case, its tolerance from `count` noise runs; NotApplicable if the reference refuses it.

    `order` says what is computed, from the outputs on.

    Raises:
        UndecidedError: the reference makes NaN of ordinary values.
    """
    try:
        plain = Float64(track=bool(case.values))
        center = _detached(bench.reference_run(case, torch.float64, plain, order))
    except (SpecError, NotApplicable):
        raise
    except Exception as error:
        raise NotApplicable(f"the reference raises {type(error).__name__}: {error}") from error
    if bad := [k for k, t in center.items() if t is not None and not case.values and bool(t.isnan().any())]:
        raise UndecidedError(
            f"the reference of {bench.spec.name} makes NaN in {bad[0]} at {case.text() or 'the given inputs'}; "
            "narrow the inputs (low=, high=, sizes=) or mend the reference"
        )
    eager = _eager(bench, case, order)
    floor: dict[str, torch.Tensor] = {}
    for name, c in center.items():
        if c is not None:
            e = eager.get(name)
            floor[name] = tolerance.floor(c, None if e is None else (e - c).abs(), bench.dtype)

    def spread(runs: int) -> dict[str, torch.Tensor]:
        return _spread(bench, case, order, center, runs)

    return Truth(center, floor, eager, plain.peak, frozenset(plain.switches), spread, count)


def _spread(bench: Workbench, case: Case, order: Order, center: Results, runs: int) -> dict[str, torch.Tensor]:
    """Root of the mean square of what random rounding changes, by name."""
    unit, accumulate = tolerance.units(bench.dtype, bench.spec.compute)
    squares = {name: torch.zeros_like(t) for name, t in center.items() if t is not None}
    for k in range(runs):
        results = bench.rounded_run(case, unit, accumulate, derive(bench.seed, "noise", k, runs), order)
        for name, t in results.items():
            c = center[name]
            if t is not None and c is not None:
                squares[name] += (t.detach() - c).square().nan_to_num(0.0)
    return {name: (total / max(runs, 1)).sqrt() for name, total in squares.items()}


def _detached(results: Results) -> Results:
    return {name: None if t is None else t.detach() for name, t in results.items()}


def _eager(bench: Workbench, case: Case, order: Order) -> Results:
    """The reference in the op's own precision, as float64; empty where PyTorch has no kernel for it."""
    width = bench.spec.compute if bench.spec.compute and bench.dtype in ("float16", "bfloat16") else bench.dtype
    try:
        results = bench.reference_run(case, make.torch_dtype(width), None, order)
    except Exception:  # "not implemented for 'Half'": the spread alone must do
        return {}
    return {name: None if t is None else t.detach().double() for name, t in results.items()}
