"""Run of a person's Triton program without a GPU, with a record of what was noticed of its kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

from retrograd import config
from retrograd.core import run_program
from retrograd.errors import UndecidedError, UsageError
from retrograd.runtime.gpu_targets import target_named
from retrograd.ttir.faults import KernelFault
from retrograd.ttir.frames import EndlessLoopError
from retrograd.ttir.launch import cpu_triton
from retrograd.ttir.schema import ExecutedKernel, KernelFinding, KernelRun
from retrograd.ttir.session import Session
from retrograd.ttir.started_processes import hearing_processes

_NOTHING = "no Triton kernel was launched"
_APART = " but inside of cpu_triton or verify, which the program calls itself"
_USAGE = "`retrograd run-kernel [options] -- script.py ...`"


def run_kernels(
    program: Sequence[str], seed: int = 0, multiprocessors: int | None = None, orders: int = 1, gpu: str = "sm_90"
) -> KernelRun:
    """Run a program, as Python does, with its Triton kernels executed on CPU tensors.

    Args:
        program: a script, "-m" and a module, or "-c" and code; then its arguments.
        seed, multiprocessors, orders, gpu: as of `retrograd.cpu_triton`.

    Raises:
        UsageError: there is no such program or GPU, or TRITON_INTERPRET is set.
        UnsupportedVersionError: this Triton compiles or launches otherwise.
    """
    command = run_program.command_of(program, _USAGE)
    if config.interpreting():
        raise UsageError("TRITON_INTERPRET is set, so that Triton interprets kernels itself; unset it")
    refusals: list[str] = []
    multiprocessors = multiprocessors or target_named(gpu).num_sms
    options: dict[str, Any] = dict(seed=seed, multiprocessors=multiprocessors, orders=orders, gpu=gpu)
    with cpu_triton(**options) as session:

        def record(code: int = 0) -> KernelRun:
            return replace(record_of(session, " ".join(program), multiprocessors, code, refusals), gpu=gpu)

        with hearing_processes(options, session, record) as started:
            code = run_program.run(command, _going_on(refusals))
        return joined(record(code), started)


@contextmanager
def _going_on(refusals: list[str]) -> Iterator[None]:
    """What cannot be executed, or does not end, ends the program and not its report."""
    try:
        yield
    except EndlessLoopError:
        pass  # noted as a fault
    except UndecidedError as error:
        refusals.append(str(error))


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
