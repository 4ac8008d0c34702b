"""Values with NaN or Inf that nothing computed from them has any more: guarded by where, nan_to_num or exp. No torch.

An operator that made one is no cause: neither a loss, nor a gradient, nor what the program reads has it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from retrograd.trace.deliberate_values import VIEWS
from retrograd.trace.diffing.identity import base_name
from retrograd.trace.schema import OPTIMIZER, Op

# What hands a number to the program or to other ranks, or begins a backward with it.
_READS = ("aten._local_scalar_dense", "aten.ones_like", "c10d::", "_c10d_functional::")


def left_out(ops: Sequence[Op]) -> set[int]:
    """Numbers of values that a forward, or what is around it, made: each of their readers gives finite numbers.

    Whoever gives truth values or indices alone, as isfinite and argmax do, has looked and left nothing out.
    """
    harmless: dict[int, bool] = {}  # by number of a value, from the last operator on: whether all readers leave it out
    for op in reversed(ops):
        if (leaves := _leaves_out(op, harmless)) is None:
            continue
        for stats in op.inputs:
            if stats.bad or stats.nan is None:
                harmless[stats.tensor] = leaves and harmless.get(stats.tensor, True)
    return {tensor for tensor, harm in harmless.items() if harm}


def _leaves_out(op: Op, harmless: dict[int, bool]) -> bool | None:
    """Whether its results do without what its inputs have; None if it says nothing of that."""
    if op.name.startswith(_READS):
        return False
    if re.search(r"^aten\.(new_\w+|\w+_like)\.", op.name):
        return None  # asks for a shape only
    results = [s for s in op.outputs if "float" in s.dtype or "complex" in s.dtype]
    unsure = [harmless.get(s.tensor) for s in results if s.bad or s.nan is None]
    if base_name(op.name) in VIEWS:  # one that nobody reads says nothing
        unsure = [known for known in unsure if known is not None]
        return all(unsure) if unsure else None
    if op.owner == OPTIMIZER and base_name(op.name) == "where":
        return not any(s.bad for s in results)  # counted or not: what it chooses goes on into a parameter, which is
    return all(unsure) if results else None
