"""Flaky tests: run again under control, told apart, counted, extrapolated, explained. Starts without torch.

report = retrograd.flake.run("tests/test_x.py::test_y", seeds=30)
retrograd.flake_rate(lambda seed: margin_of(seed), seeds=300).assert_below(0.01)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrograd.core.loading import names_at_first_use

if TYPE_CHECKING:
    from retrograd.flake.examination import run as run
    from retrograd.flake.in_process import flake_rate as flake_rate
    from retrograd.flake.schema import Flake as Flake
    from retrograd.flake.schema import FlakeReport as FlakeReport

__all__ = ["Flake", "FlakeReport", "flake_rate", "run"]
_HOMES = {"Flake": "schema", "FlakeReport": "schema", "flake_rate": "in_process", "run": "examination"}

__getattr__, __dir__ = names_at_first_use(__name__, _HOMES, __all__)
