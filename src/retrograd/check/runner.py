"""Verification of an op: runs the stages and puts their results into a Report. No stage's own knowledge lives here."""

from __future__ import annotations

import datetime
import re
import shlex
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from retrograd import config
from retrograd.check import constraints
from retrograd.check import inputs as make
from retrograd.check.acceptance import accepted, read_baseline, settle
from retrograd.check.calling import mismatched_call, source_place
from retrograd.check.case_sharding import shard_cases
from retrograd.check.cost import CostLimit
from retrograd.check.coverage import Coverage
from retrograd.check.cpu_kernels import executed
from retrograd.check.devices import checked, describe, environment, lost
from retrograd.check.draws import disagreement, under_one_seed
from retrograd.check.finding_summary import explain, progress_line, worst_faults
from retrograd.check.levels import check_level
from retrograd.check.op_runner import DrawsRandomNumbers
from retrograd.check.reference import NotApplicable, OpRaised
from retrograd.check.refusals import refused_alike, refused_by_design
from retrograd.check.schema import NO_REFERENCE, Case, Finding, Report, StageResult, verdict_of
from retrograd.check.spec import OpSpec, dtype_name, op
from retrograd.check.stages import CaseOutcome, Stage, StageContext, choose
from retrograd.compat.triton_launch import LaunchCount, count_launches
from retrograd.core import gc_pause
from retrograd.errors import RetrogradError, SpecError, UndecidedError, UsageError

Progress = Callable[[str, str], None]
# Called with "begin" and a report without stages, "start" and a stage, "case" and a case, "outcome" and what came of
# it, "finding" and the first one of a stage in a dtype as it was made, "stage" and a report of that stage alone.
Watch = Callable[[str, Any], None]

_LOST = "the op lost the GPU"
_INTERPRETED = """TRITON_INTERPRET=1: kernels run in Triton's own interpreter, which is wrong in bfloat16 and at NaN; \
races and addresses are not looked at; unset it to have them executed as on a GPU"""
GPU_LOST = "the GPU no longer answers this process"


