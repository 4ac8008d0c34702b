"""Record of the collectives of a run, its steps and patterns, as plain data with its JSON. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from hashlib import blake2b
from pathlib import Path

from retrograd.core.schema import decode, older, parsed, plain
from retrograd.core.system_errors import as_usage_error

SCHEMA = "retrograd.fsdp.log/1"
VARYING = -1  # the size of a collective whose sizes may differ between ranks and steps: routed tokens, for instance
POINT_TO_POINT = ("send", "recv")
REDUCTIONS = ("reduce-scatter", "all-reduce")
JOINED = "join"  # by: a rank without input shadows what the others do (torch.distributed.algorithms.Join)
BESIDE = "beside"  # phase of what a thread beside training issues, as one that saves a checkpoint
COMPARED = ("forward", "backward", "optimizer")  # phases of a step; the rest comes when the program likes
_NAMED = 3  # modules named of one collective
Payload = tuple[str, int, str, str, int]
Lane = tuple[str, tuple[int, ...]]  # name and ranks of a process group: order is compared within one


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective as one rank issues it.

    Attributes:
        kind: "all-gather", "reduce-scatter", "all-reduce", "broadcast", "all-to-all", "send", ...
        phase: "forward", "backward", "optimizer", "inference" (a forward without gradients), "beside" (training,
            in another thread) or "other".
        modules: names of the modules whose parameters or gradients it carries, "" for the root; () if unknown.
        numel: elements that this rank gives; VARYING for all-to-all, send and recv.
        dtype: "float32", ...
        op: "sum", "avg", ...; "" if unknown or none.
        ranks: the ranks of its group, sorted.
        by: who issues it: "fsdp", "ddp", "bucket", "module" (the forward of a module), "join"
            (in the place of a forward, by a rank without input), "" for the program.
        root: rank from or to which it goes, of its group, -1 where there is none; of send and recv the peer's rank
            among all, -1 for any.
        group: the name of its process group, the same on all of its ranks.
    """

    kind: str
    phase: str
    modules: tuple[str, ...]
    numel: int
    dtype: str
    op: str
    ranks: tuple[int, ...]
    by: str = ""
    root: int = -1
    group: str = ""

    @property
    def unordered(self) -> bool:
        """Whether it comes when its ranks or its thread like, so that nobody may compare how many there were."""
        return self.kind in POINT_TO_POINT or self.phase == BESIDE

    @property
    def lane(self) -> Lane:
        """What its order is compared in."""
        return self.group, self.ranks

    @property
    def payload(self) -> Payload:
        """What c10d moves: two that differ in their names alone are matched, and nobody notices."""
        return self.kind, self.numel, self.dtype, self.op, self.root

    @property
    def identity(self) -> str:
        """What must be equal over ranks. DDP's names are left out: they are guesses where its buckets are its own."""
        names = "" if self.by == "ddp" else "\0".join(self.modules)
        fields = (self.kind, self.phase, names, self.numel, self.dtype, self.op, self.by, self.root)
        return "\1".join(map(str, (*fields, *self.ranks)))

    @property
    def role(self) -> str:
        """What is equal over ranks that do the same in groups of their own, as those of a device mesh."""
        return "\1".join(self.identity.split("\1")[: -len(self.ranks) or None])

    @property
    def where(self) -> str:
        """Its modules in words, or the peer of a message."""
        if self.kind in POINT_TO_POINT:
            direction = "to" if self.kind == "send" else "from"
            return f"a message {direction} {f'rank {self.root}' if self.root >= 0 else 'any rank'}"
        names = [name or "(root)" for name in self.modules]
        if len(names) > _NAMED:
            return f"{names[0]} to {names[-1]} ({len(names)} modules)"
        return ", ".join(names) or "an unnamed tensor"

    @property
    def name(self) -> str:
        """For sentences: "reduce-scatter of blocks.2"."""
        return f"{self.kind} of {self.where}"

    @property
    def does(self) -> str:
        """For sentences that compare: "reduces blocks.2"."""
        return f"{_VERBS.get(self.kind, 'communicates')} {self.where}"

    @property
    def rooted(self) -> str:
        """ "from rank 1" of a broadcast, "to rank 1" of a gather; "" where every rank gives and gets."""
        if self.root < 0 or self.kind in POINT_TO_POINT:
            return ""
        return f"{'from' if self.kind in ('broadcast', 'scatter') else 'to'} rank {self.ranks[self.root]}"

    @property
    def details(self) -> str:
        """What the name leaves out."""
        size = "varying size" if self.numel == VARYING else f"{self.numel} {self.dtype}"
        words = [self.kind, size, self.op, self.phase]
        return ", ".join(w for w in words if w) + f", ranks {' '.join(map(str, self.ranks))}"


