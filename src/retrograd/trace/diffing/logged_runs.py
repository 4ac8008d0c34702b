"""Comparison of two logs of DebugMode, of whatever lengths: the first call whose logged number differs."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from retrograd.core.wording import count, some
from retrograd.errors import UsageError
from retrograd.trace.debug_mode_log import NORM, LoggedRun, load, without_phases
from retrograd.trace.diffing.causes import CauseCollector, notes
from retrograd.trace.diffing.counterparts import is_move
from retrograd.trace.diffing.divergence_reasons import CAST, COMPILED, RunConditions, reason
from retrograd.trace.diffing.identity import comparable_arguments, gives_its_input
from retrograd.trace.diffing.matching import Pair, match
from retrograd.trace.diffing.schema import DivergenceCause, OpSummary, PairRow, RunSide, TraceDiff
from retrograd.trace.diffing.verdicts import PairJudge, PairVerdict
from retrograd.trace.schema import Op

MOVED = "moved"
_NAMED = 3  # of the calls in another order so many are named
_HASH_INPUTS = "log_tensor_hashes(hash_inputs=True) tells whether inputs differed already"
_SIGNS = (
    "compare its code, its settings and its device; an L1 norm sees neither signs nor order, so its inputs may "
    "differ all the same: log_tensor_hashes(['norm', 'hash_tensor']) sees more"
)
_AS_COMPILED = "log both runs compiled, or both eager (torch.compiler.set_stance('force_eager'))"


def compare_logs(a: Path, b: Path) -> TraceDiff:
    """The first call at which two logs of `DebugMode.save_logs` differ by itself; they may differ in their calls.

    Args:
        a, b: files of torch 2.15, with tensor hashes (`DebugMode.log_tensor_hashes`) or without.

    Returns:
        Causes in the order of the run; mode "logged", or "names" where a log has no number of any tensor.

    Raises:
        TraceError: a log is cut off, garbled or of another version.
        UsageError: a file cannot be read, a log has no calls, or the logs hold other kinds of numbers.
    """
    runs = [load(a), load(b)]
    for name, run in zip((a, b), runs, strict=True):
        if not run.trace.ops:
            raise UsageError(f"{name.name!r} has no calls; was anything run under DebugMode?")
    if runs[0].kinds and runs[1].kinds and runs[0].kinds != runs[1].kinds:
        held = " and ".join(
            f"{' and '.join(sorted(run.kinds))} in {letter}" for letter, run in zip("AB", runs, strict=True)
        )
        raise UsageError(f"the logs hold other numbers: {held}; expected one kind: log both by one hash_fn")
    if runs[0].stacks != runs[1].stacks:
        runs = [without_phases(run) for run in runs]
    return _Comparison(*runs).result((a.name, b.name))


class _Comparison:
    """Two logs beside each other."""

    def __init__(self, a: LoggedRun, b: LoggedRun) -> None:
        self.a, self.b = a, b
        self.valued, self.inputs = bool(a.kinds and b.kinds), a.inputs and b.inputs
        compiled = [letter for letter, run in (("A", a), ("B", b)) if run.compiled]
        self.compiled = compiled[0] if len(compiled) == 1 else ""
        self.moves = 0  # views and copies of one side, which give what they were given

    def result(self, titles: tuple[str, str]) -> TraceDiff:
        began = time.perf_counter()
        verdicts, moved = self._verdicts()
        collector = CauseCollector(RunConditions(True), True, self.compiled, explain=self._reason)
        for at, verdict in enumerate(verdicts):
            collector.add(at, verdict)
        counts = Counter(verdict.status for verdict in verdicts)
        mode = "logged" if self.valued else "names"
        return TraceDiff(
            RunSide(titles[0], len(self.a.trace.ops), 0, ""),
            RunSide(titles[1], len(self.b.trace.ops), 0, ""),
            mode,
            tuple(self._told(cause) for cause in collector.in_order()),
            (*self._notes(moved), *_renamed(verdicts), *notes(self.a.trace, self.b.trace, mode, collector)),
            counts["same"],
            0,
            counts["carried"] + collector.late,
            time.perf_counter() - began,
            tuple(PairRow(r.status, *self._both(r.a, r.b)) for r in collector.neighbourhood(verdicts)),
        )

    def _verdicts(self) -> tuple[list[PairVerdict], list[PairVerdict]]:
        """A verdict on each pair, and on calls that both have in another order, with the same numbers."""
        # Equal numbers are no equal tensors: what comes of a difference stays so.
        judge, diverged = PairJudge(True, exact=False), False
        verdicts: list[PairVerdict] = []
        pairs = in_other_orders(match(self.a.trace.ops, self.b.trace.ops))
        for pair in pairs:
            if (pair.a is None or pair.b is None) and is_move(pair.either) and gives_its_input(pair.either):
                verdicts.append(judge.skip(pair))
                self.moves += 1
                continue
            # Where nothing was logged of the results, other arguments are a difference of their own.
            judge.values = any(t.digest is not None for op in (pair.a, pair.b) if op for t in op.outputs)
            verdict = judge.judge(pair)
            if verdict.status == "made" and diverged and not _inputs_known(verdict):
                verdict.status = "carried"  # as far as can be told
            diverged |= verdict.status in ("made", "outside", "missing", "inserted")
            verdicts.append(verdict)
        return verdicts, [verdict for verdict in verdicts if verdict.pair.level == MOVED]

    def _reason(self, verdict: PairVerdict, conditions: RunConditions) -> DivergenceCause:
        a, b = verdict.pair.both
        cause = reason(verdict, conditions)
        why = f"logged {self._numbers(verdict)}" if self.valued and any(verdict.outputs) else ""
        sizes = [", ".join(str(list(t.shape)) for t in op.outputs) for op in (a, b)]
        if sizes[0] != sizes[1] and not verdict.differs:
            return DivergenceCause("shape", f"{b.name} gives other sizes: {' -> '.join(sizes)}")
        if verdict.differs or cause.kind in ("random", "operand"):
            return replace(cause, why=cause.why if cause.kind == "random" else why)
        known = _inputs_known(verdict)
        operands = ", from inputs with the same numbers" if known and not any(verdict.inputs) else ""
        bad = [self.a.bad(a.index), self.b.bad(b.index)]
        if bad[0] != bad[1]:
            description = f"{b.name} gives NaN or Inf in {'B' if bad[1] else 'A'} alone{operands}"
            return DivergenceCause("nonfinite", description, why, "" if known else _HASH_INPUTS)
        if self.compiled:
            why += f"; {self.compiled} is compiled, which rounds otherwise: that alone may be the difference"
        advice = _SIGNS if known and self.a.kinds == {NORM} else "compare its code, its settings and its device"
        return DivergenceCause(
            "operator", f"{b.name} gives another result{operands}", why, advice if known else _HASH_INPUTS
        )

    def _numbers(self, verdict: PairVerdict) -> str:
        """What was logged of the first result that differs."""
        a, b = verdict.pair.both
        k = next(k for k, differs in enumerate(verdict.outputs) if differs)
        texts = [run.texts[op.index][1][k : k + 1] for run, op in ((self.a, a), (self.b, b))]
        x, y = (text[0].partition("logged ")[2] if text else "" for text in texts)
        numbers = f"{x or 'nothing'} in A, {y or 'nothing'} in B"
        if self.a.kinds != {NORM} or a.outputs[k].shape != b.outputs[k].shape or "," in x + y or not (x and y):
            return numbers
        relative = abs(float(x) - float(y)) / max(abs(float(x)), abs(float(y)), 5e-324)
        if not math.isfinite(relative):
            return numbers
        # An L1 norm adds in float64: so far apart the same tensor may come out in two orders of adding.
        bound = 2.0**-52 * max(math.prod(a.outputs[k].shape) - 1, 0)
        order = ", which another order of adding up the norm explains as well" if 0 < relative <= bound else ""
        return f"{numbers}, {relative:.1e} apart{order}"

    def _told(self, cause: DivergenceCause) -> DivergenceCause:
        a, b = self._both(cause.a, cause.b)
        # Of these two what a recorder does is no advice for a log.
        advice = {COMPILED[1]: _AS_COMPILED, CAST[1]: ""}.get(cause.advice, cause.advice)
        return replace(cause, a=a, b=b, why=cause.why.replace(" in the step", " in the log"), advice=advice)

    def _both(self, a: OpSummary | None, b: OpSummary | None) -> tuple[OpSummary | None, OpSummary | None]:
        return _with_texts(a, self.a), _with_texts(b, self.b)

    def _notes(self, moved: Sequence[PairVerdict]) -> Iterator[str]:
        if self.valued:
            held = f"a log holds {' and '.join(sorted(self.a.kinds))} a tensor"
            yield f"{held}: equal ones do not prove equal tensors, and whether rounding explains others cannot be told"
        if self.valued and not self.inputs:
            where = " and ".join(letter for letter, run in (("A", self.a), ("B", self.b)) if not run.inputs)
            yield f"only results were logged in {where}: {_HASH_INPUTS}"
        if not (self.a.stacks and self.b.stacks):
            yield "no stack traces in both logs, so no lines: DebugMode(record_stack_trace=True) logs them"
        if self.moves:
            number = "1 view or copy" if self.moves == 1 else f"{self.moves} views and copies"
            yield f"{number} only one of the runs has, with the numbers of what they are of"
        calls = [v.pair.a for v in moved if v.pair.a]
        if calls:
            names = some([f"{op.name} (call {op.index} in A)" for op in calls], _NAMED)
            yield f"{count(len(calls), 'call')} with the same numbers in another order: {names}"


def _renamed(verdicts: Sequence[PairVerdict]) -> Iterator[str]:
    """Names of the first calls of the note that calls have another name and the same result: a norm may be the same."""
    pairs = [v.pair.both for v in verdicts if v.differs == "replaced" and v.status == "same"]
    if pairs:
        yield some([f"{a.name} in A is {b.name} in B (call {b.index}) with the same numbers" for a, b in pairs], _NAMED)


def _with_texts(seen: OpSummary | None, run: LoggedRun) -> OpSummary | None:
    """The summary of a call with what was logged of its tensors."""
    if seen is None:
        return None
    inputs, outputs = run.texts[seen.index]
    return replace(
        seen,
        inputs=tuple(replace(t, text=inputs[t.index]) for t in seen.inputs),
        outputs=tuple(replace(t, text=outputs[t.index]) for t in seen.outputs),
    )


def _inputs_known(verdict: PairVerdict) -> bool:
    return all(t.digest is not None for op in verdict.pair.both for t in op.inputs)


def in_other_orders(pairs: Sequence[Pair]) -> list[Pair]:
    """Pairs, with calls that both sides have in another order, with the same numbers, as pairs of level `MOVED`.

    None of these is torn from a call that has no equal elsewhere.
    """
    loose = [pair for pair in pairs if pair.a is None or pair.b is None or _key(pair.a) != _key(pair.b)]
    partners = _equal_elsewhere(loose)
    torn: set[int] | None = None
    while torn is None or torn:
        partners = {a: op for a, op in partners.items() if a not in (torn or ())}
        in_b = {op.index: a for a, op in partners.items()}
        whole = [(pair.a.index, pair.b.index) for pair in loose if pair.a and pair.b]
        torn = {a if a in partners else in_b[b] for a, b in whole if (a in partners) != (b in in_b)}
    in_b = {op.index: a for a, op in partners.items()}
    result: list[Pair] = []
    ops_a = {pair.a.index: pair.a for pair in loose if pair.a}
    done: set[int] = set()
    for pair in pairs:
        moved = [pair.a.index] if pair.a and pair.a.index in partners else []
        moved += [in_b[pair.b.index]] if pair.b and pair.b.index in in_b else []
        for index in moved:
            if index not in done:  # where the first of the two is
                done.add(index)
                result.append(Pair(ops_a[index], partners[index], MOVED))
        if not moved:
            result.append(pair)
    return result


def _equal_elsewhere(loose: Sequence[Pair]) -> dict[int, Op]:
    """By index of a call of A, the call of B that has the same arguments and numbers."""
    in_b: dict[Hashable, list[Op]] = {}
    for pair in loose:
        if pair.b and (key := _key(pair.b)):
            in_b.setdefault(key, []).append(pair.b)
    partners: dict[int, Op] = {}
    for pair in loose:
        if pair.a and (others := in_b.get(_key(pair.a))):
            partners[pair.a.index] = others.pop(0)
    return partners


def _key(op: Op) -> Hashable:
    """All that a log holds of a call; nothing where not all its tensors were hashed."""
    tensors = [(t.shape, t.dtype, t.digest) for t in (*op.inputs, *op.outputs)]
    if not op.outputs or any(digest is None for _, _, digest in tensors):
        return None
    return op.name, comparable_arguments(op.arguments), len(op.inputs), tuple(tensors)