class Verification:
    """One op under check: runs stages one at a time, which is what the pytest plugin needs.

    Args and errors as in `verify`.
    """

    def __init__(
        self,
        target: Any,
        *,
        level: str = "full",
        seed: int = 0,
        dtypes: Sequence[Any] | None = None,
        device: str = "cpu",
        case: str | None = None,
        name: str | None = None,
        failed: Mapping[str, Sequence[str]] | None = None,
        watch: Watch | None = None,
        progress: Progress | None = None,
        share: tuple[int, int] = (0, 1),
        baseline: str | Path | None = None,
        **describe: Any,
    ) -> None:
        if describe and isinstance(target, OpSpec):
            raise UsageError(f"{sorted(describe)} describe an op, but `target` is one already (from retrograd.op)")
        self.spec = target if isinstance(target, OpSpec) else op(target, **describe)
        check_level(level, seed)
        self.level, self.seed, self.device = level, seed, checked(device)
        self.target = name or self.spec.name
        names = tuple(dtype_name(d) for d in dtypes) if dtypes else self.spec.dtypes
        marked = {re.split("[:@]", w)[0] for w in (case or "").split() if ":" in w or "@" in w}
        if unknown := marked - {"grad_out"}:
            known = set(make.materialise(self.spec, make.base_case(self.spec, names[0]), seed, "cpu"))
            if unknown - known:
                raise UsageError(f"`case` is about {sorted(unknown - known)}, the inputs are {sorted(known)}")
        by = (*self.spec.accept, *(read_baseline(Path(baseline), self.target) if baseline is not None else ()))
        # Where every case and dtype is run, what may stand must be seen as well.
        every = case is None and set(names) >= set(self.spec.dtypes)
        self.acceptances = tuple(replace(a, expected=every and a.level in ("quick", self.level)) for a in by)
        all_dtypes, names = names, names[share[0] :: share[1]]
        self.launches: dict[str, Any] = {}  # what executed ones did, to be put in place when they come again
        self.launch_counts: list[LaunchCount] = []
        self._contexts_again = partial(self._contexts, names, all_dtypes, case)
        self.contexts, self._notes = self._contexts_again(), tuple[str, ...]()
        self.failed: dict[str, set[str]] = {d: set((failed or {}).get(d, ())) for d in names}
        self.watch: Watch = watch or (lambda event, thing: None)
        self.progress, self._doubts = progress, dict[str, str]()

    def _contexts(self, dtypes: Sequence[str], every: tuple[str, ...], case: str | None) -> dict[str, StageContext]:
        cost = CostLimit.of_level(self.level)  # what a case costs is counted once for all dtypes
        return {
            d: StageContext.of(
                self.spec, d, cost=cost, level=self.level, seed=self.seed, device=self.device, dtypes=every,
                case=None if case is None else make.parse_case(self.spec, d, case),
                emulated=lambda: self.device == "cpu" and any(count.total for count in self.launch_counts),
            ) for d in dtypes
        }  # fmt: skip

    def report(self, results: Sequence[StageResult], seconds: float) -> Report:
        """The report of these results."""
        notes = (NO_REFERENCE,) * (self.spec.reference is None) + self._notes
        left_out = {k: v for context in self.contexts.values() for k, v in context.left_out.items()}
        if left_out:
            parts = ", ".join(f"{count} of {of} {label}" for label, (count, of) in left_out.items())
            more = "; level full runs more" if self.level != "full" else ""
            notes += (f"level {self.level} ran {parts}{more}",)
        if config.interpreting():
            notes += (_INTERPRETED,)
        return Report(
            target=self.target, verdict=verdict_of(results), level=self.level, seed=self.seed,
            dtypes=tuple(self.contexts), device=describe(self.device), stages=tuple(results),
            seconds=round(seconds, 3), started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            environment=environment(), notes=notes, acceptances=self.acceptances, place=source_place(self.spec.fn),
        )  # fmt: skip

    def calls(self) -> int:
        """How often the op has run, in all dtypes."""
        return sum(context.runner.calls for context in self.contexts.values())

    def repro(self, finding: Finding) -> str:
        """The command that runs exactly this finding's stage, case and seed again."""
        words = ["retrograd", "verify", self.target, "--only", finding.stage, "--dtype", finding.case.dtype]
        words += ["--seed", str(self.seed), "--level", self.level, "--device", self.device]
        words += ["--case", finding.case.text()]
        return shlex.join(words)

    def tell(self, finding: Finding) -> None:
        """Say that there is a finding, before it is shrunk and explained."""
        self.watch("finding", finding)
        if self.progress:
            self.progress(finding.stage, progress_line(finding))

    def run_stage(self, stage: Stage) -> StageResult:
        """Every case of a stage in every dtype, merged into one result."""
        with executed(self.device, self.launches):
            try:
                return self._run_stage(stage)
            except DrawsRandomNumbers:
                self.spec, note = under_one_seed(self.spec)
                self._notes, self.contexts = (note,), self._contexts_again()
                return self._run_stage(stage)

    def _run_stage(self, stage: Stage) -> StageResult:
        start, calls = time.perf_counter(), self.calls()
        coverage = Coverage.begin(self.contexts.values())
        result = StageResult(stage.id, stage.title, "skipped")
        if stage.needs_reference and self.spec.reference is None:
            return replace(result, reason="needs a reference; give `reference=` to retrograd.op")
        if reason := stage.applies(self.spec) or constraints.refusal(stage.id, self.spec):
            return replace(result, reason=reason)
        outcomes, cases, reasons = list[CaseOutcome](), 0, list[str]()
        for dtype, context in self.contexts.items():
            if blocked := self.failed[dtype] & set(stage.after):
                reasons.append(f"{dtype}: {', '.join(sorted(blocked))} failed already")
                continue
            if stage.needs_reference and (doubt := self._random_doubt(dtype)):
                outcomes.append(CaseOutcome(power=None, power_text="", undecided=[doubt]))
                continue
            with count_launches() as count:
                self.launch_counts.append(count)
                done, outcome = self._run_dtype(stage, context)
            cases += done
            outcomes.append(outcome)
            if any(not f.partial for f in (*outcome.findings, *outcome.accepted)):
                self.failed[dtype].add(stage.id)
        findings = tuple(replace(f, repro=self.repro(f)) for o in outcomes for f in o.findings)
        standing = tuple(replace(f, repro=self.repro(f)) for o in outcomes for f in worst_faults(o.accepted))
        weakest = max(
            (o for o in outcomes if cases), key=lambda o: o.power or 0.0, default=CaseOutcome([], [], [], None, "")
        )
        text = ", ".join(o.power_text for o in outcomes if o.power)
        undecided = list(dict.fromkeys(reason for o in outcomes for reason in o.undecided))
        status = "failed" if findings else "undecided" if undecided else "passed" if cases else "skipped"
        return replace(
            result, status=status, cases=cases, findings=findings, accepted=standing,
            reason="; ".join(reasons + undecided) or ("" if cases else "no case applies"),
            runs=self.calls() - calls, seconds=round(time.perf_counter() - start, 3),
            power=weakest.power, power_text=f"relative error {text}" if weakest.power else weakest.power_text,
            notes=tuple(dict.fromkeys(n for o in outcomes for n in o.notes)),
            profiles=tuple(p.draw() for o in outcomes for p in o.profiles), **coverage.fields(),
        )  # fmt: skip

    def _random_doubt(self, dtype: str) -> str:
        """Why values of an op that draws cannot be compared; "" if they can, or it draws nothing."""
        if self.spec.random and dtype not in self._doubts:
            self._doubts[dtype] = disagreement(self.contexts[dtype].runner)
        return self._doubts.get(dtype, "")

    def _run_dtype(self, stage: Stage, context: StageContext) -> tuple[int, CaseOutcome]:
        merged = CaseOutcome(power=0.0, power_text="")
        tried: dict[Case, bool] = {}
        powers: list[float] = []
        context.judge.worst.clear()
        context.notes.clear()
        try:
            cases = shard_cases(stage, context, [context.case] if context.case else stage.cases(context))
        except (OpRaised, NotApplicable) as error:
            return self._no_base(stage, context, error)
        for case in cases:
            self.watch("case", case)
            context.judge.remarks.clear()
            context.judge.doubts.clear()
            try:
                outcome = self._try(stage, context, case)
            except UndecidedError as error:
                merged.undecided.append(str(error))
                continue
            except NotApplicable as error:  # of the ordinary case
                return self._no_base(stage, context, error)
            if outcome is None:
                merged.notes.append(f"not applicable: {case.text()} (the reference refuses it)")
                continue
            self._set_apart(outcome)
            self.watch("outcome", outcome)
            if outcome.findings and not merged.findings:
                self.tell(outcome.findings[0])  # what is said of it below, and its smallest case, take longer to find
            tried[case] = tried.get(case, False) or bool(outcome.findings)
            context.runner.judged.append(case)
            outcome.undecided += context.judge.doubts[:1]
            outcome.notes += context.judge.remarks
            merged.add(outcome)
            powers += [] if outcome.power is None else [outcome.power]
            merged.profiles = _worst_profiles(merged.profiles + outcome.profiles)
            if outcome.findings and (reason := lost(self.device)):
                return len(tried), _crashed(outcome.findings[-1], reason)
        merged.notes[:0] = context.notes
        merged.power = max(powers, default=None)
        if merged.power:
            merged.power_text = f"{context.runner.dtype} {merged.power:.1e}"
        if merged.findings:
            shrinks = stage.shrinks and context.case is None
            merged.findings = explain(context, merged.findings, tried, partial(self._again, stage, context), shrinks)
        return len(tried), merged

    def _set_apart(self, outcome: CaseOutcome) -> CaseOutcome:
        """The same outcome, in which findings that may stand are apart from the others."""
        apart = [(finding, accepted(finding, self.acceptances)) for finding in outcome.findings]
        outcome.findings = [finding for finding, standing in apart if standing is None]
        outcome.accepted += [standing for _, standing in apart if standing is not None]
        return outcome

    def _no_base(self, stage: Stage, context: StageContext, error: Exception) -> tuple[int, CaseOutcome]:
        if isinstance(error, OpRaised) or lost(self.device):
            finding = Finding(stage.id, "raises", str(error), context.case or context.base, where="the ordinary case")
            outcome = self._set_apart(CaseOutcome([finding]))
            if outcome.findings:
                self.tell(finding)
            return 1, outcome
        at = (context.case or context.base).text() or "the given inputs"
        mend = "mend the reference, or say which sizes and dtypes it takes (`sizes=`, `dtypes=`)"
        if call := mismatched_call(self.spec.reference, list(context.runner.inputs(context.base)), self.spec.params):
            mend = f"`inputs` and `params` call it as reference({call}); mend them or its arguments"
        raise SpecError(f"{self.target}: {error} at {at} in {context.runner.dtype}; {mend}")

    def _again(self, stage: Stage, context: StageContext, case: Case) -> CaseOutcome | None:
        """As `_try`; None too if nobody can decide the case, or the reference refuses the ordinary one."""
        try:
            return self._try(stage, context, case)
        except (UndecidedError, NotApplicable):
            return None

    def _try(self, stage: Stage, context: StageContext, case: Case) -> CaseOutcome | None:
        """The outcome of one case; None if it means nothing for the op, NotApplicable if that is the ordinary one."""
        try:
            outcome = stage.check(context, case)
            outcome.findings = [replace(finding, stage=stage.id) for finding in outcome.findings]
            if torch.device(self.device).type == "cuda":
                torch.cuda.synchronize(self.device)  # an illegal access is this case's fault, not the next one's
            return outcome
        except NotApplicable:
            if lost(self.device):  # the reference may raise because of what the op has done to the GPU
                return CaseOutcome([Finding(stage.id, "crash", _LOST, case)], power_text="")
            if case == context.base:
                raise
            return None
        except OpRaised as error:
            if refused_by_design(context.spec, case, error):
                note = f"refused by design: {', '.join(f'{k}:{v}' for k, v in case.layouts)} ({error})"
                return CaseOutcome(notes=[note], power=None, power_text="")
            if case != context.base and (context.spec.reference is None or refused_alike(context, case)):
                return None  # nobody says that the op must accept it
            return CaseOutcome([Finding(stage.id, "raises", str(error), case)], power_text="")
        except Exception:
            if not lost(self.device):
                raise
            # A kernel that reads or writes where it must not is told by whoever looks at a result, which may be us.
            return CaseOutcome([Finding(stage.id, "crash", _LOST, case)], power_text="")


