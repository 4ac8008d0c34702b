"""adjoint: the backward belongs to the forward, `<grad_x, t> = d/dh <grad_out, f(x + h t)>`; no reference is asked.

Along random directions the forward is differentiated by Ridders' tableau with the noise measured at close points, so
forwards that compute in float32 need no float64 version. The perturbation that counts is the one that rounding left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from retrograd.check import constraints, finite_differences, kinks, tolerance
from retrograd.check.inputs import torch_dtype
from retrograd.check.op_runner import ForwardPass, OpRunner
from retrograd.check.outputs import as_real, like
from retrograd.check.reference import NotApplicable, OpRaised
from retrograd.check.schema import Case, Finding
from retrograd.check.seeds import derive
from retrograd.check.spec import OpSpec
from retrograd.check.stages._base import CaseOutcome, Stage, StageContext

# Relative steps: at 1/16 a 16-bit forward still says something, below 2^-13 a float32 one is noise, and two more show
# whether what seemed to converge does.
_STEPS = tuple(2.0**-k for k in range(4, 16))
_CLOSE = 8  # units of rounding between the points that measure noise: less, and neighbours would be equal
_TOGETHER = 2.0**-10  # up to this relative error, a line along all inputs at once says enough of each
_WEAK = 0.5  # from this relative error on, the check of an input proves nothing worth saying


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
        return max(tolerance.UNIT[self.case.dtype], tolerance.TF32 if self.runner.tf32 else 0.0)

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
        try:
            forward = self.runner.forward(self.case, inputs=inputs)
        except OpRaised:  # beyond what it is defined for
            return math.nan, 0.0
        return sum(float(t.sum()) for t in self.terms(forward)), self.claimed(inputs)

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
            for inputs, forward in self._close_points():
                terms = self.terms(forward)
                values.append(self._left(inputs, terms))
                stored = max(stored, self._stored(forward, terms))
                run = forward.backward()
                moving = ((run.grads[f"grad {line.name}"], line.direction) for line in (self, *self.others))
                slopes.append(sum(float((g.detach().double() * d).sum()) for g, d in moving if g is not None))
            # Points so close may all give the same numbers (one element, results stored in less than the input has).
            known = max(finite_differences.noise(values), stored), finite_differences.noise(slopes)
            self.known = known if len(values) == finite_differences.POINTS else (math.inf, math.inf)
        return self.known

    def forward_noise(self) -> float:
        """Noise of the function alone, which takes no backward."""
        values = [self._left(inputs, self.terms(forward)) for inputs, forward in self._close_points()]
        return finite_differences.noise(values) if len(values) == finite_differences.POINTS else math.inf

    def _close_points(self) -> Iterator[tuple[dict[str, Any], ForwardPass]]:
        """Inputs a few roundings apart, and the op there; they end early where it raises."""
        spacing = _CLOSE * self.unit
        for k in range(finite_differences.POINTS):
            inputs = self.inputs((k - finite_differences.POINTS // 2) * spacing)
            try:
                forward = self.runner.forward(self.case, inputs=inputs)
            except OpRaised:
                return
            yield inputs, forward

    def _left(self, inputs: dict[str, Any], terms: list[torch.Tensor]) -> float:
        """The function less what the backward claims."""
        return sum(float(t.sum()) for t in terms) - self.claimed(inputs)

    def _stored(self, forward: ForwardPass, terms: list[torch.Tensor]) -> float:
        """Standard deviation of what the last digit of outputs, half a unit off, leaves of the function: a third."""
        depends = self.depends or (1.0,) * len(forward.outs)
        units = [tolerance.unit(o.dtype) * d for o, d in zip(forward.outs, depends, strict=True) if o.requires_grad]
        sizes = [float(torch.linalg.vector_norm(u * t)) for u, t in zip(units, terms, strict=True)]
        return math.hypot(*sizes) / 3

    def judge(self) -> tuple[float, float]:
        """What the gradient leaves unexplained, and what it may leave."""
        size = math.hypot(*(line.size() for line in (self, *self.others)))
        limit = finite_differences.extrapolate(self.unexplained, _STEPS, self.noises()[0], size)
        return limit.value, self._allowed(limit.error, self.noises()[1])

    def is_weak(self, here: ForwardPass) -> bool:
        """Whether the gradient may leave too much unexplained at best; at a quarter of the price of `judge` or less.

        Less where the digits in which the forward that ran at this point is stored say so, which are the least noise
        there is, or forwards alone do.
        """
        return (
            self._is_weak(self._stored(here, self.terms(here)), 0.0)
            or self._is_weak(self.forward_noise(), 0.0)
            or self._is_weak(*self.noises())
        )

    def _is_weak(self, value: float, slope: float) -> bool:
        return self._allowed(finite_differences.least_error(_STEPS, value), slope) > _WEAK * self.size()

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
                for step in (0.0, _STEPS[0], -_STEPS[0])
            )
        except NotApplicable:
            return self
        moved = [[as_real(a) != as_real(b) for a, b in zip(here, there, strict=True)] for there in beside]
        depends = tuple(above | below for above, below in zip(*moved, strict=True))
        return self if all(map(bool, map(torch.all, depends))) else replace(self, known=None, depends=depends)


def _judged(line: Line) -> tuple[Line, float, float]:
    """A line, what the gradient leaves unexplained along it, and what it may: a closer one where it says little."""
    value, allowed = line.judge()
    if abs(value) <= allowed and allowed > _WEAK * line.size() and (closer := line.closer()) is not line:
        return closer, *closer.judge()
    return line, value, allowed


def _direction(context: StageContext, case: Case, name: str, number: int) -> torch.Tensor:
    """Random signs times the size of the values around: per row where there are rows. Zero at the edge of a range.

    Of values that keep to a constraint, along it.
    """
    value = as_real(context.runner.inputs(case)[name]).double()
    size = kinks.around(value)
    generator = torch.Generator().manual_seed(derive(context.runner.seed, "direction", name, number))
    signs = torch.randint(0, 2, value.shape, generator=generator).to(value) * 2 - 1
    rule = context.spec.tensors.get(name)
    if rule and rule.range:
        reach, (low, high) = size * _STEPS[0], rule.range
        signs = torch.where((value - reach < low) | (value + reach > high), 0.0, signs)
    return constraints.project(context.spec, name, signs * size, value)


def _locate(line: Line) -> Line | None:
    """Halve the direction while the worse half still shows the fault; None if it turns out to be a kink.

    A kink: one element is left and the gradient lies between its one-sided slopes; or the halves have so many that no
    difference quotient converges, and what the whole seemed to show was chance.
    """
    left = line.direction.flatten().nonzero().flatten()
    whole = line.name in constraints.constrained(line.runner.spec)  # half of a direction would leave the constraint
    while len(left) > 1 and not whole:
        halves: list[tuple[float, torch.Tensor, Line]] = []
        open_ends = False
        for part in (left[: len(left) // 2], left[len(left) // 2 :]):
            sparse = torch.zeros_like(line.direction.flatten())
            sparse[part] = line.direction.flatten()[part]
            half = replace(line, direction=sparse.view_as(line.direction))
            value, allowed = half.judge()
            halves.append((_ratio(value, allowed), part, half))
            open_ends |= math.isinf(allowed)
        ratio, part, half = max(halves, key=lambda item: item[0])
        if not ratio > 1:
            return None if open_ends else line
        left, line = part, half
    return None if _bends(line) else line


def _bends(line: Line) -> bool:
    """Whether the gradient lies between one-sided slopes that differ: a smooth place whose noise hides it does not."""
    low, high = finite_differences.sides(line.one_sided, _STEPS, line.noises()[0])
    if not low <= 0 <= high:
        return False
    value, allowed = line.judge()
    bend = finite_differences.bend(line.one_sided, _STEPS, line.noises()[0])
    return abs(value) - allowed <= (abs(bend.value) + bend.error) / 2


def _crosses_jumps(context: StageContext, line: Line) -> bool:
    """Whether the reference jumps between the closest points of a line, and has the gradient that the op has."""
    if context.spec.reference is None:
        return False
    reference = context.runner.reference(line.case)
    return kinks.jumps_between(reference, line.name, _STEPS[-1] * line.direction) and _agrees(context, line)


def _agrees(context: StageContext, line: Line) -> bool:
    """Whether the oracle finds nothing wrong with the gradient of a line's input."""
    findings, _ = context.judge.against_truth(line.case, context.runner.run(line.case))
    return all(finding.tensor != f"grad {line.name}" for finding in findings)


