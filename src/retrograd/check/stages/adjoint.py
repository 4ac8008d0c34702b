"""adjoint: the backward belongs to the forward, `<grad_x, t> = d/dh <grad_out, f(x + h t)>`; no reference is asked.

Along random directions the forward is differentiated by Ridders' tableau with the noise measured at close points, so
forwards that compute in float32 need no float64 version. The perturbation that counts is the one that rounding left.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from retrograd.check import constraints, cpu_kernels, finite_differences, kinks, tolerance
from retrograd.check.inputs import torch_dtype
from retrograd.check.op_runner import OpRun
from retrograd.check.outputs import as_real
from retrograd.check.reference import NotApplicable, OpRaised
from retrograd.check.schema import Case, Finding
from retrograd.check.seeds import derive
from retrograd.check.spec import OpSpec
from retrograd.check.stages._base import CaseOutcome, Stage, StageContext
from retrograd.check.stages._lines import CLEAR, STEPS, WEAK, Line, derivative_by_reference


def _judged(line: Line) -> tuple[Line, float, float]:
    """A line, what the gradient leaves unexplained along it, and what it may: a closer one where it says little."""
    value, allowed = line.judge()
    if abs(value) <= allowed and allowed > WEAK * line.size() and (closer := line.closer()) is not line:
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
        reach, (low, high) = size * STEPS[0], rule.range
        signs = torch.where((value - reach < low) | (value + reach > high), 0.0, signs)
    return constraints.project(context.spec, name, signs * size, value)


def _locate(line: Line, value: float, allowed: float) -> Line | None:
    """Halve the direction while a half still shows the fault; None if it turns out to be a kink.

    The first half is gone on with where it shows half as much as the whole did, which left `value`: that takes a third
    of the runs less. A kink that it may lead to is not the fault's worst place, so both halves are asked then.
    """
    return _narrowed(line, _ratio(value, allowed) / 2) or _narrowed(line, math.inf)


def _narrowed(line: Line, enough: float) -> Line | None:
    """As `_locate`; a half that shows `enough` is gone on with, and half of that is enough of its own halves."""
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
            if halves[0][0] > max(1.0, enough):
                break
        shown, part, half = max(halves, key=lambda item: item[0])
        if not shown > 1:
            return None if open_ends else line
        left, line, enough = part, half, enough if math.isinf(enough) else shown / 2
    return None if _bends(line) else line


def _bends(line: Line) -> bool:
    """Whether the gradient lies between one-sided slopes that differ: a smooth place whose noise hides it does not."""
    low, high = finite_differences.sides(line.one_sided, STEPS, line.noises()[0])
    if not low <= 0 <= high:
        return False
    value, allowed = line.judge()
    bend = finite_differences.bend(line.one_sided, STEPS, line.noises()[0])
    return abs(value) - allowed <= (abs(bend.value) + bend.error) / 2


def _crosses_jumps(context: StageContext, line: Line) -> bool:
    """Whether the reference jumps between the closest points of a line, and has the gradient that the op has."""
    if context.spec.reference is None:
        return False
    reference = context.runner.reference(line.case)
    return kinks.jumps_between(reference, line.name, STEPS[-1] * line.direction) and _agrees(context, line)


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
    """Each input along random directions; an alarm counts if two more directions of three show it too.

    Without a reference nothing else looks at values, and of a layer's forward in tf32 (its 14 inputs took 368 runs) no
    line says more than half of a gradient: kernels that are executed here multiply float32 as it is.
    """
    run = context.runner.run(case)  # which shows what its kernels multiply
    exact = context.runner.tf32 and context.spec.reference is None
    with cpu_kernels.exact_factors() if exact else nullcontext():
        return _along_lines(context, case, context.runner.run(case) if exact else run)


def _along_lines(context: StageContext, case: Case, run: OpRun) -> CaseOutcome:
    out = CaseOutcome()
    sought = context.judge.alarms.sought
    there = {k: g for k, g in run.grads.items() if g is not None and g.numel() and sought in ("", k)}
    grads = {k.removeprefix("grad "): g for k, g in there.items()}
    lines = _lines(context, case, grads)
    if _too_coarse(context, lines) and (by_reference := _of_reference(context, case, lines)) is not None:
        return by_reference
    directions = context.budget.directions
    together = _together(lines)
    powers = list(together.values())
    if powers:
        moved = "all inputs" if len(powers) == len(grads) else ", ".join(together)
        out.notes.append(f"{moved} moved at once, as kernels run without a GPU; level full moves each alone")
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
            if abs(value) > allowed and _confirmed(line, directions) and (narrow := _locate(at, value, allowed)):
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
            if relative[len(relative) // 2] > WEAK:
                out.notes.append(_no_power(context, name))
    out.power = max(powers, default=None)
    out.power_text = f"relative error {out.power:.1e}" if out.power is not None else "no gradient to check"
    return out


def _no_power(context: StageContext, name: str) -> str:
    return f"no power for grad {name} in {context.runner.dtype}: the forward is too coarse for differences"


def _lines(context: StageContext, case: Case, grads: dict[str, torch.Tensor]) -> list[Line]:
    """The first line of each input, at level quick for kernels without a GPU, which take long; of others none."""
    if not (context.emulated() and context.level == "quick"):
        return []
    return [Line(context.runner, case, name, grad, _direction(context, case, name, 0)) for name, grad in grads.items()]


def _too_coarse(context: StageContext, lines: list[Line]) -> bool:
    """Whether the oracle has looked more closely than any of these lines would.

    In 8 bits a line says nothing below 0.3 to 0.7 of a gradient, in 11 mostly below a tenth, which the oracle has
    compared to a hundredth and better: what is left is a mistake that the reference has too, and that its own line in
    float64 shows at two forwards an input. The lines of a kernel with four inputs took 70 runs.
    """
    return bool(lines) and context.spec.reference is not None and lines[0].unit >= tolerance.TF32


def _of_reference(context: StageContext, case: Case, lines: list[Line]) -> CaseOutcome | None:
    """What the reference says in float64 where the op has its values; None where it says nothing, as at a kink."""
    if context.judge.against_truth(case, context.runner.run(case))[0]:
        return None  # of the op itself, whether or not oracle was asked
    if derivative_by_reference(context, case, lines):
        note = (
            f"in {case.dtype} the forward is too coarse for differences: the gradient of the reference, with which "
            "oracle compares, is the derivative of its forward; level full differentiates the op"
        )
        return CaseOutcome(notes=[note], power=None, power_text="by the reference")
    spec = replace(context.spec, fn=context.spec.reference, dtypes=("float64",))
    reference = StageContext.of(spec, "float64", level=context.level, seed=context.runner.seed)
    try:
        findings = check(reference, case.but(dtype="float64")).findings
    except (OpRaised, NotApplicable):  # it takes no float64 beside what has a dtype of its own
        return None
    return CaseOutcome([replace(finding, case=case) for finding in findings]) if findings else None


def _together(lines: list[Line]) -> dict[str, float]:
    """All inputs moved at once, which costs as much as one of them; then those of which that says little, and so on.

    The smallest relative errors that this would have shown, by input; of one that is not there it says little, or
    something is wrong along the line that it shares: it wants a line of its own.
    """
    powers: dict[str, float] = {}
    while len(lines) > 1:
        first, *others = lines
        value, allowed = replace(first, others=tuple(others)).judge()
        if not abs(value) <= allowed < math.inf:
            break
        clear = {at.name: allowed / at.size() for at in lines if at.size() > 0 and allowed <= CLEAR * at.size()}
        if not clear:
            break
        powers |= clear
        lines = [at for at in lines if at.name not in clear] if len(clear) > 1 else []  # one costs as much alone
    return powers


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
