"""Peers of a rank on its machine, by their ring files: where they part, what they were doing, who is gone. No torch.

A rank notes a collective, then looks whether the others have noted the same at that place of their group: nobody waits,
and whoever comes last sees a difference before its collective starts.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from retrograd.core.rank_store import RankStore
from retrograd.fsdp.log_diff import Difference
from retrograd.fsdp.ring_file import FAILED, LEFT, RUNNING, RingEntry, RingReader, RingWriter
from retrograd.fsdp.schema import JOINED, Lane, Payload

_NAME = "ring"
_TERMINATED = "was ended by SIGTERM"
_IDLE = 3.0  # seconds without a collective after which SIGTERM may be that of somebody who saw a job hang
_AGAIN = 0.005  # seconds after which a difference is read once more: another process may have been in the middle of it
_LOOK = 0.1  # seconds between two looks for files of others


class Peers:
    """The ranks whose files this one can read.

    Args:
        exchange: through which ranks tell each other where their files are.
        own: the file of this rank.
    """

    def __init__(self, exchange: RankStore, own: RingWriter) -> None:
        self.exchange, self.own = exchange, own
        self.readers: dict[int, RingReader] = {}
        self.others = [rank for rank in range(exchange.size) if rank != exchange.rank]
        self._unknown, self._looked = list(self.others), 0.0
        self._compared: dict[tuple[int, Lane], int] = {}
        self.parted = ""
        exchange.post(_NAME, json.dumps([str(own.path), own.key.hex()]))

    @property
    def complete(self) -> bool:
        """Whether every rank of the job is on this machine and has been found."""
        return len(self.readers) == len(self.others)

    def find(self, *, now: bool = False) -> None:
        """Look for files of ranks that have none yet; those of other machines are looked for once."""
        if not self._unknown or (not now and time.monotonic() - self._looked < _LOOK):
            return
        self._looked = time.monotonic()
        for rank in list(self._unknown):
            posted = self.exchange.look(_NAME, rank)
            if posted is None:
                continue
            path, key = json.loads(posted)
            self._unknown.remove(rank)
            try:
                self.readers[rank] = RingReader(Path(path), bytes.fromhex(key))
            except (OSError, ValueError):
                continue  # another machine, or gone already

    def compare(self, lane: Lane) -> bool:
        """Compare what has come in a group since the last time; the first difference of all is kept as `parted`.

        Returns:
            Whether nothing would hang: two that differ in their names alone are matched.
        """
        self.find()
        mine, passes = self.own.count(lane), True
        for rank, reader in self.readers.items():
            if rank not in lane[1]:
                continue
            begin = self._compared.get((rank, lane), 0)
            end = min(mine, reader.count(lane))
            for number in range(begin, end):
                if payloads := _differing(self.own, reader, lane, number):
                    self.parted = self.parted or parting(self._of(lane), lane, number)
                    passes = passes and payloads[0] == payloads[1]
            self._compared[rank, lane] = max(begin, end)
        return passes

    def compare_all(self) -> str:
        """Where this rank and another part in any group, in a sentence; "" if they do not, as far as both have come."""
        for lane in list(self.own.lanes()):
            self.compare(lane)
        return self.parted

    def ahead(self, ranks: Iterable[int]) -> str:
        """A sentence on a rank that has issued a collective to which this one, at the end of a step, never came."""
        self.find()  # a rank that has issued nothing itself has not looked yet
        for rank in ranks:
            reader = self.readers.get(rank)
            for lane, mine in self._counts() if reader is not None else ():
                if rank not in lane[1] or reader is None or reader.count(lane) <= mine:
                    continue
                if reader.head.checks < self.own.head.checks and (entry := reader.entry(lane, mine)) is not None:
                    collective, line = reader.collective(entry), reader.line(entry)
                    if collective.by == JOINED:
                        continue
                    words = f"rank {rank} {collective.does} ({collective.details}){f' at {line}' if line else ''}"
                    parts = [f"{words} where rank {self.own.rank} is at the end of the step"]
                    parts += _departures(self._of(lane), lane, mine, entry.step)
                    return f"step {entry.step}, collective {entry.position}: {'; '.join(parts)}"
        return ""

    def explain(self, seconds: float) -> list[str]:
        """Where this rank and others part, and what they were doing; waits so long until one of them has ended."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not any(r.head.state == FAILED or r.gone for r in self.readers.values()):
            time.sleep(0.02)
        return self._told(self.compare_all())

    def _told(self, parted: str) -> list[str]:
        last = self.own.last()
        words = states(self.readers.values(), None if last is None else self.own.collective(last).lane)
        return [parted, *(text.replace(parted, "the same") for text in words)] if parted else words

    def terminated(self, idle: float, place: str, *, ends: bool) -> str:
        """What to say when a launcher ends this rank, which has issued nothing for `idle` seconds and is at this line.

        "" if nothing was wrong before, and on all but the lowest rank of this machine that is ended: all know the same.
        """
        words = f"{_TERMINATED}, {_after(self.own)}, now at {place}"
        parted = self.parted
        if ends:  # else this may stand in the midst of a comparison, which goes on
            self._unknown = []  # nothing is asked of a store that the main thread may be waiting for
            parted = self.compare_all()
            if self.own.head.state == RUNNING:
                self.own.say(words, FAILED)
        failed = {r.rank for r in self.readers.values() if r.head.state == FAILED and not _terminated(r)}
        failed.update(self.gone())
        if not failed and not parted and idle < _IDLE:
            return ""
        others = (r.rank for r in self.readers.values() if r.rank not in failed and r.head.state != LEFT)
        if self.own.rank > min(others, default=self.own.rank):
            return ""
        return "; ".join([f"rank {self.own.rank} {words}", *self._told(parted)])

    def gone(self) -> list[int]:
        """Ranks that have ended without a word."""
        return [rank for rank, reader in self.readers.items() if reader.head.state == RUNNING and reader.gone]

    def end_of(self, rank: int) -> str | None:
        """How a rank has ended; None if it has not, as far as is known."""
        reader = self.readers.get(rank)
        ended = reader is not None and (reader.head.state != RUNNING or reader.gone)
        return _state(reader) if reader is not None and ended else None

    def leave(self, *, keep: bool) -> None:
        """End this rank's file; unless they are kept, delete it and those of ranks that are gone."""
        if self.own.head.state == RUNNING:
            self.own.say("", LEFT)
        for reader in () if keep else (self.own, *(self.readers[rank] for rank in self.gone())):
            reader.path.unlink(missing_ok=True)

    def _of(self, lane: Lane) -> dict[int, RingReader]:
        return {self.own.rank: self.own} | {r: reader for r, reader in self.readers.items() if r in lane[1]}

    def _counts(self) -> list[tuple[Lane, int]]:
        lanes = set(self.own.lanes()).union(*(reader.lanes() for reader in self.readers.values()))
        return [(lane, self.own.count(lane)) for lane in sorted(lanes) if self.own.rank in lane[1]]


