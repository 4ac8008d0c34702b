"""Record of a check, as plain data: cases, findings, stages, reports, and their JSON.

Standard library only, so that a report can be read, compared and rendered without torch.
No renderer and no check lives here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, cast

from retrograd.core.notebook import Shown
from retrograd.core.schema import Record
from retrograd.core.wording import count, some
from retrograd.errors import UndecidedError, VerificationError

SCHEMA = "retrograd.report/1"

Status = Literal["passed", "failed", "skipped", "undecided"]
Size = int | tuple[int, ...]

# Exit codes of the command line, by verdict.
EXIT_CODES = {"proved": 0, "finding": 1, "undecided": 3}


NO_REFERENCE = "no reference: values were not compared with a truth"
# Why a stage is undecided, in all dtypes or in those that stand before it.
BUDGET_ENDED = "the budget ended before it"


@dataclass(frozen=True)
class Case:
    """One concrete input set, up to the verify seed: the same case and seed give the same bits on any machine.

    `sizes` maps a named dimension to its size (a tuple for a rank-free one such as "M..."), `params` a
    parameter to its value, `layouts` an input name or "grad_out" to a memory layout, `values` an input name
    to what it holds instead of ordinary numbers. `draw` counts independent draws of the same sizes.
    """

    dtype: str
    sizes: tuple[tuple[str, Size], ...] = ()
    params: tuple[tuple[str, Any], ...] = ()
    layouts: tuple[tuple[str, str], ...] = ()
    draw: int = 0
    values: tuple[tuple[str, str], ...] = ()

    def size(self, name: str) -> Size:
        """The size of the named dimension; KeyError if the case has none."""
        return dict(self.sizes)[name]

    def layout(self, name: str) -> str:
        """The layout of an input or of "grad_out"; "contiguous" unless stated."""
        return dict(self.layouts).get(name, "contiguous")

    def but(self, **changes: Any) -> Case:
        """A copy with fields replaced; `sizes`, `params`, `layouts` and `values` may be dicts."""
        fixed = {k: tuple(cast(dict[str, Any], v).items()) if isinstance(v, dict) else v for k, v in changes.items()}
        # Mostly nothing changes, some ten times a case; a copy takes 5 us. Of parameters 1 is not 1.0.
        same = "params" not in fixed and all(getattr(self, k) == v for k, v in fixed.items())
        return self if same else replace(self, **fixed)

    def with_size(self, name: str, size: Size) -> Case:
        """A copy in which one named dimension has another size; of "M..." a whole number is that of one dimension."""
        other = (size,) if isinstance(self.size(name), tuple) and isinstance(size, int) else size
        return replace(self, sizes=tuple((k, other if k == name else v) for k, v in self.sizes))

    def text(self) -> str:
        """The case on one line, as `--case` reads it: `M=5 N=7 eps=0.01 x:transposed x@nan draw=1` (dtype apart)."""
        words = [f"{k}={'x'.join(map(str, v)) or '()' if isinstance(v, tuple) else v}" for k, v in self.sizes]
        words += [f"{k}={v!r}".replace(" ", "") for k, v in self.params]
        words += [f"{k}:{v}" for k, v in self.layouts]
        words += [f"{k}@{v}" for k, v in self.values]
        if self.draw:
            words.append(f"draw={self.draw}")
        return " ".join(words)


@dataclass(frozen=True)
class Sighting:
    """A case at which something was seen to be wrong, with how far and how much of the tensor."""

    case: Case
    excess: float | None = None
    wrong: int | None = None
    total: int | None = None


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: what, where, how far, and how to see it again.

    `excess` is |got - want| over the error that a correct op may make at this element. `index` is the
    element of `tensor` that is furthest out. `case` is the smallest case found that still fails, `first` the one
    that it was shrunk from. `elements` says which elements of the first failing case are wrong, `looks_like`
    which known mistake gives the same numbers there. `terms` are what the attainable error at `index` is made of.
    `accepted` is the reason for which it may stand. `between` are the one-sided derivatives at a kink, in order.
    """

    stage: str
    kind: str
    what: str
    case: Case
    tensor: str = ""
    index: tuple[int, ...] | None = None
    got: float | None = None
    want: float | None = None
    excess: float | None = None
    wrong: int | None = None
    total: int | None = None
    where: str = ""
    repro: str = ""
    elements: str = ""
    looks_like: str = ""
    first: Sighting | None = None
    terms: tuple[tuple[str, float], ...] = ()
    accepted: str = ""
    between: tuple[float, float] | None = None

    @classmethod
    def of(cls, kind: str, message: str, case: Case, tensor: str = "", **more: Any) -> Finding:
        """A finding of the stage that runs, whichever that is: who runs it names it. `more` are other fields."""
        return cls("", kind, message, case, tensor, **more)

    @property
    def partial(self) -> bool:
        """Whether it takes some inputs or outputs without the others, so that stages which use all can go on."""
        return self.kind in ("subset", "output-subset")

    def text(self) -> str:
        """What, like what, which, where and how to see it again, in lines."""
        labelled = (("like", self.looks_like), ("which", self.elements), ("where", self.where), ("repro", self.repro))
        return "\n".join([f"[{self.stage}] {self.what}", *(f"  {label}: {text}" for label, text in labelled if text)])


