"""Ring file of the last collectives of a rank: memory mapped from a file outlives an abort or a signal. No torch.

Each process group has a ring of its own, in which entry j is its j-th collective. What an entry means stands once in a
table of JSON lines. The writer holds a lock on its file, which the system takes away whatever ends the process.
"""

from __future__ import annotations

import json
import mmap
import secrets
import struct
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from retrograd.core.schema import decode, plain
from retrograd.fsdp.schema import VARYING, Collective, Lane, token

try:
    import fcntl
except ImportError:  # Windows: ranks are compared through the store alone
    fcntl = None

_HEAD = struct.Struct("<8s16sIIQQIIq")
_MAGIC = b"RETRORNG"
_SAID, _PLACE, _TEXT = 256, 4352, 4096  # where two texts begin, and how long they are
_TABLE, _TABLE_END = 8448, 1 << 20
_ENTRY = struct.Struct("<Q8sIIII")
_NUMBER = struct.Struct("<Q")
_RINGS, _LENGTH = 16, 1024
_RING = 16 + _LENGTH * _ENTRY.size
_SIZE = _TABLE_END + _RINGS * _RING  # 1.5 MB, written at once: a full disk is an error here and no signal later
RUNNING, LEFT, FAILED = 1, 2, 3
_MESSAGES = "messages"  # of two ranks alone, in an order that is theirs: a ring that nobody compares


class RingEntry(NamedTuple):
    """A collective as it was issued."""

    number: int  # in its group, from 0
    token: bytes
    row: int  # of the collective
    line: int  # row of the line of the program that issued it
    step: int
    position: int  # in the step


class Head(NamedTuple):
    """The state of a rank."""

    magic: bytes
    key: bytes  # by which others know that this is the file they were told of
    rank: int
    state: int
    issued: int
    checks: int  # comparisons at the end of steps that it came to
    table: int  # where its table ends
    rings: int
    last: int  # the ring of its last collective, -1 before the first


class RingReader:
    """The file of a rank, whoever writes it and whether it still does.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no ring file, or not the one with this key.
    """

    def __init__(self, path: Path, key: bytes | None = None) -> None:
        self.path = path
        self._file = path.open("rb")
        self.map = mmap.mmap(self._file.fileno(), _SIZE, access=mmap.ACCESS_READ)
        head = self.head
        if head.magic != _MAGIC or key not in (None, head.key):
            raise ValueError(f"{path} is no ring file of this job")
        self.rank = head.rank
        self._rings: dict[Lane, int] = {}
        self._text = cache(partial(_row, self.map))

    @property
    def head(self) -> Head:
        return Head(*_HEAD.unpack_from(self.map))

    @property
    def gone(self) -> bool:
        """Whether the process that wrote it has ended."""
        if fcntl is None:
            return False
        try:
            fcntl.lockf(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN)
        return True

    def word(self, place: bool = False) -> Any:
        """What the rank last said of itself, or of where it is; None if nothing."""
        start = _PLACE if place else _SAID
        raw = self.map[start : start + _TEXT].split(b"\0", 1)[0]
        return json.loads(raw) if raw else None

    def lanes(self) -> dict[Lane, int]:
        """Its rings by their groups."""
        for ring in range(len(self._rings), self.head.rings):
            name, ranks = json.loads(self._text(_NUMBER.unpack_from(self.map, _TABLE_END + ring * _RING + 8)[0]))
            self._rings[name, tuple(ranks)] = ring
        return self._rings

    def count(self, lane: Lane) -> int:
        """How many collectives it has issued in a group."""
        ring = self._rings.get(lane)
        ring = self.lanes().get(lane) if ring is None else ring
        return 0 if ring is None else _NUMBER.unpack_from(self.map, _TABLE_END + ring * _RING)[0]

    def entry(self, lane: Lane, number: int) -> RingEntry | None:
        """One of them; None if it is not kept."""
        at = _TABLE_END + self._rings[lane] * _RING + 16 + number % _LENGTH * _ENTRY.size
        entry = RingEntry(*_ENTRY.unpack_from(self.map, at))
        return entry if entry.number == number else None

    def entries(self, lane: Lane) -> list[RingEntry]:
        """Those of a group that are kept."""
        count = self.count(lane)
        kept = (self.entry(lane, number) for number in range(max(0, count - _LENGTH), count))
        return [entry for entry in kept if entry is not None]

    def last(self) -> RingEntry | None:
        """The collective that it issued last."""
        head = self.head
        lane = next((lane for lane, ring in self.lanes().items() if ring == head.last), None)
        return None if lane is None else self.entry(lane, self.count(lane) - 1)

    def collective(self, entry: RingEntry) -> Collective:
        """What an entry means."""
        fields = json.loads(self._text(entry.row))
        if not fields:
            return Collective("collective", "", (), VARYING, "", "", ())  # its table was full
        return decode(Collective, fields | {"ranks": json.loads(self._text(fields["ranks"])) or []})

    def line(self, entry: RingEntry) -> str:
        """The line of the program that issued it; "" if it is not known."""
        return json.loads(self._text(entry.line))


