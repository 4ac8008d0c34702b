"""Matching of operators of two runs: by steps, then by everything known of them, then by less and less."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

from retrograd.core.alignment import align
from retrograd.trace.diffing.identity import LEVELS, key_without_arguments
from retrograd.trace.schema import Op

STEP = "step"


@dataclass(frozen=True, slots=True)
class Pair:
    """Operators that correspond, or one without a counterpart.

    `level` says by what they correspond (see `identity.LEVELS`); `STEP`: the other side lacks the whole step.
    """

    a: Op | None
    b: Op | None
    level: str = ""

    @property
    def both(self) -> tuple[Op, Op]:
        """The operators of a pair that has two."""
        assert self.a is not None
        assert self.b is not None
        return self.a, self.b

    @property
    def either(self) -> Op:
        """The operator of B, or else that of A."""
        op = self.b or self.a
        assert op is not None
        return op


def match(a: Sequence[Op], b: Sequence[Op]) -> list[Pair]:
    """Every operator of both runs once, in an order that both runs have."""
    pairs: list[Pair] = []
    for ops_a, ops_b in _steps(a, b):
        if ops_a and ops_b:
            pairs += _pair_step(ops_a, ops_b)
        else:
            pairs += [Pair(op, None, STEP) for op in ops_a] + [Pair(None, op, STEP) for op in ops_b]
    return pairs


def _split(ops: Sequence[Op]) -> list[Sequence[Op]]:
    starts = [k for k, op in enumerate(ops) if not k or op.step != ops[k - 1].step]
    return [ops[i:j] for i, j in zip(starts, [*starts[1:], len(ops)], strict=True)]


def _steps(a: Sequence[Op], b: Sequence[Op]) -> Iterator[tuple[Sequence[Op], Sequence[Op]]]:
    """Steps that correspond: one by one where both have as many, else by what their operators are."""
    in_a, in_b = _split(a), _split(b)
    if len(in_a) == len(in_b):
        yield from zip(in_a, in_b, strict=True)
        return
    # A step that only one of the runs has is as a rule at an end: those alike are found first.
    keys = [[hash(tuple(map(key_without_arguments, ops))) for ops in steps] for steps in (in_a, in_b)]
    i = j = 0
    for k, m in [*align(*keys), (len(in_a), len(in_b))]:
        while i < k and j < m:
            yield in_a[i], in_b[j]
            i, j = i + 1, j + 1
        for ops in in_a[i:k]:
            yield ops, ()
        for ops in in_b[j:m]:
            yield (), ops
        if k < len(in_a):
            yield in_a[k], in_b[m]
        i, j = k + 1, m + 1


def _pair_step(a: Sequence[Op], b: Sequence[Op]) -> list[Pair]:
    levels: dict[int, tuple[int, str]] = {}  # position in a -> (position in b, level)
    for name, key in LEVELS:
        for stretch in _open_stretches(levels, len(a), len(b)):
            for i, j in _align(a, b, stretch, key):
                levels[i] = (j, name)
        if name == "same":
            _slide(a, b, levels)
    return list(_merge(a, b, levels))


def _open_stretches(levels: dict[int, tuple[int, str]], n: int, m: int) -> list[tuple[int, int, int, int]]:
    """Stretches between pairs in which both sides have operators left."""
    stretches: list[tuple[int, int, int, int]] = []
    i = j = 0
    for k, (at, _) in [*sorted(levels.items()), (n, (m, ""))]:
        if k > i and at > j:
            stretches.append((i, k, j, at))
        i, j = k + 1, at + 1
    return stretches


def _align(
    a: Sequence[Op], b: Sequence[Op], stretch: tuple[int, int, int, int], key: Callable[[Op], Hashable]
) -> list[tuple[int, int]]:
    i, k, j, m = stretch
    numbers: dict[Hashable, int] = {}
    keys = [[numbers.setdefault(key(op), len(numbers)) for op in ops] for ops in (a[i:k], b[j:m])]
    return [(i + x, j + y) for x, y in align(*keys)]


def _slide(a: Sequence[Op], b: Sequence[Op], levels: dict[int, tuple[int, str]]) -> None:
    """Of equal neighbours, leave alone the one whose values have no counterpart: equal keys say nothing of that."""
    back = {j: (i, name) for i, (j, name) in levels.items()}
    _slide_side(a, b, levels, back)
    _slide_side(b, a, back, levels)


def _slide_side(
    x: Sequence[Op], y: Sequence[Op], levels: dict[int, tuple[int, str]], back: dict[int, tuple[int, str]]
) -> None:
    for free in [j for j in range(len(y)) if j not in back]:
        at = free
        # The operator before has the same key and so could be the one without a counterpart.
        while at > 0 and at - 1 in back and key_without_arguments(y[at - 1]) == key_without_arguments(y[free]):
            i, name = back[at - 1]
            if _common_tensors(x[i], y[at]) <= _common_tensors(x[i], y[at - 1]):
                break
            del back[at - 1]
            back[at], levels[i] = (i, name), (at, name)
            at -= 1


def _common_tensors(x: Op, y: Op) -> int:
    """How many tensors two operators have in common, bit for bit as far as was recorded."""
    tensors = zip((*x.inputs, *x.outputs), (*y.inputs, *y.outputs), strict=False)
    return sum((s.digest, s.low, s.high, s.rms) == (t.digest, t.low, t.high, t.rms) for s, t in tensors)


def _merge(a: Sequence[Op], b: Sequence[Op], levels: dict[int, tuple[int, str]]) -> Iterator[Pair]:
    i = j = 0
    for k, (m, name) in [*sorted(levels.items()), (len(a), (len(b), ""))]:
        yield from (Pair(op, None) for op in a[i:k])
        yield from (Pair(None, op) for op in b[j:m])
        if k < len(a):
            yield Pair(a[k], b[m], name)
        i, j = k + 1, m + 1
