"""Lines along which the adjoint stage differentiates an op's forward, and the reference's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from retrograd.check import cpu_kernels, finite_differences, tolerance
from retrograd.check.op_runner import ForwardPass, OpRunner
from retrograd.check.outputs import as_real, like
from retrograd.check.own_mistakes import may_refuse
from retrograd.check.reference import NotApplicable, OpRaised, Results
from retrograd.check.rounded_runs import moved_runs
from retrograd.check.schema import Case
from retrograd.check.stages._base import StageContext

# Relative steps: at 1/16 a 16-bit forward still says something, below 2^-13 a float32 one is noise, and two more show
# whether what seemed to converge does.
STEPS = tuple(2.0**-k for k in range(4, 16))
_CLOSE = 8  # units of rounding between the points that measure noise: less, and neighbours would be equal
_REFERENCE_STEP = 2.0**-20  # relative: float64 leaves 2^-32 of what is differentiated, and 2^-40 of its curvature
CLEAR = 2.0**-10  # up to this relative error, a line along all inputs at once says enough of each
WEAK = 0.5  # from this relative error on, the check of an input proves nothing worth saying


@dataclass
class Line:
    """The function h -> <grad_out, f(x + h t)> beside what the backward claims about it, for one input."""

    runner: OpRunner
    case: Case
    name: str
    grad: torch.Tensor
    direction: torch.Tensor
    known: tuple[float, float] | None = None
    others: tuple[Line, ...] = ()  # of other inputs, which move at the same time
    depends: tuple[torch.Tensor, ...] = ()  # of each output the elements that the input decides; all where empty

    @property
    def unit(self) -> float:
        """Unit roundoff of the function: of what tf32 cuts, closer points than its own would show nothing."""
        tf32 = self.runner.tf32 and not cpu_kernels.factors_are_exact()
        return max(tolerance.UNIT[self.case.dtype], tolerance.TF32 if tf32 else 0.0)

    def inputs(self, step: float) -> dict[str, Any]:
        """The inputs of the case with one moved along the direction, and those of `others` along theirs."""
        inputs = self.runner.inputs(self.case)
        for line in (self, *self.others):
            still = inputs[line.name]
            inputs[line.name] = like(as_real(still).double() + step * line.direction, still)
        return inputs

    def claimed(self, inputs: dict[str, Any]) -> float:
        """The moves that rounding left, times the gradients."""
        still = self.runner.inputs(self.case)
        moves = (
            (line, as_real(inputs[line.name].detach()).double() - as_real(still[line.name]).double())
            for line in (self, *self.others)
        )
        return sum(float((moved * line.grad.double()).sum().detach()) for line, moved in moves)

    def value(self, step: float) -> tuple[float, float]:
        """The function, and the realised move times the gradient: how much of the function that explains."""
        inputs = self.inputs(step)
        claimed = self.claimed(inputs)  # before the op, which may write to what it is given
        try:
            forward = self.runner.forward(self.case, inputs=inputs)
        except OpRaised:  # beyond what it is defined for
            return math.nan, 0.0
        return sum(float(t.sum()) for t in self.terms(forward)), claimed

    @staticmethod
    def terms(forward: ForwardPass) -> list[torch.Tensor]:
        """What the function adds up, of the outputs that have a gradient: others may be marked not differentiable."""
        pairs = zip(forward.grad_outs, forward.outs, strict=True)
        return [as_real(g).double() * as_real(o.detach()).double() for g, o in pairs if o.requires_grad]

    def unexplained(self, step: float) -> float:
        """Central difference of the function less what the gradient says, per unit of the direction."""
        (above, claimed_above), (below, claimed_below) = self.value(step), self.value(-step)
        return ((above - below) - (claimed_above - claimed_below)) / (2 * step)

    def one_sided(self, step: float) -> float:
        """The same from this side alone."""
        (there, claimed), (here, _) = self.value(step), self.value(0.0)
        return (there - here - claimed) / step

    def noises(self) -> tuple[float, float]:
        """Noise of the function and of the claimed slope, from points a few roundings apart.

        A part of a line keeps the noise of all of it: few elements that move change few roundings.
        """
        if self.known is None:
            values, slopes, stored = [], [], 0.0
            for claimed, forward in self._close_points():
                terms = self.terms(forward)
                values.append(sum(float(t.sum()) for t in terms) - claimed)
                stored = max(stored, self._stored(forward, terms))
                run = forward.backward()
                moving = ((run.grads[f"grad {line.name}"], line.direction) for line in (self, *self.others))
                slopes.append(sum(float((g.detach().double() * d).sum()) for g, d in moving if g is not None))
            # Points so close may all give the same numbers (one element, results stored in less than the input has).
            known = max(finite_differences.noise(values), stored), finite_differences.noise(slopes)
            self.known = known if len(values) == finite_differences.POINTS else (math.inf, math.inf)
        return self.known

    def _close_points(self) -> Iterator[tuple[float, ForwardPass]]:
        """What is claimed of inputs a few roundings apart, and the op there; they end early where it raises."""
        spacing = _CLOSE * self.unit
        for k in range(finite_differences.POINTS):
            inputs = self.inputs((k - finite_differences.POINTS // 2) * spacing)
            claimed = self.claimed(inputs)
            try:
                forward = self.runner.forward(self.case, inputs=inputs)
            except OpRaised:
                return
            yield claimed, forward

    def _stored(self, forward: ForwardPass, terms: list[torch.Tensor]) -> float:
        """Standard deviation of what the last digit of outputs, half a unit off, leaves of the function: a third."""
        depends = self.depends or (1.0,) * len(forward.outs)
        units = [tolerance.unit(o.dtype) * d for o, d in zip(forward.outs, depends, strict=True) if o.requires_grad]
        sizes = [float(torch.linalg.vector_norm(u * t)) for u, t in zip(units, terms, strict=True)]
        return math.hypot(*sizes) / 3

    def judge(self) -> tuple[float, float]:
        """What the gradient leaves unexplained, and what it may leave."""
        size = math.hypot(*(line.size() for line in (self, *self.others)))
        limit = finite_differences.extrapolate(self.unexplained, STEPS, self.noises()[0], size)
        return limit.value, self._allowed(limit.error, self.noises()[1])

    def _allowed(self, error: float, slope: float) -> float:
        lines = (self, *self.others)
        rounding = sum(tolerance.storing_error(self.case.dtype, line.grad.double() * line.direction) for line in lines)
        return tolerance.TABLEAU_ERRORS * error + tolerance.NOISE_SIGMAS * slope + rounding

    def size(self) -> float:
        """The size that the sum of the gradient's elements times the direction has, in whatever signs."""
        return float((self.grad.double() * self.direction).square().sum().sqrt())

    def closer(self) -> Line:
        """The line with the noise of those elements of outputs alone that the reference lets the input decide."""
        if self.runner.spec.reference is None:
            return self
        reference = self.runner.reference(self.case)
        try:
            here, *beside = (
                replace(reference, inputs=partial(self.inputs, step)).outputs().inexact.values()
                for step in (0.0, STEPS[0], -STEPS[0])
            )
        except NotApplicable:
            return self
        moved = [[as_real(a) != as_real(b) for a, b in zip(here, there, strict=True)] for there in beside]
        depends = tuple(above | below for above, below in zip(*moved, strict=True))
        return self if all(map(bool, map(torch.all, depends))) else replace(self, known=None, depends=depends)


