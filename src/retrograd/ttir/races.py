"""Races between the programs of a launch: two touch a byte, one of them writes, and nothing orders the two.

`UnorderedRaces` is for kernels in which no program can learn of another: any two programs that meet are in conflict.
`OrderedRaces` keeps vector clocks, which atomics and fences of programs that run in turns advance. Both hold shadows of
the memory, one cell for each few bytes that are always accessed together. Threads of one program are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from retrograd.ttir.element_types import Array
from retrograd.ttir.latest_accesses import BLOCK, NOWHERE, LatestAccesses, blocks_of

_NEVER = np.iinfo(np.int32).max
_EMPTY = -1
_TOLD = 8  # programs that an access is in conflict with: under a lock that orders nothing it is with all before it
_NO_CELLS = np.zeros(0, np.int64)
_COVERED = 1 << 22  # writes below others' that are known of a storage


@dataclass
class Conflict:
    """Two accesses of different programs that nothing orders.

    Attributes:
        first, second: program and access (as numbers) of both, the earlier in this run first.
        cells: cells of the shadow in which they meet.
        same_value: whether both write, and the same bits.
    """

    first: tuple[int, int]
    second: tuple[int, int]
    cells: Array
    same_value: bool = False


Note = Callable[["Cells", Conflict], None]


@dataclass
class Cells:
    """Cells of an access: which shadow, which cells, and the code (program and access) of whoever touches each.

    Attributes:
        owner: the storage.
        cells: indices, flat.
        programs: the program of each, flat, or of all.
        access: number of the access.
        equal: of a write: `before()` and `after()` say which bits are, and will be, as this access stores them.
    """

    owner: Any
    cells: Array
    programs: Array
    access: int
    equal: Any = None


@dataclass
class EqualBits:
    """Whether a store leaves bits as they are, asked before it is made and only where programs meet."""

    view: Array
    index: Array
    bits: Array
    per: int = 1

    def before(self) -> Array:
        """Whether memory holds the same already."""
        return np.repeat(self.view[self.index] == self.bits, self.per)

    def after(self) -> Array:
        """Whether it will hold them when all lanes have stored, or another lane's."""
        kept = self.view[self.index]
        self.view[self.index] = self.bits
        same = self.view[self.index] == self.bits
        self.view[self.index] = kept
        return np.repeat(same, self.per)


@dataclass
class _Marks:
    """Who touched a cell last, and another program that did before."""

    last: Array
    other: Array | None = None


@dataclass
class _Shadow:
    size: int
    marks: dict[str, _Marks] = field(default_factory=dict)
    # Cell and program of writes that another program's was on top of, as one number; a race of values is told there.
    covered: Array = field(default_factory=lambda: _NO_CELLS)

    def of(self, kind: str, dtype: np.dtype[Any]) -> _Marks:
        if kind not in self.marks:
            self.marks[kind] = _Marks(np.full(self.size, _EMPTY, dtype))
        return self.marks[kind]


# Atomics by the number of cells that they update at once: only those of one size are atomic to each other.
_ATOMICS = ("atomic", "atomic of 2", "atomic of 4", "atomic of 8")
# Which marks an access is in conflict with.
_AGAINST = {"read": ("write", *_ATOMICS), "write": ("write", "read", *_ATOMICS)}
_AGAINST |= {kind: ("write", "read", *(other for other in _ATOMICS if other != kind)) for kind in _ATOMICS}


def atomic_of(cells: int) -> str:
    """The kind of an atomic access to so many cells at once."""
    return _ATOMICS[cells.bit_length() - 1]


