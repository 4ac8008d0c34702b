"""The stages of `verify`: one file each. A new file with a `STAGE` is found by itself and runs in its `order`."""

from __future__ import annotations

import importlib
import pkgutil

from retrograd.check.stages._base import CaseOutcome, Stage, StageContext

__all__ = ["CaseOutcome", "Stage", "StageContext", "load"]


def load() -> list[Stage]:
    """Every stage, cheapest and most decisive first."""
    names = [m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")]
    stages = [importlib.import_module(f"{__name__}.{name}").STAGE for name in names]
    return sorted(stages, key=lambda s: s.order)
