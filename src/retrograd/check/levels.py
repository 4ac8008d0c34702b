"""Levels of `verify`: how many repeats, draws, shapes and randomly rounded runs "quick" and "full" do."""

from __future__ import annotations

from dataclasses import dataclass

from retrograd.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How much of everything a level does.

    Attributes:
        noise_runs: randomly rounded runs of the reference behind a tolerance, before an alarm.
        repeats: runs of the determinism stage.
        draws: of the ordinary case in the oracle stage.
        shapes: of the shapes stage, beside those where all sizes are alike.
        bounds_shapes: of these in the bounds stage, beside the ordinary case.
        directions: along which the adjoint stage differentiates the forward, for each input.
        extremes: of `extreme_values.NAMES`, which are in the order of how much each finds.
        crossed: combinations of parameters that each extreme meets beside the first.
        combinations: of parameters, beyond which those that cover every pair of values stand for all.
        configurations: of autotuned kernels, beside the first.
        elements: that all operators of the reference may make together in a case of the shapes stage.
        work: of the reference in the cases of a sweep together, each run counted once, in such elements (`cost.work`).
    """

    noise_runs: int
    repeats: int
    draws: int
    shapes: int
    bounds_shapes: int
    directions: int
    extremes: int
    crossed: int
    combinations: int
    configurations: int
    elements: int
    work: int


BUDGETS = {
    "quick": Budget(
        noise_runs=6,
        repeats=20,
        draws=1,
        shapes=9,
        bounds_shapes=0,
        directions=1,
        extremes=6,
        crossed=1,
        combinations=12,
        configurations=3,
        elements=1 << 21,
        work=1 << 24,
    ),
    "full": Budget(
        noise_runs=8,
        repeats=60,
        draws=3,
        shapes=40,
        bounds_shapes=6,
        directions=3,
        extremes=12,
        crossed=4,
        combinations=64,
        configurations=63,
        elements=1 << 25,
        work=1 << 40,
    ),
}


def check_level(level: str, seed: int, configs: str = "some") -> None:
    """UsageError if there is no such level or choice of configurations, or the seed is no whole number."""
    if level not in BUDGETS:
        raise UsageError(f"`level` is {level!r}, expected one of {', '.join(BUDGETS)}")
    if configs not in ("some", "all"):
        raise UsageError(f"`configs` is {configs!r}, expected some or all")
    if not isinstance(seed, int):
        raise UsageError(f"`seed` is {seed!r}, expected a whole number")


def repeats_for_noise(device: str) -> int:
    """Runs that show whether an op differs from itself; on a GPU it may do so in a few of a hundred."""
    return 100 if device.startswith("cuda") else 20
