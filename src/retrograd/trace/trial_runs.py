"""Runs of modules that only learn sizes: at first a pipeline gives each stage whatever memory holds."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from retrograd.trace.schema import OPTIMIZER, OTHER, Op, Trace

_POINT_TO_POINT = ("c10d::send", "c10d::recv_")


def without_trials(trace: Trace) -> Trace:
    """A trace in which such operators have no tensors; each is where it was."""
    trials = trial_runs(trace.ops)
    if not trials:
        return trace
    ops = [replace(op, inputs=(), outputs=()) if op.index in trials else op for op in trace.ops]
    return replace(trace, ops=ops)


def trial_runs(ops: Sequence[Op]) -> set[int]:
    """The indices of operators of modules that ran again in the step, where nothing used the results this time.

    An optimizer uses them, or another rank, directly or by what is computed from them. Only who sends to other ranks
    has any: a program of one rank may run a module, or a backward within a loss, for what nothing reads.
    """
    used, read = dict[int, Hashable](), set[int]()
    if not any(op.name.startswith(_POINT_TO_POINT) for op in ops):
        return set()
    for op in reversed(ops):
        if op.owner == OPTIMIZER or op.name.startswith("c10d") or any(t.tensor in read for t in op.outputs):
            read.update(t.tensor for t in op.inputs)
            used[op.index] = _place(op)
    again, results, trials = set(used.values()), set[int](), set[int]()
    for op in (op for op in ops if op.index not in used):
        if (op.phase != OTHER and _place(op) in again) or any(t.tensor in results for t in op.inputs):
            trials.add(op.index)
            results.update(t.tensor for t in op.outputs)
    return trials


def _place(op: Op) -> Hashable:
    return op.step, op.name, op.node, op.phase, op.module