class UnorderedRaces:
    """Conflicts where nothing within a launch orders programs.

    Args:
        note: is told of each conflict.
        accesses: how many different accesses the kernel has.
        programs: how many programs.
    """

    ordered = False

    def __init__(self, note: Note, accesses: int, programs: int) -> None:
        self._note = note
        self._shift = max(int(accesses).bit_length(), 1)
        self._narrow = programs << self._shift < 1 << 31
        self._shadows: dict[int, _Shadow] = {}

    def touch(self, kind: str, at: Cells, size: int) -> None:
        """Note an access: kind "read", "write" or that of `atomic_of`, `size` the number of cells of the storage."""
        shadow = self._shadows.get(id(at.owner))
        if shadow is None:
            shadow = self._shadows[id(at.owner)] = _Shadow(size)
        programs = at.programs if self._narrow else at.programs.astype(np.int64)
        codes = (programs << self._shift) | at.access
        for against in _AGAINST[kind]:
            marks = shadow.marks.get(against)
            for seen in (marks.last, marks.other) if marks is not None else ():
                if seen is not None:
                    equal = at.equal.before if against == kind == "write" and at.equal else None
                    self._compare(
                        seen, codes, at, equal, shadow.covered if (kind, against) == ("read", "write") else _NO_CELLS
                    )
        marks = shadow.of(kind, codes.dtype)
        before = marks.last[at.cells]
        marks.last[at.cells] = codes
        after = marks.last[at.cells]
        elsewhere = after != codes
        if kind == "write":
            if elsewhere.any():
                elsewhere = (after >> self._shift) != (codes >> self._shift)
                self._tell(after, codes, elsewhere, at, at.equal.after if at.equal else None)
            over = (before != _EMPTY) & ((before >> self._shift) != (codes >> self._shift))
            if over.any() or elsewhere.any():
                lost = [
                    _keys(at.cells[over], before[over] >> self._shift),
                    _keys(at.cells, codes >> self._shift)[elsewhere],
                ]
                shadow.covered = np.union1d(shadow.covered, np.concatenate(lost))[:_COVERED]
        else:
            self._keep_other(marks, before, codes, elsewhere, at)

    def last_writers(self, owner: Any, cells: Array) -> Array:
        """Number of the access that wrote each cell last, -1 where none did."""
        shadow = self._shadows.get(id(owner))
        mask = (1 << self._shift) - 1
        numbers = np.full(len(cells), _EMPTY, np.int64)
        for kind in ("write", *_ATOMICS):
            marks = shadow.marks.get(kind) if shadow else None
            if marks is not None:
                codes = marks.last[cells]
                numbers = np.where(codes == _EMPTY, numbers, codes & mask)
        return numbers

    def _keep_other(self, marks: _Marks, before: Array, codes: Array, elsewhere: Array, at: Cells) -> None:
        """Remember a second program that reads a cell or updates it atomically."""
        differs = (before != _EMPTY) & ((before >> self._shift) != (codes >> self._shift))
        if differs.any() or elsewhere.any():
            if marks.other is None:
                marks.other = np.full_like(marks.last, _EMPTY)
            marks.other[at.cells[differs]] = before[differs]
            marks.other[at.cells[elsewhere]] = codes[elsewhere]

    def _compare(self, marks: Array, codes: Array, at: Cells, equal: Callable[[], Array] | None, own: Array) -> None:
        earlier = marks[at.cells]
        if int(earlier.max(initial=_EMPTY)) == _EMPTY:
            return
        conflict = (earlier != _EMPTY) & ((earlier >> self._shift) != (codes >> self._shift))
        if len(own):  # who reads what it wrote itself, as did others
            conflict &= ~np.isin(_keys(at.cells, codes >> self._shift), own)
        if conflict.any():
            self._tell(earlier, codes, conflict, at, equal)

    def _tell(
        self, earlier: Array, codes: Array, conflict: Array, at: Cells, equal: Callable[[], Array] | None
    ) -> None:
        same = np.zeros(conflict.shape, bool) if equal is None or not conflict.any() else equal()
        mask = (1 << self._shift) - 1
        for is_same in (False, True):
            hit = conflict & (same == is_same)
            for access in np.unique(earlier[hit] & mask) if hit.any() else ():
                chosen = np.flatnonzero(hit & ((earlier & mask) == access))
                first, second = int(earlier[chosen[0]]), int(codes[chosen[0]])
                self._note(
                    at,
                    Conflict(
                        (first >> self._shift, first & mask), (second >> self._shift, second & mask),
                        at.cells[chosen], is_same,
                    ),
                )  # fmt: skip