def _within_rounding(context: StageContext, line: Line, value: float, allowed: float) -> bool:
    """Whether the attainable error of the gradient explains what is left, where a reference says what that is.

    So may an excess so small that a kink which a step crosses has made it, if the gradient is the reference's.
    """
    if context.spec.reference is None:
        return False
    label = f"grad {line.name}"
    truth = context.oracle.truth(line.case)
    if label not in truth.tol or not _agrees(context, line):
        return False
    # Random rounding alone: the error of the reference in this precision is the op's own where it is its own reference.
    tol = truth.tol[label] - truth.floor[label]
    rounding = float((tol * line.direction).square().sum().sqrt())
    return abs(value) <= max(allowed + rounding, tolerance.ALGORITHM * allowed)


def _ratio(value: float, allowed: float) -> float:
    return abs(value) / allowed if allowed else math.inf if value else 0.0


def _report(context: StageContext, line: Line, full: Line, value: float, allowed: float) -> Finding:
    """The finding for what `full` shows, with the elements that `line` was narrowed down to."""
    case, label, size = line.case, f"grad {line.name}", full.size()
    message = (
        f"{label} is not the derivative of the forward: along a random direction the forward's slope differs from it "
        f"by {abs(value):.3g}, {_ratio(value, allowed):.3g} times what is attainable (its own size is {size:.3g})"
    )
    left = line.direction.flatten().nonzero().flatten()
    more: dict[str, Any] = {}
    if len(left) == 1:
        index = tuple(int(i) for i in torch.unravel_index(left[0], line.grad.shape)) if line.grad.ndim else ()
        got = float(line.grad.double().flatten()[left[0]])
        more = dict(index=index, got=got, want=got + line.judge()[0] / float(line.direction.flatten()[left[0]]))
    run = context.runner.run(case) if context.spec.reference is not None else None
    if run is not None and not context.judge.against_truth(case, run)[0]:
        message += (
            "; the reference has the same mistake (if both mean it, as straight-through does, say surrogate=True)"
        )
    more |= dict(tensor=label, excess=_ratio(value, allowed), wrong=len(left), total=line.grad.numel())
    return Finding.of("not-the-derivative", message, case, **more)


