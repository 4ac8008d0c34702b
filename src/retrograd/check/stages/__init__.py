"""The stages of `verify`: one file each. A new file with a `STAGE` is found by itself and runs in its `order`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Sequence

from retrograd.check.stages._base import CaseOutcome, Stage, StageContext
from retrograd.core.loading import near
from retrograd.errors import UsageError

__all__ = ["CaseOutcome", "Stage", "StageContext", "choose", "load"]


def load() -> list[Stage]:
    """Every stage, cheapest and most decisive first."""
    names = [m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")]
    stages = [importlib.import_module(f"{__name__}.{name}").STAGE for name in names]
    return sorted(stages, key=lambda s: s.order)


def choose(only: Sequence[str] = (), skip: Sequence[str] = ()) -> list[Stage]:
    """The stages to run; UsageError for an unknown id."""
    every = load()
    ids = [s.id for s in every]
    for label, names in (("only", only), ("skip", skip)):
        if isinstance(names, str) or not isinstance(names, Iterable):
            raise UsageError(f"`{label}` is {names!r}, expected a sequence of stages such as ['oracle']")
        if unknown := [w for w in names if w not in ids]:
            close = near(unknown[0], ids)
            raise UsageError(f"`{label}` names {unknown}, expected stages among {', '.join(ids)}{close}")
    return [s for s in every if (not only or s.id in only) and s.id not in skip]
