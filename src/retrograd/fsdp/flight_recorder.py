"""Dumps of PyTorch's Flight Recorder: collectives of each rank, and where ranks part, with the stacks of both sides.

The format is the one that PyTorch documents (versions 2.x), as its watchdog writes it (pickle) or as JSON. Standard
library only, so that dumps of a cluster are read anywhere.
"""

from __future__ import annotations

import json
import pickle
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

from retrograd.core.alignment import align
from retrograd.core.system_errors import as_usage_error
from retrograd.core.wording import count, some
from retrograd.errors import UsageError
from retrograd.fsdp.log_diff import first_difference
from retrograd.fsdp.schema import POINT_TO_POINT, VARYING, Collective, Log

# Part of the name -> kind, in this order: "_reduce_scatter_base" is no reduce, "all_reduce_barrier" is a barrier.
_KINDS = {
    "barrier": "barrier", "reduce_scatter": "reduce-scatter", "all_gather": "all-gather", "allgather": "all-gather",
    "all_reduce": "all-reduce", "allreduce": "all-reduce", "all_to_all": "all-to-all", "alltoall": "all-to-all",
    "broadcast": "broadcast", "reduce": "reduce", "gather": "gather", "scatter": "scatter", "send": "send",
    "recv": "recv",
}  # fmt: skip
# Ranks may give different sizes: the root of a gather, routed tokens, several tensors as one.
_EQUAL_SIZES = ("reduce-scatter", "all-gather", "all-reduce", "broadcast", "reduce")
_DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "Long": "int64", "Int": "int32", "Byte": "uint8"}
_FRAMES = 6  # of the program's own, of each side


@dataclass(frozen=True)
class ProcessGroup:
    """A process group by its name and its ranks, which are sorted."""

    name: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"group {self.name}, ranks {' '.join(map(str, self.ranks))}"


@dataclass(frozen=True)
class DumpEntry:
    """One collective of a dump.

    Attributes:
        number: of the collective in its group, from 1; of a message, in its channel.
        collective: what it is; its modules are known from logs only.
        state: "scheduled", "started" or "completed".
        frames: "file:line function", the innermost first.
        created: when it was issued, ns since 1970.
    """

    group: ProcessGroup
    number: int
    collective: Collective
    state: str
    frames: tuple[str, ...]
    created: int

    @property
    def stack(self) -> tuple[str, ...]:
        """The innermost frames of the program, else of whatever there is: FSDP2 issues most from autograd's threads."""
        own = tuple(f for f in self.frames if "/torch/" not in f and not f.startswith("<"))
        return (own or self.frames)[:_FRAMES]


@dataclass(frozen=True)
class Dump:
    """What Flight Recorder kept of one rank; the oldest collectives may be gone."""

    rank: int
    entries: tuple[DumpEntry, ...]

    def sequences(self) -> dict[ProcessGroup, dict[int, DumpEntry]]:
        """Collectives by number, of each group."""
        groups: dict[ProcessGroup, dict[int, DumpEntry]] = {}
        for entry in self.entries:
            if entry.collective.kind not in POINT_TO_POINT:
                groups.setdefault(entry.group, {})[entry.number] = entry
        return groups


@dataclass(frozen=True)
class Parting:
    """Where the ranks of a group part: `stacks` of one rank of each side, innermost frame first."""

    group: str
    number: int
    text: str
    stacks: dict[str, tuple[str, ...]]
    created: int


@dataclass(frozen=True)
class DumpDiff:
    """What the dumps of a job say together."""

    ranks: tuple[int, ...]
    compared: int  # collectives that every rank of their group issued alike
    partings: tuple[Parting, ...]  # a group each, the earliest first
    notes: tuple[str, ...]


