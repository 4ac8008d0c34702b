"""Plan of buckets: which gradients travel together, in which order; and a launcher that keeps to it.

Standard library only. A plan is made once, from sizes and from the order of the first forward; after that nothing
about a step can change it. The launcher is told what arrives, in any order, and answers with what may leave, always
in the plan's order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from retrograd.core.schema import decode, older, parsed, plain
from retrograd.errors import BucketError, UsageError
from retrograd.fsdp.schema import read, write

MIB = 2**20
_SCHEMA = 1


@dataclass(frozen=True)
class Group:
    """Parameters that become ready together: one parameter group of `fully_shard`."""

    name: str  # its modules, as the root module names them
    bytes: int  # of its gradients on the wire
    # What a collective needs to have in common: dtypes, process groups, scaling. Others never share a bucket.
    key: str
    late: bool = False  # its gradients are handed over when backward ends, since its inputs need none


@dataclass(frozen=True)
class Bucket:
    """Groups that are reduced by one collective, in the order in which they lie in it."""

    groups: tuple[str, ...]
    bytes: int
    key: str


@dataclass(frozen=True)
class BucketPlan:
    """The order of all reductions of a backward, the same at every step and on every rank.

    Attributes:
        cap_bytes: a bucket grows until the next group would take it over this; a larger group has one for itself.
        groups: every group, in the order in which its gradients are expected.
        buckets: in the order in which they leave.
    """

    cap_bytes: int = field(metadata=older(ignored=("schema", "hash_of")))
    groups: tuple[Group, ...]
    buckets: tuple[Bucket, ...]

    @classmethod
    def of(cls, groups: Iterable[Group], cap_bytes: int) -> BucketPlan:
        """Plan buckets for groups that are expected in this order; late ones are moved to the end.

        One bucket is open for each key, so that norms in float32 between layers in bfloat16 do not cut every bucket
        short. Buckets leave in the order in which their last groups are expected: then none waits for a later one. A
        late group shares no bucket with others: it would hold them back until backward ends.

        Raises:
            UsageError: the cap is not positive, or a name occurs twice.
        """
        if cap_bytes <= 0:
            raise UsageError(f"a bucket's size must be positive, got {cap_bytes} bytes; 25 MB is common")
        ordered = tuple(sorted(groups, key=lambda group: group.late))
        names = [group.name for group in ordered]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise UsageError(f"groups must have names of their own, got {', '.join(twice)} more than once")
        buckets = [
            Bucket(tuple(g.name for g in members), sum(g.bytes for g in members), members[0].key)
            for late in (False, True)
            for members in _fill([group for group in ordered if group.late is late], cap_bytes)
        ]
        return cls(cap_bytes, ordered, tuple(buckets))

    @cached_property
    def homes(self) -> dict[str, int]:
        """The number of each group's bucket."""
        return {name: i for i, bucket in enumerate(self.buckets) for name in bucket.groups}

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Groups in the order in which they leave."""
        return tuple(name for bucket in self.buckets for name in bucket.groups)

    @cached_property
    def lone(self) -> tuple[str, ...]:
        """Of each bucket the name of its group, if it holds one alone, and nothing after the last."""
        return (*(bucket.groups[0] if len(bucket.groups) == 1 else "" for bucket in self.buckets), "")

    @property
    def hash(self) -> str:
        """16 hexadecimal digits of everything that decides an order or a size; equal on every rank."""
        return digest(self.to_json())

    def to_json(self) -> str:
        """The plan as JSON, to be kept in a file and loaded by another run."""
        return json.dumps({"schema": _SCHEMA, "hash_of": "retrograd.fsdp.buckets"} | plain(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> BucketPlan:
        """The plan that `to_json` wrote; UsageError if it is none, or its buckets do not hold each group once."""
        return parsed(text, _SCHEMA, "bucket plan", partial(decode, cls))

    def validate(self) -> None:
        """ValueError if the buckets do not hold each group once."""
        planned = sorted(name for bucket in self.buckets for name in bucket.groups)
        if planned != sorted(group.name for group in self.groups):
            raise ValueError("the buckets do not hold each of the groups exactly once; make it anew with save()")

    def save(self, path: str | Path) -> None:
        """Write the plan to a file; UsageError if that fails."""
        write(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> BucketPlan:
        """Read a plan from a file; UsageError if there is none, or it holds no plan."""
        return cls.from_json(read(path, "the plan "))

    @property
    def nominal_peak(self) -> int:
        """Most bytes that wait at once if gradients arrive as expected; no cap on pending bytes can be smaller."""
        launcher = Launcher(self, [group.name for group in self.groups])
        for group in self.groups:
            launcher.arrive(group.name, group.bytes)
        launcher.finish()
        return launcher.peak_bytes

    def describe(self) -> str:
        """The plan as text, one line a bucket."""
        total = sum(group.bytes for group in self.groups)
        late = sum(group.late for group in self.groups)
        lines = [
            f"plan {self.hash}: {len(self.groups)} groups, {_mb(total)}, in {len(self.buckets)} buckets of at most "
            f"{_mb(self.cap_bytes)}; {late} groups arrive when backward ends; at least {_mb(self.nominal_peak)} held"
        ]
        for i, bucket in enumerate(self.buckets):
            lines.append(f"  {i:>3} {_mb(bucket.bytes):>9}  {bucket.key}  [{', '.join(bucket.groups)}]")
        return "\n".join(lines)

    def rows(self) -> tuple[str, ...]:
        """The buckets in the order in which they leave, each in words."""
        return tuple(f"[{', '.join(bucket.groups)}] of {bucket.bytes} bytes" for bucket in self.buckets)


def _fill(groups: Sequence[Group], cap: int) -> list[list[Group]]:
    """The groups of each bucket, in the order of the buckets' last groups."""
    buckets: list[list[Group]] = []
    for group in groups:
        opened = next((bucket for bucket in reversed(buckets) if bucket[0].key == group.key), None)
        if opened is None or sum(g.bytes for g in opened) + group.bytes > cap:
            buckets.append([group])
        else:
            opened.append(group)
    place = {group.name: i for i, group in enumerate(groups)}
    return sorted(buckets, key=lambda bucket: place[bucket[-1].name])


