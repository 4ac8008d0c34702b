"""Comparison of results with earlier ones: what became slower, beyond what the rounds scatter. No torch.

A machine that others use is slower on one day than on the next, which rounds of one run do not show (0.7 to 0.9 for
unchanged code, seen on a busy machine). So where torch itself, in the same version, took turns in both runs, a provider
is judged by its ratio to torch, round by round.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from retrograd.bench.ratios import FEWEST, Ratio, apart, crossed
from retrograd.bench.rows import DIRECTIONS, OVER, Row
from retrograd.bench.table import plain
from retrograd.errors import UndecidedError

_WORDS = {1: "**slower**", -1: "faster", 0: "within noise", None: "one round: unknown"}
# What computes with torch's own operations and changes with torch only, the best first.
_CONTROLS = ("torch", "grid_sample", "reference", "written-out")
_LEGEND = """\
ratio: time now over time then; (a-b): quartiles over all pairs of rounds. beside: the same of the provider's ratio to \
the control in each round, from which the load of the machine drops out; what decides where it is there. slower, \
faster: every round now is above, or below, every round then."""

Label = tuple[str, str, str, str]
Pair = tuple[Row, Row]


@dataclass(frozen=True)
class TimeChange:
    label: Label  # op, shape, dtype and provider
    direction: str  # "fwd", "bwd" or "host"
    then_us: float
    now_us: float
    ratio: Ratio  # now over then
    beyond: int | None  # 1 slower, -1 faster, 0 within noise, None where rounds are missing
    beside: Ratio | None = None  # the ratio of ratios to the control; None without one
    control: bool = False  # whether others are held against this one: what changed it is the machine

    def slower(self, percent: float) -> bool:
        """Whether it takes more than `percent` longer, and the rounds, if there are any, say that this is no noise."""
        worse = (self.beside or self.ratio).median > 1 + percent / 100
        return worse and self.beyond in (1, None) and not self.control


@dataclass(frozen=True)
class RunComparison:
    """All changes, and what cannot be compared."""

    changes: tuple[TimeChange, ...]  # in the order of the rows now
    lost: tuple[tuple[Label, str], ...]  # what had a time then and has none now, with the reason
    unmatched: int  # rows now without a row then, or timed in another way (replayed then, by events now)
    machines: str  # "A, now B", where the devices differ
    copies: tuple[float, float] | None  # bandwidth of the copy (then, now)

    def slower(self, percent: float) -> list[TimeChange]:
        """What takes more than `percent` longer beyond noise."""
        return [change for change in self.changes if change.slower(percent)]


def compare(now: Sequence[Row], then: Sequence[Row]) -> RunComparison:
    """Rows of the same op, shape, dtype and provider, measured in the same way; UndecidedError if there are none."""
    earlier = {_label(row): row for row in then}
    changes: list[TimeChange] = []
    lost: list[tuple[Label, str]] = []
    unmatched = 0
    for row in now:
        before = earlier.get(_label(row))
        if before is None:
            unmatched += 1
            continue
        of_row = list(_changes(row, before, _controls(row, now, earlier)))
        changes += of_row
        if not of_row and any(before.ms(direction) for direction in DIRECTIONS) and row.skipped not in ("", OVER):
            lost.append((_label(row), row.skipped))
        else:
            unmatched += not of_row
    if not changes and not lost:
        raise UndecidedError("the earlier results have no time for any op, shape, dtype and provider of these")
    names = {row.device_name for row in then}, {row.device_name for row in now}
    machines = (", ".join(sorted(devices)) or "unknown" for devices in names)
    differ = "" if names[0] == names[1] else ", now ".join(machines)
    copies = [next((row.copy_gb_per_s for row in rows if row.copy_gb_per_s), None) for rows in (then, now)]
    both = (copies[0], copies[1]) if copies[0] and copies[1] else None
    return RunComparison(tuple(changes), tuple(lost), unmatched, differ, both)


def markdown(comparison: RunComparison) -> str:
    """A line a change, and in words what stands behind them."""
    head = "| op | shape | dtype | provider | | then us | now us | ratio | beside | |\n|" + "---|" * 10
    lines = [
        f"| {' | '.join(change.label)} | {change.direction} | {change.then_us:.1f} | {change.now_us:.1f} | "
        f"{change.ratio} | {change.beside or ''} | {'control' if change.control else _WORDS[change.beyond]} |"
        for change in comparison.changes
    ]
    lines += [f"| {' | '.join(label)} | | | - | | | {plain(reason)} |" for label, reason in comparison.lost]
    return "\n\n".join(["\n".join([head, *lines]), "\n".join([*_context(comparison), _LEGEND])]) + "\n"


def refuse_other_machines(comparison: RunComparison) -> None:
    """UndecidedError for results of different devices: nothing is slower or faster by comparison with another one."""
    if comparison.machines:
        raise UndecidedError(f"`--fail-slower` compares runs of one device; then it was {comparison.machines}")


def _context(comparison: RunComparison) -> Iterator[str]:
    if comparison.machines:
        yield f"Not one device: then {comparison.machines}."
    if comparison.copies:
        yield f"The copy ran at {comparison.copies[0]:.1f} GB/s then and at {comparison.copies[1]:.1f} now."
    controls = [change.ratio.median for change in comparison.changes if change.control]
    if controls:
        yield f"Controls took {statistics.median(controls):.2f} times as long as then (median), which is the machine's."
    if comparison.unmatched:
        yield f"{comparison.unmatched} rows cannot be compared: not measured then or now, or in another way."


def _label(row: Row) -> Label:
    return (*row.case, row.provider)


def _controls(row: Row, now: Sequence[Row], earlier: Mapping[Label, Row]) -> Pair | None:
    """The rows now and then of what a row is held against: torch's own in the same version, in rounds both times."""
    for name in _CONTROLS:
        control = next((r for r in now if r.case == row.case and r.provider == name), None)
        before = earlier.get((*row.case, name))
        if not control or not before or control.machine.get("torch") != before.machine.get("torch"):
            continue
        if min(len(control.fwd_rounds), len(before.fwd_rounds)) >= FEWEST:
            return control, before
    return None


def _changes(row: Row, before: Row, controls: Pair | None) -> Iterator[TimeChange]:
    for direction in DIRECTIONS:
        now, then = row.ms(direction), before.ms(direction)
        if not now or not then or row.how(direction) != before.how(direction):
            continue
        rounds = row.rounds(direction), before.rounds(direction)
        ratio = crossed(*rounds) or Ratio(now / then)
        beyond = apart(*rounds) if ratio.low is not None else None
        times = 1e3 * then, 1e3 * now
        control = controls is not None and row.provider == controls[0].provider
        pairs = zip(rounds, () if control else controls or (), strict=False)
        # Round by round: providers took turns, so what slowed a round down slowed both.
        held = [[a / b for a, b in zip(mine, other.rounds(direction), strict=False)] for mine, other in pairs]
        beside = crossed(*held) if held else None
        if beside is None or beside.low is None:
            yield TimeChange(_label(row), direction, *times, ratio, beyond, control=control)
        else:
            yield TimeChange(_label(row), direction, *times, ratio, apart(*held), beside)
    if row.host_us and before.host_us:
        yield TimeChange(_label(row), "host", before.host_us, row.host_us, Ratio(row.host_us / before.host_us), None)