def meet(exchange: RankStore, folder: Path | None, notes: list[str]) -> Peers | None:
    """The ranks of this machine, through files in a folder that stay, or else among temporary ones."""
    place = folder or Path(tempfile.gettempdir())
    name = f"rank-{exchange.rank}.ring" if folder else f"retrograd-{os.getpid()}-{time.monotonic_ns()}.ring"
    try:
        return Peers(exchange, RingWriter(place / name, exchange.rank))
    except OSError as error:
        notes.append(f"ranks are compared at the end of steps alone: no file in {place}: {error}")
        return None


def _differing(own: RingReader, other: RingReader, lane: Lane, number: int) -> tuple[Payload, ...]:
    """What two ranks move at one place of a group, if what they issue differs; () if not, or if it is not kept."""
    pair: list[RingEntry] = []
    for pause in (0.0, _AGAIN):
        if pause:
            time.sleep(pause)
        mine, theirs = own.entry(lane, number), other.entry(lane, number)
        if mine is None or theirs is None or mine.token == theirs.token:
            return ()
        pair = [mine, theirs]
    both = own.collective(pair[0]), other.collective(pair[1])
    return () if JOINED in (both[0].by, both[1].by) else (both[0].payload, both[1].payload)


def first_parting(readers: Sequence[RingReader]) -> str:
    """Where the ranks of a job part, from files alone; "" if they do not, as far as all have come."""
    for lane in dict.fromkeys(lane for reader in readers for lane in reader.lanes()):
        members = {reader.rank: reader for reader in readers if reader.rank in lane[1]}
        for number in range(min((r.count(lane) for r in members.values()), default=0)):
            entries = {r: e for r, reader in members.items() if (e := reader.entry(lane, number)) is not None}
            if len({entry.token for entry in entries.values()}) > 1:
                training = [r for r in entries if not _shadows(members[r], lane, number)]
                if len({entries[r].token for r in training}) > 1:
                    return parting(members, lane, number)
    return ""


def _shadows(reader: RingReader, lane: Lane, number: int) -> bool:
    """Whether a rank without input issued what is at this place, in the stead of what it would have."""
    entry = reader.entry(lane, number) if reader.count(lane) > number else None
    return entry is not None and reader.collective(entry).by == JOINED


