"""Configurations of autotuned kernels: the op under others than the first, or than the fastest on a GPU.

A GPU chooses by time, so that any of them may be what a user runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from retrograd.check import cpu_kernels, tuning
from retrograd.check.case_sharding import shard
from retrograd.check.inputs import resized
from retrograd.check.op_runner import OpRun
from retrograd.check.reference import OpRaised
from retrograd.check.schema import Case, Finding
from retrograd.check.sizes import elements
from retrograd.check.stages._base import CaseOutcome, StageContext
from retrograd.compat.triton_autotuning import constants, settings, written
from retrograd.errors import RetrogradError

if TYPE_CHECKING:
    from retrograd.ttir.session import Session

_ODD = (3, 5, 33)
_LABEL = "configurations of autotuned kernels"


@dataclass
class _Configured:
    """The op run with a configuration of its autotuned kernels, or of `kernel` alone, and what is wrong with it."""

    context: StageContext
    case: Case
    number: int | None  # None for the fastest on a GPU
    kernel: str = ""
    trials: bool = True  # whether what an autotuner times is executed too

    def __post_init__(self) -> None:
        self.run: OpRun | None = None
        with self._session() as session:
            self.session = session
            self.findings = self._judged()

    def _session(self) -> AbstractContextManager[Session | tuning.GpuTuning]:
        on_gpu = tuning.current()
        if on_gpu is not None:
            return tuning.choosing(on_gpu.fastest, self.number, self.kernel)
        return cpu_kernels.session(configuration=self.number or 0, tuned_kernel=self.kernel, trials=self.trials)

    def _judged(self) -> list[Finding]:
        context, case = self.context, self.case
        try:
            self.run = context.runner.run(case)
        except OpRaised as error:
            return [Finding.of("raises", str(error), case)]
        if context.spec.reference is None:
            return []
        return context.judge.against_truth(case, self.run)[0]

    def differing(self, first: _Configured) -> dict[str, Any]:
        """The configurations that are not those of the first run, by kernel."""
        before = {name: settings(config) for name, config in first.session.chosen.items()}
        return {name: config for name, config in self.session.chosen.items() if settings(config) != before[name]}

    def faults(self, first: _Configured) -> Iterator[Finding]:
        """What kernels do in their memory under this configuration and not under the first."""
        known = {(fault.kind, fault.kernel, fault.access.line) for fault in first.session.faults}
        for fault in self.session.faults:
            if not fault.is_mild and (fault.kind, fault.kernel, fault.access.line) not in known:
                yield Finding.of("configuration", fault.text(), self.case, wrong=fault.count)

    def wrong(self, first: _Configured) -> list[Finding]:
        """What is wrong under this configuration and not under the first."""
        return [*self.faults(first), *self.findings]

    def alone(self, first: _Configured, bits: bool) -> _Configured:
        """The same of the one kernel that makes the difference, or this where it takes several."""
        kernels = self.differing(first)
        for kernel in kernels if len(kernels) > 1 else ():
            other = replace(self, kernel=kernel)
            if _difference(other, first) if bits else other.wrong(first):
                return other
        return self


def compare(context: StageContext, case: Case) -> CaseOutcome:
    """Run the op with each configuration; a wrong value, race or access is a finding, as are other bits if promised.

    Nothing is run where no autotuned kernel was launched, nor on a GPU if not all configurations are asked for.
    """
    out, on_gpu = CaseOutcome(power_text=""), tuning.current()
    session = on_gpu or cpu_kernels.current()
    if session is None or not session.configurations or (on_gpu and not context.every_configuration):
        return out
    first = _Configured(context, case, None if on_gpu else 0)
    # What is wrong the stages tell that compare. Where an op keeps what a tuner has chosen there is nothing to choose.
    if first.findings or not first.session.configurations:
        return out
    numbers = _numbers(context, first.session.configurations)
    uneven = _Uneven(context, case if numbers and not on_gpu else None)
    differing, compared = list[_Configured](), 1
    for number in shard(context, numbers, f"{len(numbers)} more {_LABEL}"):
        try:
            run = _Configured(context, case, number)
        except RetrogradError as error:
            out.undecided.append(f"configuration {number + 1} of autotuned kernels: {error}")
            continue
        if not run.differing(first):
            continue  # those that do not compile are not chosen
        compared += 1
        out.undecided += [why for why in run.session.undecided if why not in first.session.undecided]
        if run.wrong(first):
            out.findings += _told(run, first)
        elif wrong_elsewhere := uneven.findings(number, out):
            out.findings += wrong_elsewhere
        elif _difference(run, first):
            differing.append(run)
    if differing:
        _tell_bits(out, context, first, differing, compared - 1)
    out.power_text = f"{compared} {_LABEL}" if compared > 1 else ""
    return out


def _told(run: _Configured, first: _Configured) -> list[Finding]:
    run = run.alone(first, bits=False)
    under = _text(run.differing(first))
    return [replace(finding, what=f"under {under}: {finding.what}") for finding in run.wrong(first)]


class _Uneven:
    """The op at sizes that blocks do not divide, where a configuration may need a mask that it needs nowhere else.

    Blocks of two heads of a rotary embedding were right with the four heads of the ordinary case, and raced with three.
    """

    def __init__(self, context: StageContext, base: Case | None) -> None:
        self._context, self._case = context, None if base is None else _with_odd_sizes(context, base)
        self._first: _Configured | None = None

    def findings(self, number: int, out: CaseOutcome) -> list[Finding]:
        """What is wrong there under a configuration, and under the first is not; `out` gets what cannot be said."""
        if self._case is None:
            return []
        try:
            self._first = self._first or _Configured(self._context, self._case, 0, trials=False)
            if self._first.findings or not self._first.session.configurations:
                return []
            run = _Configured(self._context, self._case, number, trials=False)
        except RetrogradError as error:
            out.undecided.append(f"configuration {number + 1} of autotuned kernels at {self._case.text()}: {error}")
            return []
        return _told(run, self._first) if run.differing(self._first) and run.wrong(self._first) else []


def _with_odd_sizes(context: StageContext, base: Case) -> Case | None:
    """The case with as many sizes as may be small and odd; None where none may, or it costs too much."""
    spec, case = context.spec, base
    for name, size in base.sizes:
        rule = spec.sizes.get(name)
        for n in (*_ODD, *(n for n in (rule if isinstance(rule, list) else ()) if n % 2 and n > 1)):
            changed = resized(spec, case, name, (n,) if name in spec.free_rank else n)
            if changed is not None and elements(size) % 2 == 0:
                case = changed
                break
    return None if case == base or not context.cost.allows(context.runner, case) else case


def _numbers(context: StageContext, configurations: Mapping[str, list[Any]]) -> list[int]:
    """Those to run beside the first: at level quick each that has a constant with a value that none before it has.

    All where all are asked for; a GPU does not begin with that of number 0.
    """
    if context.every_configuration:
        return list(range(0 if tuning.current() else 1, max(map(len, configurations.values()))))
    total, seen, numbers = max(map(len, configurations.values())), set[Any](), list[int]()
    for number in range(total):
        chosen = {kernel: configs[number % len(configs)] for kernel, configs in configurations.items()}
        here = {(kernel, *constant) for kernel, config in chosen.items() for constant in constants(config)}
        if number and (context.level != "quick" or here - seen):
            numbers.append(number)
        seen |= here
    numbers = numbers[: context.budget.configurations]
    context.ran(_LABEL, len(numbers) + 1, total)
    return numbers


def _difference(run: _Configured, first: _Configured) -> str:
    """Name of a tensor whose bits are not those of the first run; "" if none, or one of the two raised."""
    return "" if run.run is None or first.run is None else run.run.first_difference(first.run)


def _tell_bits(
    out: CaseOutcome, context: StageContext, first: _Configured, differing: list[_Configured], total: int
) -> None:
    if _difference(replace(first), first):
        return  # by themselves
    run = differing[0].alone(first, bits=True)
    name, kernels = _difference(run, first), run.differing(first)
    text = (
        f"bits of {name} depend on the configuration that autotuning chooses, by time: not the same with "
        f"{_text(kernels)} as with {', '.join(written(first.session.chosen[kernel]) for kernel in kernels)} "
        f"({len(differing)} of {total} configurations beside the first)"
    )
    if context.spec.deterministic:
        wrong = len(differing)
        out.find("not-repeatable", text, run.case, name, wrong=wrong, total=total)
    else:
        out.notes.append(text)


def _text(kernels: Mapping[str, Any]) -> str:
    return ", ".join(f"{written(config)} of kernel {name}" for name, config in kernels.items())
