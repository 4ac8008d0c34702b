"""First gradients of a leaf: autograd takes one over where nobody else holds it at that moment, else it copies it.

The same step may do either from run to run, with the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from retrograd.trace.diffing.identity import base_name, gives_its_input
from retrograd.trace.schema import Op, Stats

_NODE = "AccumulateGrad"
_MEMORY, _COPIES = "new_empty_strided", ("detach", "copy", "clone")


def alike(a: Sequence[Op], b: Sequence[Op]) -> tuple[list[Op], list[Op]]:
    """The operators of two runs; without those that take gradients over or copy them, if the runs differ in these."""
    ways = [Counter(op.name for op in ops if op.node == _NODE) for ops in (a, b)]
    return (list(a), list(b)) if ways[0] == ways[1] else (list(_as_taken(a)), list(_as_taken(b)))


def _as_taken(ops: Sequence[Op]) -> Iterator[Op]:
    """The operators, those that read a copy reading what was copied."""
    originals: dict[int, int] = {}  # tensors by their copies
    for k, op in enumerate(ops):
        if _is_taken(op):
            originals[op.outputs[0].tensor] = originals.get(op.inputs[0].tensor, op.inputs[0].tensor)
        elif not (_is_memory(op) and k + 1 < len(ops) and _is_taken(ops[k + 1])):
            yield replace(op, inputs=_reading(op.inputs, originals)) if originals else op


def _is_memory(op: Op) -> bool:
    return op.node == _NODE and base_name(op.name) == _MEMORY


def _is_taken(op: Op) -> bool:
    return op.node == _NODE and base_name(op.name) in _COPIES and len(op.inputs) == 1 and gives_its_input(op)


def _reading(inputs: Sequence[Stats], originals: dict[int, int]) -> tuple[Stats, ...]:
    return tuple(replace(t, tensor=originals[t.tensor]) if t.tensor in originals else t for t in inputs)
