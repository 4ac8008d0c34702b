"""`mutate`: chooses mutants of the functions an op runs, and has each searched for a difference and judged."""

from __future__ import annotations

import contextlib
import datetime
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from retrograd.check.runner import verify
from retrograd.check.spec import OpSpec
from retrograd.core.campaign import ResultStore, run
from retrograd.core.tasks import Outcome, Task, Work, WorkerOptions
from retrograd.env import collect
from retrograd.errors import UsageError
from retrograd.mutation.candidates import LEVELS, SOURCES, MutantCandidate, check_levels, choose, targets_of
from retrograd.mutation.judges import Tests, original_findings
from retrograd.mutation.mutant_work import MutantWork, MutantWorkElsewhere, is_through, result_of
from retrograd.mutation.schema import MutantResult, MutationReport
from retrograd.mutation.sources import campaign_of

Progress = Callable[[int, int, MutantResult], None]


def mutate(
    spec: OpSpec, *, functions: Sequence[str] = (), levels: Sequence[str] = (), count: int = 100, level: str = "quick",
    seed: int = 0, tests: str | None = None, budget: float | None = None, jobs: int = 1, timeout: float = 120.0,
    lines: Callable[[str, int], bool] | None = None, least: float = 0.0,
    beside: Mapping[str, Callable[[OpSpec, int], bool | None]] | None = None, name: str | None = None,
    progress: Progress | None = None, results: str | Path | None = None, cluster: str = "",
    load: Callable[[], OpSpec] | None = None, search: int = 1,
) -> MutationReport:  # fmt: skip
    """Change the functions of an op one at a time, and see who notices: `verify`, and the user's tests.

    Each mutant lives in a forked process (its tests in one of their own); files of the user are not touched.

    Args:
        spec: of the op, from `retrograd.op`; on a CPU, its Triton kernels executed as a GPU would.
        functions: names of those that the op runs ("RmsNorm.backward"), or of any as `package.module:function`; () for
            all that its forward and backward run, those of frameworks and those that the reference runs too apart.
        levels: "python" and "triton" source; "ttir", an operation of a kernel, and "operation", one of the recorded
            backward, which need no source and which the user's tests cannot be given; () for all that there are.
        count: how many mutants at most, drawn by `seed`.
        level: of verify, "quick" or "full".
        seed: of the choice and of all inputs.
        tests: a command such as "pytest tests/test_op.py".
        budget: seconds after which no further mutant is begun.
        jobs: processes at once.
        timeout: seconds that search and verify of a mutant may take together.
        lines: which changes to make, by file and line; None for all.
        least: share that the first judge (the tests, where there are some) must notice, for the report's exit code.
        beside: further judges by name: whether each objects to an op, of a spec and a seed; None is no.
        name: how the report calls the op.
        progress: called after each mutant with how many are done, of how many, and its result.
        results: SQLite file in which what becomes of each mutant is kept: a run that was stopped goes on where it
            was, and nothing is done again until the op, the spec, the tests, a file that one of them imports, or a
            version has changed. None keeps nothing.
        cluster: address of a Dask scheduler, whose workers take the mutants instead of processes of this machine.
        load: makes the spec on those workers; it pickles.
        search: rounds of some 130 inputs each; a mutant is searched in the next one where none shows a difference.

    Returns:
        A MutationReport.

    Raises:
        UsageError: torch sees a GPU, there is nothing to mutate, the tests fail without a mutant or import nothing
            that is mutated, `results` is another file, nothing answers at `cluster`, or it has other sources.
        MissingExtraError: `cluster` needs joblib and Dask.
        SpecError: the description of the op does not work.
    """
    start = time.monotonic()
    check_levels(levels, tests)
    _check_no_gpu()
    if cluster and load is None:
        raise UsageError("`cluster` needs `load`, which makes the spec on its workers")
    # A child of a process whose OpenMP has had threads would wait for them for ever.
    with _one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sizes 0 and 1, which nobody asked for
        verify(spec, level="quick", seed=seed, only=["contract"])  # says what is wrong with the description
        levels = tuple(levels) or (SOURCES if tests or functions or lines else LEVELS)
        changeable, targets = targets_of(spec, seed, functions, levels)
        chosen, candidates = choose(spec, targets, count, seed, lines)
        if command := Tests(tests) if tests else None:
            command.check(c.mutant.file for c in chosen)
        kept = ResultStore(results or ":memory:", campaign_of(spec, targets, (seed, level, *(beside or {}))))
        known = _known(kept, changeable, level, seed)
        work = MutantWorkElsewhere(
            load, kept.campaign, tuple(functions), levels, level, seed, beside or {}, tests, search
        )
        if not cluster:
            by_id = {c.mutant.id: c for c in chosen}
            work = partial(MutantWork, changeable, targets, by_id, level, seed, beside or {}, known, command, search)
        options = WorkerOptions(jobs=jobs, timeout=timeout, cluster=cluster)
        until = start + (math.inf if budget is None else budget)
        ended = _results(chosen, kept, work, options, until, search, command.case if command else "", progress)
        kept.close()
    notes = (f"the original has findings of verify, which no mutant is credited with: {len(known)}",) * bool(known)
    if len(ended) < len(chosen):
        notes += (f"the budget ended after {len(ended)} of {len(chosen)} mutants",)
    return MutationReport(
        target=name or spec.name, seed=seed, level=level, functions=tuple(t.name for t in targets),
        candidates=candidates, results=ended,
        judges=(*(("tests",) if tests else ()), "verify", *(beside or ())), seconds=round(time.monotonic() - start, 1),
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), command=tests or "", least=least,
        notes=notes, environment=collect(),
    )  # fmt: skip


def _results(
    chosen: Sequence[MutantCandidate], kept: ResultStore, make: Callable[[], Work], options: WorkerOptions,
    until: float, rounds: int, tests: str, progress: Progress | None,
) -> tuple[MutantResult, ...]:  # fmt: skip
    """Results of the mutants that are through in the end, in their order; those that were are passed over."""
    outcomes = {c.mutant.id: kept.of(c.mutant.id) for c in chosen}
    mutants = {c.mutant.id: c.mutant for c in chosen}
    through = {id for id, done in outcomes.items() if is_through(done, rounds, tests)}
    waiting = [Task(id, id) for id in outcomes if id not in through]
    if waiting and not options.cluster:
        work = make()  # before processes are forked, which share it
        make = lambda: work  # noqa: E731
    for id, case, outcome in run(make, waiting, kept, options, until) if waiting else ():
        outcomes[id][case] = outcome
        if is_through(outcomes[id], rounds, tests):
            through.add(id)
            if progress:
                progress(len(through), len(chosen), result_of(mutants[id], outcomes[id], tests))
    return tuple(result_of(mutants[id], done, tests) for id, done in outcomes.items() if id in through)


def _known(kept: ResultStore, spec: OpSpec, level: str, seed: int) -> set[tuple[str, ...]]:
    """Findings of the original, taken once a campaign."""
    outcome = kept.of("the original").get("findings")
    if outcome is None:
        outcome = Outcome("done", sorted(map(list, original_findings(spec, level, seed)[1])))
        kept.add("the original", "findings", outcome)
    return {tuple(key) for key in outcome.value}


def _check_no_gpu() -> None:
    if torch.cuda.is_available():
        raise UsageError(
            "mutants are forked, and torch runs no backward in a fork where there is a GPU; use `retrograd mutate`, "
            "which hides it, or set CUDA_VISIBLE_DEVICES= before torch is imported (kernels of Triton run without it)"
        )


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
