"""Records of what kernels did in a program and in processes that it started."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from retrograd.ttir.faults import KernelFault
from retrograd.ttir.schema import ExecutedKernel, KernelFinding, KernelRun

if TYPE_CHECKING:
    from retrograd.ttir.session import Session  # imports torch, before which a process that is started is prepared

_NOTHING = "no Triton kernel was launched"
_APART = " but inside of cpu_triton or verify, which the program calls itself"


def joined(own: KernelRun, started: Sequence[KernelRun]) -> KernelRun:
    """The record of a program with those of the processes that it started, in which the same is told once."""
    if not started:
        return own
    records = (own, *started)
    kernels, findings = dict[str, ExecutedKernel](), dict[str, KernelFinding]()
    for each in (kernel for record in records for kernel in record.kernels):
        known = kernels.get(each.name, replace(each, launches=0))
        kernels[each.name] = ExecutedKernel(
            each.name, known.launches + each.launches, max(known.programs, each.programs),
            known.in_turns or each.in_turns,
        )  # fmt: skip
    for each in (finding for record in records for finding in record.findings):
        findings.setdefault(each.text, each)
    undecided = tuple(
        dict.fromkeys(why for record in records for why in record.undecided if not why.startswith(_NOTHING))
    )
    notes = dict.fromkeys(note for record in records for note in record.notes)
    told = f"of the program and of {len(started)} process{'es' * (len(started) > 1)} that it started"
    return replace(
        own,
        verdict=_verdict(findings.values(), undecided),
        kernels=tuple(kernels.values()),
        findings=tuple(sorted(findings.values(), key=lambda finding: finding.mild)),
        undecided=undecided,
        notes=(*notes, told),
    )


def _verdict(findings: Iterable[KernelFinding], undecided: Sequence[str]) -> Literal["clean", "finding", "undecided"]:
    return "finding" if any(not f.mild for f in findings) else "undecided" if undecided else "clean"


def record_of(
    session: Session, target: str, multiprocessors: int, code: int = 0, refusals: Sequence[str] = ()
) -> KernelRun:
    """The record of a session that has ended."""
    kernels: dict[str, list[Any]] = {}
    for launch in session.launches:
        kernels.setdefault(launch.kernel, []).append(launch)
    executed = tuple(
        ExecutedKernel(name, len(each), max(_programs(r.grid) for r in each), any(r.in_turns for r in each))
        for name, each in kernels.items()
    )
    findings = tuple(_finding(fault) for fault in sorted(session.faults, key=lambda fault: fault.is_mild))
    undecided = (*refusals, *session.undecided)
    if code:
        undecided += (f"the program failed with exit code {code}",)
    elif not undecided and not executed:
        undecided = (_NOTHING + _APART * bool(session.elsewhere),)
    return KernelRun(
        target,
        _verdict(findings, undecided),
        session.seed,
        multiprocessors,
        executed,
        findings,
        undecided,
        (*session.order_remarks, *session.source_remarks),
        code,
    )


def _programs(grid: tuple[int, int, int]) -> int:
    return grid[0] * grid[1] * grid[2]


def _finding(fault: KernelFault) -> KernelFinding:
    accesses = [fault.access] if fault.other is None else [fault.access, fault.other]
    places = tuple(dict.fromkeys(f"{access.file}:{access.line}" for access in accesses))
    return KernelFinding(
        fault.kind, fault.kernel, fault.text(), places, fault.argument, fault.element, fault.count, fault.launches,
        fault.is_mild,
    )  # fmt: skip
