"""extremes: very large and small values, a large mean, zero and constant rows, one cell that is NaN or infinite.

Whole numbers and masks are all at one end of their range: nothing selected, everything ignored, all in one place.
Finite extremes are compared with the truth. What a cell that is not finite reaches is compared with what it reaches in
float64: NaN must not vanish on the way, must not appear elsewhere. Where the reference run in the op's own precision
disagrees with float64, nobody is asked to do better.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from retrograd.check import extreme_values, tolerance
from retrograd.check.draws import SAME_DRAW, alike
from retrograd.check.op_runner import OpRun
from retrograd.check.operators import EXTREMA
from retrograd.check.own_mistakes import may_refuse
from retrograd.check.reference import OpRaised, Results, detached
from retrograd.check.rounding import Float64
from retrograd.check.schema import Case, Finding
from retrograd.check.spec import OpSpec
from retrograd.check.stages._base import CaseOutcome, Stage, StageContext
from retrograd.check.stages._extreme_cases import bounded, cases, unbounded
from retrograd.check.stages._numbers_beside import judge_numbers
from retrograd.check.tensor_comparison import first_index

# What is in place of an infinity, to see where things tend to; exp of the last is still a number of float64.
_FAR = (32.0, 128.0, 512.0)


@dataclass
class Reach:
    """One tensor of a case with a cell that is not finite: what is, what float64 and the same precision make of it."""

    got: torch.Tensor
    want: torch.Tensor
    eager: torch.Tensor
    plain: torch.Tensor  # float64 without the cell

    def for_nan(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where NaN vanished, where it appeared: exactly the places of float64 have it."""
        agreed = self.want.isnan() == self.eager.isnan()
        return agreed & self.want.isnan() & ~self.got.isnan(), agreed & ~self.want.isnan() & self.got.isnan()

    def for_inf(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for an infinity, whose way through a formula depends on the formula: rows count, not elements.

        A row that float64 leaves finite must be finite; one in which something is not must have something that is not.
        """
        not_finite, odd_want, odd_eager = (~t.isfinite() for t in (self.got, self.want, self.eager))
        if self.want.ndim > 1:
            not_finite, odd_want, odd_eager = (t.any(-1, keepdim=True) for t in (not_finite, odd_want, odd_eager))
        agreed = odd_want == odd_eager
        gone, new = (t.expand_as(self.want) for t in (agreed & odd_want & ~not_finite, agreed & ~odd_want & not_finite))
        untouched = (self.want == self.plain) & ~self.got.isfinite() & self.eager.isfinite()
        return gone & ~self.want.isfinite(), new & ~self.got.isfinite() | untouched


def _rows(mask: torch.Tensor) -> str:
    """ "rows 2, 5" of a mask; all of a vector's places."""
    flat = mask.flatten(0, -2).any(-1) if mask.ndim > 1 else mask.flatten()
    places = [int(i) for i in flat.nonzero().flatten()]
    word = "row" if mask.ndim > 1 else "element"
    shown = ", ".join(map(str, places[:6])) + (f" and {len(places) - 6} more" if len(places) > 6 else "")
    return f"{word}{'s' if len(places) != 1 else ''} {shown}" if places else "nothing"


def _not_finite(context: StageContext, case: Case, name: str, extreme: str, out: CaseOutcome) -> None:
    try:
        run = context.runner.run(case)
    except OpRaised as error:
        out.notes.append(f"refuses {extreme} in {name}: {str(error).splitlines()[0]}")
        return
    truth, plain = context.oracle.truth(case), context.oracle.truth(case.but(values=()))
    at, moved = list(extreme_values.cell(run.inputs[name].shape)), _Moved(context, case, name)
    for label, got in run.tensors.items():
        want, before, eager = truth.want.get(label), plain.want.get(label), truth.eager.get(label)
        if got is None or want is None or before is None:
            continue
        reach = Reach(got.detach().double(), want, want if eager is None else eager, before)
        gone, new = reach.for_nan() if extreme == "nan" else reach.for_inf()
        if extreme == "nan":
            gone, new = _told(context, case, moved, label, reach, gone, new, run, out)
        elif bool(gone.any()) and not bool((gone := gone & ~_limit(case, moved, label, reach)).any()):
            out.notes.append(f"{extreme} in {name}{at} leaves {label} at its limit, where float64 has 0 times infinity")
        if bool((gone | new).any()) and _takes_a_place(context, case, label, reach):
            where = f"other places of {label} than in float64, put there by a sort or as the largest"
            out.notes.append(f"{extreme} in {name}{at} is in {where}: which place it takes is a convention")
            gone, new = torch.zeros_like(gone), torch.zeros_like(new)
        if bool(new.any()) and not bool((new & ~_coupled(moved, label, reach)).any()):
            where = f"reaches {_rows(new)} of {label} too, along dimensions that float64 couples"
            out.notes.append(f"{extreme} in {name}{at} {where}: masked products and differences of sums carry it")
            new = torch.zeros_like(new)
        for mask, kind, verb in ((gone, "vanished", "vanishes from"), (new, "spread", "spreads to")):
            if not bool(mask.any()):
                continue
            index = first_index(mask)
            not_finite = torch.isnan if extreme == "nan" else lambda t: ~t.isfinite()
            message = (
                f"{extreme} in {name}{at} {verb} {label}{list(index)}: in float64 it reaches {_rows(not_finite(want))} "
                f"of {label}, here {_rows(not_finite(reach.got))}"
            )
            there, right = float(reach.got[index]), float(want[index])
            wrong, total = int(mask.sum()), mask.numel()
            out.find(kind, message, case, label, index=index, got=there, want=right, wrong=wrong, total=total)
    judge_numbers(context, case, run, out)


def _told(
    context: StageContext, case: Case, moved: _Moved, label: str, reach: Reach, gone: torch.Tensor, new: torch.Tensor,
    run: OpRun, out: CaseOutcome,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Where a NaN vanished and appeared, without what is a convention, which is a note."""
    name = moved.name
    at = list(extreme_values.cell(run.inputs[name].shape))
    if label in run.complex:  # one number has two places
        gone = gone & ~reach.got.isnan().any(-1, keepdim=True)
        new = new & ~reach.want.isnan().any(-1, keepdim=True)
    if bool(gone.any()):
        gone = gone & _depends(moved, label, reach)
    gone, new = _by_convention(context, case, name, label, reach, gone, new, out)
    if gone.ndim > 1 and bool(gone.any()) and not bool((gone.any(-1) & ~reach.got.isnan().any(-1)).any()):
        # Which of a row's largest it is, and whom it takes with it, differs between sorts and masks.
        out.notes.append(f"nan in {name}{at} reaches fewer places of the rows of {label} that have it in float64")
        gone = torch.zeros_like(gone)
    if new.ndim > 1 and bool(new.any()) and not bool((new.any(-1) & ~reach.want.isnan().any(-1)).any()):
        # Formulas by blocks multiply by zeros what they do not want of a block.
        out.notes.append(f"nan in {name}{at} reaches more of the rows of {label} that have it in float64")
        new = torch.zeros_like(new)
    return gone, new


def _by_convention(
    context: StageContext, case: Case, name: str, label: str, reach: Reach, gone: torch.Tensor, new: torch.Tensor,
    out: CaseOutcome,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Both masks without what relu or a comparison makes of a NaN at its own element."""
    at = list(extreme_values.cell(context.runner.inputs(case)[name].shape))
    if context.oracle.truth(case.but(values=())).switches:
        if gone.nonzero().tolist() == [at]:
            out.notes.append(f"nan in {name}{at} does not reach {label}{at} itself, where float64 has it: a convention")
            gone = torch.zeros_like(gone)
        if new.nonzero().tolist() == [at]:
            out.notes.append(f"nan in {name}{at} reaches {label}{at} itself, where float64 has none: a convention")
            new = torch.zeros_like(new)
    return gone, new


def _takes_a_place(context: StageContext, case: Case, label: str, reach: Reach) -> bool:
    """Whether the reference asks for places (of the largest, in their order) among NaNs or equal infinities.

    What such a place decides has NaN elsewhere, in no more places. A gradient may have none, as long as the outputs do:
    what goes to the place of a largest number is no NaN itself, and goes to all, as 0 / 0, where none is equal to it.
    Infinities that are equal share a gradient that one of them may have: it is somewhere.
    """
    nan = case.values[0][1] == "nan"
    odd = torch.isnan if nan else lambda t: ~t.isfinite()
    count = int(odd(reach.got).sum())
    if count > int(odd(reach.want).sum()) or not (count or nan):
        return False
    mode = Float64(record=True)
    context.runner.reference(case).run(torch.float64, mode)
    if not label.startswith("grad "):
        return count > 0 and bool(mode.unplaced - EXTREMA)
    want, got = context.oracle.truth(case).want, context.runner.run(case).tensors
    outputs = [(t, got.get(k)) for k, t in want.items() if t is not None and not k.startswith("grad ")]
    return bool(mode.unplaced) and all(g is not None and odd(t).any() == odd(g).any() for t, g in outputs)


class _Moved:
    """Results of the reference in float64 with one element of an input moved, which all tensors of a case ask for.

    Attributes:
        name: of the input.
        value: what it is without the extreme value.
    """

    def __init__(self, context: StageContext, case: Case, name: str) -> None:
        self._runner, self._plain = context.runner, case.but(values=())
        self.name, self.value = name, context.runner.inputs(self._plain)[name]
        self._known: dict[tuple[tuple[int, ...], float], Results] = {}

    def by(self, place: tuple[int, ...], step: float, label: str) -> torch.Tensor | None:
        """One result with so much added at a place; None if there is none, or the reference refuses such numbers."""
        if (place, step) not in self._known:
            shift = torch.zeros_like(self.value, dtype=torch.promote_types(self.value.dtype, torch.float64))
            shift[place] = step
            self._known[place, step] = {}
            with may_refuse():
                reference = self._runner.reference(self._plain)
                results = reference.run(torch.float64, reference.exactly(), shift={self.name: shift})
                self._known[place, step] = detached(results)
        return self._known[place, step].get(label)


def _limit(case: Case, moved: _Moved, label: str, reach: Reach) -> torch.Tensor:
    """Where a tensor is what the reference tends to as the cell grows: what 0 times infinity hides in float64."""
    sign = -1.0 if case.values[0][1] == "-inf" else 1.0
    at, ends = extreme_values.cell(moved.value.shape), list[torch.Tensor]()
    for far in _FAR:
        if (end := moved.by(at, sign * far - moved.value[at].double().item(), label)) is None:
            return torch.zeros_like(reach.want, dtype=torch.bool)
        ends.append(end)
    first, second, last = ends
    step = (last - second).abs()
    return (step <= (second - first).abs() / 2) & ((reach.got - last).abs() <= 2 * step + SAME_DRAW * last.abs())


def _depends(moved: _Moved, label: str, reach: Reach) -> torch.Tensor:
    """Where a tensor depends on the cell at all, not by 0 * NaN alone: where another number there changes it."""
    at = extreme_values.cell(moved.value.shape)
    here = moved.value[at].item()
    beyond = 1.0 + moved.value.nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    depends = torch.zeros_like(reach.want, dtype=torch.bool)
    # A number that is not the largest or the least decides nothing until it is moved beyond all others; what is not
    # finite there says that the formula is not meant for such numbers.
    for number, step in enumerate((1.0 + abs(here), beyond - here, -beyond - here)):
        if (there := moved.by(at, step, label)) is None:
            return torch.ones_like(depends)
        depends = depends | (there != reach.plain) & (there.isfinite() if number else True)
    return depends


def _coupled(moved: _Moved, label: str, reach: Reach) -> torch.Tensor:
    """Where the way of summing decides what a cell reaches: along dimensions in which float64 couples cells.

    A block of a causal sum multiplies by zeros what it masks, as torch's own masked products do, and a suffix sum may
    be a difference of two others: NaN then reaches the steps before it, but no other sequence of the batch. The first
    and the last cell of the input tell too what is coupled: the last step of a causal sum reaches itself alone. So does
    NaN in the cell itself, which an infinity less itself is.
    """
    shape, masks = moved.value.shape, [~reach.want.isfinite()]
    for place in ((0,) * len(shape), extreme_values.cell(shape), tuple(n - 1 for n in shape)):
        there = moved.by(place, math.nan, label)
        if there is not None and there.shape == reach.want.shape:
            masks.append(there.isnan())
    places = [mask.nonzero() for mask in masks if bool(mask.any())]
    dims = [d for d in range(reach.want.ndim) if any(bool((at[:, d] != at[0, d]).any()) for at in places)]
    here = masks[0].any(tuple(dims), keepdim=True) if dims else masks[0]
    return here.expand_as(reach.want)


def _excused(context: StageContext, case: Case, run: OpRun, out: CaseOutcome) -> dict[str, torch.Tensor]:
    """Elements nobody can be asked for: the same precision or the result itself overflows, or no digit is left.

    Random rounding says how far right results lie apart where it is a small change. Where it is not, a right result may
    be another function altogether: with a mean of 1e4 added and rounded to bfloat16, a norm's variance is 0.
    """
    truth = context.oracle.truth(case)
    masks, empty = dict[str, torch.Tensor](), []
    at_end = case.values[0][1] in extreme_values.ENDS
    outputs = [t for k, t in truth.want.items() if t is not None and not k.startswith("grad ")]
    nothing = at_end and any(bool(t.isnan().any()) for t in outputs)
    for label, want in truth.want.items():
        got, eager = run.tensors.get(label), truth.eager.get(label)
        if want is None or got is None or got.shape != want.shape:
            continue
        if not all(t is None or tolerance.moderate(t, got.dtype) for t in (want, eager)):
            beyond = tolerance.overflows(want, got.dtype)
            masks[label] = beyond if eager is None else beyond | ~eager.isfinite()
        if at_end:  # a mean of nothing: which number stands for it is a convention, and so is whether it has a gradient
            masks[label] = masks.get(label, False) | want.isnan()
        if nothing and label.startswith("grad "):
            masks[label] |= got.isnan()
        allowed = context.judge.alarms.allowed(case, label, got, want, truth)
        if allowed is None or allowed.says_nothing:
            lost = truth.lost(label)
            known = ~got.isfinite() & (want != 0) & (truth.tol[label] <= want.abs())  # NaN instead of digits
            left = lost | tolerance.no_digit_left(truth.tol[label], want) & ~known
            masks[label] = masks.get(label, False) | left
            empty += [label] if bool((masks[label] & (lost | (truth.tol[label] > want.abs()))).any()) else []
    if empty:
        (_, extreme), *_ = case.values
        out.notes.append(
            f"{', '.join(empty)} not judged with {extreme} in {', '.join(name for name, _ in case.values)} in "
            f"{case.dtype}: one rounding of the reference's own formula changes it by more than its size"
        )
    return masks


def _unmoved(context: StageContext, case: Case) -> bool:
    """Whether the reference's outputs are what they were without the mean that all inputs have, but for rounding."""
    want, before = context.oracle.truth(case).want, context.oracle.truth(case.but(values=())).want
    outputs = [(t, before.get(k)) for k, t in want.items() if t is not None and not k.startswith("grad ")]
    return all(b is not None and alike(t, b) for t, b in outputs)


def _finite(context: StageContext, case: Case, out: CaseOutcome) -> None:
    (name, extreme), *_ = case.values
    truth = context.oracle.truth(case)
    if len(case.values) > 1 and not _unmoved(context, case):
        return
    if truth.peak > tolerance.largest_safe(case.dtype, context.spec.compute):
        out.notes.append(f"{extreme} is not judged in {case.dtype}: the reference's own formula overflows there")
        return
    if extreme in extreme_values.EXACT_ENDS and not all(
        t is None or bool(t.isfinite().all()) for t in truth.want.values()
    ):
        out.notes.append(f"{name} exactly at its {extreme} end is not judged: the reference is not finite there")
        return
    run = context.runner.run(case)
    findings, profiles = context.judge.against_truth(case, run, _excused(context, case, run, out))
    named = [_named(f, run) for f in findings]
    if extreme == "max/4" and any(f.kind == "not-finite" for f in named) and _overflows(context, case):
        out.notes.append(f"max/4 is not judged in {case.dtype}: a number on the reference's way overflows there")
        return
    out.findings += named
    out.profiles += profiles


def _overflows(context: StageContext, case: Case) -> bool:
    """Whether any number of the reference, chosen or not, passes half of the range: other formulas have others."""
    mode = Float64(track=True, widest=True)
    context.runner.reference(case).run(torch.float64, mode)
    return mode.widest > tolerance.largest_safe(case.dtype, context.spec.compute)


def _named(finding: Finding, run: OpRun) -> Finding:
    got = run.tensors.get(finding.tensor)
    lost = got is not None and not bool(got.isfinite().all())
    return replace(finding, kind="not-finite") if lost else finding


def check(context: StageContext, case: Case) -> CaseOutcome:
    """One run; the truth needs the usual noise runs for finite extremes, none for a cell that is not finite."""
    out = CaseOutcome(power_text="exact: any NaN or Inf; values as in oracle")
    cells = [(name, extreme) for name, extreme in case.values if extreme in extreme_values.CELLS]
    for name, extreme in cells:
        _not_finite(context, case, name, extreme, out)
    if case.values and not cells:
        _finite(context, case, out)
    return out


def _applies(spec: OpSpec) -> str:
    if unbounded(spec) or bounded(spec):
        return ""
    return "no input is known to take any value; name those that do: extremes=('x',)"


STAGE = Stage(
    "extremes", "huge, tiny, zero, NaN, Inf in their places", 77, check, cases,
    needs_reference=True, after=("oracle", "contract"), hears=True, applies=_applies,
)  # fmt: skip