def parting(readers: Mapping[int, RingReader], lane: Lane, number: int) -> str:
    """The sentence on ranks that issue different collectives at one place of a group."""
    readers = {r: reader for r, reader in sorted(readers.items()) if not _shadows(reader, lane, number)}
    entries = {r: reader.entry(lane, number) for r, reader in readers.items() if reader.count(lane) > number}
    kinds: dict[bytes, list[int]] = {}
    for rank, entry in entries.items():
        if entry is not None:
            kinds.setdefault(entry.token, []).append(rank)
    (first, *_), (second, *_) = list(kinds.values())[:2]
    here, there = entries[first], entries[second]
    assert here is not None
    assert there is not None
    difference = Difference(0, readers[first].collective(here), readers[second].collective(there), "other")
    parts = [difference.text(f"rank {first}", f"rank {second}")]
    lines = {first: readers[first].line(here), second: readers[second].line(there)}
    if len(set(lines.values())) == 1:
        parts += [f"at {lines[first]}"] * bool(lines[first])
    else:
        parts += [f"rank {rank} at {line}" for rank, line in lines.items() if line]
    parts += [f"{_ranks(ranks[1:])} as rank {ranks[0]}" for ranks in kinds.values() if ranks[1:]]
    parts += [f"{_ranks(late)} not there yet" for late in ([r for r in readers if r not in entries],) if late]
    parts += _departures(readers, lane, number, here.step)
    return f"step {here.step}, collective {here.position}: {'; '.join(parts)}"


def _departures(readers: Mapping[int, RingReader], lane: Lane, number: int, step: int) -> list[str]:
    """Which ranks do other than in their earlier steps, where the rest does not."""
    here = {r: reader.entry(lane, number) for r, reader in readers.items() if reader.count(lane) > number}
    own = dict.fromkeys(readers, step) | {r: entry.step for r, entry in here.items() if entry is not None}
    # A rank may be in its next step already, where others still end theirs, or never end it.
    common = dict.fromkeys(readers, min(step, *own.values()))
    for steps in (common, own):
        for anywhere in (False, True):  # also DDP's first steps, which begin otherwise than those after them
            words = {r: _departure(reader, lane, number, steps[r], anywhere) for r, reader in readers.items()}
            if "" in words.values() and any(words.values()):
                return [f"rank {rank} departs from its steps before: {text}" for rank, text in words.items() if text]
    return []


def _departure(reader: RingReader, lane: Lane, number: int, step: int, anywhere: bool) -> str | None:
    """What a rank does other than in each of its earlier steps; "" if nothing, None if there are none to compare.

    `anywhere`: what it does may come in the midst of an earlier step, too.
    """
    entries, steps = reader.entries(lane), dict[int, list[RingEntry]]()
    for entry in entries:
        if entry.step <= step:  # another rank may be behind
            steps.setdefault(entry.step, []).append(entry)
    now = [entry for entry in steps.pop(step, []) if entry.number <= number]
    if entries and entries[0].number:
        steps.pop(entries[0].step, None)  # its beginning was overwritten
    here = reader.entry(lane, number) if reader.count(lane) > number else None
    ended = reader.count(lane) <= number or (here is not None and here.step > step)
    longest, before = -1, list[RingEntry]()
    starts = [
        (e, k) for e in steps.values() for k in range(1, len(e)) if anywhere and now and e[k].token == now[0].token
    ]
    for earlier in (*steps.values(), *(rows[at:] for rows, at in starts)):
        pairs = zip(now, earlier, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0].token == pair[1].token, pairs))
        if same == len(now) and (not ended or len(earlier) == same):
            return ""
        if same > longest:
            longest, before = same, earlier
    if not before or (anywhere and not now):
        return None
    same = longest
    due = reader.collective(before[same]).name if same < len(before) else "the end of the step"
    when = f"in step {before[0].step}"
    if same == len(now):
        return f"it ends without {due}, which came there {when}"
    name = reader.collective(now[same]).name
    if same + 1 < len(before) and before[same + 1].token == now[same].token:
        return f"it passes over {due}, which came before {name} {when}"
    return f"{name} comes where {due} came {when}"


def states(readers: Iterable[RingReader], here: Lane | None = None) -> list[str]:
    """How ranks ended or where they are, seen from a rank that is in this group."""
    words: dict[str, list[int]] = {}
    for reader in sorted(readers, key=lambda r: r.rank):
        words.setdefault(_state(reader, here), []).append(reader.rank)
    return [f"{_ranks(ranks)} {text}" for text, ranks in words.items()]


def _state(reader: RingReader, here: Lane | None = None) -> str:
    head, after = reader.head, _after(reader, here)
    if head.state == FAILED:
        return str(reader.word())
    if head.state == LEFT:
        return f"stopped recording {after}"
    if reader.gone:
        return f"is gone without a word, killed or aborted, {after}"
    place = reader.word(place=True)
    return f"is {after}" + (f", now at {place[1]}" if place is not None and place[0] == head.issued else "")


def _after(reader: RingReader, here: Lane | None = None) -> str:
    if (last := reader.last()) is None:
        return "before any collective"
    line = f" at {reader.line(last)}" if reader.line(last) else ""
    collective = reader.collective(last)
    apart = here is not None and collective.ranks == here[1] and collective.group != here[0]
    line += " in another process group of the same ranks" * apart
    return f"after {collective.name}{line} (collective {last.position} of step {last.step})"


def _terminated(reader: RingReader) -> bool:
    """Whether a launcher ended it, and not what it met itself."""
    return str(reader.word()).startswith(_TERMINATED)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {' '.join(map(str, ranks))}"
