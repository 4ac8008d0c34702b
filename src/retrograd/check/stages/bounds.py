"""bounds: nothing outside the tensors is read or written, in a kernel of whatever kind.

Every tensor that the op is given, or makes with an operator of PyTorch, lies inside guard bands: results must not
depend on what they hold, and they must hold it afterwards. Kernels executed on the CPU have every address checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from retrograd import config
from retrograd.check import cpu_kernels, kernel_faults
from retrograd.check.guard_bands import HUGE, NAN, PLAIN, SIDES, Bands, Guard
from retrograd.check.op_runner import OpRun
from retrograd.check.reference import OpRaised
from retrograd.check.schema import Case, Finding
from retrograd.check.stages import shapes
from retrograd.check.stages._base import CaseOutcome, Stage, StageContext
from retrograd.check.stages._torchs_own import set_apart
from retrograd.core.wording import count

if TYPE_CHECKING:
    from retrograd.ttir.session import Session

_REPEATS = 20  # to see whether an op differs from itself, as everywhere


def cases(context: StageContext) -> list[Case]:
    """The ordinary case, with gaps between the rows of everything that has rows; some shapes at level full.

    So too where there is no reference beside which the shapes stage could run.
    """
    base = context.base
    rows = [n for n, v in context.runner.inputs(base).items() if isinstance(v, torch.Tensor) and v.ndim > 1]
    rows += ["grad_out"] if any(g.ndim > 1 for g in context.runner.grad_outs(base)) else []
    gaps = [base.but(layouts=dict.fromkeys(rows, "rows"))] if rows else []
    more = context.budget.bounds_shapes
    return [base, *gaps, *(shapes.cases(context)[:more] if more else shapes.without_reference(context))]


@dataclass
class _Guarded:
    """What came out of a run inside guard bands: results or the error, and what was touched outside."""

    bands: Bands
    run: OpRun | None = None
    error: OpRaised | None = None
    written: list[tuple[str, Guard, list[int]]] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)


@dataclass
class _Trial:
    """A case inside bands.

    Attributes:
        whole: whether the bands are part of the storages, as Triton's interpreter copies those of arguments.
    """

    context: StageContext
    case: Case
    whole: bool

    def run(self, fill: str, only: tuple[str, tuple[str, ...]] | None = None) -> _Guarded:
        """One forward and backward inside bands that hold `fill`, `only` on some sides of one tensor."""
        done = _Guarded(Bands(fill, only, whole=self.whole))
        _run(self.context, self.case, done, done.bands)
        return done


def _run(context: StageContext, case: Case, done: _Guarded, bands: Bands) -> None:
    """One forward and backward with everything inside `bands`, which are looked at after each."""
    inputs = {k: bands.place(v, k, f"input `{k}`") for k, v in context.runner.inputs(case).items()}
    gs = context.runner.grad_outs(case)
    gs = [bands.place(g, "grad_out", f"grad_out of output {i}") for i, g in enumerate(gs)]
    graph: Any = None

    def part(phase: str) -> Any:
        with bands, nullcontext() if cpu_kernels.current() is None else cpu_kernels.session() as session:
            if session is not None:
                done.sessions.append(session)
            return context.runner.forward(case, inputs=inputs, grad_outs=gs) if phase == "forward" else graph.backward()

    for phase in ("forward", "backward"):
        try:
            graph = part(phase)
        except OpRaised as error:
            if bands.broken:
                raise bands.broken from None
            done.error = error
        known = [guard for _, guard, _ in done.written]
        for guard in bands.guards:
            if not any(guard is k for k in known) and (places := guard.overwritten()):
                done.written.append((phase, guard, places))
        if done.error:
            return
    done.run = graph


def _writes(case: Case, done: _Guarded) -> Iterator[Finding]:
    for phase, guard, places in done.written:
        by_side = {side: [p for p in places if guard.side(p) == side] for side in SIDES}
        places_by_side = ", ".join(
            f"{count(len(at), 'element')} {side}{_nearest(guard, side, at)}" for side, at in by_side.items() if at
        )
        message = f"the {phase} writes outside {guard.name}: {places_by_side}"
        yield Finding.of("write", message, case, tensor=guard.owner)


def _nearest(guard: Guard, side: str, places: list[int]) -> str:
    if side == SIDES[2]:
        return ""
    away = -max(places) if side == SIDES[0] else min(places) - guard.extent + 1
    return f" (the nearest {away} away)" if away > 1 else ""


def _outside(trial: _Trial, done: _Guarded) -> Iterator[Finding]:
    faults = (fault for session in done.sessions for fault in session.faults)
    yield from kernel_faults.findings(faults, kernel_faults.MEMORY, trial.case, "bounds", trial.context.told)


Noisy = Callable[[], bool]


def _noisy(trial: _Trial) -> bool:
    """Whether the op differs from itself inside the same bands; without any, what it reads outside may be noise."""
    first = trial.run(PLAIN).run
    again = (trial.run(PLAIN).run for _ in range(_REPEATS))
    return first is not None and any(t is not None and t.first_difference(first) for t in again)


def _differs(trial: _Trial, first: OpRun, second: OpRun, noisy: Noisy) -> str:
    """Name of a tensor that differs by more than the op does from itself, or may by rounding; "" if none."""
    name = first.first_difference(second)
    if not name:
        return ""
    a, b = first.tensors[name], second.tensors[name]
    if a is None or b is None or a.shape != b.shape:
        return name
    lost = bool((a.isfinite() != b.isfinite()).any())
    if lost or noisy():
        return name if lost else ""
    # Libraries choose their path by where memory begins, which repeats do not show: then the last bits differ.
    return trial.context.judge.changed(trial.case, second, first)


def _reads(trial: _Trial, runs: dict[str, _Guarded]) -> Iterator[Finding]:
    """A finding if results depend on what the bands hold."""
    case = trial.case
    first, second = runs[NAN].run, runs[HUGE].run
    if first is None or second is None:
        fill, error = next((fill, done.error) for fill, done in runs.items() if done.error)
        message = f"with {fill} around the tensors that it is given {error}; with other values it does not"
        yield Finding.of("read", message, case)
        return
    noisy = cache(lambda: _noisy(trial))
    name, fill = _differs(trial, first, second, noisy), f"{NAN}, then {HUGE}"
    if not name and any(t is not None and bool(t.isnan().any()) for t in first.tensors.values()):
        # Huge values can end as NaN too (inf - inf), and then both runs are alike.
        second = trial.run(PLAIN).run or second
        name, fill = _differs(trial, first, second, noisy), f"{NAN}, then {PLAIN}"
    if not name:
        return
    a, b = first.tensors[name], second.tensors[name]
    differing = int((~((a == b) | (a.isnan() & b.isnan()))).sum()) if a is not None and b is not None else 0
    where = _culprit(trial, noisy)
    if not where:
        return  # it does not come again: an op that is seldom off
    message = f"{name} depends on memory outside {where}: {fill} there change {count(differing, 'element')}"
    yield Finding.of("read", message, case, tensor=name, wrong=differing)


def _culprit(trial: _Trial, noisy: Noisy) -> str:
    """Around which tensor, and on which side, the memory lies that is read; "" if no one's makes a difference."""
    plain = trial.run(PLAIN)
    want, guards = plain.run, plain.bands.guards
    owners = {guard.owner: guard.name for guard in guards if guard.owner} | {"": "a tensor that the op makes"}

    def read(owner: str, sides: tuple[str, ...]) -> bool:
        for fill in (NAN, HUGE):
            got = trial.run(fill, (owner, sides)).run
            if got is None or (want is not None and _differs(trial, got, want, noisy)):
                return True
        return False

    for owner, name in owners.items():
        if read(owner, SIDES):
            at = [side for side in SIDES if read(owner, (side,))]
            return f"{name} ({' and '.join(at)})" if at else name
    return ""


