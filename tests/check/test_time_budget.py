"""A time budget: ordinary cases come first, what was found stays, and what was left out is told."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from retrograd import op, tensor, verify
from retrograd.check import isolation, time_budget
from retrograd.check.acceptance import settled
from retrograd.check.isolation import ProcessLimits, VerifyCommand, verify_isolated
from retrograd.check.schema import BUDGET_ENDED, Acceptance, Report
from retrograd.errors import UndecidedError, UsageError
from retrograd.report import to_text

DTYPES = ("float32", "bfloat16")


class Clock:
    """Time that passes with calls of an op alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time_budget.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def square(clock: Clock, wrong: Callable[[torch.Tensor], bool] = lambda x: False) -> Any:
    """x * x, a call of which takes a second; its gradient is wrong where that is said."""

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            clock.now += 1
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return (2.5 if wrong(x) else 2) * grad * x

    return op(Square.apply, lambda x: x * x, {"x": tensor("M", "N")}, dtypes=DTYPES, name="square")


def run(spec: Any, budget: float | None = None, **options: Any) -> Report:
    """At level quick, without what takes longest, and what says whether Triton has been loaded."""
    skip = [] if "only" in options else ["bounds", "compiler", "races"]
    return verify(spec, level="quick", skip=skip, budget=budget, **options)


def test_all_in_time_is_what_it_is_without_a_budget(clock: Clock) -> None:
    whole, within = run(square(clock)), run(square(clock), 1e9)
    assert within.verdict == "proved"
    assert within.left_out == ""
    assert "PROVED in" in to_text(within)
    for mine, usual in zip(within.stages, whole.stages, strict=True):
        for name in (
            "id",
            "status",
            "reason",
            "cases",
            "power",
            "power_text",
            "notes",
            "compared",
            "sizes",
            "left_out",
        ):
            assert getattr(mine, name) == getattr(usual, name), (mine.id, name)
    assert within.covers.partition(" cases")[0] == whole.covers.partition(" cases")[0]


def test_ordinary_cases_come_first(clock: Clock) -> None:
    seen: list[tuple[str, str]] = []
    stage = [""]

    def watch(event: str, about: Any) -> None:
        if event == "start":
            stage[0] = about.id
        elif event == "case":
            seen.append((about.dtype, stage[0]))

    run(square(clock), 1e9, watch=watch)
    stages = list(dict.fromkeys(name for _, name in seen))
    # adjoint, kinks and batch look at one dtype.
    first = [name for dtype, name in seen[: len(seen)] if dtype == DTYPES[0]]
    ordinary = len(list(itertools.takewhile(lambda case: case[0] == DTYPES[0], seen)))
    assert len(set(first[:ordinary])) == ordinary  # one case a stage
    others = list(itertools.takewhile(lambda case: case[0] == DTYPES[1], seen[ordinary:]))
    assert len({name for _, name in others}) == len(others)
    assert set(stages) == {name for _, name in seen[: ordinary + len(others)]}


@pytest.mark.parametrize("seconds", [1, 10, 40, 80, 150])
def test_what_is_left_out_is_told(seconds: int, clock: Clock) -> None:
    whole, within = run(square(clock)), run(square(clock), seconds)
    assert [stage.id for stage in within.stages] == [stage.id for stage in whole.stages]
    lost = [stage for stage in within.stages if BUDGET_ENDED in stage.reason]
    assert within.verdict == ("undecided" if lost else "proved")
    assert within.left_out
    text = to_text(within)
    assert f"with a budget of {seconds} s, which left out" in text
    assert ("PROVED" in text) == (not lost)
    for mine, usual in zip(within.stages, whole.stages, strict=True):
        if mine in lost:
            assert mine.status == "undecided"
        else:
            assert mine.cases + mine.left_out == usual.cases
            assert mine.status == usual.status
        assert any("left out" in note for note in mine.notes) == bool(mine.left_out)
    if seconds == 1:
        assert [stage.cases for stage in within.stages] == [1] + [0] * (len(whole.stages) - 1)
    assert Report.from_json(within.to_json()) == within


def test_a_dtype_that_nobody_looked_at_is_undecided(clock: Clock) -> None:
    within = run(square(clock), 2, only=["mutation", "algebra"])
    assert [(s.id, s.status, s.cases, s.reason) for s in within.stages] == [
        ("mutation", "undecided", 1, f"bfloat16: {BUDGET_ENDED}"),
        ("algebra", "undecided", 0, BUDGET_ENDED),
    ]


