"""Causes of a comparison of an eager run with a compiled one, from the values that both have. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from retrograd.core.wording import some
from retrograd.trace.diffing.divergence_reasons import COMPILED
from retrograd.trace.diffing.schema import DivergenceCause, OpSummary
from retrograd.trace.diffing.shared_values import Anchor, SharedValues
from retrograd.trace.diffing.summaries import op_summary
from retrograd.trace.schema import Op, Stats, Trace

_DECOMPOSITION = (
    "torch.compile replaces operators by decompositions and generated kernels: backend='aot_eager' runs the former "
    "alone; retrograd verify checks one operator by itself"
)
_GIVEN = "what it is computed from is in {} too, if nothing between has changed it"
_RANDOM = "torch._inductor.config.fallback_random = True lets generated code draw what eager code draws"


@dataclass(frozen=True)
class CompiledComparison:
    """Causes, notes, and how many operators of the eager run are the same, bit for bit and within rounding."""

    causes: tuple[DivergenceCause, ...]
    notes: tuple[str, ...]
    same: int
    within: int


def compare_values(eager: Trace, compiled: Trace, letter: Literal["A", "B"]) -> CompiledComparison:
    """Compare by the values that both runs have; `letter` is that of the compiled run."""
    shared = SharedValues(eager.ops, compiled.ops)
    other = "A" if letter == "B" else "B"
    if shared.out:
        causes = (_Sides(shared, letter).first_out(),)
    elif shared.unseen or shared.unknown or shared.unpaired or not shared.counterparts:
        causes = (_untold(shared, letter),)
    else:
        causes = ()
    exact = [all(_equal(t.digest, shared, t.tensor) for t in op.outputs) for op in eager.ops]
    present = [any(t.tensor in shared.counterparts for t in op.outputs) for op in eager.ops]
    same = sum(x and y for x, y in zip(exact, present, strict=True))
    return CompiledComparison(causes, tuple(_notes(shared, letter, other)), same, sum(present) - same)


def _equal(digest: int | None, shared: SharedValues, tensor: int) -> bool:
    return tensor in shared.counterparts and digest is not None and shared.counterparts[tensor].digest == digest


def _notes(shared: SharedValues, letter: str, other: str) -> Iterator[str]:
    known = len(shared.counterparts) + sum(anchor.excess <= 1 for anchor in shared.anchors)
    if known and not shared.out:
        yield f"{known} tensors of {other} are in {letter}, where torch.compile compiled, the same up to rounding"
    if shared.last:
        names = some(shared.last, 3)
        yield f"what the last step made of {names} is read by nothing in {letter}, whose optimizer is compiled"
    if any(shared.alone):
        yield (
            f"{shared.alone[0]} operators of {other} and {shared.alone[1]} of {letter} have no counterpart of their "
            "own: one side splits, fuses or leaves out what the other computes"
        )


def _untold(shared: SharedValues, letter: Literal["A", "B"]) -> DivergenceCause:
    """Nothing is known to differ, and not all is known to be the same."""
    why, advice = COMPILED
    op = next(iter(shared.unseen), None) or next((anchor.eager for anchor in shared.unknown), None) or shared.eager[0]
    parts = [f"{len(shared.unseen)} operators have results that no value of {letter} shows to be right"] * bool(
        shared.unseen
    )
    if op.step != shared.eager[0].step:
        parts.append(f"all before step {op.step} is the same up to rounding")
    parts += [f"{len(shared.unknown)} updated parameters were not measured"] * bool(shared.unknown)
    parts += [f"{shared.unpaired} updates of parameters are in one run alone"] * bool(shared.unpaired)
    description = f"operators do not correspond where torch.compile compiled in {letter} alone"
    why = "; ".join([*parts, why])
    summary = op_summary(op)
    if letter == "B":
        return DivergenceCause("missing", description, why, advice, a=summary, count=max(1, len(shared.unseen)))
    return DivergenceCause("inserted", description, why, advice, b=summary, count=max(1, len(shared.unseen)))


def _marked(op: Op, tensor: Stats, read: bool) -> OpSummary:
    """An operator with a tensor marked among its results, or its inputs: what a compiled update wrote is read next."""
    read = read or not any(t is tensor for t in op.outputs)
    marks = [t is tensor for t in (op.inputs if read else op.outputs)]
    return op_summary(op, inputs=marks) if read else op_summary(op, outputs=marks)


@dataclass(frozen=True)
class _Sides:
    shared: SharedValues
    letter: Literal["A", "B"]  # of the compiled run

    def first_out(self) -> DivergenceCause:
        """The first operator that is out, or the first and the last of those of which one is."""
        anchor, leads = self.shared.out[0], self.shared.leads()
        drawn = self.shared.draws()
        if drawn is not None:
            description = f"{drawn.name} draws other numbers in {self.letter}, where torch.compile compiled"
            return replace(self._anchor(anchor, drawn, ""), kind="random", what=description, advice=_RANDOM)
        if not leads:
            return self._anchor(anchor, anchor.eager, "")
        outside = self.shared.from_outside(leads[0])
        if outside is not None:
            name = f"{outside.name or 'an input'} of {leads[0].name}"
            return replace(
                self._anchor(anchor, leads[0], ""), kind="outside", what=f"{name} comes in with other values"
            )
        for op in leads:
            reader = self.shared.reader(op)
            if reader is not None:
                return self._operator(op, *reader)
        return self._anchor(anchor, leads[0], " or an operator that it leads to")

    def _operator(self, op: Op, reader: Op, place: int) -> DivergenceCause:
        chain = self.shared.chain(op)
        first, *more = [other for other in chain if other.phase == op.phase]
        between = f"between {first.name} ({op_summary(first).where}) and its result " if more else ""
        kept = ", nor of what the forward kept for it" if first is not chain[0] else ""
        marks = [self.shared.is_unseen(t) for t in op.outputs]
        theirs = op_summary(reader, inputs=[k == place for k in range(len(reader.inputs))])
        description = f"{op.name} has another result in {self.letter}, where torch.compile compiled"
        why = (
            f"{reader.name} reads it there, whose other inputs are the same up to rounding; "
            f"{between + 'nothing is seen' + kept + '; ' if between else ''}"
            f"{_GIVEN.format(self.letter)}; {self._consequences()}"
        )
        return self._cause(description, why, op_summary(op, outputs=marks), self._placed(theirs, op))

    def _anchor(self, anchor: Anchor, op: Op, more: str) -> DivergenceCause:
        if op is anchor.eager and anchor.read:
            description = f"what {op.name} reads is another value"
        else:
            description = f"{op.name}{more} has another result"
        description += f" in {self.letter}, where torch.compile compiled"
        ours, theirs = _marked(anchor.eager, anchor.a, anchor.read), _marked(anchor.compiled, anchor.b, anchor.read)
        return self._cause(description, self._consequences(), self._placed(ours, op), self._placed(theirs, op))

    def _consequences(self) -> str:
        out = self.shared.out
        names = list(dict.fromkeys(name for anchor in out for name in anchor.parameters))
        worst = max(anchor.excess for anchor in out)
        times = f"up to {worst:.3g} times the attainable difference" if math.isfinite(worst) else "beyond rounding"
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"what it leads to is out, {times}: the gradients or values of {', '.join(names[:3])}{more}"

    def _cause(self, description: str, why: str, eager: OpSummary, compiled: OpSummary) -> DivergenceCause:
        a, b = (eager, compiled) if self.letter == "B" else (compiled, eager)
        return DivergenceCause("operator", description, why, _DECOMPOSITION, a=a, b=b)

    def _placed(self, summary: OpSummary, op: Op) -> OpSummary:
        """Where the eager run has it: generated code knows no module and no line."""
        return replace(summary, phase=op.phase, module=op.module, place=op.place, code=op.code, inside=op.inside)
