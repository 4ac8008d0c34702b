"""Verification of an op: runs one stage at a time and says it in a Report. No stage's own knowledge lives here."""

from __future__ import annotations

import datetime
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from retrograd import config
from retrograd.check import constraints, kernel_faults, tuning
from retrograd.check import inputs as make
from retrograd.check.acceptance import accepted, read_baseline
from retrograd.check.calling import mismatched_call, source_place
from retrograd.check.case_sharding import shard_cases, shared_notes
from retrograd.check.cost import CostLimit
from retrograd.check.coverage import Coverage, joined
from retrograd.check.cpu_kernels import executed
from retrograd.check.devices import checked, describe, environment, lost
from retrograd.check.draws import disagreement, under_one_seed
from retrograd.check.finding_summary import crashed, explain, fault, progress_line, worst_faults
from retrograd.check.levels import check_level
from retrograd.check.op_runner import DrawsRandomNumbers
from retrograd.check.reference import Batching, NotApplicable, OpRaised
from retrograd.check.refusals import refused_alike, refused_by_design
from retrograd.check.schema import NO_REFERENCE, Case, Finding, Report, StageResult, verdict_of
from retrograd.check.spec import OpSpec, dtype_name, op
from retrograd.check.stages import CaseOutcome, Stage, StageContext
from retrograd.check.tensor_comparison import worst_profiles
from retrograd.check.time_budget import Portion, StageProgress, TimeBudget
from retrograd.compat.triton_launch import LaunchCount, count_launches
from retrograd.errors import SpecError, UndecidedError, UsageError

Progress = Callable[[str, str], None]
# Called with "begin" and a report without stages, "start" and a stage, "case" and a case, "outcome" and what came of
# it, "finding" and the first one of a stage in a dtype as it was made, "stage" and a report of that stage alone.
Watch = Callable[[str, Any], None]

