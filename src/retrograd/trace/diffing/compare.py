"""Two traces -> what differs first, in words; what follows from it is counted."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from retrograd.errors import UsageError
from retrograd.trace.diffing.divergence_reasons import Setting, reason
from retrograd.trace.diffing.formatting import row, seen, side
from retrograd.trace.diffing.identity import base, module
from retrograd.trace.diffing.matching import STEP, pair
from retrograd.trace.diffing.schema import Cause, Kind, Row, TraceDiff
from retrograd.trace.diffing.verdicts import Judge, Judged, packs
from retrograd.trace.schema import BACKWARD, OTHER, Op, Trace

MODES = ("bitwise", "attainable")
_BEFORE, _AFTER = 6, 10  # rows of the neighbourhood
_MOST_OTHERS = 12
_INCIDENTAL = frozenset({"start", "seed", "lost"})  # of what a trace says of itself: no two runs need share it


def compare(a: Trace, b: Trace, level: str | None = None, titles: tuple[str, str] = ("A", "B")) -> TraceDiff:
    """What `retrograd.trace.diff` returns; `titles` are what the runs are called."""
    began = time.perf_counter()
    mode = _mode(a, b, level)
    judge = Judge(mode != "attainable", values=mode != "names")
    judged = [judge.judge(p) for p in pair(a.ops, b.ops)]
    setting = Setting(_devices(a) == _devices(b), (a.meta.get("seed", ""), b.meta.get("seed", "")))
    gathered = _Gathered(setting, judge.bitwise)
    for k, found in enumerate(judged):
        gathered.add(k, found)
    causes = [cause for _, cause in sorted(gathered.causes.values(), key=lambda c: c[0])]
    first = min((at for at, _ in gathered.causes.values()), default=None)
    counts = dict.fromkeys(("same", "within", "carried", "outside"), 0)
    for found in judged:
        if found.status in counts:
            counts[found.status] += 1
    return TraceDiff(
        side(a, titles[0]),
        side(b, titles[1]),
        mode,
        tuple(causes),
        tuple(_notes(a, b, mode, gathered)),
        counts["same"],
        counts["within"],
        counts["carried"] + gathered.late,
        time.perf_counter() - began,
        _rows(judged, first),
    )


def _mode(a: Trace, b: Trace, level: str | None) -> Literal["bitwise", "attainable", "names"]:
    if level is not None and level not in MODES:
        raise UsageError(f"`level` is {level!r}, expected 'bitwise', 'attainable' or None for what fits the runs")
    for name, trace in (("a", a), ("b", b)):
        if not trace.ops:
            raise UsageError(f"`{name}` has no operators; was anything run while it was recorded?")
    if "names" in (a.level, b.level):
        if level is not None:
            raise UsageError(
                f"`level` is {level!r}, but a run was recorded at level 'names', without values; record at 'fast'"
            )
        return "names"
    if level is not None:
        return level  # type: ignore[return-value]
    return "bitwise" if _devices(a) == _devices(b) and _dtypes(a) == _dtypes(b) else "attainable"


def _devices(trace: Trace) -> set[str]:
    return {t.device.partition(":")[0] for op in trace.ops for t in op.outputs}


def _dtypes(trace: Trace) -> set[str]:
    return {t.dtype for op in trace.ops for t in op.outputs if "float" in t.dtype}


Key = tuple[str, ...]


@dataclass
class _Gathered:
    """Causes by what they have in common, each with the position of its first place."""

    setting: Setting
    bitwise: bool
    causes: dict[Key, tuple[int, Cause]] = field(default_factory=dict[Key, tuple[int, Cause]])
    late: int = 0  # values from outside that differ after something had differed already
    renamed: int = 0
    computed: int = 0
    packed: int = 0  # casts and views that only one of the runs has, where dtypes may differ
    idle: int = 0  # arguments that differ without any effect
    _names: dict[Key, list[str]] = field(
        default_factory=dict[Key, list[str]]
    )  # of operators that one line has on one side alone
    _last: tuple[int, Key] = (-2, ())
    _diverged: bool = False

    def add(self, at: int, found: Judged) -> None:
        """One more pair."""
        op = found.pair.b or found.pair.a
        assert op is not None
        if found.status in ("inserted", "missing") and not self.bitwise and packs(op):
            self.packed += 1
        elif found.status in ("inserted", "missing"):
            self._structural(at, found, op)
        elif found.status == "outside":
            self._outside(at, found, op)
        elif found.status == "made":
            self._made(at, found, op)
        elif found.differs:
            self._itself(at, found, op)

    def _put(self, key: Key, at: int, cause: Cause) -> None:
        if key not in self.causes:
            self.causes[key] = (at, cause)
            return
        first, known = self.causes[key]
        others = (
            known.others
            if key[1:2] == (STEP,)
            else known.others + ((cause.where,) if cause.where not in (known.where, *known.others) else ())
        )
        self.causes[key] = (first, replace(known, count=known.count + 1, others=others[:_MOST_OTHERS]))

    def _made(self, at: int, found: Judged, op: Op) -> None:
        why = reason(found, self.setting)
        self._diverged = True
        cause = Cause(why.kind, why.what, why.why, why.advice, **_both(found))
        # A random operator is one cause wherever it is; any other is one where it stands in the source.
        place = () if why.kind == "random" else (op.place or module(op.module),)
        self._put((why.kind, op.name, *place), at, cause)

    def _itself(self, at: int, found: Judged, op: Op) -> None:
        """The operator differs in itself, and its values do not or may not for that reason."""
        if found.status in ("same", "within"):
            self.renamed += found.differs == "replaced"
            self.idle += found.differs != "replaced"
        elif found.differs == "number" or _sizes_differ(found):
            self.computed += 1
        else:
            self._made(at, found, op)

    def _outside(self, at: int, found: Judged, op: Op) -> None:
        assert found.pair.a is not None
        assert found.pair.b is not None
        _, known = self.causes.get(("outside",), (0, None))
        # What differs later may have been changed by what differs by now, where nobody recorded it.
        if self._diverged and (known is None or known.b is None or op.phase == BACKWARD or op.step != known.b.step):
            self.late += 1
            return
        k = found.outside[0]
        was, now = found.pair.a.inputs[k], found.pair.b.inputs[k]
        how = "sizes" if was.shape != now.shape else "dtype" if was.dtype != now.dtype else "values"
        name = next((f"{t.name}, " for t in (now, was) if t.name), "")
        what = f"{name}input {k} of {op.name}{',' if name else ''} comes in from outside with other {how}"
        why = "no operator of the trace made it: a parameter, data, or state that was there before"
        advice = "load the same state and the same batch in both runs, or record from an earlier step"
        if op.node == "AccumulateGrad" and op.name == "aten.add_.Tensor" and k == 0:
            why = "it is the gradient that the new one is added to, from a backward before the recording began"
            advice = "set gradients to None in both runs (zero_grad) before the first backward"
        self._diverged = True
        self._put(("outside",), at, Cause("outside", what, why, advice, **_both(found)))

    def _structural(self, at: int, found: Judged, op: Op) -> None:
        """An operator without a counterpart; in a backward it belongs to one of the forward where one explains it."""
        status: Kind = "inserted" if found.status == "inserted" else "missing"
        self._diverged = True
        if found.pair.level == STEP:
            what = f"step {op.step} is in {'B' if status == 'inserted' else 'A'} alone"
            self._put((status, STEP, str(op.step)), at, Cause(status, what, **_both(found)))
            return
        owner = self._owner(at, status, op)
        if owner is not None:
            first, known = self.causes[owner]
            backward = f"its backward: {op.name}"
            full = backward in known.others or len(known.others) >= _MOST_OTHERS
            others = known.others if full else (*known.others, backward)
            self.causes[owner] = (first, replace(known, others=others))
            self._last = (at, owner)
            return
        key = (status, op.place or module(op.module))
        if key in self.causes:
            self._again(key, op, status)
        else:
            near = f"module {op.module}" if op.module else f"the {op.phase}" if op.phase != OTHER else "the step"
            why = f"{'A' if status == 'inserted' else 'B'} has nothing that corresponds to it in {near}"
            self._put(key, at, Cause(status, _alone([op.name], status), why, "", **_both(found)))
            self._names[key] = [op.name]
        self._last = (at, key)

    def _again(self, key: Key, op: Op, status: str) -> None:
        """One more operator of a line that only one side has; one edit is one cause."""
        at, known = self.causes[key]
        first, names = known.b or known.a, self._names[key]
        assert first is not None
        if op.name == names[0]:
            known = replace(known, count=known.count + 1)
        if op.name not in names and (op.step, op.module) == (first.step, first.module):
            names.append(op.name)
            known = replace(known, what=_alone(names, status))
        where = seen(op).where
        if where not in (first.where, *known.others) and len(known.others) < _MOST_OTHERS:
            known = replace(known, others=(*known.others, where))
        self.causes[key] = (at, known)

    def _owner(self, at: int, status: str, op: Op) -> Key | None:
        if op.phase != BACKWARD:
            return None
        node = op.node.removesuffix("0").removesuffix("Backward").lower().replace("_", "")
        for key, (_, cause) in self.causes.items():
            one = cause.b or cause.a
            if key[0] != status or one is None or one.phase == BACKWARD:
                continue
            same_line = one.place and one.place == op.place
            if same_line or (node and base(one.name).replace("_", "") == node and one.module == op.module):
                return key
        last, key = self._last
        # What stands beside an operator of such a backward sums up its gradient or hands it on.
        belongs = last == at - 1 and key and key[0] == status and self.causes[key][1].others
        return key if belongs else None


def _both(found: Judged) -> dict[str, Any]:
    a, b = found.pair.a, found.pair.b
    return {
        "a": seen(a, found.inputs, found.outputs) if a else None,
        "b": seen(b, found.inputs, found.outputs) if b else None,
    }


def _sizes_differ(found: Judged) -> bool:
    a, b = found.pair.a, found.pair.b
    assert a is not None
    assert b is not None
    return [t.shape for t in a.inputs] != [t.shape for t in b.inputs]


def _rows(judged: Sequence[Judged], first: int | None) -> tuple[Row, ...]:
    if first is None:
        return ()
    return tuple(row(found) for found in judged[max(0, first - _BEFORE) : first + _AFTER + 1])


def _notes(a: Trace, b: Trace, mode: str, gathered: _Gathered) -> Iterable[str]:
    if mode == "names":
        yield "a run was recorded without values: only operators, arguments, sizes and dtypes were compared"
    elif mode == "attainable":
        yield "differences within the attainable error of each operator do not count"
    if mode == "bitwise" and not all(any(t.digest is not None for op in x.ops for t in op.outputs) for x in (a, b)):
        yield "no digests were recorded: tensors with the same least, greatest and rms count as the same"
    if gathered.packed:
        yield f"{gathered.packed} casts and views only one of the runs has"
    if gathered.renamed:
        yield f"{_have(gathered.renamed)} another name and the same result"
    if gathered.idle:
        yield f"{_have(gathered.idle)} other arguments and the same result"
    if gathered.computed:
        yield f"{_have(gathered.computed)} other numbers or sizes as arguments, which follows from the causes"
    for name in sorted((set(a.meta) & set(b.meta)) - _INCIDENTAL):
        if a.meta[name] != b.meta[name]:
            yield f"{name}: {a.meta[name]} in A, {b.meta[name]} in B"
    for letter, trace in (("A", a), ("B", b)):
        if "lost" in trace.meta:
            yield f"operators are missing from the trace of {letter}: {trace.meta['lost']}"
    if a.rank != b.rank:
        yield f"ranks: {a.rank} in A, {b.rank} in B"


def _alone(names: Sequence[str], status: str) -> str:
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} in {'B' if status == 'inserted' else 'A'} alone"


def _have(number: int) -> str:
    return "1 operator has" if number == 1 else f"{number} operators have"