def derivative_by_reference(context: StageContext, case: Case, lines: Sequence[Line]) -> bool:
    """Whether the reference's gradients are the slopes of its forward along these lines, in float64.

    What is the reference's mistake as well as the op's shows there, at two forwards for each line.
    """
    truth, moves = context.oracle.truth(case), {line.name: _REFERENCE_STEP * line.direction for line in lines}
    if any(context.runner.inputs(case)[name].is_complex() for name in moves):
        return False
    still = {name: torch.zeros_like(move) for name, move in moves.items()}
    shifts = [still | {name: sign * move} for name, move in moves.items() for sign in (1.0, -1.0)]
    values: list[float] = []
    with may_refuse():  # points beside the case
        for outs in moved_runs(context.runner.reference(case), shifts, _outputs_alone):
            pairs = zip(context.runner.grad_outs(case), outs.values(), strict=True)
            terms = [(as_real(g).double() * out).flatten(1).sum(1) for g, out in pairs if out is not None]
            values += torch.stack(terms).sum(0).tolist()
    if len(values) != len(shifts):
        return False
    for line, above, below in zip(lines, values[::2], values[1::2], strict=True):
        grad = truth.want.get(f"grad {line.name}")
        along = line.direction * 0.0 if grad is None else grad.double() * line.direction
        left = abs((above - below) / (2 * _REFERENCE_STEP) - float(along.sum()))
        rounding = tolerance.unit(torch.float64) * (abs(above) + abs(below)) / _REFERENCE_STEP
        if not left <= CLEAR * float(along.square().sum().sqrt()) + rounding:
            return False
    return True


def _outputs_alone(
    case: Case, seed: int, outs: dict[str, torch.Tensor], leaves: dict[str, torch.Tensor], gs: list[torch.Tensor],
    runs: int = 0,
) -> Results:  # fmt: skip
    del case, seed, leaves, gs, runs
    return {name: out.detach() for name, out in outs.items()}