_RAISES = "raises"  # among the stages that failed: it raises at the ordinary case, and others would say that again
_LOST = "the op lost the GPU"
_INTERPRETED = """TRITON_INTERPRET=1: kernels run in Triton's own interpreter, which is wrong in bfloat16 and at NaN; \
races and addresses are not looked at; unset it to have them executed as on a GPU"""


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
        budget: float | None = None,
        configs: str = "some",
        **describe: Any,
    ) -> None:
        if describe and isinstance(target, OpSpec):
            raise UsageError(f"{sorted(describe)} describe an op, but `target` is one already (from retrograd.op)")
        self.spec = target if isinstance(target, OpSpec) else op(target, **describe)
        check_level(level, seed, configs)
        self.budget, self._progress = TimeBudget(budget), dict[tuple[str, str], StageProgress]()
        self.level, self.seed, self.device, self.configs = level, seed, checked(device), configs
        self.target, self.is_named = name or self.spec.name, name is not None
        names = tuple(dtype_name(d) for d in dtypes) if dtypes else self.spec.dtypes
        self._check_case(case or "", names[0])
        by = (*self.spec.accept, *(read_baseline(Path(baseline), self.target) if baseline is not None else ()))
        # Where every case and dtype is run, what may stand must be seen as well.
        every = case is None and set(names) >= set(self.spec.dtypes)
        self.acceptances = tuple(replace(a, expected=every and a.level in ("quick", self.level)) for a in by)
        all_dtypes, names = names, names[share[0] :: share[1]]
        self.launches: dict[str, Any] = {}  # what executed ones did, to be put in place when they come again
        self.fastest: tuning.Fastest = {}  # configurations of autotuned kernels on a GPU, in all stages
        self.launch_counts: list[LaunchCount] = []
        self._contexts_again = partial(self._contexts, names, all_dtypes, case)
        self.contexts, self._notes = self._contexts_again(), tuple[str, ...]()
        self.failed: dict[str, set[str]] = {d: set((failed or {}).get(d, ())) for d in names}
        self.watch: Watch = watch or (lambda event, thing: None)
        self.progress, self._doubts = progress, dict[str, str]()
        self._shared: dict[str, dict[str, str]] = {}  # by stage

    def _check_case(self, case: str, dtype: str) -> None:
        """UsageError if the text of a case is about inputs that there are not."""
        marked = {re.split("[:@]", w)[0] for w in case.split() if ":" in w or "@" in w}
        if unknown := marked - {"grad_out"}:
            known = set(make.materialise(self.spec, make.base_case(self.spec, dtype), self.seed, "cpu"))
            if unknown - known:
                raise UsageError(f"`case` is about {sorted(unknown - known)}, the inputs are {sorted(known)}")

    def _contexts(self, dtypes: Sequence[str], every: tuple[str, ...], case: str | None) -> dict[str, StageContext]:
        # What a case costs, and whether its reference can run several times at once, is found once for all dtypes.
        cost, batching = CostLimit.of_level(self.level), Batching(allowed=True)
        return {
            d: StageContext.of(
                self.spec, d, cost=cost, batching=batching, level=self.level, seed=self.seed, device=self.device,
                dtypes=every, case=None if case is None else make.parse_case(self.spec, d, case),
                launched=lambda: any(count.total for count in self.launch_counts),
                every_configuration=self.configs == "all",
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
        notes += shared_notes(next(iter(self.contexts.values())).dtypes, self._shared) if self._shared else ()
        notes += tuning.notes(self.fastest, self.configs == "all")
        if config.interpreting():
            notes += (_INTERPRETED,)
        return Report(
            target=self.target, verdict=verdict_of(results), level=self.level, seed=self.seed,
            dtypes=tuple(self.contexts), device=describe(self.device), stages=tuple(results),
            seconds=round(seconds, 3), started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            environment=environment(), notes=notes, acceptances=self.acceptances, place=self._place,
            budget=self.budget.seconds,
        )  # fmt: skip

    @cached_property
    def _place(self) -> str:
        return source_place(self.spec.fn)  # reads the file: 0.6 ms, and there is a report after each stage

    def calls(self) -> int:
        """How often the op has run, in all dtypes."""
        return sum(context.runner.calls for context in self.contexts.values())

    def repro(self, finding: Finding) -> str:
        """The command that runs exactly this finding's stage, case and seed again; without a name, the call."""
        if not self.is_named:
            more = ', configs="all"' if self.configs == "all" else ""
            return (
                f'rg.verify(spec, only=["{finding.stage}"], dtypes=["{finding.case.dtype}"], seed={self.seed}, '
                f'level="{self.level}", device="{self.device}", case={finding.case.text()!r}{more})'
            )
        words = ["retrograd", "verify", self.target, "--only", finding.stage, "--dtype", finding.case.dtype]
        words += ["--seed", str(self.seed), "--level", self.level, "--device", self.device]
        words += ["--case", finding.case.text(), *(["--configs", self.configs] if self.configs == "all" else [])]
        return shlex.join(words)

    def tell(self, finding: Finding) -> None:
        """Say that there is a finding, before it is shrunk and explained."""
        self.watch("finding", finding)
        if self.progress:
            self.progress(finding.stage, progress_line(finding))

    def run_stage(
        self, stage: Stage, portion: Portion | None = None, earlier: StageResult | None = None
    ) -> StageResult:
        """Every case of a stage in every dtype, or those of a portion, merged into one result with those before it."""
        portion, earlier = (
            portion or Portion(tuple(self.contexts)),
            earlier or StageResult(stage.id, stage.title, "skipped"),
        )
        with executed(self.device, self.launches), tuning.pinned(self.device, self.fastest):
            try:
                result = self._run_stage(stage, portion, earlier)
            except DrawsRandomNumbers:
                self.spec, note = under_one_seed(self.spec)
                self._notes, self.contexts = (note,), self._contexts_again()
                self._progress.clear()
                result = self._run_stage(stage, portion, earlier)
        return self.account(result)

    def waiting(self, chosen: Sequence[Stage]) -> list[StageResult]:
        """The results of stages of which nothing has run."""
        return [self.account(StageResult(stage.id, stage.title, "undecided")) for stage in chosen]

    def account(self, result: StageResult) -> StageResult:
        """The result of a stage with what the budget has left out so far."""
        return self.budget.account(result, {d: self._progress.get((result.id, d)) for d in self.contexts})

    def has_left(self, stage: Stage, portion: Portion) -> bool:
        """Whether there may be cases of the portion that were not run."""
        known = [self._progress.get((stage.id, dtype)) for dtype in portion.dtypes]
        return any(p is None or p.position < (min(1, len(p.cases)) if portion.first else len(p.cases)) for p in known)

    def end(self, stage: Stage) -> None:
        """Run no more of a stage, for another reason than time."""
        self._progress |= {(stage.id, dtype): StageProgress() for dtype in self.contexts}

    def _run_stage(self, stage: Stage, portion: Portion, earlier: StageResult) -> StageResult:
        start, calls = time.perf_counter(), self.calls()
        coverage = Coverage.begin(self.contexts.values())
        reason = "needs a reference; give `reference=` to retrograd.op"
        if not stage.needs_reference or self.spec.reference is not None:
            reason = stage.applies(self.spec) or constraints.refusal(stage.id, self.spec)
        if reason:
            self.end(stage)
            return replace(earlier, reason=reason)
        for dtype in portion.dtypes:
            if not self.budget.over():
                self._run_dtype(stage, self.contexts[dtype], portion)
        every = [p for dtype in self.contexts if (p := self._progress.get((stage.id, dtype))) is not None]
        outcomes = [p.outcome for p in every if p.tried or not p.blocked]
        for outcome in outcomes:
            outcome.profiles = [p.drawn() for p in outcome.profiles]  # kept while other stages run
        cases, reasons = sum(len(p.tried) for p in every), [p.blocked for p in every if p.blocked]
        findings = tuple(replace(f, repro=self.repro(f)) for o in outcomes for f in o.findings)
        standing = tuple(replace(f, repro=self.repro(f)) for o in outcomes for f in worst_faults(o.accepted))
        weakest = max(
            (o for o in outcomes if cases), key=lambda o: o.power or 0.0, default=CaseOutcome([], [], [], None, "")
        )
        text = ", ".join(o.power_text for o in outcomes if o.power)
        undecided = list(dict.fromkeys(reason for o in outcomes for reason in o.undecided))
        status = "failed" if findings else "undecided" if undecided else "passed" if cases else "skipped"
        return replace(
            earlier, status=status, cases=cases, findings=findings, accepted=standing,
            reason="; ".join(reasons + undecided) or ("" if cases else "no case applies"),
            runs=earlier.runs + self.calls() - calls,
            seconds=round(earlier.seconds + time.perf_counter() - start, 3),
            power=weakest.power, power_text=f"relative error {text}" if weakest.power else weakest.power_text,
            notes=joined(n for o in outcomes for n in o.notes),
            profiles=tuple(p.draw() for o in outcomes for p in o.profiles), **coverage.fields(earlier),
        )  # fmt: skip

    def _random_doubt(self, dtype: str) -> str:
        """Why values of an op that draws cannot be compared; "" if they can, or it draws nothing."""
        if self.spec.random and dtype not in self._doubts:
            self._doubts[dtype] = disagreement(self.contexts[dtype].runner)
        return self._doubts.get(dtype, "")

    def _run_dtype(self, stage: Stage, context: StageContext, portion: Portion) -> None:
        dtype = context.runner.dtype
        progress = self._progress.setdefault((stage.id, dtype), StageProgress())
        if blocked := self.failed[dtype] & set(stage.after):
            progress.end(f"{dtype}: {', '.join(sorted(blocked))} failed already")
            return
        unable = f"{dtype}: it raises at the ordinary case" if _RAISES in self.failed[dtype] else ""
        if unable and stage.id != "races":  # which may know why, as of a kernel that never ends
            progress.end(unable)
            return
        if stage.needs_reference and (doubt := self._random_doubt(dtype)):
            progress.outcome = CaseOutcome(power=None, power_text="", undecided=[doubt])
            return
        with count_launches(blocks=False) as count:
            self.launch_counts.append(count)
            self._run_cases(stage, context, progress, portion)
        outcome = progress.outcome
        if unable and all(finding.kind == "raises" for finding in outcome.findings):
            progress.tried.clear()
            progress.end(unable)
            return
        if outcome.findings:
            progress.end()
        if any(not f.partial for f in (*outcome.findings, *outcome.accepted)):
            self.failed[dtype].add(stage.id)
        if outcome.findings and stage.id == "contract" and not lost(self.device) and _raises(context):
            self.failed[dtype].add(_RAISES)

    def _run_cases(self, stage: Stage, context: StageContext, progress: StageProgress, portion: Portion) -> None:
        merged, tried = progress.outcome, progress.tried
        context.judge.worst.clear()
        context.notes.clear()
        context.shared.clear()
        try:
            if not progress.position:
                wanted = [context.case] if context.case else stage.cases(context)
                progress.cases = shard_cases(stage, context, wanted)
        except (OpRaised, NotApplicable) as error:
            self._no_base(stage, context, error, progress)
            return
        for case in progress.cases[progress.position : 1 if portion.first else None]:
            if self.budget.over():
                break
            progress.position += 1
            self.watch("case", case)
            context.judge.begin_case(worst_faults(merged.findings))
            try:
                outcome = self._try(stage, context, case)
            except UndecidedError as error:
                merged.undecided.append(str(error))
                continue
            except NotApplicable as error:  # of the ordinary case
                self._no_base(stage, context, error, progress)
                return
            if outcome is None:
                merged.notes.append(f"not applicable: {case.text()} (the reference refuses it)")
                continue
            self._set_apart(outcome)
            self.watch("outcome", outcome)
            if outcome.findings and not merged.findings:
                self.tell(outcome.findings[0])  # what is said of it below, and its smallest case, take longer to find
            tried[case] = tried.get(case, frozenset()).union(map(fault, outcome.findings))
            context.runner.judged += [case] * (case not in context.unjudged)
            outcome.undecided += context.judge.doubts[:1]
            outcome.notes += context.judge.remarks
            merged.add(outcome)
            progress.powers += [] if outcome.power is None else [outcome.power]
            merged.profiles = worst_profiles(merged.profiles + outcome.profiles)
            if outcome.findings and (reason := lost(self.device)):
                progress.outcome = crashed(outcome.findings[-1], reason)
                return
        self._sum_up(stage, context, progress)

    def _sum_up(self, stage: Stage, context: StageContext, progress: StageProgress) -> None:
        """What the cases that were run say together."""
        merged = progress.outcome
        context.judge.begin_case()
        merged.notes[:0] = context.notes
        if context.shared:
            self._shared.setdefault(stage.id, {}).update(context.shared)
        merged.power = max(progress.powers, default=None)
        if merged.power:
            merged.power_text = f"{context.runner.dtype} {merged.power:.1e}"
        if merged.findings:
            shrinks = stage.shrinks and context.case is None
            again = partial(self._again, stage, context)
            merged.findings = explain(context, merged.findings, progress.tried, again, shrinks)

    def _set_apart(self, outcome: CaseOutcome) -> CaseOutcome:
        """The same outcome, in which findings that may stand are apart from the others."""
        apart = [(finding, accepted(finding, self.acceptances)) for finding in outcome.findings]
        outcome.findings = [finding for finding, standing in apart if standing is None]
        outcome.accepted += [standing for _, standing in apart if standing is not None]
        return outcome

    def _no_base(self, stage: Stage, context: StageContext, error: Exception, progress: StageProgress) -> None:
        if isinstance(error, OpRaised) or lost(self.device):
            finding = Finding(stage.id, "raises", str(error), context.case or context.base, where="the ordinary case")
            progress.outcome = self._set_apart(CaseOutcome([finding]))
            progress.tried = {finding.case: frozenset([fault(finding)])}
            if progress.outcome.findings:
                self.tell(finding)
            return
        at = (context.case or context.base).text() or "the given inputs"
        mend = "mend the reference, or say which sizes and dtypes it takes (`sizes=`, `dtypes=`)"
        if call := mismatched_call(self.spec.reference, list(context.runner.inputs(context.base)), self.spec.params):
            mend = f"`inputs` and `params` call it as reference({call}); mend them or its arguments"
        raise SpecError(f"{self.target}: {error} at {at} in {context.runner.dtype}; {mend}")

    def _again(self, stage: Stage, context: StageContext, case: Case) -> CaseOutcome | None:
        """As `_try`; None too if nobody can decide the case, the reference refuses the ordinary one, or time is up."""
        try:
            return None if self.budget.over() else self._try(stage, context, case)
        except (UndecidedError, NotApplicable):
            return None

    def _try(self, stage: Stage, context: StageContext, case: Case) -> CaseOutcome | None:
        """The outcome of one case; None if it means nothing for the op, NotApplicable if that is the ordinary one."""
        try:
            with kernel_faults.heard() as faults:
                outcome = stage.check(context, case)
            if stage.hears:
                kinds = kernel_faults.heard_kinds(case)
                outcome.findings += kernel_faults.findings(faults, kinds, case, stage.id, context.told)
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


def _raises(context: StageContext) -> bool:
    """Whether the op raises at its ordinary case."""
    try:
        context.runner.run(context.base)
    except OpRaised:
        return True
    return False
