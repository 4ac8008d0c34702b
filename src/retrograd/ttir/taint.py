"""Taint: which elements of a value come from memory that nobody has written, followed through operations.

Loading such memory is no fault by itself: kernels load whole tiles and mask what is not there. It becomes one where an
address, a mask or a branch depends on it, or where it arrives in a result that is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from retrograd.ttir.element_types import Array
from retrograd.ttir.ir import Operation
from retrograd.ttir.operations import Compute, attributes
from retrograd.ttir.shaping import SHAPING

# Marks of results from marks and values of operands; None where what moves values moves marks too.
Rule = Callable[[list[Array], list[Array]], Any] | None


def spread(
    taint: dict[int, Array], registers: list[Any], operands: Sequence[int], results: Sequence[int],
    compute: Compute, rule: Rule,
) -> None:  # fmt: skip
    """Mark the results of an operation, after it: taints by slot, slots of its operands and results, and `rule_of`."""
    marks = [taint.get(slot) for slot in operands]
    if all(mark is None for mark in marks):
        for slot in results:
            taint.pop(slot, None)
        return
    none = [np.zeros((1,) * registers[slot].ndim, bool) for slot in operands]
    filled = [n if m is None else m for m, n in zip(marks, none, strict=True)]
    outcome = compute(*filled) if rule is None else rule(filled, [registers[slot] for slot in operands])
    for slot, mark in zip(results, outcome if isinstance(outcome, tuple) else (outcome,) * len(results), strict=True):
        if mark.any():
            taint[slot] = mark
        else:
            taint.pop(slot, None)


def rule_of(operation: Operation, compute: Compute) -> Rule:
    """How marks of operands become those of results; None where `compute`, which moves values, moves them too."""
    name = operation.name
    if name in ("arith.andi", "arith.ori") and operation.results[0].type.element == "i1":
        return _decided_by_zeros if name == "arith.andi" else _decided_by_ones
    if name == "tt.dot":
        return lambda m, _: m[0].any(-1, keepdims=True) | m[1].any(-2, keepdims=True) | m[2]
    if name in ("tt.dot_scaled", "tt.histogram"):
        result = operation.results[0].type.shape
        return lambda m, _: np.array([any(x.any() for x in m)]).reshape((1,) * (len(result) + 1))
    if name in ("tt.reduce", "tt.scan"):
        return _along(name, operation)
    if name == "tt.gather":
        return lambda m, values: compute(m[0], values[1]) | m[1]
    if name in SHAPING:
        return None
    return _select if name == "arith.select" else _union


def _union(marks: list[Array], values: list[Array]) -> Array:
    outcome = marks[0]
    for mark in marks[1:]:
        outcome = outcome | mark
    return outcome


def _select(marks: list[Array], values: list[Array]) -> Array:
    condition = values[0]
    more = max(values[1].ndim, values[2].ndim) - condition.ndim
    shape = condition.shape + (1,) * more
    own = marks[0].reshape(marks[0].shape + (1,) * (len(shape) - marks[0].ndim))
    return own | np.where(condition.reshape(shape), marks[1], marks[2])


def _decided_by_zeros(marks: list[Array], values: list[Array]) -> Array:
    """A conjunction is known where one side is known to be false."""
    return (marks[0] & (values[1] | marks[1])) | (marks[1] & (values[0] | marks[0]))


def _decided_by_ones(marks: list[Array], values: list[Array]) -> Array:
    """A disjunction is known where one side is known to be true."""
    return _decided_by_zeros(marks, [~value for value in values])


def _along(name: str, operation: Operation) -> Callable[[list[Array], list[Array]], Any]:
    axis = int(attributes(operation)["axis"]) + 1
    if name == "tt.reduce":
        return lambda marks, _: _union(marks, []).any(axis)
    extent = operation.operands[0].type.shape[axis - 1]

    def scanned(marks: list[Array], _: list[Array]) -> Any:
        mark = _union(marks, [])
        shape = (*mark.shape[:axis], extent, *mark.shape[axis + 1 :])
        # In whichever direction the scan goes: what is beyond a marked element may be marked without need.
        return np.broadcast_to(mark.any(axis, keepdims=True), shape)

    return scanned