@dataclass(frozen=True)
class Acceptance:
    """A class of findings that may stand: "stage", "stage/kind" or "stage/kind/tensor", and why.

    `level` is the lowest that sees it, `source` where it is written ("accept=" or a file). `expected` says whether
    this run would see it: all dtypes of the op, no single case, that level.
    """

    finding: str
    reason: str
    level: str = "quick"
    source: str = "accept="
    expected: bool = False


@dataclass(frozen=True)
class Profile:
    """How far one tensor is from the truth, for pictures.

    `ratio` is err / attainable error on a grid: the tensor seen as rows x last dimension, each cell the
    maximum of its block. `ulp_edges` and `ulp_counts` are the histogram of distances to the correctly
    rounded result, in units in the last place; the last bin is open.
    """

    tensor: str
    case: Case
    shape: tuple[int, ...]
    ratio: tuple[tuple[float, ...], ...]
    ulp_edges: tuple[float, ...]
    ulp_counts: tuple[int, ...]
    worst: float


@dataclass(frozen=True)
class StageResult:
    """What one stage says. `power` is the smallest relative error it would have caught, 0 for an exact stage.

    `accepted` are findings that may stand, for the reasons that they have; `findings` are all others. `compared` are
    names of results that were held against the reference, `gradients` those of the op that there were, `uncompared`
    outputs that are no tensors; `sizes` the least and the largest of each dimension; `left_out` counts cases for which
    a budget left no time.
    """

    id: str
    title: str
    status: Status
    reason: str = ""
    cases: int = 0
    runs: int = 0
    seconds: float = 0.0
    power: float | None = None
    power_text: str = ""
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    profiles: tuple[Profile, ...] = ()
    accepted: tuple[Finding, ...] = ()
    compared: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    uncompared: tuple[str, ...] = ()
    sizes: tuple[tuple[str, int, int], ...] = ()
    left_out: int = 0


