"""A made-up report with everything a renderer may meet."""

from __future__ import annotations

import math

from retrograd.check.schema import Case, Finding, Profile, Report, Sighting, StageResult

CASE = Case("float32", sizes=(("M...", (2, 3)), ("N", 7)), params=(("eps", 0.01),), layouts=(("x", "transposed"),))
FIRST = CASE.but(sizes=(("M...", (16,)), ("N", 48)), values=(("x", "1e4"),))
TERMS = (("12 sigma: random rounding of the formula", 9e-7), ("u |want|: storing the result", 1e-7), ("3 E", 0.0))
WHAT = "grad_x is wrong in the last column: the mask of the tail block is missing </script><!-- [bold]x[/bold]"
WHERE = "columns 4 to 6 of the last dimension, all rows, from N=5 on, only when x is transposed"
REPRO = "retrograd verify my/very/long/path/to/the/file.py:rms_norm --only oracle --seed 0 --case 'M...=2x3 N=7'"


def finding() -> Finding:
    return Finding(
        "oracle", "value", WHAT, CASE, "grad_x", (0, 1, 6), 1.25, math.nan, 940.4, 3, 42, WHERE, REPRO,
        first=Sighting(FIRST, 1210.0, 700, 768), terms=TERMS,
    )  # fmt: skip


def profile(tensor: str = "grad_x", worst: float = math.inf) -> Profile:
    ratio = ((0.001, 0.001, 1.0, 1.0001), (0.5, 50.0, math.nan, math.inf))
    return Profile(tensor, CASE, (2, 3, 7), ratio, (0.0, 1.0, 2.0, 4.0), (30, 9, 0, 3), worst)


def report(verdict: str = "finding") -> Report:
    bad = verdict == "finding"
    oracle = StageResult(
        "oracle", "Gradient equals the float64 reference", "failed" if bad else "passed", cases=24, runs=96,
        seconds=1.5, power=3e-6, power_text="catches relative errors from 3e-6", notes=("x was rescaled [a]",),
        findings=(finding(),) if bad else (), profiles=(profile(),),
    )  # fmt: skip
    stages = (
        StageResult("empty", "Empty tensors", "passed", cases=1, runs=2, power=0.0, profiles=(profile("grad_w", 0.5),)),
        oracle,
        StageResult("races", "Two runs give the same bits", "skipped", reason="needs a GPU"),
        StageResult("nan", "NaN goes where it should", "undecided", reason="the reference makes NaN"),
    )
    return Report(
        "my/file.py:rms_norm", verdict, "full", 0, ("float32", "bfloat16"), "cpu", stages, 65.4,  # type: ignore[arg-type]
        "2026-11-21T06:00:00", "retrograd verify my/file.py:rms_norm", {"torch": "2.13", "gpu": "<none>"}, ("a note",),
    )  # fmt: skip
