"""batch: a row's bits do not depend on the batch that it stands in, forward and backward.

The same rows run in a large batch, one alone, in a smaller batch and at other places. What differs counts only where
the float64 reference says that rows do not depend on each other.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from retrograd.check.cost import elements
from retrograd.check.inputs import resized
from retrograd.check.op_runner import OpRun, same_bits
from retrograd.check.oracle import Truth, truth_of
from retrograd.check.reference import NotApplicable, OpRaised
from retrograd.check.schema import Case, Finding
from retrograd.check.sizes import elements as count_of
from retrograd.check.spec import OpSpec
from retrograd.check.stages._base import CaseOutcome, Stage, StageContext
from retrograd.check.tensor_comparison import first_index

_WHOLE = (129, 33)  # of the large batch, the first that is cheap: beyond a block of rows, and a multiple of none
_NOTED = (33,)  # where nothing but a note can come of it, at level quick
_LONG = (1025, 257)  # of another dimension, the first that is cheap: 48 are one block of most kernels, nothing to split
_AGAIN = 3  # runs of the same call before other bits are said to come of the batch
_EXACT = "float64"  # in which the reference says whether rows depend on each other


class NotByRows(Exception):
    """A tensor follows the size of the batch otherwise than by an equal share for each row."""


@dataclass(frozen=True)
class Rows:
    """Some rows of a batch, and where they stand: "alone", "in a batch of 33"."""

    index: tuple[int, ...]
    place: str

    def of(self, t: torch.Tensor, axis: int, batch: int) -> torch.Tensor:
        """These rows of a tensor of the batch, in memory of their own."""
        shares = t.detach().unflatten(axis, (batch, -1))
        index = torch.tensor(self.index, device=t.device)
        return shares.index_select(axis, index).flatten(axis, axis + 1).contiguous()


def batch_axis(whole: torch.Tensor, part: torch.Tensor, batch: int, rows: int) -> int | None:
    """The dimension in which a tensor has more for a batch than for some rows; None if it has the same shape.

    Raises:
        NotByRows: it has no equal share for each row.
    """
    sizes = list(zip(whole.shape, part.shape, strict=False))
    axes = [i for i, (n, m) in enumerate(sizes) if n != m]
    if whole.ndim == part.ndim and not axes:
        return None
    if whole.ndim != part.ndim or len(axes) > 1:
        raise NotByRows
    (n, m), axis = sizes[axes[0]], axes[0]
    if n % batch or n // batch * rows != m:
        raise NotByRows
    return axis


@dataclass(frozen=True)
class BatchOfRows:
    """A batch, of which rows are run for themselves with the inputs and gradients that they have in it.

    Attributes:
        context: of the op.
        name: of the dimension.
        case: of the whole batch.
        truths: of rows that were held against the reference.
    """

    context: StageContext
    name: str
    case: Case
    truths: dict[Rows, Truth] = field(default_factory=dict[Rows, Truth], hash=False)

    @cached_property
    def size(self) -> int:
        """How many rows there are."""
        return count_of(self.case.size(self.name))

    def resized(self, size: int) -> Case | None:
        """The case with another size of the batch and no other change; None where the spec does not allow it."""
        other = resized(self.context.spec, self.case, self.name, size)
        return other if other == self.case.with_size(self.name, size) else None

    @property
    def asked(self) -> bool:
        """Whether the op promises that bits do not depend on the batch."""
        return bool(self.context.spec.batch_invariant)

    def parts(self) -> list[tuple[Rows, Case]]:
        """What is run for itself: one row, a quarter, at level full other sizes, and all in another order.

        Where it is promised four rows are alone: a sum in another order has the same bits in a fifth of all rows.
        """
        quarter = self.size // 4 + 1
        sizes = dict.fromkeys([quarter] if self.context.level == "quick" else [quarter, 2, 8, 16, 32, 64])
        more: list[int] = [0, self.size // 3, self.size - 1] if self.asked else []
        rows = [Rows((i,), "alone") for i in dict.fromkeys([self.size // 2, *more]) if self.size]
        rows += [Rows(tuple(range(n)), f"in a batch of {n}") for n in sizes if 1 < n < self.size]
        rows += [Rows(tuple(reversed(range(self.size))), "at another place of it")]
        cases = ((each, self.resized(len(each.index))) for each in rows)
        return [(each, case) for each, case in cases if case is not None]

    @cached_property
    def axes(self) -> tuple[dict[str, int | None], list[int | None]]:
        """The dimension of the batch in each input, and in each output that has a gradient."""
        part = next((case for _, case in self.parts() if case != self.case), None)
        if part is None:
            raise NotByRows
        rows, runner = count_of(part.size(self.name)), self.context.runner
        whole, own = runner.inputs(self.case), runner.inputs(part)
        named = {n: batch_axis(t, own[n], self.size, rows) for n, t in whole.items() if isinstance(t, torch.Tensor)}
        gradients = zip(runner.grad_outs(self.case), runner.grad_outs(part), strict=True)
        return named, [batch_axis(g, h, self.size, rows) for g, h in gradients]

    def inputs(self, rows: Rows, case: Case) -> dict[str, Any]:
        """The inputs of some rows, as they are in the batch; what has no rows is the same."""
        own, whole = self.context.runner.inputs(case), self.context.runner.inputs(self.case)
        return own | {name: self._taken(rows, whole[name], axis) for name, axis in self.axes[0].items()}

    def grad_outs(self, rows: Rows) -> list[torch.Tensor]:
        """The gradients of the outputs of some rows, as they are in the batch."""
        gs = self.context.runner.grad_outs(self.case)
        return [self._taken(rows, g, axis) for g, axis in zip(gs, self.axes[1], strict=True)]

    def _taken(self, rows: Rows, t: torch.Tensor, axis: int | None) -> torch.Tensor:
        return t if axis is None else rows.of(t, axis, self.size)

    def run(self, rows: Rows, case: Case) -> OpRun:
        """Forward and backward of some rows."""
        inputs, gs = self.inputs(rows, case), self.grad_outs(rows)
        return self.context.runner.forward(case, inputs=inputs, grad_outs=gs).backward()

    @cached_property
    def truth(self) -> Truth:
        """What the reference gives in float64 for the batch."""
        reference = replace(self.context.runner.reference(self.case), case=self.case.but(dtype=_EXACT), tf32=False)
        return truth_of(reference, self.context.budget.noise_runs)

    def truth_of_rows(self, rows: Rows, case: Case) -> Truth:
        """What it gives in float64 for some rows."""
        if rows in self.truths:
            return self.truths[rows]
        reference = replace(
            self.context.runner.reference(case), case=case.but(dtype=_EXACT), tf32=False,
            inputs=lambda: self.inputs(rows, case), ordinary=lambda: self.inputs(rows, case),
            grad_outs=lambda: self.grad_outs(rows),
        )  # fmt: skip
        return self.truths.setdefault(rows, truth_of(reference, self.context.budget.noise_runs))

    def result_axes(self, run: OpRun) -> dict[str, int]:
        """The dimension of the batch by the name of a result; without those that have none."""
        named, gradients = self.axes
        axes = dict(zip(run.outs, gradients, strict=True)) | {f"grad {name}": axis for name, axis in named.items()}
        return {name: axis for name, axis in axes.items() if axis is not None and run.tensors.get(name) is not None}

    def independent(self, name: str, axis: int, rows: Rows, case: Case) -> bool:
        """Whether a result of some rows is, by the reference, the same without the others."""
        if self.context.spec.reference is None:
            return True  # the spec says so
        try:
            whole, part = self.truth, self.truth_of_rows(rows, case)
        except NotApplicable:
            return False
        want, other = whole.want.get(name), part.want.get(name)
        if want is None or other is None:
            return False
        tol = rows.of(whole.tol[name], axis, self.size) + part.tol[name]
        return bool(((rows.of(want, axis, self.size) - other).abs() <= tol).all())


def batch_name(spec: OpSpec) -> str:
    """The dimension that is the batch: as the spec says, else the first that a tensor begins with; "" without.

    What an index counts is none: a vocabulary is no batch.
    """
    return spec.batch_invariant if isinstance(spec.batch_invariant, str) else spec.leading


def cases(context: StageContext) -> list[Case]:
    """The ordinary case with a large batch, or with its own where that is all that the spec allows; long where asked.

    What is only noted is looked for in one dtype at level quick.
    """
    brief = not context.spec.batch_invariant and context.level == "quick"
    if brief and context.runner.dtype != context.dtypes[0]:
        return []
    batch, most = BatchOfRows(context, batch_name(context.spec), context.base), context.budget.elements
    larger = (case for size in (_NOTED if brief else _WHOLE) if (case := batch.resized(size)) is not None)
    whole = next((case for case in larger if elements(context.runner, case, most) <= most), context.base)
    return [whole, *(_longer(batch, whole) if batch.asked else [])]


def _longer(batch: BatchOfRows, whole: Case) -> list[Case]:
    """For each other dimension, the batch with a long one, or the longest that the spec allows."""
    context, longer = batch.context, list[Case]()
    for name, size in whole.sizes:
        if name == batch.name:
            continue
        rule = context.spec.sizes.get(name)
        ends = [max(rule)] if isinstance(rule, list) else [min(rule[1], _LONG[0])] if isinstance(rule, tuple) else []
        lengths = sorted((n for n in {*_LONG, *ends} if n > count_of(size)), reverse=True)
        tried = (resized(context.spec, whole, name, (n,) if name in context.spec.free_rank else n) for n in lengths)
        kept = (case for case in tried if case is not None and case.size(batch.name) == whole.size(batch.name))
        most = context.budget.elements
        longer += itertools.islice((case for case in kept if elements(context.runner, case, most) <= most), 1)
    return longer


@dataclass
class _Differences:
    """Results that have other bits in another batch: what that means, by name."""

    findings: dict[str, Finding] = field(default_factory=dict[str, Finding])
    depending: dict[str, None] = field(default_factory=dict[str, None])
    unrepeatable: dict[str, None] = field(default_factory=dict[str, None])

    def note(self, batch: BatchOfRows, whole: OpRun, part: OpRun, rows: Rows, case: Case) -> None:
        """Add what differs between the batch and some rows of it that ran for themselves."""
        for name, axis in batch.result_axes(part).items():
            there, alone = whole.tensors.get(name), part.tensors[name]
            if there is None or alone is None or name in {**self.findings, **self.depending, **self.unrepeatable}:
                continue
            there = rows.of(there, axis, batch.size)
            if same_bits(there, alone):
                continue
            if not batch.independent(name, axis, rows, case):
                self.depending[name] = None
            elif not _repeatable(batch, name, rows, case, whole, part):
                self.unrepeatable[name] = None
            else:
                self.findings[name] = _finding(batch, name, axis, rows, alone, there)


def _repeatable(batch: BatchOfRows, name: str, rows: Rows, case: Case, whole: OpRun, part: OpRun) -> bool:
    """Whether a result of the batch and of the rows has the same bits each time."""
    return all(
        same_bits(batch.context.runner.run(batch.case).tensors[name], whole.tensors[name])
        and same_bits(batch.run(rows, case).tensors[name], part.tensors[name])
        for _ in range(_AGAIN)
    )


def _finding(batch: BatchOfRows, name: str, axis: int, rows: Rows, alone: torch.Tensor, there: torch.Tensor) -> Finding:
    mask = (alone != there) & ~(alone.isnan() & there.isnan())
    index, wrong = first_index(mask), int(mask.sum())
    row = rows.index[index[axis] * len(rows.index) // mask.shape[axis]]
    got, want = float(alone[index]), float(there[index])
    message = (
        f"{name}: row {row} of {batch.name} has other bits {rows.place} than in a batch of {batch.size}: "
        f"{got:.9g} and {want:.9g}; {wrong} of {mask.numel()} elements differ, and by the float64 reference no row "
        "depends on another"
    )
    return Finding.of(
        "batch-dependent", message, batch.case, name,
        index=index, got=got, want=want, wrong=wrong, total=mask.numel(),
    )  # fmt: skip


def _differences(batch: BatchOfRows) -> _Differences:
    whole, differences = batch.context.runner.run(batch.case), _Differences()
    for rows, case in batch.parts():
        try:
            part = batch.run(rows, case)
        except OpRaised:
            continue  # what is refused of these sizes is for the stages that are about them
        differences.note(batch, whole, part, rows, case)
    return differences


def _nothing(reason: str, asked: bool) -> CaseOutcome:
    """The outcome where no row can be compared, which decides nothing if the op promises that it can."""
    return CaseOutcome(power=None, power_text=reason, undecided=[f"`batch_invariant`: {reason}"] * asked)


def check(context: StageContext, case: Case) -> CaseOutcome:
    """Four runs at level quick, seven where asked; what differs is held against the reference and repeated."""
    batch = BatchOfRows(context, batch_name(context.spec), case)
    asked = batch.asked
    try:
        if not any(axis is not None for axis in batch.axes[1]):
            return _nothing(f"no output has rows along {batch.name}", asked)
        differences = _differences(batch)
    except NotByRows:
        return _nothing(f"no tensor can be cut into rows along {batch.name}, or no other size of it is allowed", asked)
    except OpRaised as error:
        return _nothing(f"{error} at {case.text()}", asked)
    names = ", ".join(differences.depending)
    if names and not differences.findings:
        return _nothing(f"by the float64 reference rows of {names} along {batch.name} depend on each other", asked)
    out = CaseOutcome(power_text=f"exact: any bit of rows along {batch.name}")
    out.undecided += [
        f"{name} has other bits at each run of the same call, whatever the batch"
        for name in differences.unrepeatable if asked
    ]  # fmt: skip
    if asked:
        out.findings = list(differences.findings.values())
    elif differences.findings:
        first = next(iter(differences.findings.values()))
        names = ", ".join(differences.findings)
        out.notes.append(f"bits of {names} depend on the batch ({first.what}); `batch_invariant=` makes it a finding")
        out.power, out.power_text = None, "not batch invariant"
    return out


def _applies(spec: OpSpec) -> str:
    if spec.batch_invariant is False:
        return "`batch_invariant=False`: bits may depend on the batch"
    if spec.random:
        return "random numbers are drawn by place, so that another batch draws others"
    if not spec.batch_invariant and spec.reference is None:
        return "without a reference nobody says whether rows depend on each other"
    return "" if batch_name(spec) else "no dimension is known to be that of a batch"


STAGE = Stage(
    "batch", "a row has the same bits in any batch", 82, check, cases, after=("contract", "determinism"),
    shrinks=False, applies=_applies,
)  # fmt: skip