@dataclass(frozen=True)
class Report(Record, Shown):
    """The whole record of one `verify`; true if the backward pass was proved right by every stage that ran.

    `verdict` is "proved" (no finding, at least one stage ran to its end), "finding" or "undecided". `budget` is the
    time in seconds after which no case was begun, if there was one.
    """

    _noun: ClassVar[str] = "report"

    target: str
    verdict: Literal["proved", "finding", "undecided"]
    level: str
    seed: int
    dtypes: tuple[str, ...]
    device: str
    stages: tuple[StageResult, ...]
    seconds: float = 0.0
    started: str = ""
    command: str = ""
    environment: dict[str, str] = field(default_factory=dict[str, str])
    notes: tuple[str, ...] = ()
    acceptances: tuple[Acceptance, ...] = ()
    place: str = ""  # file and line of the op, from the folder of the call; "" for what lies elsewhere
    budget: float | None = None
    schema: str = SCHEMA

    def __bool__(self) -> bool:
        return self.verdict == "proved"

    @property
    def exit_code(self) -> int:
        """0 proved, 1 finding, 3 cannot decide."""
        return EXIT_CODES[self.verdict]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Every finding that may not stand, in the order of the stages."""
        return tuple(f for s in self.stages for f in s.findings)

    @property
    def accepted(self) -> tuple[Finding, ...]:
        """Every finding that may stand, each with its reason."""
        return tuple(f for s in self.stages for f in s.accepted)

    @property
    def covers(self) -> str:
        """What was compared, at which sizes, how often, in a line; "" where no record was kept of it."""
        ran = [stage for stage in self.stages if stage.status in ("passed", "failed")]
        compared = dict.fromkeys(name for stage in ran for name in stage.compared)
        alone = [n for n in dict.fromkeys(n for stage in ran for n in stage.gradients) if n not in compared]
        others = dict.fromkeys(name for stage in ran for name in stage.uncompared)
        if not compared and not alone:
            if not self.stages:
                return "nothing: no stage was left to run"
            nothing = self.verdict == "undecided" and all(stage.status != "undecided" for stage in self.stages)
            return "nothing: no output has a gradient, and none was compared with a reference" if nothing else ""
        ranges: dict[str, tuple[int, int]] = {}
        for name, low, high in (item for stage in ran for item in stage.sizes):
            least, most = ranges.get(name, (low, high))
            ranges[name] = (min(least, low), max(most, high))
        adjoint = any(stage.id == "adjoint" and stage.cases for stage in ran)
        parts = [f"{', '.join(compared)} compared with the reference"] * bool(compared)
        parts += [f"{', '.join(alone)} {'compared with differences' if adjoint else 'without a reference'}"] * bool(
            alone
        )
        parts += ["no gradient"] * (not any(stage.gradients for stage in ran))
        parts += [f"not compared: {', '.join(others)}"] * bool(others)
        sizes = [name + (f" {low} to {high}" if low != high else f" {low}") for name, (low, high) in ranges.items()]
        parts += [", ".join(self.dtypes)] + [", ".join(sizes)] * bool(sizes)
        return (
            f"{'; '.join(parts)}; {count(sum(s.cases for s in ran), 'case')}, {count(sum(s.runs for s in ran), 'run')}"
        )

    def with_stages(self, stages: Iterable[StageResult]) -> Report:
        """The report with these stages, and the verdict that they come to."""
        together = tuple(stages)
        return replace(self, stages=together, verdict=verdict_of(together))

    @property
    def left_out(self) -> str:
        """What the budget left out, in a few words; "" if nothing."""
        lost = [stage.id for stage in self.stages if BUDGET_ENDED in stage.reason]
        cut = sum(stage.left_out for stage in self.stages)
        parts = [f"{count(len(lost), 'stage')} ({some(lost, 5)})"] * bool(lost)
        parts += [f"{cut} of {count(cut + sum(stage.cases for stage in self.stages), 'case')}"] * bool(cut)
        return " and ".join(parts)

    def stage(self, stage_id: str) -> StageResult:
        """The result of one stage; KeyError names the stages there are."""
        for result in self.stages:
            if result.id == stage_id:
                return result
        raise KeyError(f"no stage {stage_id!r} in this report; it has {[s.id for s in self.stages]}")

    def raise_if_failed(self) -> None:
        """Raise VerificationError with the findings, UndecidedError if undecided; return None if proved."""
        if self.verdict == "finding":
            lines = [f"{self.target}: {len(self.findings)} finding(s)"]
            for f in self.findings:
                lines.append(f.text())
            raise VerificationError("\n".join(lines))
        if self.verdict == "undecided":
            reasons = [f"{s.id}: {s.reason}" for s in reasons_once(self.stages) if s.status == "undecided"]
            ran = any(s.runs for s in self.stages)
            reasons = reasons or [f"nothing to prove: it covers {self.covers}" if ran else "no stage ran"]
            raise UndecidedError(f"{self.target}: cannot decide; {'; '.join(reasons)}")


def reasons_once(stages: Sequence[StageResult]) -> tuple[StageResult, ...]:
    """The stages; one that is undecided for the reason of an earlier one refers to that."""
    first: dict[str, str] = {}
    told = list[StageResult]()
    for stage in stages:
        if stage.status == "undecided" and stage.reason in first:
            stage = replace(stage, reason=f"for the same reason as {first[stage.reason]}")
        elif stage.status == "undecided" and stage.reason:
            first[stage.reason] = stage.id
        told.append(stage)
    return tuple(told)


def verdict_of(stages: Sequence[StageResult]) -> Literal["proved", "finding", "undecided"]:
    """The verdict that results of stages come to; none that ran to its end, or compared anything, decides nothing."""
    if any(stage.findings for stage in stages):
        return "finding"
    ran = [stage for stage in stages if stage.status in ("passed", "failed")]
    nothing = any(stage.runs for stage in ran) and not any(stage.compared or stage.gradients for stage in ran)
    return "undecided" if not ran or nothing or any(stage.status == "undecided" for stage in stages) else "proved"