def first_difference(ours: BucketPlan, theirs: BucketPlan) -> str:
    """Where two plans part, in words; empty when they are equal."""
    if ours == theirs:
        return ""
    if ours.cap_bytes != theirs.cap_bytes:
        return f"the bucket size is {_mb(ours.cap_bytes)} against {_mb(theirs.cap_bytes)}"
    for i, (own, other) in enumerate(zip(ours.groups, theirs.groups, strict=False)):
        if own.name != other.name:
            return f"group {i} is {own.name} against {other.name}"
        for aspect in ("bytes", "key", "late"):
            if getattr(own, aspect) != getattr(other, aspect):
                return f"group {i}, {own.name}, has {aspect} {getattr(own, aspect)} against {getattr(other, aspect)}"
    if len(ours.groups) != len(theirs.groups):
        longer = max((ours, theirs), key=lambda plan: len(plan.groups))
        extra = longer.groups[min(len(ours.groups), len(theirs.groups))].name
        return f"{len(ours.groups)} groups against {len(theirs.groups)}; {extra} is in one only"
    for i, (own, other) in enumerate(zip(ours.buckets, theirs.buckets, strict=False)):
        if own != other:
            return f"bucket {i} is [{', '.join(own.groups)}] against [{', '.join(other.groups)}]"
    return f"{len(ours.buckets)} buckets against {len(theirs.buckets)}"


