"""Kinds of flakes that runs show: seed, run, order, environment. Pure functions of runs."""

# SciPy has no stubs.
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

from retrograd.flake.rates import rate
from retrograd.flake.schema import Kind, Rate, Run

# What runs of one seed, alone in three processes and several times in each, look like.
Pattern = Literal["unknown", "steady", "later", "process", "runs"]
# A count that independent runs would give more rarely than this is taken for no coincidence.
_COINCIDENCE = 0.01


def counted(runs: Iterable[Run]) -> list[Run]:
    """Runs with an outcome: all but the skipped."""
    return [run for run in runs if run.outcome != "skipped"]


def main_runs(runs: Iterable[Run], setting: str | None = None) -> list[Run]:
    """The runs of the plan, in the setting of this name; None is the first setting."""
    main = [run for run in counted(runs) if run.stage == "seeds"]
    chosen = main[0].setting if main and setting is None else setting
    return [run for run in main if run.setting == chosen]


def focus(runs: Iterable[Run]) -> str | None:
    """The setting to look closer at: the first in which a run failed, else the first; None if nothing ran."""
    main = [run for run in counted(runs) if run.stage == "seeds"]
    return next((run.setting for run in main if run.failed), main[0].setting if main else None)


def by_seed(runs: Iterable[Run]) -> dict[int, list[Run]]:
    """Runs of each seed, in their order."""
    groups: dict[int, list[Run]] = defaultdict(list)
    for run in runs:
        groups[run.seed].append(run)
    return dict(groups)


def mixed(runs: Iterable[Run], aspect: Literal["failed", "bits"]) -> list[int]:
    """Seeds whose runs differ: in whether they fail, or in anything that was compared."""
    return [seed for seed, group in by_seed(runs).items() if len({getattr(run, aspect) for run in group}) > 1]


def margin(run: Run, ignored: frozenset[str] = frozenset()) -> float | None:
    """Largest err / tol of a run; inf for a failure that no comparison explains, None where nothing was compared."""
    worst = max((m.worst for m in run.margins if m.site not in ignored), default=None)
    if run.failed and (worst is None or worst <= 1):
        return math.inf
    return worst


def no_checks(runs: Iterable[Run]) -> frozenset[str]:
    """Sites that compare without checking: beyond their tolerance in a run that passed."""
    return frozenset(m.site for run in runs if run.outcome == "passed" for m in run.margins if m.worst > 1)


def pattern(runs: Iterable[Run]) -> Pattern:
    """How the runs of one seed behave alone: the first of a process, the later ones, from process to process."""
    processes: dict[int, list[object]] = defaultdict(list)
    for run in counted(runs):
        if run.stage == "alone":
            processes[run.process].append(run.bits)
    rows = list(processes.values())
    if not rows:
        return "unknown"
    within = [len(set(row)) == 1 for row in rows]
    if all(within):
        return "steady" if len({row[0] for row in rows}) == 1 else "process"
    alike = len({tuple(row) for row in rows}) == 1
    return "later" if alike and len(rows) > 1 else "runs"


def self_seeded(runs: Sequence[Run]) -> bool:
    """Whether what is compared does not depend on the seed: the test seeds itself, or draws nothing."""
    seeds = by_seed(runs)
    return len(seeds) > 1 and any(run.margins for run in runs) and len({run.bits for run in runs}) == 1


def kinds(runs: Sequence[Run]) -> tuple[Kind, ...]:
    """The kinds of flake in all runs of an examination; () if nothing failed."""
    shown: list[Kind] = []
    if _is_order(runs):
        shown.append("order")
    settings = list(dict.fromkeys(run.setting for run in runs if run.stage == "seeds"))
    if environment(runs):
        shown.append("environment")
    for setting in settings:
        main = main_runs(runs, setting)
        shown += _within(main, [run for run in runs if run.setting == setting], "order" in shown)
    if poisoned(runs) and not shown:
        shown.append("run")
    if not shown and any(run.failed for run in main_runs(runs)):
        shown.append("seed")
    every: tuple[Kind, ...] = ("seed", "run", "order", "environment")
    return tuple(kind for kind in every if kind in shown)


def poisoned(runs: Iterable[Run]) -> list[Run]:
    """Runs that failed because fresh memory was filled with NaN: each did, and none in the same mode without."""
    looked = [run for run in runs if run.stage == "fill"]
    filled = [run for run in looked if run.fill == "nan"]
    sound = all(run.failed for run in filled) and not any(run.failed for run in looked if run.fill == "control")
    return filled if len(filled) > 1 and sound else []


