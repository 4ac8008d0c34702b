"""Results beside earlier ones of the same machine: what became slower, beyond what the rounds scatter. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from retrograd.bench.rows import WAYS, Measured, own
from retrograd.bench.spread import Ratio, apart, crossed
from retrograd.errors import UndecidedError

_WORDS = {1: "**slower**", -1: "faster", 0: "within noise", None: "one round: unknown"}
_LEGEND = """\
ratio: time now over time then; (a-b): quartiles over all pairs of rounds. slower, faster: the ranges between the \
quartiles of both runs do not touch. Of nine rounds each that are drawn alike, one line in 35 is called slower by \
chance."""

Place = tuple[str, str, str, str]


@dataclass(frozen=True)
class Change:
    """One time now and then.

    Attributes:
        place: op, shape, dtype and provider.
        way: "fwd", "bwd" or "host".
        then_us, now_us: microseconds.
        ratio: now over then.
        beyond: 1 slower, -1 faster, 0 within noise, None where rounds are missing.
    """

    place: Place
    way: str
    then_us: float
    now_us: float
    ratio: Ratio
    beyond: int | None

    def slower(self, percent: float) -> bool:
        """Whether it takes more than `percent` longer, and the rounds, if there are any, say that this is no noise."""
        return self.ratio.median > 1 + percent / 100 and self.beyond in (1, None)


@dataclass(frozen=True)
class Comparison:
    """All changes, and what cannot be compared.

    Attributes:
        changes: in the order of the rows now.
        lost: what had a time then and has none now, with the reason.
        unmatched: rows now without a row then.
        machines: the device then and now, where they differ.
        copies: bandwidth of the copy (then, now).
    """

    changes: tuple[Change, ...]
    lost: tuple[tuple[Place, str], ...]
    unmatched: int
    machines: tuple[str, str] | None
    copies: tuple[float, float] | None

    def slower(self, percent: float) -> list[Change]:
        """What takes more than `percent` longer beyond noise."""
        return [change for change in self.changes if change.slower(percent)]


def compare(now: Sequence[Measured], then: Sequence[Measured]) -> Comparison:
    """Rows of the same op, shape, dtype and provider, measured in the same way.

    Raises:
        UndecidedError: they have nothing in common.
    """
    earlier = {_place(row): row for row in then}
    changes: list[Change] = []
    lost: list[tuple[Place, str]] = []
    unmatched = 0
    for row in now:
        before = earlier.get(_place(row))
        if before is None:
            unmatched += 1
            continue
        found = list(_changes(row, before))
        changes += found
        if not found and any(before.ms(way) for way in WAYS) and row.skipped:
            lost.append((_place(row), row.skipped))
    if not changes and not lost:
        raise UndecidedError("the earlier results have no time for any op, shape, dtype and provider of these")
    names = {row.device_name for row in then}, {row.device_name for row in now}
    differ = None if names[0] == names[1] else (", ".join(sorted(names[0])), ", ".join(sorted(names[1])))
    copies = [next((row.copy_gb_per_s for row in rows if row.copy_gb_per_s), None) for rows in (then, now)]
    both = (copies[0], copies[1]) if copies[0] and copies[1] else None
    return Comparison(tuple(changes), tuple(lost), unmatched, differ, both)


def markdown(found: Comparison) -> str:
    """A line a change, and in words what stands behind them."""
    head = "| op | shape | dtype | provider | | then us | now us | ratio | |\n|" + "---|" * 9
    lines = [
        f"| {' | '.join(change.place)} | {change.way} | {change.then_us:.1f} | {change.now_us:.1f} | {change.ratio} | "
        f"{_WORDS[change.beyond]} |"
        for change in found.changes
    ]
    lines += [f"| {' | '.join(place)} | | | - | | {_plain(reason)} |" for place, reason in found.lost]
    return "\n\n".join(["\n".join([head, *lines]), "\n".join([*_context(found), _LEGEND])]) + "\n"


def refuse_other_machines(found: Comparison) -> None:
    """Nothing is slower or faster by comparison with another machine.

    Raises:
        UndecidedError: the results come from different devices.
    """
    if found.machines:
        raise UndecidedError(f"`--fail-slower` compares runs of one device; then it was {_then_now(found.machines)}")


def _context(found: Comparison) -> Iterator[str]:
    if found.machines:
        yield f"Not one device: then {_then_now(found.machines)}."
    if found.copies:
        yield f"The copy ran at {found.copies[0]:.1f} GB/s then and at {found.copies[1]:.1f} now."
    others = [change.ratio.median for change in found.changes if not own(change.place[3])]
    if others:
        yield f"Providers that are not retrograd: median ratio {statistics.median(others):.2f}, which is the machine's."
    if found.unmatched:
        yield f"{found.unmatched} rows have no row then."


def _then_now(names: tuple[str, str]) -> str:
    return f"{names[0] or 'unknown'}, now {names[1] or 'unknown'}"


def _place(row: Measured) -> Place:
    return (*row.place, row.provider)


def _changes(row: Measured, before: Measured) -> Iterator[Change]:
    for way in WAYS:
        now, then = row.ms(way), before.ms(way)
        same_how = (row.fwd_how, row.bwd_how) == (before.fwd_how, before.bwd_how)
        if now and then and same_how:
            rounds = row.rounds(way), before.rounds(way)
            ratio = crossed(*rounds) or Ratio(now / then)
            known = ratio.low is not None
            yield Change(_place(row), way, 1e3 * then, 1e3 * now, ratio, apart(*rounds) if known else None)
    if row.host_us and before.host_us:
        ratio = Ratio(row.host_us / before.host_us)
        yield Change(_place(row), "host", before.host_us, row.host_us, ratio, None)


def _plain(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")