@dataclass
class Launcher:
    """Keeps one backward to a plan: gradients arrive in any order, buckets leave in the plan's.

    A group that arrives a second time (a module that is used twice under reentrant checkpointing, chunks of a loss)
    never joins a bucket of the first round, whether that has left already or not: what a bucket holds would depend on
    the order of arrival. Its further gradients leave when backward ends, again in the plan's order.
    """

    plan: BucketPlan
    expected: Collection[str]  # names of groups that can have gradients in this backward; others are not waited for
    max_pending: int | None = None  # most bytes that may be held; None for no limit
    peak_bytes: int = 0  # most that waited at once so far, after what could leave had left
    peak_groups: int = 0  # likewise
    blocked_by: str | None = None  # the group that was waited for when most waited
    next: int = 0  # the bucket that leaves next
    pending_bytes: int = 0  # held now
    _arrived: set[str] = field(default_factory=set[str])
    _pending: dict[str, int] = field(default_factory=dict[str, int])
    _again: dict[str, int] = field(default_factory=dict[str, int])
    _lacking: list[int] = field(default_factory=list[int])  # by bucket: groups that have not arrived
    _reached: int = 0

    def __post_init__(self) -> None:
        self.expected = frozenset(self.expected)
        self._lacking = [0] * len(self.plan.buckets) + [1]  # no bucket leaves after the last
        for name, index in self.plan.homes.items():
            self._lacking[index] += name in self.expected

    @property
    def blocking(self) -> str | None:
        """The first group of the next bucket that has not arrived."""
        order = self.plan.order
        # Never back: what has arrived stays so. From the start, each of 200 groups of a bucket would be looked at
        # whenever one arrives.
        while self._reached < len(order) and (
            order[self._reached] in self._arrived or order[self._reached] not in self.expected
        ):
            self._reached += 1
        waits = self.next < len(self.plan.buckets) and self._reached < len(order)
        return order[self._reached] if waits else None

    def arrive(self, name: str, size: int) -> list[int]:
        """Take gradients of a group; the buckets that leave now, in order. BucketError if too much would be held."""
        home = self.plan.homes.get(name)
        if home is None:
            raise BucketError(f"group {name} is not in the plan; make a plan of the model as it is")
        if name in self._arrived:
            before = self._again.get(name, 0)
            self._again[name] = max(size, before)
            self.pending_bytes += self._again[name] - before
        else:
            self._arrived.add(name)
            self._pending[name] = size
            self.pending_bytes += size
            self._lacking[home] -= name in self.expected
        leaving: list[int] = []
        # A bucket of frozen groups leaves, empty, with the next one: what is left at the end is then only what misses.
        while not self._lacking[self.next]:
            leaving.append(self._leave())
        if not self._pending and not self._again:
            return leaving
        if self.pending_bytes > self.peak_bytes:
            self.peak_bytes, self.blocked_by = self.pending_bytes, self.blocking
        self.peak_groups = max(self.peak_groups, len(self._pending) + len(self._again))
        if self.max_pending is not None and self.pending_bytes > self.max_pending:
            raise BucketError(
                f"{_mb(self.pending_bytes)} of gradients are held, more than max_pending_mb allows "
                f"({_mb(self.max_pending)}): bucket {self.next} waits for {self.blocking}, which comes later than the "
                "plan says; make a plan in which it comes later, or raise max_pending_mb"
            )
        return leaving

    def passes(self, name: str) -> bool:
        """Whether a group is all that leaves now, in a bucket of its own: then it has left, or else nothing is done.

        What `arrive` would do, without the accounts of what waits.
        """
        index = self.next
        if self.plan.lone[index] != name or self._lacking[index] != 1 or not self._lacking[index + 1]:
            return False
        self._arrived.add(name)
        self._lacking[index] = 0
        self.next = index + 1
        return True

    def missing(self) -> list[str]:
        """Groups that were expected and have not arrived, in the order of the plan."""
        return [g.name for g in self.plan.groups if g.name in self.expected and g.name not in self._arrived]

    def finish(self) -> list[int]:
        """End of backward: the buckets that are left, in order, whether complete or not."""
        return [self._leave() for _ in range(self.next, len(self.plan.buckets))]

    def repeated(self) -> list[tuple[int, list[str]]]:
        """After `finish`: (bucket, groups) of gradients that arrived again; they leave now."""
        again: dict[int, list[str]] = {}
        for name in self.plan.order if self._again else ():
            if name in self._again:
                again.setdefault(self.plan.homes[name], []).append(name)
                self.pending_bytes -= self._again.pop(name)
        return list(again.items())

    def _leave(self) -> int:
        index, self.next = self.next, self.next + 1
        for name in self.plan.buckets[index].groups:
            self.pending_bytes -= self._pending.pop(name, 0)
        return index


def digest(thing: Any) -> str:
    """16 hexadecimal digits of a text or of anything JSON can hold."""
    text = thing if isinstance(thing, str) else json.dumps(thing, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _mb(size: int) -> str:
    return f"{size / MIB:.3g} MB"
