"""Level quick where runs cost much: cases of a sweep dealt out to the dtypes, instead of all of them in each.

A stride that is ignored or a mask that is missing is so in every dtype, and a dtype's own faults show in most cases: so
each case runs in one dtype, and each dtype has a share. What decides is what the op is, not a clock: the same seed
gives the same report on any machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from retrograd.check.op_runner import Workbench
from retrograd.check.schema import Case
from retrograd.check.stages._base import Stage

T = TypeVar("T")

# Cases of a stage in all dtypes together, beyond which they are dealt out also where runs are cheap: five layouts of
# each of three tensors in three dtypes are fewer, those of a norm with a residual (four inputs, two outputs) are more.
_MANY = 48
# Inputs of an op from which on it is dealt out likewise: sweeps grow with the inputs twice, in cases and in what a case
# costs. A norm with a residual (four) took 1.2 s for which 0.9 s are left, one without (two or three) takes 0.7 s.
_WIDE = 4


def dealt(stage: Stage, bench: Workbench, wanted: list[Case]) -> tuple[list[Case], str]:
    """The cases of a stage that this dtype is to run, and a note that says so; all and "" where nothing is left out."""
    few = bench.level != "quick" or bench.override is not None or len(bench.dtypes) < 2 or len(wanted) < 2
    many = len(wanted) * len(bench.dtypes) > _MANY
    why = _costly(bench) or ("there are many" if many else "")
    if not stage.deals or few or not why:
        return wanted, ""
    place = bench.dtypes.index(bench.dtype)
    mine = wanted[place :: len(bench.dtypes)] or [wanted[place % len(wanted)]]
    return mine, _note(bench, f"{len(wanted)} cases", why)


def share(
    bench: Workbench, things: Sequence[T], what: str, dtypes: Sequence[str] | None = None, least: int = 2
) -> tuple[list[T], str]:
    """Likewise of what a stage does in one case, where kernels are interpreted or inputs many; `what` for the note.

    `dtypes` are those that it is dealt out to, if not all; fewer things than `least` are left to each.
    """
    among = list(bench.dtypes if dtypes is None else dtypes)
    few = bench.level != "quick" or bench.override is not None or len(among) < 2 or len(things) < least
    why = _costly(bench)
    if few or not why or bench.dtype not in among:
        return list(things), ""
    return list(things[among.index(bench.dtype) :: len(among)]), _note(bench, what, why)


def _costly(bench: Workbench) -> str:
    """Why each run of this op is dear; "" if it is not."""
    if bench.interpreted:
        return "kernels are interpreted"
    inputs = bench.spec.inputs
    # Inputs that a function makes are not counted before there are any.
    return "there are many inputs" if isinstance(inputs, Mapping) and len(inputs) >= _WIDE else ""


def _note(bench: Workbench, what: str, why: str) -> str:
    return f"{what} dealt out to {', '.join(bench.dtypes)}, as {why}; level full has all in each"
