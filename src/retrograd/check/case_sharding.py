"""Sharding of cases over dtypes: at level quick, where runs or kernels cost much, each runs in one dtype, not in all.

A stride that is ignored or a mask that is missing is so in every dtype, and a dtype's own faults show in most cases: so
each case runs in one dtype, and each dtype has a share. What decides is what the op is, not a clock: the same seed
gives the same report on any machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from retrograd.check.schema import Case
from retrograd.check.stages._base import Stage, StageContext

T = TypeVar("T")

# Cases of a stage in all dtypes together, beyond which they are sharded also where runs are cheap: five layouts of
# each of three tensors in three dtypes are fewer, those of a norm with a residual (four inputs, two outputs) are more.
_MANY = 48
# Inputs of an op from which on they are sharded likewise: sweeps grow with the inputs twice, in cases and in what one
# costs. A norm with a residual (four) took 1.2 s for which 0.9 s are left, one without (two or three) takes 0.7 s.
WIDE = 4


def shard_cases(stage: Stage, context: StageContext, cases: list[Case]) -> list[Case]:
    """The cases of a stage that this dtype is to run, which is noted where some are left out."""
    few = context.level != "quick" or context.case is not None or len(context.dtypes) < 2 or len(cases) < 2
    many = len(cases) * len(context.dtypes) > _MANY
    why = _costly(context) or ("there are many" if many else "")
    if not stage.sharded or few or not why:
        return cases
    place = context.dtypes.index(context.runner.dtype)
    context.shared[f"{len(cases)} cases"] = why
    return cases[place :: len(context.dtypes)] or [cases[place % len(cases)]]


def shard(
    context: StageContext, items: Sequence[T], label: str, dtypes: Sequence[str] | None = None, least: int = 2
) -> list[T]:
    """Likewise of what a stage does in one case, where runs are dear; `label` for the note.

    `dtypes` are those that share them, if not all; fewer items than `least` are left to each.
    """
    among = list(context.dtypes if dtypes is None else dtypes)
    few = context.level != "quick" or context.case is not None or len(among) < 2 or len(items) < least
    why = _costly(context)
    if few or not why or context.runner.dtype not in among:
        return list(items)
    context.shared[label] = why
    return list(items[among.index(context.runner.dtype) :: len(among)])


def _costly(context: StageContext) -> str:
    """Why each run of this op is dear; "" if it is not."""
    if context.launched():
        return "kernels run without a GPU" if context.emulated() else "a kernel is compiled for each"
    inputs = context.spec.inputs
    # Inputs that a function makes are not counted before there are any.
    return "there are many inputs" if isinstance(inputs, Mapping) and len(inputs) >= WIDE else ""


def shared_notes(dtypes: Sequence[str], by_stage: Mapping[str, Mapping[str, str]]) -> tuple[str, ...]:
    """What dtypes shared at level quick, a note for each reason; `by_stage` has the reason of each part by stage."""
    reasons: dict[str, list[str]] = {}
    for stage, parts in by_stage.items():
        for why in dict.fromkeys(parts.values()):
            labels = ", ".join(label for label, its in parts.items() if its == why)
            reasons.setdefault(why, []).append(f"{stage} ({labels})")
    among = ", ".join(dtypes)
    return tuple(
        f"level quick shared work among {among}, as {why}: {', '.join(parts)}; level full has all in each"
        for why, parts in reasons.items()
    )
