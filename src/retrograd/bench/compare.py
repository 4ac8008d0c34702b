"""Results beside earlier ones of the same machine: what became slower, beyond what the rounds scatter. No torch.

A machine that others use is slower on one day than on the next, which rounds of one run do not show (0.7 to 0.9 for
unchanged code, seen on a busy machine). So where torch itself, in the same version, took turns in both runs, a provider
is judged by its ratio to torch, round by round.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from retrograd.bench.rows import OVER, WAYS, Measured
from retrograd.bench.spread import FEWEST, Ratio, apart, crossed
from retrograd.errors import UndecidedError

_WORDS = {1: "**slower**", -1: "faster", 0: "within noise", None: "one round: unknown"}
# What computes with torch's own operations and changes with torch only, the best first.
_CONTROLS = ("torch", "grid_sample", "reference", "written-out")
_LEGEND = """\
ratio: time now over time then; (a-b): quartiles over all pairs of rounds. beside: the same of the provider's ratio to \
the control in each round, from which the load of the machine drops out; what decides where it is there. slower, \
faster: every round now is above, or below, every round then."""

Place = tuple[str, str, str, str]
Pair = tuple[Measured, Measured]


@dataclass(frozen=True)
class Change:
    """One time now and then.

    Attributes:
        place: op, shape, dtype and provider.
        way: "fwd", "bwd" or "host".
        then_us, now_us: microseconds.
        ratio: now over then.
        beside: the same of ratios to the control; None without one.
        beyond: 1 slower, -1 faster, 0 within noise, None where rounds are missing.
        control: whether others are held against this one: what changed it is the machine.
    """

    place: Place
    way: str
    then_us: float
    now_us: float
    ratio: Ratio
    beyond: int | None
    beside: Ratio | None = None
    control: bool = False

    def slower(self, percent: float) -> bool:
        """Whether it takes more than `percent` longer, and the rounds, if there are any, say that this is no noise."""
        worse = (self.beside or self.ratio).median > 1 + percent / 100
        return worse and self.beyond in (1, None) and not self.control


@dataclass(frozen=True)
class Comparison:
    """All changes, and what cannot be compared.

    Attributes:
        changes: in the order of the rows now.
        lost: what had a time then and has none now, with the reason.
        unmatched: rows now without a row then, or timed in another way (replayed then, by events now).
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
        found = list(_changes(row, before, _controls(row, now, earlier)))
        changes += found
        if not found and any(before.ms(way) for way in WAYS) and row.skipped not in ("", OVER):
            lost.append((_place(row), row.skipped))
        else:
            unmatched += not found
    if not changes and not lost:
        raise UndecidedError("the earlier results have no time for any op, shape, dtype and provider of these")
    names = {row.device_name for row in then}, {row.device_name for row in now}
    differ = None if names[0] == names[1] else (", ".join(sorted(names[0])), ", ".join(sorted(names[1])))
    copies = [next((row.copy_gb_per_s for row in rows if row.copy_gb_per_s), None) for rows in (then, now)]
    both = (copies[0], copies[1]) if copies[0] and copies[1] else None
    return Comparison(tuple(changes), tuple(lost), unmatched, differ, both)


def markdown(found: Comparison) -> str:
    """A line a change, and in words what stands behind them."""
    head = "| op | shape | dtype | provider | | then us | now us | ratio | beside | |\n|" + "---|" * 10
    lines = [
        f"| {' | '.join(change.place)} | {change.way} | {change.then_us:.1f} | {change.now_us:.1f} | {change.ratio} | "
        f"{change.beside or ''} | {'control' if change.control else _WORDS[change.beyond]} |"
        for change in found.changes
    ]
    lines += [f"| {' | '.join(place)} | | | - | | | {_plain(reason)} |" for place, reason in found.lost]
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
    controls = [change.ratio.median for change in found.changes if change.control]
    if controls:
        yield f"Controls took {statistics.median(controls):.2f} times as long as then (median), which is the machine's."
    if found.unmatched:
        yield f"{found.unmatched} rows cannot be compared: not measured then or now, or in another way."


def _then_now(names: tuple[str, str]) -> str:
    return f"{names[0] or 'unknown'}, now {names[1] or 'unknown'}"


def _place(row: Measured) -> Place:
    return (*row.place, row.provider)


def _controls(row: Measured, now: Sequence[Measured], earlier: Mapping[Place, Measured]) -> Pair | None:
    """The rows now and then of what a row is held against: torch's own in the same version, in rounds both times."""
    for name in _CONTROLS:
        found = next((r for r in now if r.place == row.place and r.provider == name), None)
        before = earlier.get((*row.place, name))
        if not found or not before or found.machine.get("torch") != before.machine.get("torch"):
            continue
        if min(len(found.fwd_rounds), len(before.fwd_rounds)) >= FEWEST:
            return found, before
    return None


def _changes(row: Measured, before: Measured, controls: Pair | None) -> Iterator[Change]:
    for way in WAYS:
        now, then = row.ms(way), before.ms(way)
        if not now or not then or row.how(way) != before.how(way):
            continue
        rounds = row.rounds(way), before.rounds(way)
        ratio = crossed(*rounds) or Ratio(now / then)
        beyond = apart(*rounds) if ratio.low is not None else None
        times = 1e3 * then, 1e3 * now
        if controls and row.provider == controls[0].provider:
            yield Change(_place(row), way, *times, ratio, beyond, control=True)
            continue
        held = tuple(_over(mine, control.rounds(way)) for mine, control in zip(rounds, controls or (), strict=False))
        beside = crossed(*held) if len(held) == 2 else None
        if beside is None or beside.low is None:
            yield Change(_place(row), way, *times, ratio, beyond)
        else:
            yield Change(_place(row), way, *times, ratio, apart(*held), beside)
    if row.host_us and before.host_us:
        yield Change(_place(row), "host", before.host_us, row.host_us, Ratio(row.host_us / before.host_us), None)


def _over(mine: Sequence[float], control: Sequence[float]) -> tuple[float, ...]:
    """Ratios of rounds that were run in turn."""
    return tuple(a / b for a, b in zip(mine, control, strict=False))


def _plain(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")