def _crashed(last: Finding, reason: str) -> CaseOutcome:
    """The outcome where the GPU is lost: what runs now raises the same, and would be told of cases that are right."""
    message = f"{last.what}\nafterwards the GPU answers no call: {reason}"
    return CaseOutcome([replace(last, kind="crash", what=message, where="the first case that does it")])


def _worst_profiles(profiles: list[Any]) -> list[Any]:
    """The worst profile of each tensor: enough to draw."""
    best: dict[str, Any] = {}
    for p in profiles:
        if p.tensor not in best or p.worst > best[p.tensor].worst:
            best[p.tensor] = p
    return sorted(best.values(), key=lambda p: -p.worst)


def verify(
    target: Any, *, level: str = "full", seed: int = 0, only: Sequence[str] = (), skip: Sequence[str] = (),
    dtypes: Sequence[Any] | None = None, device: str = "cpu", case: str | None = None, name: str | None = None,
    progress: Progress | None = None, failed: Mapping[str, Sequence[str]] | None = None, watch: Watch | None = None,
    share: tuple[int, int] = (0, 1), baseline: str | Path | None = None, **describe: Any,
) -> Report:  # fmt: skip
    """Prove the backward pass of an op right, or say what is wrong, where and how to see it again.

    Args:
        target: what `retrograd.op` returned; or a callable, with the arguments of `retrograd.op` beside it.
        level: "quick" (a second or two) or "full".
        seed: of all data; the same seed gives the same report, races apart.
        only, skip: stage ids.
        dtypes: instead of those of the spec.
        device: "cpu", "cuda" or "cuda:1". On "cpu" Triton kernels are executed as a GPU would run them.
        case: one case as `Case.text` writes it, instead of the cases of each stage.
        name: how repro lines call the target.
        progress: called with a stage id and a line of text as each stage starts and ends, and when it finds something.
        failed: ids of stages that an earlier process found wrong, by dtype; what they make meaningless is skipped.
        watch: told of everything that begins and ends (`Watch`), for who has to know where a process was when it died.
        share: (i, n): every n-th dtype from number i on, for processes that share the work; none may be left.
        baseline: a file of accepted findings (`retrograd-baseline.toml`), which counts like `accept=` of the op.

    Returns:
        A Report; true if proved.

    Raises:
        UsageError: an argument is wrong.
        SpecError: the description does not work (the reference raises on ordinary inputs, the op returns nothing).

    UndecidedError is not raised but reported as a verdict.

    Numerics: truth in float64 by the reference; tolerance from random rounding (`check.tolerance`).
    """
    start = time.perf_counter()
    chosen = choose(only, skip)
    verification = Verification(
        target, level=level, seed=seed, dtypes=dtypes, device=device, case=case, name=name, failed=failed, watch=watch,
        progress=progress, share=share, baseline=baseline, **describe,
    )  # fmt: skip
    if watch:
        watch("begin", verification.report([], 0.0))
    with gc_pause.frozen():
        results = _run(verification, chosen if verification.contexts else ())
    report = verification.report(results, time.perf_counter() - start)
    return settle(report) if share == (0, 1) else report


def _run(verification: Verification, chosen: Sequence[Stage]) -> list[StageResult]:
    """The results of these stages, one after another; the others are left out once the GPU is lost."""
    watch, progress = verification.watch, verification.progress
    results: list[StageResult] = []
    for stage in chosen:
        if progress:
            progress(stage.id, "running")
        watch("start", stage)
        try:
            result = verification.run_stage(stage)
        except UndecidedError as error:
            result = StageResult(stage.id, stage.title, "undecided", reason=str(error))
        except RetrogradError:
            raise
        except Exception as error:  # what the op raises is a finding already: this is a fault of the checker's own
            frame = traceback.extract_tb(error.__traceback__)[-1]
            problem = f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
            reason = f"the check itself failed, not the op: {problem}"
            result = StageResult(stage.id, stage.title, "undecided", reason=reason)
        results.append(result)
        watch("stage", verification.report([result], result.seconds))
        if progress:
            progress(stage.id, f"{result.status} ({result.seconds:.2f} s)")
        if result.findings and (reason := lost(verification.device)):
            left_out = f"{GPU_LOST}: {reason}"
            results += [StageResult(s.id, s.title, "skipped", reason=left_out) for s in chosen[len(results) :]]
            break
    return results
