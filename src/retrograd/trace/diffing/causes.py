"""Causes of a comparison: what differs first, grouped by one edit, in the order of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from retrograd.trace.diffing.divergence_reasons import CAST, COMPILED, RunConditions, reason
from retrograd.trace.diffing.identity import base_name, unwrapped_module
from retrograd.trace.diffing.matching import STEP
from retrograd.trace.diffing.schema import DivergenceCause, Kind, PairRow
from retrograd.trace.diffing.summaries import op_summary, summaries
from retrograd.trace.diffing.verdicts import PairVerdict, is_packaging
from retrograd.trace.schema import BACKWARD, OTHER, Op, Trace

_BEFORE, _AFTER = 6, 10  # rows of the neighbourhood
_MAX_OTHERS = 12
_INCIDENTAL = frozenset({"start", "seed", "lost"})  # keys of `Trace.meta` that no two runs need share

Key = tuple[str, ...]


@dataclass
class CauseCollector:
    """Causes by a key that one edit shares, each with the position of its first place."""

    conditions: RunConditions
    bitwise: bool
    compiled: str = ""  # the run in which compiled code ran that was not seen, if in one alone
    causes: dict[Key, tuple[int, DivergenceCause]] = field(default_factory=dict[Key, tuple[int, DivergenceCause]])
    explain: Callable[[PairVerdict, RunConditions], DivergenceCause] = reason  # of one that both sides have
    late: int = 0  # values from outside that differ after something had differed already
    renamed: int = 0
    computed: int = 0
    packed: int = 0  # casts and views that only one of the runs has, where dtypes may differ
    in_other_dtypes: list[PairVerdict] = field(default_factory=list[PairVerdict])
    rewired: list[PairVerdict] = field(default_factory=list[PairVerdict])  # reads the result of another operator
    idle: int = 0  # arguments that differ without any effect
    _names: dict[Key, list[str]] = field(
        default_factory=dict[Key, list[str]]
    )  # of operators that one line has on one side alone
    _last: tuple[int, Key] = (-2, ())
    _diverged: bool = False

    def in_order(self) -> tuple[DivergenceCause, ...]:
        """The causes in the order of the run."""
        return tuple(cause for _, cause in sorted(self.causes.values(), key=lambda c: c[0]))

    def neighbourhood(self, verdicts: Sequence[PairVerdict]) -> tuple[PairRow, ...]:
        """The operators around the first place of the first cause."""
        first = min((at for at, _ in self.causes.values()), default=None)
        near = () if first is None else verdicts[max(0, first - _BEFORE) : first + _AFTER + 1]
        return tuple(PairRow(verdict.status, **summaries(verdict)) for verdict in near)

    def add(self, at: int, verdict: PairVerdict) -> None:
        op = verdict.pair.either
        if verdict.pair.a and verdict.pair.b and float_dtypes(verdict.pair.a) != float_dtypes(verdict.pair.b):
            self.in_other_dtypes.append(verdict)
        if verdict.reads:
            self.rewired.append(verdict)
        if verdict.status in ("inserted", "missing") and not self.bitwise and is_packaging(op):
            self.packed += 1
        elif verdict.status in ("inserted", "missing"):
            self._structural(at, verdict, op)
        elif verdict.status == "outside":
            self._outside(at, verdict, op)
        elif verdict.status == "made":
            self._divergence(at, verdict, op)
        elif verdict.differs:
            self._operator_itself(at, verdict, op)

    def _put(self, key: Key, at: int, cause: DivergenceCause) -> None:
        if key not in self.causes:
            self.causes[key] = (at, cause)
            return
        first, known = self.causes[key]
        others = (
            known.others
            if key[1:2] == (STEP,)
            else known.others + ((cause.where,) if cause.where not in (known.where, *known.others) else ())
        )
        self.causes[key] = (first, replace(known, count=known.count + 1, others=others[:_MAX_OTHERS]))

    def _divergence(self, at: int, verdict: PairVerdict, op: Op) -> None:
        self._diverged = True
        cause = replace(self.explain(verdict, self.conditions), **summaries(verdict))
        # A random operator is one cause wherever it is; any other is one where it stands in the source.
        place = () if cause.kind == "random" else (op.place or unwrapped_module(op.module),)
        self._put((cause.kind, op.name, *place), at, cause)

    def _operator_itself(self, at: int, verdict: PairVerdict, op: Op) -> None:
        """The operator differs in itself, and its values do not or may not for that reason."""
        if verdict.status in ("same", "within"):
            self.renamed += verdict.differs == "replaced"
            self.idle += verdict.differs != "replaced"
        elif verdict.differs == "number" or len({tuple(t.shape for t in o.inputs) for o in verdict.pair.both}) > 1:
            self.computed += 1
        else:
            self._divergence(at, verdict, op)

    def _outside(self, at: int, verdict: PairVerdict, op: Op) -> None:
        a, b = verdict.pair.both
        _, known = self.causes.get(("outside",), (0, None))
        # What differs later may have been changed by what differs by now, where nobody recorded it.
        if self._diverged and (known is None or known.b is None or op.phase == BACKWARD or op.step != known.b.step):
            self.late += 1
            return
        k = verdict.outside[0]
        was, now = a.inputs[k], b.inputs[k]
        how = "sizes" if was.shape != now.shape else "dtype" if was.dtype != now.dtype else "values"
        name = next((f"{t.name}, " for t in (now, was) if t.name), "")
        description = f"{name}input {k} of {op.name}{',' if name else ''} comes in from outside with other {how}"
        why = "no operator of the trace made it: a parameter, data, or state that was there before"
        advice = "load the same state and the same batch in both runs, or record from an earlier step"
        if op.node == "AccumulateGrad" and op.name == "aten.add_.Tensor" and k == 0:
            why = "it is the gradient that the new one is added to, from a backward before the recording began"
            advice = "set gradients to None in both runs (zero_grad) before the first backward"
        self._diverged = True
        self._put(("outside",), at, DivergenceCause("outside", description, why, advice, **summaries(verdict)))

    def _structural(self, at: int, verdict: PairVerdict, op: Op) -> None:
        """An operator without a counterpart; in a backward it belongs to one of the forward where one explains it."""
        status: Kind = "inserted" if verdict.status == "inserted" else "missing"
        self._diverged = True
        if self.compiled and verdict.pair.level != STEP:
            description = f"operators do not correspond where torch.compile compiled in {self.compiled} alone"
            self._put(("compiled",), at, DivergenceCause(status, description, *COMPILED, **summaries(verdict)))
            return
        if verdict.pair.level == STEP:
            description = f"step {op.step} is in {'B' if status == 'inserted' else 'A'} alone"
            self._put((status, STEP, str(op.step)), at, DivergenceCause(status, description, **summaries(verdict)))
            return
        was, now = op.inputs[-1].dtype if op.inputs else "", op.outputs[0].dtype if op.outputs else ""
        if is_packaging(op) and was != now:
            key = (status, "dtype", *sorted((was, now)))  # a backward casts back
            description = f"{was} is cast to {now} in {'B' if status == 'inserted' else 'A'} alone"
            why, advice = CAST
            self._put(key, at, DivergenceCause("dtype", description, why, advice, **summaries(verdict)))
            self._last = (at, key)
            return
        owner = self._owner(at, status, op)
        if owner is not None:
            first, known = self.causes[owner]
            backward = f"its backward: {op.name}"
            full = backward in known.others or len(known.others) >= _MAX_OTHERS
            others = known.others if full else (*known.others, backward)
            self.causes[owner] = (first, replace(known, others=others))
            self._last = (at, owner)
            return
        key = (status, op.place or unwrapped_module(op.module))
        if key in self.causes:
            self._again(key, op, status)
        else:
            near = f"module {op.module}" if op.module else f"the {op.phase}" if op.phase != OTHER else "the step"
            why = f"{'A' if status == 'inserted' else 'B'} has nothing that corresponds to it in {near}"
            self._put(key, at, DivergenceCause(status, _alone([op.name], status), why, "", **summaries(verdict)))
            self._names[key] = [op.name]
        self._last = (at, key)

    def _again(self, key: Key, op: Op, status: str) -> None:
        """One more operator of a line that only one side has; one edit is one cause."""
        at, known = self.causes[key]
        first, names = known.first, self._names[key]
        assert first is not None
        if op.name == names[0]:
            known = replace(known, count=known.count + 1)
        if op.name not in names and (op.step, op.module) == (first.step, first.module):
            names.append(op.name)
            known = replace(known, what=_alone(names, status))
        where = op_summary(op).where
        if where not in (first.where, *known.others) and len(known.others) < _MAX_OTHERS:
            known = replace(known, others=(*known.others, where))
        self.causes[key] = (at, known)

    def _owner(self, at: int, status: str, op: Op) -> Key | None:
        if op.phase != BACKWARD:
            return None
        node = op.node.removesuffix("0").removesuffix("Backward").lower().replace("_", "")
        for key, (_, cause) in self.causes.items():
            first = cause.first
            if key[0] != status or first is None or first.phase == BACKWARD:
                continue
            same_line = first.place and first.place == op.place
            if same_line or (node and base_name(first.name).replace("_", "") == node and first.module == op.module):
                return key
        last, key = self._last
        # An operator beside one of such a backward sums up its gradient or propagates it.
        belongs = last == at - 1 and key and key[0] == status and self.causes[key][1].others
        return key if belongs else None


def notes(a: Trace, b: Trace, mode: str, collector: CauseCollector) -> Iterable[str]:
    """What a reader of the comparison should know beside the causes."""
    if mode == "names":
        yield "a run was recorded without values: only operators, arguments, sizes and dtypes were compared"
    elif mode == "attainable":
        yield "differences within the attainable error of each operator do not count"
    if mode == "bitwise" and not all(any(t.digest is not None for op in x.ops for t in op.outputs) for x in (a, b)):
        yield "no digests were recorded: tensors with the same least, greatest and rms count as the same"
    if collector.packed:
        yield f"{collector.packed} casts and views only one of the runs has"
    if collector.in_other_dtypes:
        first, second = collector.in_other_dtypes[0].pair.both
        dtypes = [", ".join(float_dtypes(op)) for op in (first, second)]
        where = f"the first {second.name}, {op_summary(second).where}: {dtypes[0]} in A, {dtypes[1]} in B"
        yield f"{_have(len(collector.in_other_dtypes))} results of another dtype, {where}"
    if collector.renamed:
        yield f"{_have(collector.renamed)} another name and the same result"
    if collector.idle:
        yield f"{_have(collector.idle)} other arguments and the same result"
    if collector.computed:
        yield f"{_have(collector.computed)} other numbers or sizes as arguments, which follows from the causes"
    if collector.rewired and not collector.bitwise:
        number, first = len(collector.rewired), collector.rewired[0]
        where = f"the first {first.pair.either.name}, {op_summary(first.pair.either).where}: {first.reads}"
        read = "1 operator reads" if number == 1 else f"{number} operators read"
        yield f"{read} another value, which another order of adding alone does as well: {where}"
    for name in sorted((set(a.meta) & set(b.meta)) - _INCIDENTAL):
        if a.meta[name] != b.meta[name]:
            yield f"{name}: {a.meta[name]} in A, {b.meta[name]} in B"
    for letter, trace in (("A", a), ("B", b)):
        if "lost" in trace.meta:
            yield f"operators are missing from the trace of {letter}: {trace.meta['lost']}"
    if a.rank != b.rank:
        yield f"ranks: {a.rank} in A, {b.rank} in B"


def float_dtypes(op: Op) -> list[str]:
    """The dtypes of an operator's results that are floating-point numbers."""
    return [t.dtype for t in op.outputs if "float" in t.dtype]


def _alone(names: Sequence[str], status: str) -> str:
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} in {'B' if status == 'inserted' else 'A'} alone"


def _have(number: int) -> str:
    return "1 operator has" if number == 1 else f"{number} operators have"
