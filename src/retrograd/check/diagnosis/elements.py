"""Rule for the elements of a tensor that are wrong: the simplest that gives exactly these."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

_BLOCKS = (2, 4, 8, 16, 32, 64, 128)
_RELATIONS: tuple[tuple[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]], ...] = (
    ("=", torch.eq),
    ("!=", torch.ne),
    (">", torch.gt),
    (">=", torch.ge),
    ("<", torch.lt),
    ("<=", torch.le),
)


def describe(wrong: torch.Tensor, names: Sequence[str]) -> str:
    """The rule for the elements where `wrong` (bool, of any shape) is true, its axes called `names`; "" if none is.

    Tried in this order: all; a rule for each axis alone (one index, a head, a tail, an interval, every k-th); a
    relation between two axes; else how many there are where.
    """
    count, total = int(wrong.sum()), wrong.numel()
    if not count or count == total or not wrong.ndim:
        return "every element" if count else ""
    rules, box = [], torch.ones_like(wrong)
    for axis, name in enumerate(names):
        others = [a for a in range(wrong.ndim) if a != axis]
        line = wrong.any(others) if others else wrong
        box &= line.view([-1 if a == axis else 1 for a in range(wrong.ndim)])
        if not bool(line.all()):
            rules.append(_of_a_line(line.tolist(), name))
    if int(box.sum()) == count:
        return ", ".join(rules)
    if relation := _relation(wrong, names):
        return relation
    there = f" where {', '.join(rules)}" if rules else ""
    return f"{count} of {int(box.sum())} elements{there}"


def _of_a_line(line: list[bool], name: str) -> str:
    size, at = len(line), [i for i, wrong in enumerate(line) if wrong]
    first, last = at[0], at[-1]
    if len(at) == 1:
        return f"{name} = {first}" + {0: " (the first)", size - 1: " (the last)"}.get(first, "")
    if len(at) == last - first + 1:
        if last == size - 1:
            blocks = [b for b in _BLOCKS if size % b and first == size // b * b]
            return f"{name} >= {first}" + (f" (what is left after whole blocks of {blocks[-1]})" if blocks else "")
        return f"{name} < {last + 1}" if first == 0 else f"{first} <= {name} <= {last}"
    step = math.gcd(*(i - first for i in at[1:]))
    if step > 1 and at == list(range(first % step, size, step)):
        return f"{name} % {step} = {first % step}"
    right = [i for i in range(size) if not line[i]]
    if len(right) == 1:
        return f"{name} != {right[0]}"
    return f"{len(at)} of {size} {name}"


def _relation(wrong: torch.Tensor, names: Sequence[str]) -> str:
    grids = torch.meshgrid(*(torch.arange(n) for n in wrong.shape), indexing="ij")
    for a in range(wrong.ndim):
        for b in range(a + 1, wrong.ndim):
            for sign, holds in _RELATIONS:
                if torch.equal(holds(grids[a], grids[b]), wrong.cpu()):
                    return f"{names[a]} {sign} {names[b]}"
    return ""
