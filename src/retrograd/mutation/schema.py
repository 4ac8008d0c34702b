"""Record of `retrograd mutate`: mutants and what became of each, by rarity. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from retrograd.core.notebook import Shown
from retrograd.core.schema import Record

MUTATION_SCHEMA = "retrograd.mutation/1"

# Whether a result is NaN where its own input is: relu and a comparison differ in it, which is a convention.
OWN_NAN = "a NaN's own element"
# At which inputs a mutant differs from the original, the most ordinary first.
RARITIES = (
    "every input", "some inputs", "parameters", "sizes", "special values", "layouts", "subset of gradients", "dtypes",
    OWN_NAN, "order or races", "found by verify alone",
)  # fmt: skip
# Of a mutant: it differs; no input was found at which it does; it differs only where the gradient jumps; it raises at
# every ordinary input; it ends its process; it never ends; it cannot stand in the place of the function.
Fate = Literal["differs", "equivalent", "kink", "raises", "crashed", "timed out", "not applicable"]


@dataclass(frozen=True)
class Mutant:
    """One change of one function.

    `id` is made of the function, the operator and the change, so that it stays from run to run while the function
    does. `level` is "python", "triton", "ttir" or "operation"; the last two have no `file`. `line` is that of the
    change in `file`; `diff` is a unified one.
    """

    id: str
    level: str
    function: str
    operator: str
    file: str
    line: int
    diff: str


@dataclass(frozen=True)
class Judgement:
    """What a judge ("verify", or "tests" for the user's command) says of a mutant, why, and after how long."""

    judge: str
    killed: bool
    why: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class MutantResult:
    """What became of a mutant.

    `rarity` is one of RARITIES for one that differs, else "". `case` is the smallest input that shows it, as `--case`
    of verify reads it, in `dtype`; `difference` what is seen there, and `test` a test that would have noticed.
    """

    mutant: Mutant
    fate: Fate
    rarity: str = ""
    dtype: str = ""
    case: str = ""
    difference: str = ""
    test: str = ""
    judgements: tuple[Judgement, ...] = ()
    seconds: float = 0.0

    def killed(self, judge: str) -> bool:
        """Whether a judge notices it."""
        return any(j.killed for j in self.judgements if j.judge == judge)


@dataclass(frozen=True)
class MutationReport(Record, Shown):
    """A run: the op, the seed that chose the mutants, how many there were to choose from, and each one's result.

    `judges` are who judged, the one whose survivors count first. `least` is the share that this judge must kill.
    """

    _noun: ClassVar[str] = "mutation report"

    target: str
    seed: int
    level: str
    functions: tuple[str, ...]
    candidates: int
    results: tuple[MutantResult, ...]
    judges: tuple[str, ...]
    seconds: float = 0.0
    started: str = ""
    command: str = ""
    least: float = 0.0
    notes: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict[str, str])
    schema: str = MUTATION_SCHEMA

    @property
    def differing(self) -> tuple[MutantResult, ...]:
        """Mutants that are known to compute something else, and do not raise everywhere."""
        return tuple(r for r in self.results if r.fate == "differs")

    def survivors(self, judge: str) -> tuple[MutantResult, ...]:
        """Those of which a judge notices nothing, the most ordinary first."""
        left = [r for r in self.differing if not r.killed(judge)]
        return tuple(sorted(left, key=lambda r: RARITIES.index(r.rarity)))

    def score(self, judge: str) -> float:
        """Share of the differing mutants that a judge kills; 1 where there is none."""
        return 1 - len(self.survivors(judge)) / len(self.differing) if self.differing else 1.0

    @property
    def exit_code(self) -> int:
        """0, or 1 where the first judge kills a smaller share than asked for."""
        return 1 if self.score(self.judges[0]) < self.least else 0