def check(context: StageContext, case: Case) -> CaseOutcome:
    """Each input along random directions; an alarm counts if two more directions of three show it too."""
    out = CaseOutcome()
    run = context.runner.run(case)
    grads = {k.removeprefix("grad "): g for k, g in run.grads.items() if g is not None and g.numel()}
    directions = context.budget.directions
    together = _together(context, case, grads)
    powers = list(together.values())
    if powers:
        out.notes.append("all inputs moved at once, as kernels run without a GPU; level full moves each alone")
    out.notes += [_no_power(context, name) for name, power in together.items() if power > _WEAK]
    for name, grad in grads.items():
        if name in together:
            continue
        label = f"grad {name}"

        def line(number: int, name: str = name, grad: torch.Tensor = grad) -> Line:
            return Line(context.runner, case, name, grad, _direction(context, case, name, number))

        relative = []
        for number in range(directions):
            at, value, allowed = _judged(line(number))
            if (size := at.size()) > 0:
                relative.append(allowed / size)
            if abs(value) > allowed and _confirmed(line, directions) and (narrow := _locate(at)):
                if _crosses_jumps(context, narrow):
                    out.notes.append(
                        f"{label} not differentiated: the forward rounds, and jumps between any two points"
                    )
                elif not _within_rounding(context, at, value, allowed):
                    out.findings.append(_report(context, narrow, at, value, allowed))
                break
        relative.sort()
        if relative:
            powers.append(relative[len(relative) // 2])
            if relative[len(relative) // 2] > _WEAK:
                out.notes.append(_no_power(context, name))
    out.power = max(powers, default=None)
    out.power_text = f"relative error {out.power:.1e}" if out.power is not None else "no gradient to check"
    return out


def _no_power(context: StageContext, name: str) -> str:
    return f"no power for grad {name} in {context.runner.dtype}: the forward is too coarse for differences"


def _together(context: StageContext, case: Case, grads: dict[str, torch.Tensor]) -> dict[str, float]:
    """At level quick, for kernels without a GPU: all inputs moved at once, which costs as much as one of them.

    The smallest relative errors that this would have shown, by input; the others want a line of their own: all, where
    it shows something or says little of one that a closer look may say more of. In 11 bits and fewer none says much,
    and the oracle has looked more closely; there those that are left are such that a line alone may say anything of,
    which is not asked where a reference takes long: for the five inputs of a chunked recurrence it is 60 of 90 runs.
    """
    if not context.emulated() or context.level != "quick" or len(grads) < 2:
        return {}
    first, *others = (
        Line(context.runner, case, name, grad, _direction(context, case, name, 0)) for name, grad in grads.items()
    )
    value, allowed = replace(first, others=tuple(others)).judge()
    if not abs(value) <= allowed < math.inf:
        return {}
    powers = {at.name: allowed / at.size() if at.size() > 0 else math.inf for at in (first, *others)}
    if max(powers.values()) <= _TOGETHER:
        return powers
    if context.spec.reference is None or first.unit < tolerance.TF32:
        return {}
    if context.cost.is_dear(context.runner):
        return powers
    # The noise of one may be that of another, so each that is weak is asked for its own.
    here = context.runner.forward(case)
    return {
        at.name: powers[at.name] for at in (first, *others) if powers[at.name] <= _WEAK or at.closer().is_weak(here)
    }


def _confirmed(line: Callable[[int], Line], first: int) -> bool:
    """Whether two of three further directions show a fault: at a kink one direction may, by chance."""
    results = [_judged(line(first + k)) for k in range(3)]
    return sum(abs(value) > allowed for _, value, allowed in results) >= 2


def _cases(context: StageContext) -> list[Case]:
    """The ordinary case; with a reference only in the widest dtype, where differences are sharp."""
    widest = min(context.spec.dtypes, key=lambda d: torch.finfo(torch_dtype(d)).eps)
    return [context.base] if context.spec.reference is None or context.runner.dtype == widest else []


def _applies(spec: OpSpec) -> str:
    return "its gradient is not meant to be the forward's derivative (surrogate=True)" if spec.surrogate else ""


# Where the oracle has shown a wrong value, differences would say the same, at three times the cost of all else.
STAGE = Stage(
    "adjoint", "the backward belongs to the forward", 55, check, _cases, after=("contract", "oracle"), applies=_applies
)
