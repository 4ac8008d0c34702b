"""Stage: a list of cases and a check of one case. Running, shrinking, reporting are not its business."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from retrograd.check.cost import CostLimit
from retrograd.check.judge import Judge
from retrograd.check.kernel_faults import Told
from retrograd.check.levels import BUDGETS, Budget
from retrograd.check.op_runner import OpRunner
from retrograd.check.oracle import Oracle
from retrograd.check.reference import Batching
from retrograd.check.schema import Case, Finding
from retrograd.check.spec import OpSpec
from retrograd.check.tensor_comparison import LazyProfile


@dataclass(frozen=True)
class StageContext:
    """What a stage works with, for one dtype of an op.

    Attributes:
        runner: runs the op.
        oracle: has the truth.
        judge: compares the two.
        level, budget: how much is to be done.
        case: the only one to check; None for those that each stage wants.
        dtypes: all that are verified.
        launched: says whether the op has launched Triton kernels: for a GPU one is compiled for each kind of size and
            dtype, and without a GPU a run takes milliseconds.
        cost: which cases are cheap enough.
        left_out: by kind, how many of how many things are run where a level or a limit leaves some out.
        notes: on the present stage, whatever its cases say.
        shared: what of the present stage the dtypes share at level quick, and why (`check.case_sharding`).
        every_configuration: whether autotuned kernels are to run with each, whatever the level says.
        told: which stage tells a fault of an executed kernel.
        unjudged: cases at which the op runs and nothing is compared, as a truth would take too long.
    """

    runner: OpRunner
    oracle: Oracle
    judge: Judge
    level: str
    budget: Budget
    cost: CostLimit
    case: Case | None = None
    dtypes: tuple[str, ...] = ()
    launched: Callable[[], bool] = lambda: False
    left_out: dict[str, tuple[int, int]] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    every_configuration: bool = False
    told: Told = field(default_factory=Told)
    unjudged: set[Case] = field(default_factory=set)

    @property
    def is_dear(self) -> bool:
        """Whether a run of the reference takes so long that no more of them is asked for than must be."""
        return self.spec.reference is not None and self.cost.is_dear(self.runner)

    def emulated(self) -> bool:
        """Whether the op has launched Triton kernels without a GPU."""
        return self.runner.device == "cpu" and self.launched()

    def ran(self, label: str, count: int, of: int) -> None:
        """Note that `count` of so many things are run, where a level or a limit leaves some out."""
        if count < of:
            self.left_out[label] = (count, of)

    @classmethod
    def of(
        cls, spec: OpSpec, dtype: str, *, level: str = "quick", seed: int = 0, device: str = "cpu",
        case: Case | None = None, dtypes: tuple[str, ...] = (), launched: Callable[[], bool] = lambda: False,
        cost: CostLimit | None = None, batching: Batching | None = None, every_configuration: bool = False,
    ) -> StageContext:  # fmt: skip
        """A context in which nothing has run yet; `cost` and `batching` are what is known of other dtypes' cases."""
        runner, budget = OpRunner(spec, dtype, seed, device), BUDGETS[level]
        runner.batching = batching or runner.batching
        oracle = Oracle(runner, budget.noise_runs)
        cost = cost or CostLimit.of_level(level)
        return cls(
            runner, oracle, Judge(runner, oracle), level, budget, cost, case, dtypes, launched,
            every_configuration=every_configuration,
        )  # fmt: skip

    @property
    def spec(self) -> OpSpec:
        """The op as it was described."""
        return self.runner.spec

    @property
    def base(self) -> Case:
        """The ordinary case."""
        return self.runner.base


@dataclass
class CaseOutcome:
    """What the check of one case says. `power` is the smallest relative error it would have caught; 0 is exact.

    `undecided` are the reasons of cases that nobody can decide, beside which others were; `accepted` are findings that
    may stand.
    """

    findings: list[Finding] = field(default_factory=list)
    profiles: list[LazyProfile] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    power: float | None = 0.0
    power_text: str = "exact: any bit"
    undecided: list[str] = field(default_factory=list)
    accepted: list[Finding] = field(default_factory=list)

    def find(self, kind: str, message: str, case: Case, tensor: str = "", **more: Any) -> None:
        """Add a finding; arguments as of `Finding.of`."""
        self.findings.append(Finding.of(kind, message, case, tensor, **more))

    def add(self, other: CaseOutcome) -> None:
        """Take over what the check of another case says, but for its power and profiles."""
        self.findings += other.findings
        self.accepted += other.accepted
        self.notes += other.notes
        self.undecided += other.undecided
        self.power_text = self.power_text or other.power_text


@dataclass(frozen=True)
class Stage:
    """One stage. `id` is stable (junit names, --only, --skip).

    Args:
        id: stable name.
        title: the question it answers, a few words.
        order: place in the run; cheapest first.
        check: checks one case.
        cases: the cases to check; the ordinary one, if not said otherwise.
        needs_reference: skipped without one.
        after: stages whose failure in the same dtype makes this one meaningless, so it is skipped.
        shrinks: whether a failing case is shrunk; not where a check takes too long to be made forty times.
        applies: "" if the op is to be checked by this stage, else why it is not.
        sharded: whether level quick may spread its cases over the dtypes (`check.case_sharding`).
        hears: whether faults of executed kernels in its cases are told, beside those of bounds and races.
    """

    id: str
    title: str
    order: int
    check: Callable[[StageContext, Case], CaseOutcome]
    cases: Callable[[StageContext], list[Case]] = lambda context: [context.base]
    needs_reference: bool = False
    after: tuple[str, ...] = ()
    shrinks: bool = True
    applies: Callable[[OpSpec], str] = lambda spec: ""
    sharded: bool = False
    hears: bool = False
