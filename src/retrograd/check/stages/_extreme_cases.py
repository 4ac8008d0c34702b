"""Cases of the extremes stage: which input gets which extreme value, at a level, in a dtype, with a dear reference."""

from __future__ import annotations

from retrograd.check import extreme_values
from retrograd.check.case_sharding import WIDE, shard
from retrograd.check.inputs import param_cases
from retrograd.check.schema import Case
from retrograd.check.spec import OpSpec
from retrograd.check.stages._base import StageContext

# Another dtype differs in its range: what is about the formula is asked in the first one.
_OTHER_DTYPES = ("nan", "inf", "-inf", "mean", "-mean", "1e4", "max/4")
_Values = tuple[tuple[str, str], ...]  # extremes of a case by input


def unbounded(spec: OpSpec) -> tuple[str, ...]:
    """The inputs that may hold anything: those the spec names, else the described ones without a range."""
    if spec.extremes is not None:
        return spec.extremes
    return tuple(name for name, tensor in spec.tensors.items() if tensor.high is None and tensor.differentiable)


def bounded(spec: OpSpec) -> tuple[str, ...]:
    """The described inputs with a range, masks among them: all elements may be at one end of it."""
    return tuple(name for name, tensor in spec.tensors.items() if tensor.high is not None or tensor.dtype == "bool")


def _ends(spec: OpSpec, name: str) -> tuple[str, ...]:
    return extreme_values.EVERY_END if spec.tensors[name].floating else extreme_values.ENDS


def cases(context: StageContext) -> list[Case]:
    """Every extreme of every such input; at level quick the ones that find most. In the first dtype ends of ranges.

    There, too, one mean in all inputs at once, judged where it changes nothing: what differences of two inputs lose of
    it no single one shows; and each extreme meets further combinations of parameters, one after the other in turn.
    """
    every: list[_Values] = [((name, extreme),) for name, extreme in _shared(context)]
    if first := context.runner.dtype == context.spec.dtypes[0]:
        every += [((name, end),) for name in bounded(context.spec) for end in _ends(context.spec, name)]
        together = unbounded(context.spec)
        every += [tuple((name, "mean") for name in together)] if len(together) > 1 else []
    others = param_cases(context.spec, context.base, context.budget.combinations)[1:] if first else []
    turns = min(context.budget.crossed, len(others))
    chosen = _dealt(context, every)
    wide = context.level == "quick" and context.emulated() and len(unbounded(context.spec)) >= WIDE
    if turns and (wide or chosen is not every):
        return _alternating(context.base, others, chosen)
    crossed = [
        (others[(turn + number * turns) % len(others)], values)
        for number, values in enumerate(chosen)
        for turn in range(turns)
    ]
    return [case.but(values=values) for case, values in [*((context.base, v) for v in chosen), *crossed]]


def _alternating(base: Case, others: list[Case], every: list[_Values]) -> list[Case]:
    """Every other extreme at another combination of parameters, and of the next input the ones between.

    Of a norm with a residual, all at both were 60 cases, and half of its time.
    """
    inputs = list(dict.fromkeys(values[0][0] for values in every))
    return [
        (others[number // 2 % len(others)] if (number + inputs.index(values[0][0])) % 2 else base).but(values=values)
        for number, values in enumerate(every)
    ]


def _dealt(context: StageContext, every: list[_Values]) -> list[_Values]:
    """All; where a reference takes long, of the finite ones one of each input, by turns for each and seed.

    What is finite needs a truth of its own, with the randomly rounded runs behind it: a recurrence of 33 steps has
    thousands of operators, and half a second goes by. More of each as long as there is work left to do.
    """
    by_input: dict[str, list[_Values]] = {}
    for values in every:
        if len(values) == 1 and values[0][1] not in extreme_values.CELLS:
            by_input.setdefault(values[0][0], []).append(values)
    count = sum(map(len, by_input.values()))
    if count <= len(by_input) or count <= (most := context.cost.truths(context.runner)):
        return every
    turned = [_turned(own, n + context.runner.seed) for n, own in enumerate(by_input.values())]
    rounds = [own[turn] for turn in range(max(map(len, turned))) for own in turned if turn < len(own)]
    chosen = rounds[: max(most, len(by_input))]
    context.ran("finite extremes", len(chosen), count)
    return [values for values in every if values in chosen or values[0][1] in extreme_values.CELLS or len(values) > 1]


def _turned(own: list[_Values], by: int) -> list[_Values]:
    """Those of an input in turn, large ones first: they find most."""
    large = [values for values in own if values[0][1] in extreme_values.LARGE]
    small = [values for values in own if values not in large]
    return [part[(by + turn) % len(part)] for part in (large, small) for turn in range(len(part))]


def _shared(context: StageContext) -> list[tuple[str, str]]:
    """The extremes of floating inputs in this dtype.

    Where a NaN goes is asked in one of the dtypes; of finite extremes the dtypes after the first take a share each:
    only their range is another.
    """
    names = extreme_values.NAMES[: context.budget.extremes]
    others = [d for d in context.dtypes if d != context.spec.dtypes[0]]
    if context.runner.dtype in others:
        names = tuple(n for n in names if n in _OTHER_DTYPES)
    every = [
        (name, extreme)
        for name in unbounded(context.spec)
        for extreme in names
        if extreme not in extreme_values.CELLS or name not in context.spec.finite
    ]
    finite = [e for e in every if e[1] not in extreme_values.CELLS]
    mine = shard(context, finite, "finite extremes of all dtypes but the first", others)
    mine += shard(context, [e for e in every if e not in finite], "cells that are not finite")
    return [e for e in every if e in mine]
