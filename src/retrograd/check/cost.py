"""Cost of a case: how many elements the operators of a reference make in it, without making them, and how many run."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from typing import Any

import torch

from retrograd.check.levels import BUDGETS
from retrograd.check.op_runner import OpRunner
from retrograd.check.own_mistakes import may_refuse
from retrograd.check.schema import Case
from retrograd.check.sizes import elements as extent
from retrograd.check.sizes import shape
from retrograd.compat.torch_dispatch import EagerMode, tree_leaves

# Elements that a processor adds up while an operator is called below a mode: some 50 us.
_CALL = 10_000
_SWEEP = 16  # cases with truths of their own of an op of three inputs: five extremes each, and the ordinary one


class _EnoughError(Exception):
    """There are more elements than anyone asks about: a recurrence of a thousand steps goes on for long."""


class _Count(EagerMode):
    """Adds up the operators and the elements of all results, until these are more than `most`, or make more work."""

    def __init__(self, most: float, work: float) -> None:
        super().__init__()
        self.elements = self.operators = 0
        self._most, self._work = most, work

    @property
    def work(self) -> int:
        """What a run takes, in elements that operators make."""
        return self.elements + _CALL * self.operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.elements += sum(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor))
        self.operators += 1
        if self.elements > self._most or self.work > self._work:
            raise _EnoughError
        return out


def elements(runner: OpRunner, case: Case, most: int, work: float = math.inf) -> int:
    """The elements that all operators of the reference make; where it looks at values, of all dimensions together.

    Counting ends above `most`, and gives more than that where a run takes more than `work`. The reference runs on meta
    tensors, which have shapes alone; on those of the case where all dimensions together are few, or none is larger than
    in the ordinary case, as it then takes a tenth of the time. Where the described inputs alone have more than `most`
    it is their number, and nothing is drawn: a positive definite matrix of 4097 rows takes 10 s.
    """
    described = sum(math.prod(shape(tensor.dims, case)) for tensor in runner.spec.tensors.values())
    if described > most:
        return described
    # A size of 0 must not hide the others.
    every = math.prod(max(n, 1) for _, size in case.sizes for n in (size if isinstance(size, tuple) else (size,)))
    small = case.sizes and (every <= most or _within(case, runner.base))
    for device in (*(["cpu"] if small else []), "meta"):
        with may_refuse():  # it asks for values, which a meta tensor has not, or there is no kernel for the dtype
            count = _counted_on(runner, case, device, most, work)
            return count.elements if count.work <= work else most + 1
    return every


def work(runner: OpRunner, case: Case) -> int:
    """What a run of the reference takes, in elements that operators make; 0 where it cannot be had."""
    with may_refuse():
        return _counted_on(runner, case, "cpu").work
    return 0


def _counted_on(runner: OpRunner, case: Case, device: str, most: float = math.inf, work: float = math.inf) -> _Count:
    """What the reference does, run on a device; no further than to so many elements, and so much work."""
    if runner.spec.reference is None:
        raise ValueError("there is no reference")
    inputs = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in runner.inputs(case).items()}
    reference = runner.reference(case)
    count = _Count(most, work)
    with contextlib.suppress(_EnoughError), torch.no_grad(), reference.without_traces(), count:
        reference.call(inputs)
    return count


@dataclass
class CostLimit:
    """Which cases make at most so many elements, and of how many a sweep may have truths of their own.

    Shared by dtypes, on which that does not depend. A case with no size larger than one that is cheap enough is so too,
    and one with none smaller than one that is not is not: counting again takes a run of the reference.
    """

    most: int
    work: int
    _cheap: list[Case] = field(default_factory=list)
    _dear: list[Case] = field(default_factory=list)
    _ordinary: int | None = None

    @classmethod
    def of_level(cls, level: str) -> CostLimit:
        """That of level quick or full."""
        return cls(BUDGETS[level].elements, BUDGETS[level].work)

    def truths(self, runner: OpRunner) -> int:
        """How many cases of the ordinary sizes a sweep may have that each need a truth of their own."""
        if self._ordinary is None:
            self._ordinary = work(runner, runner.base)
        return max(self.work // max(self._ordinary, 1), 1)

    def afford(self, runner: OpRunner, cases: list[Case]) -> list[Case]:
        """Of cases that each need a truth of their own those that keep within the work, where it takes long."""
        if not self.is_dear(runner):
            return cases
        left, chosen = self.work, list[Case]()
        for case in cases:
            takes = work(runner, case)
            if takes <= left or takes * _SWEEP <= self.work:  # a size of one takes nothing
                left -= takes
                chosen.append(case)
        return chosen

    def is_dear(self, runner: OpRunner) -> bool:
        """Whether that is fewer than a sweep has, so that no more is asked for than it must."""
        return self.truths(runner) < _SWEEP

    def allows(self, runner: OpRunner, case: Case) -> bool:
        """Whether the operators of the reference make few enough elements in the case.

        Where it takes long, also whether one run alone keeps within the work: a recurrence of a thousand steps makes
        few elements at each, and to count all of them took 0.4 s.
        """
        if any(_within(case, other) for other in self._cheap):
            return True
        if any(_within(other, case) for other in self._dear):
            return False
        work = self.work if self.is_dear(runner) else math.inf
        allowed = elements(runner, case, self.most, work) <= self.most
        (self._cheap if allowed else self._dear).append(case)
        return allowed


def _within(case: Case, other: Case) -> bool:
    """Whether no size of a case is larger than the other's, with the same parameters."""
    if case.params != other.params:
        return False
    sizes = dict(other.sizes)
    return all(extent(size) <= extent(sizes[name]) for name, size in case.sizes)
