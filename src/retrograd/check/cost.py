"""Cost of a case: how many elements the operators of a reference make in it, without making them."""

from __future__ import annotations

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


class _Count(EagerMode):
    """Adds up the elements of all results."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.elements += sum(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor))
        return out


def elements(runner: OpRunner, case: Case, most: int) -> int:
    """The elements that all operators of the reference make; of all dimensions together where it looks at values.

    The reference runs on meta tensors, which have shapes alone; on those of the case where all dimensions together
    are few, as it then takes a tenth of the time. Where the described inputs alone have more than `most` it is their
    number, and nothing is drawn: a positive definite matrix of 4097 rows takes 10 s.
    """
    described = sum(math.prod(shape(tensor.dims, case)) for tensor in runner.spec.tensors.values())
    if described > most:
        return described
    # A size of 0 must not hide the others.
    every = math.prod(max(n, 1) for _, size in case.sizes for n in (size if isinstance(size, tuple) else (size,)))
    for device in (*(["cpu"] if case.sizes and every <= most else []), "meta"):
        with may_refuse():  # it asks for values, which a meta tensor has not, or there is no kernel for the dtype
            return _elements_on(runner, case, device)
    return every


def _elements_on(runner: OpRunner, case: Case, device: str) -> int:
    """The elements of all results of the reference, run on a device."""
    if runner.spec.reference is None:
        raise ValueError("there is no reference")
    inputs = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in runner.inputs(case).items()}
    reference = runner.reference(case)
    with torch.no_grad(), reference.without_traces(), _Count() as count:
        reference.call(inputs)
    return count.elements


@dataclass
class CostLimit:
    """Which cases make at most so many elements; shared by dtypes, on which that does not depend.

    A case with no size larger than one that is cheap enough is so too, and one with none smaller than one that is not
    is not: counting again takes a run of the reference.
    """

    most: int
    _cheap: list[Case] = field(default_factory=list)
    _dear: list[Case] = field(default_factory=list)

    @classmethod
    def of_level(cls, level: str) -> CostLimit:
        """That of level quick or full."""
        return cls(BUDGETS[level].elements)

    def allows(self, runner: OpRunner, case: Case) -> bool:
        """Whether the operators of the reference make few enough elements in the case."""
        if any(_within(case, other) for other in self._cheap):
            return True
        if any(_within(other, case) for other in self._dear):
            return False
        allowed = elements(runner, case, self.most) <= self.most
        (self._cheap if allowed else self._dear).append(case)
        return allowed


def _within(case: Case, other: Case) -> bool:
    """Whether no size of a case is larger than the other's, with the same parameters."""
    if case.params != other.params:
        return False
    sizes = dict(other.sizes)
    return all(extent(size) <= extent(sizes[name]) for name, size in case.sizes)
