"""Rule for the elements of a tensor that are wrong: the simplest that gives exactly these."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence

import torch

_CHANCE = 0.01  # that some place of an axis has no wrong element, from which on it says nothing
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
    lines = [_along(wrong, axis) for axis in range(wrong.ndim)]
    partial = {axis: line for axis, line in enumerate(lines) if not bool(line.all())}
    rules = {axis: _of_a_line(line.flatten().tolist(), names[axis]) for axis, line in partial.items()}
    if int(_box(wrong, partial.values()).sum()) == count:
        return ", ".join(rules.values())
    if relation := _relation(wrong, names):
        return relation
    told = {axis: rule for axis, rule in rules.items() if not _by_chance(wrong, lines[axis], rule)}
    there = f" where {', '.join(told.values())}" if told else ""
    return f"{count} of {int(_box(wrong, [lines[axis] for axis in told]).sum())} elements{there}"


def _along(wrong: torch.Tensor, axis: int) -> torch.Tensor:
    """Which places of an axis have a wrong element, as a tensor that is broadcast along the others."""
    others = [a for a in range(wrong.ndim) if a != axis]
    return wrong.any(others, keepdim=True) if others else wrong


def _box(wrong: torch.Tensor, lines: Iterable[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(torch.logical_and, lines, torch.ones_like(wrong))


def _by_chance(wrong: torch.Tensor, line: torch.Tensor, rule: str) -> bool:
    """Whether elements that are wrong here and there leave out such places of an axis: a rule without a pattern."""
    places = line.numel()
    each, hit = wrong.numel() // places, int(line.sum())
    share = int(wrong.sum()) / (hit * each)
    return (" != " in rule or " of " in rule) and places * (1 - share) ** each > _CHANCE


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
