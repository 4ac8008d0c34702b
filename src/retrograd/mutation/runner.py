"""`mutate`: chooses mutants of the functions an op runs, and has each searched for a difference and judged."""

from __future__ import annotations

import contextlib
import datetime
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from retrograd.check.runner import verify
from retrograd.check.spec import OpSpec
from retrograd.env import collect
from retrograd.errors import UsageError
from retrograd.mutation.candidates import LEVELS, SOURCES, AnyTarget, MutantCandidate, check_levels, choose, targets_of
from retrograd.mutation.edits import Edit
from retrograd.mutation.isolation import Outcome, run_forked
from retrograd.mutation.judges import Tests, by_verify, original_findings
from retrograd.mutation.regression_test import text_of
from retrograd.mutation.schema import RARITIES, Judgement, MutantResult, MutationReport
from retrograd.mutation.search import Search

Progress = Callable[[int, int, MutantResult], None]


def mutate(
    spec: OpSpec, *, functions: Sequence[str] = (), levels: Sequence[str] = (), count: int = 100, level: str = "quick",
    seed: int = 0, tests: str | None = None, budget: float | None = None, jobs: int = 1, timeout: float = 120.0,
    lines: Callable[[str, int], bool] | None = None, least: float = 0.0,
    beside: Mapping[str, Callable[[OpSpec, int], bool | None]] | None = None, name: str | None = None,
    progress: Progress | None = None,
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

    Returns:
        A MutationReport.

    Raises:
        UsageError: torch sees a GPU, there is nothing to mutate, or the tests fail without a mutant.
        SpecError: the description of the op does not work.
    """
    start = time.monotonic()
    check_levels(levels, tests)
    _check_no_gpu()
    command = Tests(tests) if tests else None
    # A child of a process whose OpenMP has had threads would wait for them for ever.
    with _one_thread():
        verify(spec, level="quick", seed=seed, only=["contract"])  # says what is wrong with the description
        spec, targets = targets_of(
            spec, seed, functions, levels or (SOURCES if tests or functions or lines else LEVELS)
        )
        chosen, candidates = choose(spec, targets, count, seed, lines)
        known = original_findings(spec, level, seed)
        search = Search(spec, seed)
        tasks = [_MutantTask(c, targets, search, spec, level, seed, known, beside or {}) for c in chosen]
        results: dict[int, MutantResult] = {}
        ended = run_forked(tasks, jobs=jobs, timeout=timeout, until=start + (math.inf if budget is None else budget))
        judged = _judged(((n, _result(chosen[n], outcome)) for n, outcome in ended), chosen, command, jobs)
        for number, result in judged:
            results[number] = result
            if progress:
                progress(len(results), len(chosen), result)
    notes = (f"the original has findings of verify, which no mutant is credited with: {len(known)}",) * bool(known)
    if len(results) < len(chosen):
        notes += (f"the budget ended after {len(results)} of {len(chosen)} mutants",)
    return MutationReport(
        target=name or spec.name, seed=seed, level=level, functions=tuple(t.name for t in targets),
        candidates=candidates, results=tuple(results[n] for n in sorted(results)),
        judges=(*(("tests",) if tests else ()), "verify", *(beside or ())), seconds=round(time.monotonic() - start, 1),
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), command=tests or "", least=least,
        notes=notes, environment=collect(),
    )  # fmt: skip


@dataclass
class _MutantTask:
    """What a child does: the mutant in place, searched and verified."""

    candidate: MutantCandidate
    targets: Sequence[AnyTarget]
    search: Search
    spec: OpSpec
    level: str
    seed: int
    known: set[tuple[str, ...]]
    beside: Mapping[str, Callable[[OpSpec, int], bool | None]]

    def __call__(self) -> MutantResult:
        target, edit, search = self.candidate.target, self.candidate.edit, self.search
        blank = MutantResult(self.candidate.mutant, "equivalent")
        try:
            target.replace(edit, self.targets)
        except (SyntaxError, ValueError) as error:
            return replace(blank, fate="not applicable", difference=str(error))
        search.original = self._original
        operation = target.kind in ("operation", "ttir")  # others run where fewer gradients are asked for
        rarities = tuple(r for r in RARITIES if not (operation and r == "subset of gradients"))
        first = next(search.differences(rarities), None)
        if first is not None and first.raises and first.rarity == "every input":
            return replace(blank, fate="raises", difference=first.seen.text)
        if first is not None and search.at_kink(first):
            return replace(blank, fate="kink", difference=first.seen.text)
        verified = by_verify(self.spec, self.level, self.seed, self.known, ("contract",) * operation)
        if first is None and not verified.killed:
            return replace(blank, judgements=(verified,))
        judgements = (verified, *(self._asked(name, judge) for name, judge in self.beside.items()))
        differs = replace(blank, fate="differs", rarity="found by verify alone", judgements=judgements)
        if first is None:
            return replace(differs, difference=verified.why)
        trial = search.smaller(first.trial)
        test = text_of(search.runner(trial), trial.case, trial.only, self.candidate.mutant.operator)
        return replace(
            differs, rarity=first.rarity, dtype=trial.case.dtype, case=trial.case.text(),
            difference=(search.difference(trial) or first.seen).text, test=test,
        )  # fmt: skip

    def _asked(self, name: str, judge: Callable[[OpSpec, int], bool | None]) -> Judgement:
        try:
            return Judgement(name, bool(judge(self.spec, self.seed)))
        except Exception as error:  # what raises is noticed
            return Judgement(name, True, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")

    @contextlib.contextmanager
    def _original(self) -> Iterator[None]:
        self.candidate.target.replace(Edit("", 0, 0, "", 0), self.targets)
        try:
            yield
        finally:
            self.candidate.target.replace(self.candidate.edit, self.targets)


def _judged(
    results: Iterator[tuple[int, MutantResult]], chosen: Sequence[MutantCandidate], tests: Tests | None, jobs: int
) -> Iterator[tuple[int, MutantResult]]:
    """The results with what the tests say of those that differ, which run once no process is forked any more."""
    waiting: list[tuple[int, MutantResult]] = []
    for number, result in results:
        if tests is not None and result.fate == "differs":
            waiting.append((number, result))
        else:
            yield number, result
    if tests is not None:
        with ThreadPoolExecutor(jobs) as pool:
            judge = tests.judge
            judgements = pool.map(lambda n: judge(chosen[n].target, chosen[n].edit), [n for n, _ in waiting])
            for (number, result), judgement in zip(waiting, judgements, strict=True):
                yield number, replace(result, judgements=(judgement, *result.judgements))


def _result(candidate: MutantCandidate, outcome: Outcome) -> MutantResult:
    if outcome.state == "done":
        return replace(outcome.value, seconds=round(outcome.seconds, 3))
    # Whoever runs it sees that: a process that dies or never ends is as loud as a failing test.
    fate: Any = "crashed" if outcome.state == "crashed" else "timed out"
    return MutantResult(candidate.mutant, fate, difference=outcome.text, seconds=round(outcome.seconds, 3))


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