def test_a_wrong_gradient_is_found_in_little_time(clock: Clock) -> None:
    usual = run(square(clock, lambda x: True)).findings[0]
    began = clock.now
    found: list[float] = []
    within = run(
        square(clock, lambda x: True), 60, watch=lambda event, _: event == "finding" and found.append(clock.now)
    )
    assert within.verdict == "finding"
    assert found[0] - began < 60
    finding = within.stage("oracle").findings[0]
    assert (finding.kind, finding.tensor) == (usual.kind, usual.tensor)
    assert "x 1.25" in finding.looks_like or finding.looks_like == usual.looks_like
    assert within.left_out
    assert "which left out" in to_text(within)


def test_what_ordinary_cases_do_not_show_is_never_called_proved(clock: Clock) -> None:
    strided = lambda x: not x.is_contiguous()  # noqa: E731
    assert run(square(clock, strided), 1e9).verdict == "finding"
    for seconds in (30, 60, 100):
        within = run(square(clock, strided), seconds)
        if within.verdict != "finding":
            assert within.left_out
            assert "PROVED in" not in to_text(within)


def test_an_acceptance_is_not_stale_where_cases_were_left_out(clock: Clock) -> None:
    stage = run(square(clock), 4, only=["layouts"]).stage("layouts")
    assert (stage.status, stage.left_out > 0) == ("passed", True)
    by = (Acceptance("layouts/wrong-value", "known", expected=True),)
    assert settled(stage, by) == stage
    assert settled(run(square(clock), only=["layouts"]).stage("layouts"), by).status == "failed"


@pytest.mark.parametrize("budget", [0, -1.0])
def test_no_time_is_refused(budget: float, clock: Clock) -> None:
    with pytest.raises(UsageError, match="expected a time above 0"):
        run(square(clock), budget)


# ---- In a process of its own

_OP = """
import sys, time
from pathlib import Path
import torch
from retrograd import op, tensor

folder = Path(__file__).parent
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return misbehave(x, g)

def hang():
    (folder / "hangs").touch()
    while True: time.sleep(1)

spec = op(Square.apply, lambda x: x * x, dict(x=tensor("M", "N")), dtypes=["float32"], name="square")
"""
HANGS = "def misbehave(x, g):\n    if not x.is_contiguous(): hang()\n    return 2 * g * x\n"
# Told at the ordinary case; smaller ones, which are tried then, do not end.
WRONG = "def misbehave(x, g):\n    if x.shape != (7, 48): hang()\n    return 3 * g * x\n"
CRASHES = (
    "import ctypes\ndef misbehave(x, g):\n    if not x.is_contiguous(): ctypes.string_at(0)\n    return 2 * g * x\n"
)
IMPORTS = "hang()\n"


def isolated(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch, only: str) -> Report:
    """Verified in a process; an hour passes at once as soon as the op says that it hangs."""
    (folder / "op.py").write_text(_OP + body)
    real, began = isolation.time.monotonic, isolation.time.monotonic()
    monkeypatch.setattr(
        isolation, "time", Stopped(lambda: real() if not (folder / "hangs").exists() else began + 1e6, isolation.time)
    )
    monkeypatch.chdir(folder)
    words = ("op.py:spec", "--level", "quick", "--seed", "0", "--device", "cpu")
    return verify_isolated(VerifyCommand(words, ("--only", only)), ProcessLimits(300.0, 0, 3600.0))


class Stopped:
    """The module `time` with another clock, for one module: `core.subprocesses` keeps its own."""

    def __init__(self, monotonic: Callable[[], float], stock: Any) -> None:
        self.monotonic, self._stock = monotonic, stock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)


def test_a_case_that_does_not_end_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = isolated(tmp_path, HANGS, monkeypatch, "algebra,layouts")
    assert report.budget == 3600.0
    layouts = report.stage("layouts")
    assert layouts.left_out
    assert any("had not ended" in note and "x:" in note for note in layouts.notes)
    assert report.left_out == f"{layouts.left_out} of {layouts.left_out + layouts.cases + 1} cases"
    assert "PROVED in" not in to_text(report)


def test_what_was_told_stays_where_it_could_not_be_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = isolated(tmp_path, WRONG, monkeypatch, "oracle")
    assert report.verdict == "finding"
    assert [(f.stage, f.tensor) for f in report.findings] == [("oracle", "grad x")]
    assert report.stage("oracle").status == "failed"


def test_a_crash_ends_its_stage_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = isolated(tmp_path, CRASHES, monkeypatch, "algebra,layouts,shapes")
    assert {s.id: s.status for s in report.stages} == {"algebra": "passed", "layouts": "failed", "shapes": "passed"}
    assert [f.kind for f in report.findings] == ["crash"]


def test_an_import_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UndecidedError, match="still being imported at the end of the budget of 3600 s"):
        isolated(tmp_path, IMPORTS, monkeypatch, "oracle")
