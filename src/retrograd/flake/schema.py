"""Record of a flake examination, as plain data: runs with their margins, rates, tails, reasons, and their JSON.

Standard library only, so that a record can be read and rendered without torch, pytest or SciPy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from retrograd.core.notebook import Shown
from retrograd.core.schema import Record
from retrograd.errors import UndecidedError, UsageError, VerificationError
from retrograd.flake import binomial

SCHEMA = "retrograd.flake/1"

Outcome = Literal["passed", "failed", "error", "crashed", "hung", "skipped"]
Verdict = Literal["steady", "flaky", "broken", "undecided"]
Kind = Literal["seed", "run", "order", "environment"]

# What a kind means, for every renderer.
KINDS = {
    "seed": "seed flake: the same seed gives the same outcome, other seeds another",
    "run": "run flake: the same seed gives different outcomes",
    "order": "order flake: the outcome depends on what ran before in the process",
    "environment": "environment: the outcome depends on threads or environment variables",
}
EXIT_CODES = {"steady": 0, "flaky": 1, "broken": 1, "undecided": 3}
# "error" is a failure in a fixture: for who waits for green it is the same.
FAILURES = ("failed", "error", "crashed", "hung")


@dataclass(frozen=True)
class Margin:
    """The comparisons that one line of a test made in one run.

    `worst` is the largest err / tol (inf where a side is not finite or the tolerance is 0), `rest` the largest among
    the elements within the tolerance. `wrong` of `total` elements are beyond it. `ulps` is the tolerance of the worst
    element in units in the last place of its dtype. `got_bits`, `want_bits` are digests of everything compared.
    """

    site: str
    call: str
    worst: float
    rest: float
    wrong: int
    total: int
    calls: int = 1
    dtype: str = ""
    ulps: float | None = None
    got: float | None = None
    want: float | None = None
    index: tuple[int, ...] = ()
    got_bits: str = ""
    want_bits: str = ""


@dataclass(frozen=True)
class Run:
    """One run of the test, and all that was controlled in it.

    `process` counts processes, `place` the runs before it in the same process; `before` are other tests that ran
    first in it; `fill` is "", "control" (torch's deterministic mode) or "nan" (that, and fresh memory is NaN).
    """

    seed: int
    outcome: Outcome
    stage: str = "seeds"
    setting: str = ""
    process: int = 0
    place: int = 0
    hash_seed: int | None = None
    before: tuple[str, ...] = ()
    fill: str = ""
    message: str = ""
    seconds: float = 0.0
    margins: tuple[Margin, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether the run counts as a failure: wrong, an error in a fixture, a crash, or beyond the time limit."""
        return self.outcome in FAILURES

    @property
    def bits(self) -> tuple[Any, ...]:
        """All that can differ between two runs that should be the same: the outcome and what was compared."""
        return (self.outcome, *((m.site, m.calls, m.got_bits, m.want_bits) for m in self.margins))


@dataclass(frozen=True)
class Rate:
    """Failures in independent runs; `low` and `high` hold the true probability at `level` (Clopper-Pearson)."""

    failures: int
    runs: int
    low: float
    high: float
    level: float

    @property
    def share(self) -> float:
        """Failures per run; 0 if nothing ran."""
        return self.failures / self.runs if self.runs else 0.0


@dataclass(frozen=True)
class Tail:
    """P(a run's margin exceeds 1) extrapolated from the margins; where it is not `supported`, `reason` says why.

    `jumps` says that failures were seen which the margins of passing runs do not lead to. `shows` is the smallest n for
    which n runs fail at least once with 95 % confidence, None where the probability is beyond what the runs can tell.
    """

    probability: float
    low: float
    high: float
    level: float
    runs: int
    supported: bool
    reason: str = ""
    jumps: bool = False
    shows: int | None = None


@dataclass(frozen=True)
class Reason:
    """Why it fails: a kind (kink, accumulation, tolerance, uninitialised, hash, state, ...) and the evidence."""

    kind: str
    text: str


@dataclass(frozen=True)
class Flake(Shown):
    """What is known about one test; true if no run failed.

    `verdict` is "steady" (no failure seen), "flaky", "broken" (every run fails) or "undecided" (nothing ran).
    `counting` says what the rate counts as one independent draw of chance. `shows` is the smallest n for which n runs
    fail at least once with 95 % confidence, at the rate's estimate and at the ends of its interval (few, many).
    """

    target: str
    verdict: Verdict
    rate: Rate
    counting: Literal["seeds", "runs", "processes"] = "seeds"
    kinds: tuple[Kind, ...] = ()
    tail: Tail | None = None
    reasons: tuple[Reason, ...] = ()
    shows: tuple[int | None, int | None, int | None] = (None, None, None)
    repro: tuple[str, ...] = ()
    settings: tuple[tuple[str, Rate], ...] = ()
    failing_seeds: tuple[int, ...] = ()
    message: str = ""
    notes: tuple[str, ...] = ()
    runs: tuple[Run, ...] = ()

    def __bool__(self) -> bool:
        return self.verdict == "steady"

    def assert_below(self, limit: float, *, confidence: float = 0.95) -> None:
        """Assert that the runs prove a failure probability below `limit`.

        The bound is the exact one-sided one from the counts alone, so it holds whatever the margins look like: no
        failure in 299 runs proves less than 1 % at 95 %.

        Raises:
            VerificationError (an AssertionError): they do not; says whether it failed too often or ran too rarely.
            UsageError: `limit` or `confidence` is no probability.
            MissingExtraError: SciPy is not installed.
        """
        if not 0 < limit <= 1:
            raise UsageError(f"`limit` is {limit}, expected a probability above 0, such as 0.01")
        rate = self.rate
        bound = binomial.upper(rate.failures, rate.runs, confidence) if rate.runs else 1.0
        if bound < limit:
            return
        text = f"{self.target}: {rate.failures} of {rate.runs} runs fail; at {confidence:.0%} that proves less than "
        text += f"{bound:.3g} only, not less than {limit:g}"
        if rate.failures:
            text += f"; failing seeds: {', '.join(map(str, self.failing_seeds[:10]))}"
            text += f"\nfirst failure: {self.message}" if self.message else ""
        else:
            text += f"; {binomial.runs_to_show(limit, confidence)} runs without a failure would"
        raise VerificationError(text)

    def raise_if_failed(self) -> None:
        """Raise VerificationError if a run failed, UndecidedError if nothing ran."""
        if self.verdict == "undecided":
            raise UndecidedError(f"{self.target}: cannot decide; {'; '.join(self.notes) or 'no run had an outcome'}")
        if not self:
            lines = [f"{self.target}: {self.rate.failures} of {self.rate.runs} runs fail ({', '.join(self.kinds)})"]
            lines += [f"  {reason.kind}: {reason.text}" for reason in self.reasons]
            lines += [f"  repro: {line}" for line in self.repro]
            raise VerificationError("\n".join(lines))


@dataclass(frozen=True)
class FlakeReport(Record, Shown):
    """The record of one `retrograd flake`: one Flake a test; true if no run of any test failed."""

    _noun: ClassVar[str] = "flake report"

    flakes: tuple[Flake, ...]
    seconds: float = 0.0
    started: str = ""
    command: str = ""
    environment: dict[str, str] = field(default_factory=dict[str, str])
    schema: str = SCHEMA

    def __bool__(self) -> bool:
        return all(self.flakes)

    @property
    def exit_code(self) -> int:
        """1 if any run of any test failed, else 3 if a test could not be decided, else 0."""
        codes = {EXIT_CODES[flake.verdict] for flake in self.flakes}
        return 1 if 1 in codes else max(codes, default=0)

    def raise_if_failed(self) -> None:
        """Raise for the first test that is not steady, as `Flake.raise_if_failed` does."""
        for flake in self.flakes:
            flake.raise_if_failed()
