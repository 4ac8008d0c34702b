"""The steps of one rank as they come: sequences, patterns, and whether a step differs from those before. Pure."""

from __future__ import annotations

from collections import deque
from functools import reduce
from hashlib import blake2b

from retrograd.fsdp.log_diff import first_difference
from retrograd.fsdp.messages import Channels
from retrograd.fsdp.schema import (
    COMPARED,
    REDUCTIONS,
    Collective,
    Lane,
    Log,
    LoggedStep,
    Pattern,
    chained,
    chained_role,
)

_STEPS = 10_000  # rows kept; 1 kB each at most, so 10 MB
_PATTERNS = 256  # a healthy run has one to four; a random order has as many as steps
_OPEN = 100_000  # collectives kept of a step that nobody ends


class Journal:
    """Takes collectives and ends of steps.

    Steps are compared with steps of their kind: those that reduce gradients with each other, those that only
    accumulate with each other, those that update the same parameters with each other. So micro-batches that alternate
    are no change, nor are two models that are trained in turn.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.table: dict[Collective, int] = {}
        self.entries: list[Collective] = []
        self.patterns: dict[str, tuple[int, Pattern]] = {}
        self.steps: deque[LoggedStep] = deque(maxlen=_STEPS)
        self.setup: list[int] = []
        self.current: list[int] = []
        self.issued = 0  # in the open step, also those that are not kept
        self.total = 0
        self.updated = 0  # a hash of the parameters that the open step updates
        self.notes: list[str] = []
        self.since: list[tuple[int, int]] = []  # (step, number) since ranks agreed
        self.groups: dict[Lane, bytes] = {}  # rolling hash of what each group did
        self._roles: dict[Lane, bytes] = {}  # the same without the ranks
        self.channels = Channels()
        self._latest: dict[tuple[bool, bool, int], list[int]] = {}
        self._known: dict[tuple[bool, bool, int], set[bytes]] = {}
        self._begun = False
        self._last: Collective | None = None

    def add(self, collective: Collective) -> None:
        """A collective that is about to be issued."""
        number = self.table.setdefault(collective, len(self.table))
        if number == len(self.entries):
            self.entries.append(collective)
        if not self._begun and (collective.phase in COMPARED or collective.by == "fsdp"):
            self._begun = True
            # Groups, meshes and first broadcasts belong to no step.
            self.setup, self.current, self.issued = self.current, [], 0
        self.issued += 1
        if len(self.current) < _OPEN:
            self.current.append(number)
            self.since.append((self.total, number))
            del self.since[:-_OPEN]
        elif self.issued == _OPEN + 1:
            self.notes.append(f"step {self.total} has more than {_OPEN} collectives; the rest is hashed, not kept")
        if collective.unordered:
            return  # of two ranks alone, or of another thread, in an order that is theirs
        lane = collective.lane
        self.groups[lane] = chained(self.groups.get(lane, bytes(8)), collective)
        self._roles[lane] = chained_role(self._roles.get(lane, bytes(8)), collective)

    @property
    def digest(self) -> bytes:
        """Of everything so far, equal over the ranks of a mesh: threads may use their groups in any order."""
        return blake2b(b"".join(sorted(self._roles.values())), digest_size=8).digest()

    def end_step(self) -> str:
        """Close the step; what differs from the steps of its kind, "" if nothing."""
        numbers, self.current = self.current, []
        key = reduce(chained, (self.entries[n] for n in numbers), bytes(8)).hex()
        if key not in self.patterns and len(self.patterns) < _PATTERNS:
            self.patterns[key] = len(self.patterns), Pattern(key, self.total, 0, numbers)
        number, pattern = self.patterns.get(key, (-1, None))
        if pattern is not None:
            pattern.count += 1
        self.steps.append(LoggedStep(self.total, key, number, self.issued))
        change = self._change(numbers)
        self.total, self.issued = self.total + 1, 0
        return change

    def agreed(self) -> None:
        """The ranks were compared: what came so far need not be kept for them."""
        self._last = self.last
        self.since.clear()

    def _change(self, numbers: list[int]) -> str:
        # In a group of one, as local SGD reduces its buckets between averages, nobody waits for anybody.
        among = (n for n in numbers if len(self.entries[n].ranks) > 1 or self.size == 1)
        mine = [n for n in among if self.entries[n].phase in COMPARED]
        if not mine:
            return ""
        of = [self.entries[n] for n in mine]
        kind = (
            any(c.kind == "all-gather" and c.phase == "forward" for c in of),
            any(c.kind in REDUCTIONS and c.phase == "backward" for c in of),
            self.updated,
        )
        digest = reduce(chained, of, bytes(8))
        known = self._known.setdefault(kind, set())
        before = self._latest.get(kind)
        self._latest[kind] = mine
        if digest in known:
            return ""
        if len(known) < _PATTERNS:
            known.add(digest)
        if before is None:
            return ""
        was = [self.entries[n] for n in before]
        if (note := _rebuilt(was, of)) is not None:
            self.notes.append(f"step {self.total}: {note}")
            return ""
        less, more = sorted((before, mine), key=len)
        if less * (len(more) // len(less)) == more:
            self.notes.append(
                f"step {self.total}: {len(more) // len(less)} times the collectives of "
                f"{'an earlier step' if more is mine else 'this step in an earlier one'}: other micro-batches, or an "
                "optimizer that GradScaler kept from its step"
            )
            return ""
        difference = first_difference(was, of)
        if difference is None:
            return ""
        return f"collective {difference.index}: {difference.text('an earlier step', 'this step')}"

    @property
    def last(self) -> Collective | None:
        """The collective that was issued last; None before the first."""
        return self.entries[self.since[-1][1]] if self.since else self._last

    def place(self) -> str:
        """Where the run is, for messages."""
        return f"collective {max(self.issued - 1, 0)} of step {self.total}"

    def log(self) -> Log:
        patterns = [pattern for _, pattern in self.patterns.values()]
        return Log(
            self.rank, self.size, list(self.entries), patterns, list(self.steps), self.total, self.digest.hex(),
            list(self.setup), list(self.current), list(self.notes),
        )  # fmt: skip


def _rebuilt(was: list[Collective], now: list[Collective]) -> str | None:
    """DDP builds its buckets anew after the first backward: other all-reduces of the same gradients."""
    rest = [[c for c in side if c.by != "ddp"] for side in (was, now)]
    # int32 is which parameters a rank has used, which with static_graph it asks in the first step alone.
    sums = [[c for c in side if c.by == "ddp" and c.kind == "all-reduce" and c.dtype != "int32"] for side in (was, now)]
    if first_difference(*rest) is not None:
        return None
    if not any(sums):  # a hook's all-reduces are no bucket's: what is left of DDP is how it synchronises them
        return "DDP synchronised its buckets, which it does once, when it rebuilds them"
    if not all(sums):
        return None
    sizes = [sum(c.numel for c in side) for side in sums]
    if sizes[0] != sizes[1]:
        # In a pipeline stage of micro-batches it rebuilds between two of these, and reduces before and after.
        between = any(c.by == "ddp" and c.kind == "broadcast" and c.dtype == "int32" for c in (*was, *now))
        return "DDP rebuilt its buckets within a step, as it does once" if between else None
    if [c.numel for c in sums[0]] == [c.numel for c in sums[1]]:
        return "DDP synchronised its buckets, or asked which parameters are used, which it does once"
    return f"DDP rebuilt its buckets, {len(sums[0])} -> {len(sums[1])} all-reduces, as it does after its first backward"
