"""`mutate`: chooses mutants of the functions an op runs, and has each searched for a difference and judged."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from retrograd.check.calling import Call
from retrograd.check.cpu_kernels import executed
from retrograd.check.op_runner import OpRunner
from retrograd.check.runner import verify
from retrograd.check.spec import OpSpec
from retrograd.compat import triton_source
from retrograd.core.loading import near
from retrograd.core.wording import some
from retrograd.env import collect
from retrograd.errors import UsageError
from retrograd.mutation.backward_operations import BackwardOperations
from retrograd.mutation.edits import Edit
from retrograd.mutation.functions import MutationTarget, functions_of, named
from retrograd.mutation.isolation import Outcome, run_forked
from retrograd.mutation.judges import Tests, by_verify, original_findings
from retrograd.mutation.kernel_operations import KernelOperations
from retrograd.mutation.operators import WEIGHTS
from retrograd.mutation.regression_test import text_of
from retrograd.mutation.schema import RARITIES, Judgement, Mutant, MutantResult, MutationReport
from retrograd.mutation.search import Search
from retrograd.ttir.kept_texts import EDITS

LEVELS = ("python", "triton", "ttir", "operation")
AnyTarget = MutationTarget | KernelOperations | BackwardOperations
Progress = Callable[[int, int, MutantResult], None]


@dataclass(frozen=True)
class MutantCandidate:
    """A mutant that may be made."""

    target: AnyTarget
    edit: Edit
    mutant: Mutant


def mutate(
    spec: OpSpec,
    *,
    functions: Sequence[str] = (),
    levels: Sequence[str] = (),
    count: int = 100,
    level: str = "quick",
    seed: int = 0,
    tests: str | None = None,
    budget: float | None = None,
    jobs: int = 1,
    timeout: float = 120.0,
    lines: Callable[[str, int], bool] | None = None,
    least: float = 0.0,
    beside: Mapping[str, Callable[[OpSpec, int], bool | None]] | None = None,
    name: str | None = None,
    progress: Progress | None = None,
) -> MutationReport:
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
        UsageError: there is nothing to mutate, or the tests fail without a mutant.
        SpecError: the description of the op does not work.
    """
    start = time.monotonic()
    _check_levels(levels, tests)
    command = Tests(tests) if tests else None
    # A child of a process whose OpenMP has had threads would wait for them for ever.
    with _one_thread():
        verify(spec, level="quick", seed=seed, only=["contract"])  # says what is wrong with the description
        wanted = levels or (LEVELS[:2] if tests or functions or lines else LEVELS)
        targets: list[AnyTarget] = []
        targets += [t for t in _functions(spec, seed, functions) if t.kind in wanted]
        if "ttir" in wanted and (kernels := _kernel_operations(spec, seed)):
            targets.append(kernels)
        if "operation" in wanted and not spec.state:  # a module is called by its own means
            spec, operations = _with_operations(spec, seed)
            targets.append(operations)
        chosen, candidates = _choose(targets, count, seed, lines)
        if not chosen:
            raise UsageError(
                f"there is nothing to mutate in {spec.name}: {len(targets)} functions with source, none with a change "
                "in the lines asked for; name some with functions=['package.module:f']"
            )
        known = original_findings(spec, level, seed)
        search = Search(spec, seed)
        tasks = [_MutantTask(c, targets, search, spec, level, seed, known, beside or {}) for c in chosen]
        until = float("inf") if budget is None else start + budget
        results: dict[int, MutantResult] = {}
        ended = run_forked(tasks, jobs=jobs, timeout=timeout, until=until)
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
        judgements = (verified, *(self._judged(name, judge) for name, judge in self.beside.items()))
        differs = replace(blank, fate="differs", rarity="found by verify alone", judgements=judgements)
        if first is None:
            return replace(differs, difference=verified.why)
        trial = search.smaller(first.trial)
        test = text_of(search.runner(trial), trial.case, trial.only, self.candidate.mutant.operator)
        return replace(
            differs, rarity=first.rarity, dtype=trial.case.dtype, case=trial.case.text(),
            difference=(search.difference(trial) or first.seen).text, test=test,
        )  # fmt: skip

    def _judged(self, name: str, judge: Callable[[OpSpec, int], bool | None]) -> Judgement:
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