class RingWriter(RingReader):
    """The file of this rank, made anew.

    Raises:
        OSError: it cannot be written, or there is no room.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self.key = path, secrets.token_bytes(16)
        self._file = path.open("w+b")
        self._file.write(bytes(_SIZE))
        self._file.flush()
        if fcntl is not None:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.map = mmap.mmap(self._file.fileno(), _SIZE)
        self._state = Head(_MAGIC, self.key, rank, RUNNING, 0, 0, _TABLE, 0, -1)
        self.rank = rank
        self._rings: dict[Lane, int] = {}
        self._rows: dict[str, int] = {}
        self._known: dict[Collective, tuple[int, int, bytes]] = {}
        self._text = cache(partial(_row, self.map))
        self._update()

    def add(self, collective: Collective, line: str, step: int, index: int) -> None:
        """Note a collective that is about to be issued."""
        known = self._known.get(collective)
        if known is None:
            ring = self._ring(collective)
            fields = plain(collective) | {"ranks": self._note(list(collective.ranks))}
            known = self._known[collective] = ring, self._note(fields), token(collective)
        ring, row, digest = known
        if ring == _RINGS:
            return
        at = _TABLE_END + ring * _RING
        (count,) = _NUMBER.unpack_from(self.map, at)
        entry = at + 16 + count % _LENGTH * _ENTRY.size
        _ENTRY.pack_into(self.map, entry, count, digest, row, self._note(line), step, index)
        _NUMBER.pack_into(self.map, at, count + 1)  # after the entry: others read as many as there are
        self._update(issued=self._state.issued + 1, last=ring)

    def came(self) -> None:
        """This rank has come to the comparison at the end of a step."""
        self._update(checks=self._state.checks + 1)

    def say(self, text: Any, state: int | None = None, place: bool = False) -> None:
        """Leave a word for the others: how this rank ended, or where it is."""
        raw = json.dumps(text).encode()
        raw = raw if len(raw) < _TEXT else json.dumps(str(text)[: _TEXT // 2]).encode()[: _TEXT - 1]
        start = _PLACE if place else _SAID
        self.map[start : start + _TEXT] = raw.ljust(_TEXT, b"\0")
        if state is not None:
            self._update(state=state)

    def _update(self, **fields: Any) -> None:
        self._state = self._state._replace(**fields)
        _HEAD.pack_into(self.map, 0, *self._state)

    def _ring(self, collective: Collective) -> int:
        """The ring of its group; one too many if there is none left."""
        lane = (_MESSAGES, ()) if collective.unordered else collective.lane
        if lane not in self._rings and len(self._rings) < _RINGS:
            ring, row = self._state.rings, self._note([lane[0], list(lane[1])])
            if row == _TABLE:
                return _RINGS
            _NUMBER.pack_into(self.map, _TABLE_END + ring * _RING + 8, row)
            self._rings[lane] = ring
            self._update(rings=ring + 1)
        return self._rings.get(lane, _RINGS)

    def _note(self, value: Any) -> int:
        """The row of a value, the table's first ("") if it is full."""
        text = json.dumps(value)
        row = self._rows.get(text)
        if row is None:
            if not self._rows and text != '""':
                self._note("")
            row, raw = self._state.table, text.encode() + b"\n"
            if row + len(raw) > _TABLE_END:
                return _TABLE
            self.map[row : row + len(raw)] = raw
            self._rows[text] = row
            self._update(table=row + len(raw))
        return row


def _row(table: Any, row: int) -> str:
    end = table.find(b"\n", row, _TABLE_END)
    return bytes(table[row:end]).decode()