def _within(main: list[Run], runs: Sequence[Run], ordered: bool) -> list[Kind]:
    """Seed and run flake in one setting."""
    failing = {run.seed for run in main if run.failed}
    if not failing:
        return []
    wavering = mixed([*main, *(run for run in runs if run.stage == "alone")], "failed")
    shown: list[Kind] = []
    if wavering and not (ordered and pattern(runs) in ("steady", "later")):
        shown.append("run")
    always = [seed for seed in failing if seed not in wavering]
    others = len(by_seed(main)) > len(failing)
    if always and others and not ordered and not (shown and _coincidence(main, len(always))):
        shown.append("seed")
    return shown


def _coincidence(main: list[Run], always: int) -> bool:
    """Whether independent runs would make so many seeds fail at every repeat, if all seeds are alike."""
    from scipy import special

    seeds = by_seed(main)
    share = sum(run.failed for run in main) / len(main)
    every = share ** (len(main) / len(seeds))
    return float(special.bdtrc(always - 1, len(seeds), every)) > _COINCIDENCE


def _is_order(runs: Sequence[Run]) -> bool:
    """Whether runs differ by what ran before: other tests, or the test itself."""
    alone = [run for run in runs if run.stage == "alone"]
    after = [run for run in counted(runs) if run.stage == "order"]
    steady = {run.seed: run.failed for run in alone if run.place == 0} | {
        seed: group[0].failed
        for seed, group in by_seed(main_runs(runs, focus(runs))).items()
        if len({r.failed for r in group}) == 1
    }
    if any(run.seed in steady and run.failed != steady[run.seed] for run in after if _confirmed(run, after)):
        return True
    if pattern(runs) == "later" and len({run.failed for run in alone}) > 1:
        return True
    return replayed(runs)


def _confirmed(run: Run, after: Sequence[Run]) -> bool:
    """An order counts if it gave the same outcome each time that it was tried, and that was more than once."""
    same = [other.failed for other in after if other.before == run.before]
    return len(same) > 1 and len(set(same)) == 1


def replayed(runs: Sequence[Run]) -> bool:
    """Whether a steady seed takes another outcome after the same earlier runs, each time that they are repeated."""
    again = [run for run in counted(runs) if run.stage == "replay"]
    alone = [run for run in counted(runs) if run.stage == "alone"]
    if len(again) < 2 or not alone or pattern(runs) != "steady":
        return False
    return len({run.failed for run in again}) == 1 and again[0].failed != alone[0].failed


def environment(runs: Sequence[Run]) -> bool:
    """Whether settings differ in how often the same seeds fail, by more than their intervals allow."""
    main = [run for run in counted(runs) if run.stage == "seeds"]
    groups = {name: [run for run in main if run.setting == name] for name in {run.setting for run in main}}
    if len(groups) < 2:
        return False
    rates = [rate(sum(run.failed for run in group), len(group)) for group in groups.values()]
    if max(r.low for r in rates) > min(r.high for r in rates):
        return True
    # Steady in each setting, another outcome in another: no interval is needed where every run is repeatable.
    steady = not any(mixed(group, "failed") for group in groups.values())
    repeated = all(len(group) > len(by_seed(group)) for group in groups.values())
    return steady and repeated and bool(mixed(main, "failed"))


def settings_rates(runs: Sequence[Run], chosen: Sequence[Kind]) -> tuple[tuple[str, Rate], ...]:
    """The failure rate in each setting, the first setting first."""
    names = dict.fromkeys(run.setting for run in runs if run.stage == "seeds")
    return tuple((name, rate_of(runs, chosen, name)) for name in names)


Unit = Literal["seeds", "runs", "processes"]


def unit(runs: Sequence[Run], chosen: Sequence[Kind]) -> Unit:
    """What counts as one independent draw of chance.

    A seed; a run where the same seed gives different outcomes and seeds make no difference; a process where its runs
    agree with each other, or where the later ones depend on the earlier.
    """
    shape = pattern(runs)
    if (shape == "process" and "run" in chosen) or ("order" in chosen and (shape == "later" or replayed(runs))):
        return "processes"
    return "runs" if "run" in chosen and "seed" not in chosen else "seeds"


def independent(runs: Sequence[Run], chosen: Sequence[Kind], setting: str | None = None) -> list[Run]:
    """The runs of a setting that may be counted as independent: one a unit, the first."""
    main = main_runs(runs, setting)
    counting = unit(runs, chosen)
    if counting == "runs":
        return main
    if counting == "seeds":
        return [group[0] for group in by_seed(main).values()]
    alone = [run for run in counted(runs) if run.stage == "alone" and main and run.setting == main[0].setting]
    firsts = [run for run in (*main, *alone) if run.place == 0]
    # Processes with one hash seed are one draw, if it is the hash that decides.
    return list({(run.hash_seed, run.seed): run for run in reversed(firsts)}.values())


def rate_of(runs: Sequence[Run], chosen: Sequence[Kind], setting: str | None = None) -> Rate:
    """The rate of the independent runs of a setting."""
    drawn = independent(runs, chosen, setting)
    return rate(sum(run.failed for run in drawn), len(drawn))