def _functions(spec: OpSpec, seed: int, names: Sequence[str]) -> list[MutationTarget]:
    """The functions of these names; all that the op runs where there is none."""
    targets = named(name for name in names if ":" in name)
    if len(targets) == len(names) > 0:
        return targets
    own = _run_by(spec, seed)
    known = list(dict.fromkeys(t.name for t in own))
    for name in (n for n in names if ":" not in n):
        if name not in known:
            raise UsageError(
                f"`functions` names {name!r}, which {spec.name} does not run{near(name, known)}; it runs {some(known)}"
            )
    return [*targets, *(t for t in own if not names or t.name in names)]


def _run_by(spec: OpSpec, seed: int) -> list[MutationTarget]:
    """Functions that an ordinary call of the op runs."""
    runner = OpRunner(spec, spec.dtypes[0], seed, "cpu")
    with executed("cpu", None):
        runner.grad_outs(runner.base)  # runs the reference

        def without() -> None:
            if spec.reference is not None:
                runner.reference(runner.base).run(torch.float64)

        return functions_of(lambda: runner.run(runner.base), without)


def _check_levels(levels: Sequence[str], tests: str | None) -> None:
    if isinstance(levels, str) or (unknown := [level for level in levels if level not in LEVELS]):
        raise UsageError(f"`levels` is {levels!r}, expected some of {', '.join(LEVELS)}; unknown: {unknown}")
    if tests and (unseen := [level for level in LEVELS[2:] if level in levels]):
        raise UsageError(
            f"`levels` has {unseen}, which the processes of `tests` cannot be given; leave one of them out"
        )


def _kernel_operations(spec: OpSpec, seed: int) -> KernelOperations | None:
    """The operations of the kernels that an ordinary call launches; None without any."""
    runner = OpRunner(spec, spec.dtypes[0], seed, "cpu")
    with executed("cpu", None):
        kernels = [t.function for t in functions_of(lambda: runner.run(runner.base)) if t.kind == "triton"]
        operations = KernelOperations(kernels)
        triton_source.forget(kernels)
        EDITS.append(operations.note)
        try:
            runner.run(runner.base)
        finally:
            EDITS.remove(operations.note)
    return operations if operations.listed else None


def _with_operations(spec: OpSpec, seed: int) -> tuple[OpSpec, BackwardOperations]:
    """The spec with an op whose backward is watched, and the operations of an ordinary one."""
    call = spec.fn if isinstance(spec.fn, Call) else None
    operations = BackwardOperations(call.fn if call else spec.fn)
    spec = replace(spec, fn=replace(call, fn=operations) if call else operations)
    runner = OpRunner(spec, spec.dtypes[0], seed, "cpu")
    with executed("cpu", None):
        forward = runner.forward(runner.base)
        operations.recorded = recorded = []
        forward.backward()
        operations.recorded = None
    operations.listed = tuple(recorded)
    return spec, operations


def _choose(
    targets: Sequence[AnyTarget],
    count: int,
    seed: int,
    lines: Callable[[str, int], bool] | None,
) -> tuple[list[MutantCandidate], int]:
    """Mutants in the order of their places, drawn without replacement, and how many there are."""
    every: list[MutantCandidate] = []
    taken = Counter[str]()
    for target in targets:
        for edit in target.edits():
            if lines is None or lines(target.file, target.line + edit.line):
                every.append(MutantCandidate(target, edit, _described(target, edit, taken)))
    draw = random.Random(seed)
    # Weighted, without replacement (Efraimidis and Spirakis, 2006).
    keys = [draw.random() ** (1 / WEIGHTS.get(c.edit.operator, 1)) for c in every]
    order = sorted(range(len(every)), key=lambda i: -keys[i])[:count]
    return [every[i] for i in sorted(order)], len(every)


def _described(target: AnyTarget, edit: Edit, taken: Counter[str]) -> Mutant:
    path = _relative(target.file)
    diff = edit.diff(target.source, path, target.line)
    digest = hashlib.sha256(f"{target.name}\n{edit.operator}\n{diff.partition('@@')[2]}".encode()).hexdigest()[:8]
    taken[digest] += 1
    number = f".{taken[digest]}" if taken[digest] > 1 else ""
    return Mutant(
        f"{target.name}-{digest}{number}",
        target.kind,
        target.name,
        edit.operator,
        target.file,
        target.line + edit.line,
        diff,
    )


def _relative(file: str) -> str:
    with contextlib.suppress(ValueError):
        return str(Path(file).resolve().relative_to(Path.cwd()))
    return file


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


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