class OrderedRaces:
    """Conflicts where atomics and fences order some accesses: happens-before by vector clocks, one program at a time.

    Args:
        note: is told of each conflict.
        programs: how many there are.
    """

    ordered = True

    def __init__(self, note: Note, programs: int) -> None:
        self._note = note
        self._clocks = np.zeros((programs, programs), np.int32)
        np.fill_diagonal(self._clocks, 1)
        self._released: dict[int, dict[int, Array]] = {}  # storage -> cell -> clock
        self._at_fence: dict[int, Array] = {}
        # What a program has looked at relaxed: all of it, which a fence acquires, and by storage and cell.
        self._to_acquire: dict[int, Array] = {}
        self._seen: dict[int, dict[tuple[int, int], Array]] = {}
        # Storage, kind of access, block of cells -> the latest ones of each program.
        self._latest: dict[tuple[int, str, int], LatestAccesses] = {}
        # Storage, block of cells -> program -> number among all atomics of its latest one, and of that whose result is
        # looked at, for each cell.
        self._updates: dict[tuple[int, int], dict[int, Array]] = {}
        self._count, self._looks = 1, False
        self._released_now: set[int] = set()

    def touch(self, kind: str, at: Cells, size: int) -> None:
        """Note an access of one program, as `UnorderedRaces.touch`."""
        me = int(at.programs.flat[0])
        parts = blocks_of(at.cells)
        for against in _AGAINST[kind]:
            for program, (hit, accesses) in self._unordered(against, kind, me, at, parts).items():
                self._tell(program, accesses, me, hit, at, against == kind == "write")
        for number, _, inside in parts:
            latest = self._latest.setdefault((id(at.owner), kind, number), LatestAccesses())
            self._mark(latest, kind, me, inside, at.access)
            if kind in _ATOMICS:
                updates = self._updates.setdefault((id(at.owner), number), {})
                updates.setdefault(me, np.zeros((2, BLOCK), np.int64))[: 1 + self._looks, inside] = self._count
        if kind in _ATOMICS:
            self._count += 1
            if me in self._released_now:  # this atomic is the last of what it has released
                self._released_now.remove(me)
                self._clocks[me][me] += 1

    def _observed(self, owner: int, number: int, program: int, me: int, inside: Array | slice) -> Any:
        """Cells whose latest atomic of a program comes before one of `me`, which has looked at what it wrote.

        PTX orders what is observed so before all that the observer does then, whatever the atomics say of other memory.
        """
        updates = self._updates.get((owner, number), {})
        return updates[program][0, inside] < updates[me][1, inside] if me in updates else np.False_

    def _unordered(
        self, against: str, kind: str, me: int, at: Cells, parts: list[tuple[int, Any, Array | slice]]
    ) -> dict[int, tuple[Array, Array]]:
        """Which cells others have touched that nothing orders with this access, by program, and their accesses."""
        conflicts: dict[int, tuple[Array, Array]] = {}
        for number, lanes, inside in parts:
            latest = self._latest.get((id(at.owner), against, number))
            if latest is None:
                continue
            known = self._clocks[me].take(latest.programs)
            known[latest.programs == me] = _NEVER  # nobody is in conflict with itself
            later = latest.clocks[: len(known), inside] > known[:, None]
            for row in np.flatnonzero(later.any(axis=1)).tolist():
                if len(conflicts) == _TOLD:
                    break
                program, hit = int(latest.programs[row]), later[row]
                if against in _ATOMICS and kind not in _ATOMICS:
                    hit = hit & ~self._observed(id(at.owner), number, program, me, inside)
                if hit.any():
                    if program not in conflicts:
                        conflicts[program] = np.zeros(len(at.cells), bool), np.zeros(len(at.cells), np.int32)
                    conflicts[program][0][lanes] = hit
                    conflicts[program][1][lanes] = latest.accesses[row, inside]
        return conflicts

    def _mark(self, latest: LatestAccesses, kind: str, me: int, inside: Array | slice, access: int) -> None:
        mine = latest.row(me)
        if kind == "write":
            # Who writes after all that it knows of replaces the marks of those: nobody can miss them any more.
            known = self._clocks[me].take(latest.programs)
            clocks = latest.clocks[: len(known), inside]
            latest.clocks[: len(known), inside] = np.where(clocks <= known[:, None], 0, clocks)
        latest.clocks[mine, inside] = self._clocks[me][me]
        latest.accesses[mine, inside] = access

    def last_writers(self, owner: Any, cells: Array) -> Array:
        """Number of an access that wrote each cell, of the latest there are, -1 where none did."""
        numbers = np.full(len(cells), _EMPTY, np.int64)
        for number, lanes, inside in blocks_of(cells):
            for kind in ("write", *_ATOMICS):
                latest = self._latest.get((id(owner), kind, number), NOWHERE)
                for row in range(len(latest.programs)):
                    marked = latest.clocks[row, inside] > 0
                    numbers[lanes] = np.where(marked, latest.accesses[row, inside], numbers[lanes])
        return numbers

    def _tell(self, program: int, accesses: Array, me: int, hit: Array, at: Cells, writes: bool) -> None:
        equal = at.equal.before() if writes and at.equal else np.zeros(hit.shape, bool)
        for is_same in (False, True):
            chosen = np.flatnonzero(hit & (equal == is_same))
            if len(chosen):
                conflict = Conflict((program, int(accesses[chosen[0]])), (me, at.access), at.cells[chosen], is_same)
                self._note(at, conflict)

    def synchronise(
        self, program: int, owner: Any, cells: Array, order: str, writes: bool = True, looks: bool = True
    ) -> None:
        """Note that a program updates sync variables atomically, or, as a swap that fails, reads them only.

        `order` is acquire, release, acq_rel or relaxed; what writes nothing releases nothing. Who does not look at the
        result cannot know whom it came after: that it did is chance, and it acquires what it has seen there before.
        """
        self._looks = looks
        clock = self._clocks[program]
        acquires, releases = order in ("acquire", "acq_rel"), writes and order in ("release", "acq_rel")
        at_fence = self._at_fence.get(program) if writes else None
        released = self._released.setdefault(id(owner), {})
        for cell in np.unique(cells).tolist():
            known = released.get(cell)
            if not looks:
                seen = self._seen.get(program, {}).get((id(owner), cell)) if acquires else None
                if seen is not None:
                    np.maximum(clock, seen, out=clock)
            elif known is not None:
                if acquires:
                    np.maximum(clock, known, out=clock)
                else:
                    pending = self._to_acquire.setdefault(program, np.zeros_like(clock))
                    np.maximum(pending, known, out=pending)
                    self._seen.setdefault(program, {})[id(owner), cell] = known.copy()
            told = clock if releases else at_fence
            if told is not None:
                released[cell] = told.copy() if known is None else np.maximum(known, told)
        if releases or at_fence is not None:
            self._released_now.add(program)

    def overwrite(self, owner: Any, cells: Array) -> None:
        """Note that a plain store replaces sync variables: who reads them learns nothing of those before."""
        if released := self._released.get(id(owner)):
            # There are few sync variables: to look up each of 2^22 cells took half of a run in turns.
            variables = np.fromiter(released, np.int64, len(released))
            for cell in variables[np.isin(variables, cells)].tolist():
                del released[cell]

    def fence(self, program: int) -> None:
        """Note a fence: relaxed atomics before it acquire, those after it release."""
        clock = self._clocks[program]
        if program in self._to_acquire:
            np.maximum(clock, self._to_acquire[program], out=clock)
        self._at_fence[program] = clock.copy()
        clock[program] += 1


def _keys(cells: Array, programs: Array) -> Array:
    return cells.astype(np.int64) << 31 | programs
