"""Operators of ranks that compute what one of a reference does: on shards, in a stage, a microbatch at a time."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from retrograd.core.alignment import align
from retrograd.trace.diffing.error_bounds import PRODUCTS
from retrograd.trace.diffing.identity import base_name, names, unwrapped_module
from retrograd.trace.diffing.verdicts import is_packaging
from retrograd.trace.schema import BACKWARD, FORWARD, OPTIMIZER, OTHER, PROGRAM, Op, Stats

_TRANSPOSED = names("t transpose permute squeeze unsqueeze flatten unflatten")
_COPIES = names("clone copy _to_copy")
_ON_LISTS = ("_foreach_", "_fused_")


def counterparts(reference: Sequence[Op], ops: Sequence[Op], ranks: int) -> dict[int, dict[int, Op]]:
    """What a rank has of each operator of the reference, by that one's index and by microbatch, from 0.

    Args:
        reference: the operators of a run on one device.
        ops: those of one rank, which may have a part of the model, and take the batch in several microbatches.
        ranks: how many there are.
    """
    by_step: list[dict[int, list[Op]]] = []
    for side in (reference, ops):
        by_step.append(defaultdict(list))
        for op in side:
            by_step[-1][op.step].append(op)
    whole, parts = by_step
    pairs: dict[int, dict[int, Op]] = {}
    for step in sorted(whole.keys() & parts.keys()):
        pairs |= _of_step(whole[step], parts[step], ranks)
    return pairs


def _of_step(reference: Sequence[Op], ops: Sequence[Op], ranks: int) -> dict[int, dict[int, Op]]:
    of_model = {unwrapped_module(op.module) for op in reference}, _optimized(reference)
    whole, keys = _keyed([op for op in reference if computes(op)], *of_model)
    parts, own = _keyed([op for op in ops if computes(op)], *of_model)
    wanted, there = Counter(keys), Counter(own)
    forward = Counter(key for key, op in zip(keys, whole, strict=True) if op.phase == FORWARD)
    several = 1 if _comes_again(whole) else _most_often(there[key] // n for key, n in forward.items() if there[key])
    split = {key for key, n in wanted.items() if there[key] == several * n}
    keys_of = {op.index: key for op, key in zip(parts, own, strict=True) if key in split}
    numbers = _numbers(ops, keys_of, wanted) if several > 1 else dict[int, int]()
    for op, key in zip(parts, own, strict=True):
        if several == 1 or op.phase == OTHER or there[key] <= wanted[key]:
            numbers.setdefault(op.index, 0)
    pairs: dict[int, dict[int, Op]] = defaultdict(dict)
    for number in range(several):
        # What runs once a step is with the first. What runs more often than there are microbatches is with none.
        mine = [(op, key) for op, key in zip(parts, own, strict=True) if numbers.get(op.index) == number]
        # Without sizes, which shards have of their own; all that is common is wanted, in order.
        for i, j in align(keys, [key for _, key in mine], patience=False):
            if fits(mine[j][0].outputs, whole[i].outputs, ranks * several):
                pairs[i][number] = mine[j][0]
    # Where a microbatch lacks an operator, nothing is known of what all of them have together.
    needed = [several if key in split else 1 for key in keys]
    return {whole[i].index: by_number for i, by_number in pairs.items() if len(by_number) == needed[i]}


def _numbers(ops: Sequence[Op], keys: dict[int, Hashable], wanted: Counter[Hashable]) -> dict[int, int]:
    """The microbatch of each operator that has a key, by its index.

    A rank takes its microbatches in order in the forward. In a backward what it reads tells which one it is of, as some
    schedules take them in another order there, or gradients of parameters after those of all inputs (zero bubble).
    """
    numbers, of_value, seen = dict[int, int](), dict[int, int](), Counter[Hashable]()
    for op in ops:
        if op.phase != BACKWARD and op.index in keys:
            key = keys[op.index]
            numbers[op.index] = seen[key] // wanted[key]
            seen[key] += 1
        elif (number := _only(of_value.get(t.tensor) for t in op.inputs)) is not None:
            numbers[op.index] = number
        if op.index in numbers:
            of_value |= dict.fromkeys((t.tensor for t in op.outputs), numbers[op.index])
    rest = [op for op in ops if op.phase == BACKWARD and op.index not in numbers]  # reads what another rank sent alone
    while rest:
        readers: dict[int, set[int]] = defaultdict(set)
        for op in (op for op in ops if op.phase == BACKWARD and op.index in numbers):
            for t in op.inputs:
                readers[t.tensor].add(numbers[op.index])
        known = {value: of.pop() for value, of in readers.items() if len(of) == 1}
        told = {op.index: _only(known.get(t.tensor) for t in (*op.inputs, *op.outputs)) for op in rest}
        numbers |= {index: number for index, number in told.items() if number is not None}
        left = [op for op in rest if op.index not in numbers]
        rest = left if len(left) < len(rest) else []
    return {index: number for index, number in numbers.items() if index in keys}


def _only(numbers: Iterable[int | None]) -> int | None:
    """The number that all are that are known; None if they are several."""
    known = {number for number in numbers if number is not None}
    return known.pop() if len(known) == 1 else None


def _keyed(ops: Sequence[Op], modules: set[str], known: set[str]) -> tuple[list[Op], list[Hashable]]:
    """Operators and what each does, and where, in the whole model; an optimizer's by its parameter.

    Those come last, by name, since a stage may have its parameters in another order.
    """
    names = parameters_of(ops, known)
    ops = sorted(ops, key=lambda op: names.get(op.index, ""))
    return ops, [
        (kind(op.name), kind(op.node), op.phase, _in_whole(op.module, modules), *_for(op, names)) for op in ops
    ]


def _for(op: Op, names: dict[int, str]) -> tuple[bool, str]:
    return op.owner == OPTIMIZER, names.get(op.index, "")


def parameters_of(ops: Sequence[Op], known: set[str] | None = None) -> dict[int, str]:
    """The parameter that each operator of an optimizer is for, as far as it is for one, by index.

    Those that read a state or a gradient are with the one that changes the parameter in the end.
    """
    known = _optimized(ops) if known is None else known
    mine = [op for op in ops if op.owner in (OPTIMIZER, PROGRAM) and op.phase == OTHER]  # a program clips gradients
    values = {op.index: [t for t in (*op.inputs, *op.outputs) if math.prod(t.shape) > 1] for op in mine}
    above: dict[int, int] = {}  # values that an operator has together: a tree for each parameter

    def root(value: int) -> int:
        while above.setdefault(value, value) != value:
            above[value] = value = above[above[value]]
        return value

    for tensors in values.values():
        for t in tensors[1:]:
            above[root(t.tensor)] = root(tensors[0].tensor)
    named: dict[int, set[str]] = defaultdict(set)
    for t in (t for tensors in values.values() for t in tensors if t.name):
        named[root(t.tensor)] |= {_in_whole(t.name, known)} & known
    single = {value: next(iter(names)) for value, names in named.items() if len(names) == 1}
    return {index: single.get(root(ts[0].tensor), "") if ts else "" for index, ts in values.items()}


def _optimized(ops: Sequence[Op]) -> set[str]:
    return {unwrapped_module(t.name) for op in ops if op.owner == OPTIMIZER for t in op.inputs if t.name}


def _in_whole(path: str, known: set[str]) -> str:
    """A path in the whole model; the number of a stage before it is left out."""
    path = rest = unwrapped_module(path)
    while rest and rest not in known:
        rest = rest.partition(".")[2]
    return rest or path


def _most_often(ratios: Iterable[int]) -> int:
    return max(Counter(ratios).most_common(1), default=(1, 0))[0]


def _comes_again(ops: Sequence[Op]) -> bool:
    """Whether a module runs forward after its backward: the reference, too, takes its batch in parts."""
    back: set[str] = set()
    for op in ops:
        if op.phase == BACKWARD and op.module:
            back.add(op.module)
        elif op.phase == FORWARD and op.module in back:
            return True
    return False


def lengths_of_lists(ops: Sequence[Op]) -> frozenset[int]:
    """How many tensors the operators on lists have that an optimizer, or clipping, runs."""
    return frozenset(len(op.outputs) for op in ops if op.phase != BACKWARD and base_name(op.name).startswith(_ON_LISTS))


def by_tensor(ops: Sequence[Op]) -> list[Op]:
    """Operators with those of optimizers and of clipping, on lists, as one for each tensor: a stage has other lists."""
    result: list[Op] = []
    for op in ops:
        name, parts = base_name(op.name), len(op.outputs)
        if name.startswith("_fused_"):  # lists of parameters, gradients and states
            parts = next((k for k, t in enumerate(op.inputs) if not t.name), 0)
        if op.phase == BACKWARD or not name.startswith(_ON_LISTS) or parts < 2 or len(op.outputs) % parts:
            result.append(op)
            continue
        lists = len(op.inputs) // parts * parts
        for k in range(parts):  # what stands behind the lists is for all: the factor of clipping
            result.append(
                replace(op, inputs=op.inputs[k:lists:parts] + op.inputs[lists:], outputs=op.outputs[k::parts])
            )
    return [replace(op, index=index) for index, op in enumerate(result)]


def fits(parts: Sequence[Stats], wholes: Sequence[Stats], most: int) -> bool:
    """Whether tensors may be shards, one of so many: of a node's products either may come first."""
    return len(parts) == len(wholes) and all(
        part.shape == whole.shape
        or (is_shard(part.shape, whole.shape) and math.prod(part.shape) * most >= math.prod(whole.shape))
        for part, whole in zip(parts, wholes, strict=True)
    )


def is_shard(part: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether a tensor may be a shard of another: as many dimensions, none longer and at least one shorter."""
    return len(part) == len(whole) and part != whole and all(m <= n for m, n in zip(part, whole, strict=True))


def kind(name: str) -> str:
    """What an operator or a node is called here: products have one name, with a term that is added or without."""
    base = base_name(name).removesuffix("0").removesuffix("Backward").lower()
    return "product" if base in PRODUCTS else base


def is_move(op: Op) -> bool:
    """Whether the elements of the result are those of the first input."""
    return is_packaging(op) or (base_name(op.name) in _TRANSPOSED and len(op.outputs) == 1 == len(op.inputs))


def computes(op: Op) -> bool:
    """Whether an operator gives numbers that were measured and are not simply its input's.

    A momentum begins as a copy of a gradient, which is compared where an optimizer reads it.
    """
    copied = op.owner == OPTIMIZER and base_name(op.name) in _COPIES
    return (copied or not is_move(op)) and any(t.rms is not None or t.nan is not None for t in op.outputs)
