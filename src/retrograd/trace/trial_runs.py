"""Runs of modules that only learn sizes: at first a pipeline gives each stage whatever memory holds."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from retrograd.trace.schema import OPTIMIZER, OTHER, Op, Trace

_POINT_TO_POINT = ("c10d::send", "c10d::recv_")
_USES = ("c10d", "aten._local_scalar_dense")  # another rank, or the program itself, as it reads a validation loss


def without_trials(trace: Trace) -> Trace:
    """A trace in which such operators have no tensors; each is where it was."""
    trials = trial_runs(trace.ops)
    if not trials:
        return trace
    ops = [replace(op, inputs=(), outputs=()) if op.index in trials else op for op in trace.ops]
    return replace(trace, ops=ops)


def trial_runs(ops: Sequence[Op]) -> set[int]:
    """The indices of operators of modules that ran again in the step, where nothing used the results this time.

    An optimizer uses them, another rank, or the program that reads a number, as they are or by what is made of them.
    Only who sends to other ranks has any: one rank alone may run a module for what nothing reads.
    """
    used, read = dict[int, Hashable](), set[int]()
    sends = any(op.name.startswith(_POINT_TO_POINT) for op in ops)
    for op in reversed(ops) if sends else ():
        if op.owner == OPTIMIZER or op.name.startswith(_USES) or any(t.tensor in read for t in op.outputs):
            read.update(t.tensor for t in op.inputs)
            used[op.index] = _place(op)
    again, results, trials = set(used.values()), set[int](), set[int]()
    for op in (op for op in ops if sends and op.index not in used):
        if (op.phase != OTHER and _place(op) in again) or any(t.tensor in results for t in op.inputs):
            trials.add(op.index)
            results.update(t.tensor for t in op.outputs)
    return trials


def _place(op: Op) -> Hashable:
    return op.step, op.name, op.node, op.phase, op.module