class _PlainUnpickler(pickle.Unpickler):
    """Builds lists, dicts, text and numbers: anything else a pickle may ask for would be code of its writer."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise UsageError(f"it asks for {module_name}.{global_name}, and a dump holds plain data alone")


def is_dump(path: Path) -> bool:
    """Whether a file is a dump rather than a log of ours."""
    with as_usage_error(f"{str(path)!r} cannot be read"):
        data = path.read_bytes()
    return data[:1] == b"\x80" or (b'"pg_config"' in data and b'"entries"' in data)


def load(paths: Sequence[Path]) -> list[Dump]:
    """The dumps of the ranks of a job; the number of its rank ends a file's name.

    Raises:
        UsageError: a file cannot be read, is no dump, or asks for more than plain data; two are of one rank.
    """
    dumps = sorted((_load(path) for path in paths), key=lambda dump: dump.rank)
    ranks = tuple(dump.rank for dump in dumps)
    if len(set(ranks)) < max(len(ranks), 2):
        raise UsageError(f"dumps of ranks {ranks} were given; expected one of each of two ranks or more")
    # Gloo's dumps do not tell who is in a group.
    users: dict[ProcessGroup, tuple[int, ...]] = {}
    for group in dict.fromkeys(entry.group for dump in dumps for entry in dump.entries if not entry.group.ranks):
        here = tuple(dump.rank for dump in dumps if any(entry.group == group for entry in dump.entries))
        users[group] = ranks if group.name.endswith("(default_pg)") else here
    return [replace(dump, entries=tuple(_with_ranks(e, users) for e in dump.entries)) for dump in dumps]


def _with_ranks(entry: DumpEntry, users: Mapping[ProcessGroup, tuple[int, ...]]) -> DumpEntry:
    ranks, peer = users.get(entry.group, entry.group.ranks), entry.collective.root
    # A dump numbers the peer of a message within its group.
    peer = ranks[peer] if 0 <= peer < len(ranks) else -1
    collective = replace(entry.collective, ranks=ranks, root=peer)
    return replace(entry, group=ProcessGroup(entry.group.name, ranks), collective=collective)


def _load(path: Path) -> Dump:
    source = f"{str(path)!r} is no dump of Flight Recorder"
    rank = re.search(r"(\d+)(?:\.\w+)?$", path.name)
    if rank is None:
        raise UsageError(
            f"{str(path)!r} does not say whose dump it is; expected a name that ends with the rank: dump_3"
        )
    with as_usage_error(f"{str(path)!r} cannot be read"):
        data = path.read_bytes()
    try:
        content = _PlainUnpickler(BytesIO(data)).load() if data[:1] == b"\x80" else json.loads(data)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None
    except Exception as error:  # a broken pickle raises anything
        raise UsageError(f"{source}: {type(error).__name__}: {error}") from None
    if str(content.get("version", "") if isinstance(content, dict) else "").partition(".")[0] != "2":
        raise UsageError(f"{source} of version 2.x, which is what can be read")
    try:
        return Dump(int(rank[1]), tuple(_entries(content)))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise UsageError(f"{source}: an entry lacks or has an unexpected {error}") from None


def _entries(content: Mapping[str, Any]) -> Iterable[DumpEntry]:
    members = {
        name: tuple(sorted(json.loads(config["ranks"]) if isinstance(config["ranks"], str) else config["ranks"]))
        for name, config in content.get("pg_config", {}).items()
    }
    for entry in content["entries"]:
        name, about = entry["process_group"]
        group = ProcessGroup(f"{name} ({about})" if about not in ("", "undefined") else name, members.get(name, ()))
        known = entry["profiling_name"].partition(":")[2].lower()
        kind = next((kind for part, kind in _KINDS.items() if part in known), known)
        # A collective that gathers is as large as what a rank gives, one that scatters as what it gets from all.
        numel = sum(prod(sizes) for sizes in entry["input_sizes"]) if kind in _EQUAL_SIZES else VARYING
        dtype = next(iter(entry["input_dtypes"]), "")
        peer = re.search(r"(?:->|<-)(\d+)", known)
        collective = Collective(
            kind, "", (), numel, _DTYPES.get(dtype, dtype.lower()), "", group.ranks,
            root=int(peer[1]) if peer else -1,
        )  # fmt: skip
        frames = tuple(f"{f['filename']}:{f['line']} {f['name']}" for f in entry.get("frames", []))
        # Gloo sets no state, but says of what has ended that it is retired.
        state = "completed" if entry.get("retired") else entry["state"]
        number = entry["p2p_seq_id" if kind in POINT_TO_POINT else "collective_seq_id"]
        yield DumpEntry(group, number, collective, state, frames, entry["time_created_ns"])


def with_modules(dump: Dump, log: Log) -> Dump:
    """The dump with the modules that our own log of the same rank and run knows.

    Collectives of a group are aligned by kind, size and dtype: one of the two may have begun later.
    """
    issued = [c for _, part in log.parts() for c in part or ()]
    names: dict[int, tuple[str, ...]] = {}
    for group in {entry.group for entry in dump.entries}:
        places = [k for k, entry in enumerate(dump.entries) if entry.group == group]
        ours = [c for c in issued if c.ranks == group.ranks]
        seen = [dump.entries[k].collective for k in places]
        pairs = align(*([(c.kind, c.numel, c.dtype) for c in side] for side in (seen, ours)))
        names |= {places[i]: ours[j].modules for i, j in pairs}
    entries = tuple(
        replace(e, collective=replace(e.collective, modules=names.get(k, ()))) for k, e in enumerate(dump.entries)
    )
    return replace(dump, entries=entries)


def compare(dumps: Sequence[Dump]) -> DumpDiff:
    """Compare the dumps of ranks of one job, as `load` gave them, group by group."""
    by_rank = {dump.rank: dump.sequences() for dump in dumps}
    partings: list[Parting] = []
    notes: list[str] = []
    compared = 0
    for group in dict.fromkeys(group for groups in by_rank.values() for group in groups):
        # A rank of the group whose dump has none of it issued nothing.
        sides = {rank: groups.get(group, {}) for rank, groups in by_rank.items() if rank in group.ranks}
        if len(sides) < 2:
            continue
        start = max(min(side, default=1) for side in sides.values())  # the oldest entries of a full buffer are gone
        for number in range(start, max(max(side, default=0) for side in sides.values()) + 1):
            parting, note = _parted(group, number, sides)
            notes += [note] if note else []
            if parting or note:
                partings += [parting] if parting else []
                break
            compared += 1
    absent = sorted({rank for groups in by_rank.values() for group in groups for rank in group.ranks} - set(by_rank))
    if absent:
        notes.append(f"there is no dump of rank {some([str(rank) for rank in absent])}")
    for dump in dumps:
        waiting = [e for e in dump.entries if e.collective.kind in POINT_TO_POINT and e.state != "completed"]
        if waiting:
            at = f", at {waiting[0].stack[0]}" if waiting[0].stack else ""
            more = f"; {count(len(waiting), 'message')} of it not completed" if len(waiting) > 1 else ""
            notes.append(f"rank {dump.rank} waits in {waiting[0].collective.name}{at}{more}")
    return DumpDiff(tuple(by_rank), compared, tuple(sorted(partings, key=lambda p: p.created)), tuple(notes))


def _parted(
    group: ProcessGroup, number: int, sides: Mapping[int, Mapping[int, DumpEntry]]
) -> tuple[Parting | None, str]:
    """How the ranks of a group part at a collective, or a note where they only may; (None, "") if they do the same."""
    # Without modules: where logs named them, one may have been aligned a step off.
    roles = {
        r: replace(side[number].collective, modules=()).role if number in side else "" for r, side in sides.items()
    }
    if len(set(roles.values())) == 1:
        return None, ""
    most = Counter(role for role in roles.values() if role).most_common(1)[0][0]
    usual = next(rank for rank, role in roles.items() if role == most)
    # Who does something else tells more than who has not come as far.
    odd = min((rank for rank, role in roles.items() if role != most), key=lambda rank: not roles[rank])
    mine, theirs = ([side[n] for n in sorted(side) if n >= number] for side in (sides[usual], sides[odd]))
    bare = [[replace(e.collective, modules=()) for e in side] for side in (mine, theirs)]
    difference = first_difference(*bare)
    assert difference is not None
    first, second = mine[0].collective, theirs[0].collective if theirs else None
    text = replace(difference, first=first, second=second).text(f"rank {usual}", f"rank {odd}")
    stacks = {f"rank {usual}": mine[0].stack}
    if theirs:
        stacks[f"rank {odd}"] = theirs[0].stack
    elif mine[0].state == "completed":
        return None, f"{group}: the dump of rank {odd} is older than the others, it ends before collective {number}"
    elif last := sides[odd].get(number - 1):
        text += f": rank {usual} has it {mine[0].state}, rank {odd}'s last, {last.collective.name}, is {last.state}"
        stacks[f"rank {odd}, its last"] = last.stack
    else:
        text += f": rank {usual} has it {mine[0].state}, rank {odd} has issued nothing in this group"
    for rank in (usual, odd):
        if alike := [str(r) for r in roles if roles[r] == roles[rank] and r != rank]:
            text += f"; rank {some(alike)} as rank {rank}"
    return Parting(str(group), number, text, stacks, mine[0].created), ""
