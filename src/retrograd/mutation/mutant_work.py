"""Work on mutants, a process each: put in place, searched for a difference, judged by verify and by the user's tests.

Everything is imported, and the original has run at every input of the search, before processes are forked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from retrograd.check.spec import OpSpec
from retrograd.core.schema import decode, plain
from retrograd.core.tasks import Begin, End, Outcome
from retrograd.errors import UsageError
from retrograd.mutation.candidates import AnyTarget, MutantCandidate, candidates_of, targets_of
from retrograd.mutation.edits import Edit
from retrograd.mutation.judges import Tests, by_verify, original_findings
from retrograd.mutation.regression_test import verified_tests
from retrograd.mutation.schema import RARITIES, Judgement, Mutant, MutantResult
from retrograd.mutation.search import Search
from retrograd.mutation.sources import campaign_of

SEARCHED = "search and verify"  # the first case of each mutant; the last is the user's tests
Judge = Callable[[OpSpec, int], bool | None]
_ORDERS = ("races", "determinism")  # stages of verify that see what no single run shows
_MARGIN = 60.0  # seconds that ending the tests of a mutant may take


@dataclass
class MutantWork:
    """What a process does with a mutant; made before it is forked."""

    spec: OpSpec
    targets: Sequence[AnyTarget]
    candidates: Mapping[str, MutantCandidate]
    level: str
    seed: int
    beside: Mapping[str, Judge]
    known: set[tuple[str, ...]]
    tests: Tests | None = None
    rounds: int = 1

    def __post_init__(self) -> None:
        self._searches = [Search(self.spec, self.seed, number) for number in range(self.rounds)]

    def __call__(self, mutant: str, done: Mapping[str, Outcome]) -> Iterator[Begin | End]:
        """The cases of a mutant, by its id."""
        candidate = self.candidates[mutant]
        in_place = False
        for number, case in enumerate(searches(self.rounds)):
            if case in done:
                result = result_of(candidate.mutant, {case: done[case]})
            else:
                yield Begin(case)
                fails, in_place = "" if in_place else self._put(candidate), True
                if fails:
                    result = MutantResult(candidate.mutant, "not applicable", difference=fails)
                else:
                    result = self._result(candidate, self._searches[number], () if number == 0 else result.judgements)
                yield End(case, plain(result))
            if result.fate != "equivalent":
                break
        if self.tests and result.fate == "differs" and self.tests.case not in done:
            yield Begin(self.tests.case, limit=self.tests.timeout + _MARGIN)
            yield End(self.tests.case, plain(self.tests.judge(candidate.target, candidate.edit)))

    def _put(self, candidate: MutantCandidate) -> str:
        """Put the mutant in place; why it cannot be."""
        try:
            candidate.target.replace(candidate.edit, self.targets)
        except (SyntaxError, ValueError) as error:
            return str(error) or type(error).__name__
        return ""

    def _result(self, candidate: MutantCandidate, search: Search, judgements: tuple[Judgement, ...]) -> MutantResult:
        """What a search sees of the mutant that is in place; verify is asked unless there are judgements already."""
        blank = MutantResult(candidate.mutant, "equivalent", judgements=judgements)
        search.original = lambda: self._original(candidate)
        operation = candidate.target.kind in ("operation", "ttir")  # others run where fewer gradients are asked for
        rarities = tuple(r for r in RARITIES if not (operation and r == "subset of gradients"))
        first = next(search.differences(rarities), None)
        if first is not None and first.raises and first.rarity == "every input":
            return replace(blank, fate="raises", difference=first.seen.text)
        if first is not None and search.at_kink(first):
            return replace(blank, fate="kink", difference=first.seen.text)
        verified = judgements[0] if judgements else self._by_verify(operation)
        if first is None and not verified.killed:
            return replace(blank, judgements=(verified,))
        asked = (verified, *(self._asked(name, judge) for name, judge in self.beside.items()))
        unseen = "order or races" if verified.why.startswith(_ORDERS) else "found by verify alone"
        differs = replace(blank, fate="differs", rarity=unseen, judgements=asked)
        if first is None:
            return replace(differs, difference=verified.why)
        trial = search.smaller(first.trial)
        # What an earlier round has not seen at its ordinary inputs does not differ at every one.
        rarity = "some inputs" if judgements and first.rarity == "every input" else first.rarity
        return replace(
            differs, rarity=rarity, dtype=trial.case.dtype, case=trial.case.text(),
            difference=(search.difference(trial) or first.seen).text,
            test=verified_tests(search.runner(trial), trial, candidate.mutant.operator, search.original),
        )  # fmt: skip

    def _by_verify(self, operation: bool) -> Judgement:
        return by_verify(self.spec, self.level, self.seed, self.known, ("contract",) * operation)

    def _asked(self, name: str, judge: Judge) -> Judgement:
        try:
            return Judgement(name, bool(judge(self.spec, self.seed)))
        except Exception as error:  # what raises is noticed
            return Judgement(name, True, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")

    @contextlib.contextmanager
    def _original(self, candidate: MutantCandidate) -> Iterator[None]:
        candidate.target.replace(Edit("", 0, 0, "", 0), self.targets)
        try:
            yield
        finally:
            candidate.target.replace(candidate.edit, self.targets)


def searches(rounds: int) -> list[str]:
    """Cases of a mutant in which it is searched, in their order; a further one where the last has found nothing."""
    return [SEARCHED, *(f"search {number}" for number in range(1, rounds))]


def is_through(done: Mapping[str, Outcome], rounds: int, tests: str) -> bool:
    """Whether no case of a mutant is left."""
    if "" in done:
        return True
    for outcome in (done.get(case) for case in searches(rounds)):
        if outcome is None:
            return False
        if outcome.state != "done" or outcome.value["fate"] not in ("equivalent", "differs"):
            return True
        if outcome.value["fate"] == "differs":
            return not tests or tests in done
    return True


def result_of(mutant: Mutant, done: Mapping[str, Outcome], tests: str = "") -> MutantResult:
    """What became of a mutant, from the outcomes of its cases.

    Args:
        mutant: of which `done` has the first case, or that its process ended outside of one.
        done: outcomes by case.
        tests: the case of the user's tests, if they judge.
    """
    outcome = done.get("") or [o for case, o in done.items() if case.startswith("search")][-1]
    seconds = round(outcome.seconds, 3)
    if outcome.state != "done":
        # Whoever runs it sees that: a process that dies or never ends is as loud as a failing test.
        fate: Any = "crashed" if outcome.state == "crashed" else "timed out"
        return MutantResult(mutant, fate, difference=outcome.text, seconds=seconds)
    result = replace(decode(MutantResult, outcome.value), mutant=mutant, seconds=seconds)
    if judged := done.get(tests):
        # A process that died while the tests ran in another one says nothing of them.
        lost = Judgement("tests", False, f"no verdict: {judged.text}", round(judged.seconds, 3))
        judgement = decode(Judgement, judged.value) if judged.state == "done" else lost
        result = replace(result, judgements=(judgement, *result.judgements))
    return result


@dataclass(frozen=True)
class MutantWorkElsewhere:
    """What makes the work in a process that shares no memory with this one; it pickles.

    Attributes:
        load: makes the spec.
        campaign: digest of the sources, which must be the same there.
    """

    load: Callable[[], OpSpec] | None
    campaign: str
    functions: tuple[str, ...]
    levels: tuple[str, ...]
    level: str
    seed: int
    beside: Mapping[str, Judge]
    tests: str | None
    rounds: int

    def __call__(self) -> MutantWork:
        """The work; UsageError where the sources there are not those of the process that asks."""
        torch.set_num_threads(1)
        assert self.load is not None
        described = self.load()
        spec, targets = targets_of(described, self.seed, self.functions, self.levels)
        campaign = campaign_of(described, targets, (self.seed, self.level, *self.beside))
        if campaign != self.campaign:
            raise UsageError("the op, or what it is made of, has other sources or versions than where this was started")
        candidates = {c.mutant.id: c for c in candidates_of(targets)}
        _, known = original_findings(spec, self.level, self.seed)
        tests = Tests(self.tests) if self.tests else None
        return MutantWork(spec, targets, candidates, self.level, self.seed, self.beside, known, tests, self.rounds)
