"""Outcomes of comparing a job's ranks, two logs or the dumps of a job, as one record."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from retrograd.core.wording import count
from retrograd.fsdp.check_command import Checked
from retrograd.fsdp.flight_recorder import DumpDiff
from retrograd.fsdp.log_diff import LogDiff
from retrograd.fsdp.outcome.schema import RankComparison, RankDifference, RankSteps


def of_check(checked: Checked, command: Sequence[str]) -> RankComparison:
    """Of a job that was run."""
    # What a rank found while it ran says it better, and of a job that was stopped the last step is not whole.
    partings = () if checked.problems else tuple(map(_parting, checked.diffs))
    summary = f"same order over {len(checked.logs)} ranks"
    if checked.exit_code:
        summary = f"the program ended with exit code {checked.code}" if checked.code else ""
        if checked.logs and not checked.problems and not any(log.total for log in checked.logs):
            summary = f"no step of an optimizer was recorded\n{summary}".rstrip()
    if not checked.logs:
        hint = "no process recorded anything: is it started by torchrun, and does it import torch?"
        summary = f"{hint}\n{summary}".rstrip()
    ranks = tuple(
        RankSteps(
            log.rank, log.total, tuple((p.count, len(p.entries)) for p in log.patterns), log.hash, tuple(log.notes)
        )
        for log in checked.logs
    )
    verdict = ("same", "differs", "failed")[checked.exit_code]
    problems = _told_once(checked.problems)
    return RankComparison(shlex.join(command), verdict, summary, partings, problems, ranks, code=checked.code)


def of_logs(compared: LogDiff, files: Sequence[Path]) -> RankComparison:
    """Of two logs."""
    target = " ".join(map(str, files))
    if not compared.same:
        return RankComparison(target, "differs", partings=(_parting(compared),))
    return RankComparison(target, "same", compared.words())


def of_dumps(compared: DumpDiff, files: Sequence[Path]) -> RankComparison:
    """Of the dumps of a job."""
    target = " ".join(map(str, files))
    if compared.partings:
        partings = tuple(
            RankDifference(f"{p.group}, collective {p.number}", p.text, stacks=p.stacks) for p in compared.partings
        )
        return RankComparison(target, "differs", partings=partings, notes=compared.notes)
    if not compared.compared:
        summary = "cannot tell: no collective of a group stands in the dumps of two ranks"
        return RankComparison(target, "undecided", summary, notes=compared.notes)
    alike = count(compared.compared, "collective")
    summary = f"same order: ranks {' '.join(map(str, compared.ranks))}, {alike} that all have in their dumps"
    return RankComparison(target, "same", summary, notes=compared.notes)


def _told_once(problems: Sequence[str]) -> tuple[str, ...]:
    """Problems without the clauses that one before has: a rank that fails says what it knows of the others again."""
    told: dict[str, None] = {}
    shorter: list[str] = []
    for problem in problems:
        clauses = problem.split("; ")
        fresh = [clause for clause in clauses if clause not in told]
        told |= dict.fromkeys(clauses)
        shorter += ["; ".join(fresh)] * bool(fresh)
    return tuple(shorter)


def _parting(compared: LogDiff) -> RankDifference:
    return RankDifference(compared.place, compared.text, compared.difference)
