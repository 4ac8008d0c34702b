"""Reasons of failures, where the runs tell: kink, accumulation order, tolerance, uninitialised memory, hashes, state.

Pure functions of runs. Each reason states its evidence; where nothing points anywhere, there is none.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

from retrograd.core.wording import some
from retrograd.flake.classify import by_seed, focus, main_runs, margin, mixed, pattern, poisoned, replayed
from retrograd.flake.schema import Kind, Margin, Reason, Run, Tail

# A kink hits few elements far, and leaves the others where they are in every run.
_FEW = 0.02
_FAR = 10.0
_CALM = 1 / 3
# Below half a unit in the last place only an exact result is within the tolerance.
_HALF = 0.5
# An ordinary run comes this near to the tolerance, or it is not the tolerance that is tight.
_TIGHT = 0.3
# Rounding in another order changes the margin of one seed smoothly, without gaps as wide as this factor.
_SMOOTH = 10.0


def find(runs: Sequence[Run], kinds: Sequence[Kind], tail: Tail | None, ignored: frozenset[str]) -> tuple[Reason, ...]:
    """Every reason that the runs of an examination support."""
    main = main_runs(runs, focus(runs))
    failing = [run for run in runs if run.failed and run.stage in ("seeds", "alone") and not run.fill]
    reasons = [_uninitialised(runs), _crash(failing, main)]
    if "order" in kinds:
        reasons.append(_state(runs))
    if "run" in kinds or mixed([*main, *(r for r in runs if r.stage == "alone")], "bits"):
        reasons.append(_hash(runs))
        if not any(reasons):
            reasons.append(_unrepeatable(runs, kinds, ignored))
    if failing and "run" not in kinds:
        reasons.append(_kink(failing, main, ignored))
    if failing and not any(r and r.kind == "kink" for r in reasons):
        reasons.append(_tolerance(failing, main, tail, ignored))
    return tuple(reason for reason in reasons if reason)


def _uninitialised(runs: Sequence[Run]) -> Reason | None:
    filled = [run for run in runs if run.stage == "fill" and run.fill == "nan"]
    control = [run for run in runs if run.stage == "fill" and run.fill == "control"]
    if len(filled) < 2 or len(control) < 2 or any(run.failed for run in control):
        return None
    seed = filled[0].seed
    if poisoned(runs):
        text = f"with fresh memory filled with NaN seed {seed} fails at each of {len(filled)} runs, else it passes: "
        return Reason("uninitialised", f"{text}memory from torch.empty is read before it is written")
    steady = len({run.bits for run in control}) == 1
    if steady and all(run.bits != control[0].bits for run in filled):
        text = f"with fresh memory filled with NaN the compared values of seed {seed} change, though within the "
        return Reason("uninitialised", f"{text}tolerance: memory from torch.empty is read before it is written")
    return None


def _crash(failing: Sequence[Run], main: Sequence[Run]) -> Reason | None:
    for outcome, text in (("crashed", "end the process"), ("hung", "exceed the time limit")):
        count = sum(run.outcome == outcome for run in main)
        if count:
            first = next(run for run in failing if run.outcome == outcome)
            line = " | ".join(line.strip() for line in first.message.splitlines()[:3])
            return Reason(outcome, f"{count} of {len(main)} runs {text}; seed {first.seed}: {line}")
    return None


def _state(runs: Sequence[Run]) -> Reason | None:
    after = [run for run in runs if run.stage == "order" and run.before]
    alone = {run.seed: run.failed for run in main_runs(runs, focus(runs))}
    odd = [run for run in after if alone.get(run.seed, run.failed) != run.failed]
    if odd:
        fewest = min(odd, key=lambda run: len(run.before))
        verb, but = ("fails", "passes") if fewest.failed else ("passes", "fails")
        after_these = f"after {some(fewest.before, 3)} and {but} alone"
        return Reason("state", f"it {verb} {after_these}: state is left behind in the process")
    if replayed(runs):
        again = next(run for run in runs if run.stage == "replay")
        verb = "fails" if again.failed else "passes"
        text = f"seed {again.seed} {verb} after the same {again.place} earlier runs in its process, each time, and "
        text += "never alone"
    elif pattern(runs) == "later":
        first, *others = [run for run in runs if run.stage == "alone"]
        text = "the first run in a process and the later ones differ, in each process alike"
        if any(run.failed != first.failed for run in others):
            text += f" (first: {first.outcome}, second: {others[0].outcome})"
    else:
        return None
    return Reason("state", f"{text}: the test leaves state behind for itself (a module global, a cache)")


def _hash(runs: Sequence[Run]) -> Reason | None:
    alone = {run.hash_seed: run for run in runs if run.stage == "alone" and run.place == 0}
    again = [run for run in runs if run.stage == "hash"]
    if pattern(runs) != "process" or not again:
        return None
    if all(run.hash_seed in alone and run.bits == alone[run.hash_seed].bits for run in again):
        failing = [str(seed) for seed, run in alone.items() if run.failed]
        shown = f"; it fails with PYTHONHASHSEED={', '.join(failing)}" if failing else ""
        return Reason("hash", f"the result follows PYTHONHASHSEED: the order of a set or hash() of a string{shown}")
    text = "runs of one process agree, processes differ with the same seeds: addresses, the time, a process id, or"
    return Reason("process", f"{text} memory that happens to be there")


def _unrepeatable(runs: Sequence[Run], kinds: Sequence[Kind], ignored: frozenset[str]) -> Reason | None:
    """Runs of one seed that differ, though alone in their process: rounding in another order, or something worse."""
    groups = by_seed(run for run in runs if run.stage in ("seeds", "alone") and not run.fill).values()
    groups = [group for group in groups if len({run.bits for run in group}) > 1]
    if not groups or pattern(runs) == "later" or replayed(runs):
        return None
    group = max(groups, key=len)  # the seed that was looked at alone: the more runs, the more can be said
    known = [m for run in group if (m := margin(run, ignored)) is not None]
    side = _side(group)
    if not known or (not any(known) and "run" not in kinds):
        return None
    spread = f"{min(known):.3g} to {max(known):.3g}"
    if not _jumps(known):
        control = [run for run in runs if run.stage == "control"]
        cured = len(control) > 2 and len({run.bits for run in control}) == 1
        also = "; torch.use_deterministic_algorithms(True) makes it repeatable" if cured else ""
        text = f"{side} of one seed differs by rounding from run to run (margin {spread})"
        return Reason("accumulation", f"{text}: sums in another order, as by atomics or threads{also}")
    if "run" not in kinds:
        return None
    text = f"{side} of one seed jumps from run to run (margin {spread}): more than rounding can do"
    return Reason("race", f"{text}; a race, a generator of its own, the time, or memory that nobody wrote")


def _jumps(margins: Sequence[float]) -> bool:
    """Whether there is a gap between the margins of one seed that errors of rounding do not leave.

    Of n errors that spread smoothly from 0 the k smallest lie beyond a factor f with probability f^-k.
    """
    ranked = sorted(margins)
    if not math.isfinite(ranked[-1]):
        return True
    pairs = enumerate(pairwise(ranked), 1)
    return any(high > max(_SMOOTH, 100 ** (1 / k)) * max(low, 1e-12) for k, (low, high) in pairs)


def _side(group: Sequence[Run]) -> str:
    """Which side of the comparison changes."""
    got = {tuple(m.got_bits for m in run.margins) for run in group}
    want = {tuple(m.want_bits for m in run.margins) for run in group}
    if len(got) > 1:
        return "the result" if len(want) < 2 else "the result, and what it is compared with,"
    return "what the result is compared with" if len(want) > 1 else "the outcome"


def _worst(run: Run, ignored: frozenset[str]) -> Margin | None:
    beyond = [m for m in run.margins if m.worst > 1 and m.site not in ignored]
    return max(beyond, key=lambda m: m.worst, default=None)


def _kink(failing: Sequence[Run], main: Sequence[Run], ignored: frozenset[str]) -> Reason | None:
    margins = [_worst(run, ignored) for run in failing]
    calm = [m for run in main if not run.failed and (m := margin(run, ignored)) is not None]
    if not margins or not calm or max(calm) > _CALM:
        return None
    for m in margins:
        if m is None or m.wrong > _FEW * m.total or m.worst < _FAR * m.rest or m.rest > _CALM:
            return None
    m = max((m for m in margins if m), key=lambda m: m.worst)
    elements = f"{m.wrong} of {m.total} elements" if m.wrong > 1 else f"1 element of {m.total}"
    far = f"margin {m.worst:.3g}" + (f", {m.got:.6g} against {m.want:.6g}" if m.got is not None else "")
    verb = "is" if m.wrong == 1 else "are"
    text = f"at {m.site} {elements} {verb} beyond the tolerance ({list(m.index)}: {far}), "
    text += f"the others keep within {m.rest:.2g} of it, as all do in runs that pass ({max(calm):.2g}), and the seed "
    return Reason("kink", f"{text}repeats it: single inputs lie where the derivative jumps (floor, clamp, max, |x|)")


def _tolerance(
    failing: Sequence[Run], main: Sequence[Run], tail: Tail | None, ignored: frozenset[str]
) -> Reason | None:
    beyond = [m for run in failing if (m := _worst(run, ignored))]
    tight = min((m for m in beyond if m.ulps is not None), key=lambda m: m.ulps or 0.0, default=None)
    if tight is not None and tight.ulps is not None and tight.ulps < _HALF:
        text = f"at {tight.site} the tolerance of the worst element is {tight.ulps:.2g} units in the last place of"
        return Reason("tolerance", f"{text} {tight.dtype}: less than rounding the exact result would cost")
    margins = [m for run in main if not run.failed and (m := margin(run, ignored)) is not None]
    if not beyond or not margins or (tail is not None and tail.jumps):
        return None
    middle, m = statistics.median(margins), max(beyond, key=lambda m: m.worst)
    continued = tail is not None and tail.supported
    if m.worst > _FAR or not (continued or middle >= _TIGHT):
        return None
    text = f"the margins of failing runs (up to {m.worst:.3g}) only go on where those of passing runs end (median "
    text += f"{middle:.2g}, largest {max(margins):.2g}): at {m.site} the tolerance is no larger than the error that the"
    return Reason("tolerance", f"{text} computation has in an ordinary run")