def _refusal(context: StageContext, case: Case, out: CaseOutcome, error: OpRaised | None) -> None:
    """The op raises whatever the bands hold. Without bands too, which other stages tell; or because of them."""
    try:
        context.runner.run(case)
    except OpRaised:
        if case == context.base or context.case is not None:
            raise
    else:
        out.notes.append(f"not checked at {case.text() or 'the given inputs'}: inside a larger allocation {error}")


def check(context: StageContext, case: Case) -> CaseOutcome:
    """Two runs inside guard bands, with NaN and with huge values; more to say where, once there is a finding."""
    if cpu_kernels.awaited() and not context.runner.calls:  # an op may import Triton as late as in its first call
        with suppress(OpRaised):
            context.runner.run(case)
    trial = _Trial(context, case, whole=config.interpreting())
    out = _judged(trial)
    if trial.whole and not context.emulated() and out.findings:
        # No kernel that is interpreted: then storages begin at their tensors, as an op finds them elsewhere.
        out = _judged(_Trial(context, case, whole=False))
    return out


def _judged(trial: _Trial) -> CaseOutcome:
    context, case = trial.context, trial.case
    executed = cpu_kernels.current() is not None
    out = CaseOutcome(power_text=f"exact: within 16 KiB of any tensor{', any address of a kernel' * executed}")
    runs = {fill: trial.run(fill) for fill in (NAN, HUGE)}
    findings: dict[Any, Finding] = {}
    for done in runs.values():
        for finding in (*_outside(trial, done), *_writes(case, done)):
            findings.setdefault((finding.kind, finding.tensor, finding.what), finding)
    errors = [done.error for done in runs.values()]
    if all(errors):
        _refusal(context, case, out, errors[0])
    else:
        findings |= {(f.kind, f.tensor, f.what): f for f in _reads(trial, runs)}
    out.findings += findings.values()
    set_apart(context, case, out)
    return out


STAGE = Stage("bounds", "nothing outside the tensors is touched", 35, check, cases, sharded=True)