_VERBS = {
    "all-gather": "gathers", "reduce-scatter": "reduces", "all-reduce": "reduces", "broadcast": "broadcasts",
    "all-to-all": "exchanges", "barrier": "waits at a barrier with", "reduce": "reduces", "gather": "gathers",
    "scatter": "scatters", "send": "sends", "recv": "receives",
}  # fmt: skip


@lru_cache(maxsize=8192)
def token(collective: Collective) -> bytes:
    """Eight bytes for a collective, the same in every process."""
    return blake2b(collective.identity.encode(), digest_size=8).digest()


def chained(before: bytes, collective: Collective) -> bytes:
    """The hash of a sequence and one collective more: 64 bits, the same in every process."""
    return blake2b(before + token(collective), digest_size=8).digest()


def chained_role(before: bytes, collective: Collective) -> bytes:
    """As `chained`, of what ranks of a mesh have in common: of a group only its size."""
    return blake2b(before + f"{collective.role}\1{len(collective.ranks)}".encode(), digest_size=8).digest()


@dataclass(frozen=True, slots=True)
class LoggedStep:
    number: int  # from 0
    hash: str  # of its collectives in their order, 16 hex digits
    pattern: int  # number of the pattern that it follows, -1 if there were too many to keep
    count: int  # of its collectives


@dataclass(slots=True)
class Pattern:
    """A sequence of collectives that one step or several follow."""

    hash: str
    first: int
    count: int
    entries: list[int]


@dataclass
class Log:
    """What one rank did.

    Attributes:
        rank: which rank.
        size: how many there are.
        table: each different collective once.
        patterns: sequences of numbers into `table`.
        steps: the steps that are kept, the last ones.
        total: how many steps there were.
        hash: over what each group did, all steps and what follows the last; equal over the ranks of a mesh, since of a
            group only the size counts, and without point-to-point messages.
        setup: what came before the first forward, numbers into `table`.
        open: what follows the last step.
        notes: what a reader should know, as DDP's rebuilt buckets.
        problems: what was found wrong while the run went on.
        versions: names and versions of packages.
    """

    rank: int = field(default=0, metadata=older(ignored=("schema",)))
    size: int = 1
    table: list[Collective] = field(default_factory=list[Collective])
    patterns: list[Pattern] = field(default_factory=list[Pattern])
    steps: list[LoggedStep] = field(default_factory=list[LoggedStep])
    total: int = 0
    hash: str = ""
    setup: list[int] = field(default_factory=list[int])
    open: list[int] = field(default_factory=list[int])
    notes: list[str] = field(default_factory=list[str])
    problems: list[str] = field(default_factory=list[str])
    versions: dict[str, str] = field(default_factory=dict[str, str])

    def collectives(self, numbers: Sequence[int]) -> list[Collective]:
        """The collectives behind numbers."""
        return [self.table[n] for n in numbers]

    def parts(self) -> Iterator[tuple[str, list[Collective] | None]]:
        """Setup, each kept step and what follows the last, with their collectives; None where they were not kept."""
        yield "before the first step", self.collectives(self.setup)
        for step in self.steps:
            kept = self.patterns[step.pattern].entries if step.pattern >= 0 else None
            yield f"step {step.number}", None if kept is None else self.collectives(kept)
        yield f"step {self.total}, not ended", self.collectives(self.open)

    def validate(self) -> None:
        """ValueError if a number leads nowhere."""
        try:
            list(self.parts())
        except IndexError:
            raise ValueError("a number leads to no collective or pattern") from None

    def to_json(self) -> str:
        """As JSON."""
        return json.dumps({"schema": SCHEMA} | plain(self))

    def save(self, path: str | Path) -> None:
        """Write it as JSON; UsageError if that fails."""
        write(path, self.to_json())

    @staticmethod
    def from_json(text: str, source: str = "a text") -> Log:
        """Read it again; UsageError if it is no log of this schema, told with `source`."""
        return parsed(text, SCHEMA, f"log of collectives in {source}", partial(decode, Log))

    @staticmethod
    def load(path: str | Path) -> Log:
        """Read a file; UsageError if it cannot be read or is no log."""
        return Log.from_json(read(path), str(path))


def write(path: str | Path, text: str) -> None:
    """Write a file; UsageError if that fails."""
    with as_usage_error(f"`path` is {str(path)!r}, which cannot be written"):
        Path(path).write_text(text + "\n", encoding="utf-8")


def read(path: str | Path, noun: str = "") -> str:
    """Read a file; UsageError if that fails, which begins with `noun`."""
    with as_usage_error(f"{noun}{str(path)!r} cannot be read"):
        return Path(path).read_text(encoding="utf-8")
