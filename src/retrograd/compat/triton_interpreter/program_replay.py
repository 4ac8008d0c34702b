"""A tape of a program: its operations on arrays, made again for other data, sizes, memory and programs.

What depends on whole numbers and on the program alone is made once for each of these. So is where the program looks in
the memory of each argument: addresses are kept as distances from their pointer.
"""

from __future__ import annotations

from functools import cache
from typing import Any

_BYTES = 1 << 20  # of numbers that a tape keeps, of those that depend on whole numbers and on the program alone


class Diverged(Exception):
    """A program that is played goes another way; `late` if it has written by then."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late = late


class AddressOffsets:
    """Addresses by their distances from a pointer.

    Attributes:
        root: the slot of the pointer.
        distances: in bytes.
        found: what whoever looks them up keeps of that, by what else it depends on.
    """

    def __init__(self, root: int, distances: Any) -> None:
        self.root, self.distances = root, distances
        self.found: dict[Any, Any] = {}
        self.nbytes = distances.nbytes


class RecordedProgram:
    """The operations of one way through a kernel."""

    def __init__(
        self, kind: Any, notes: tuple[list[Any], ...], values: list[Any], inputs: int, roots: dict[int, int]
    ) -> None:
        self._kind, self._notes = kind, notes
        self._index: list[Any] = []
        self._place: list[Any] = []
        self._data: list[Any] = []
        self._values, self._inputs, self._roots = values, inputs, roots
        self._known: dict[Any, list[Any] | None] = {}
        self._room = _BYTES

    def replay(self, inputs: list[Any], program: Any) -> bool:
        """Make the operations; False if another way is to be taken and nothing is written yet.

        Args:
            inputs: numbers of the arguments that have some, in order.
            program: what those of the values depend on that depend on neither memory nor where it lies.

        Raises:
            Diverged: another way is to be taken, and something is written.
        """
        if self._notes is not None:  # many tapes are never played
            index, place, data = self._notes
            self._index, self._place = ([_step(self._kind, {}, *note) for note in notes] for notes in (index, place))
            self._data = [_step(self._kind, self._roots, *note) for note in data]
            used = {slot for note in data for slot in note[2]}
            self._roots = {slot: root for slot, root in self._roots.items() if slot in used}
            self._notes = None
        try:
            if program in self._known:
                kept = self._known[program]
                if kept is None:
                    return False
                values = kept.copy()
            else:
                values = self._values.copy()
                values[: self._inputs] = inputs
                self._known[program] = None
                _make(self._index, values)
                _make(self._place, values)
                for slot, root in self._roots.items():
                    values[slot] = AddressOffsets(root, values[slot] - values[root])
                self._remember(program, values)
                values = values.copy()
            values[: self._inputs] = inputs
            _make(self._data, values)
        except Diverged as other:
            if other.late:
                raise
            return False
        return True

    def _remember(self, program: Any, values: list[Any]) -> None:
        """Keep the values of a program that only its numbers decide."""
        self._known[program] = values
        self._room -= sum(getattr(v, "nbytes", 0) for v in values)
        if self._room < 0:
            self._known, self._room = {}, _BYTES


def _step(
    kind: Any, roots: dict[int, int], function: Any, args: list[Any], slots: list[int], types: list[Any],
    into: Any, arrays: Any,
) -> tuple[Any, int, int, Any]:  # fmt: skip
    """The step of an operation, for `_make`: a function of two arrays and its slots, or a function of all values."""
    if arrays is not None:
        op, left, right, out = arrays
        if hasattr(op, "resolve_dtypes") and op.resolve_dtypes((left, right, None))[-1] == out:
            return op, slots[0], slots[1], into
    operands = [(s, a, t, roots.get(s)) for s, a, t in zip(slots, args, types, strict=True)]
    new = object.__new__
    addresses = _addresses(kind)

    def handle(data: Any, dtype: Any) -> Any:
        instance = new(kind)
        instance.__dict__ = {"data": data, "dtype": dtype, "attr": {}}
        return instance

    def pointers(places: Any, dtype: Any, pointer: Any) -> Any:
        instance = new(addresses)
        instance.__dict__ = {"places": places, "pointer": pointer, "dtype": dtype, "attr": {}}
        return instance

    def step(values: list[Any]) -> None:
        result = function(
            *[
                a
                if s < 0
                else values[s]
                if t is None
                else handle(values[s], t)
                if root is None
                else pointers(values[s], t, values[root])
                for s, a, t, root in operands
            ]
        )
        if type(into) is int:
            values[into] = result.data if type(result) is kind else result
        elif into is not None:
            for slot, value in zip(into, result, strict=True):
                values[slot] = value.data if type(value) is kind else value

    return step, -1, -1, -1


@cache
def _addresses(kind: Any) -> Any:
    """The interpreter's handle of values, of addresses that are worked out when somebody looks at them."""

    class Addresses(kind):
        @property
        def data(self) -> Any:
            known = self.__dict__.get("data")
            if known is None:
                known = self.__dict__["data"] = self.places.distances + self.pointer
            return known

    return Addresses


def _make(steps: list[Any], values: list[Any]) -> None:
    for op, left, right, into in steps:
        if left < 0:
            op(values)
        else:
            values[into] = op(values[left], values[right])
