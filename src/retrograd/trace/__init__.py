"""Traces: every operator of a training step with statistics of its tensors; NaN provenance, divergence, precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrograd.core.loading import names_at_first_use
from retrograd.trace.filters import Listing, listing
from retrograd.trace.nan_provenance import Provenance, provenance
from retrograd.trace.schema import Exponents, Op, Stats, Trace
from retrograd.trace.store import load, save

if TYPE_CHECKING:
    from retrograd.trace.bisecting.precision import bisect_precision as bisect_precision
    from retrograd.trace.diffing.compare import diff as diff
    from retrograd.trace.recording import record as record
    from retrograd.trace.recording import repeat_steps as repeat_steps
    from retrograd.trace.recording import twice as twice

# Loaded when they are first used: recording needs no comparison, and reading a file needs no torch.
_HOMES = {
    "bisect_precision": "bisecting.precision",
    "diff": "diffing.compare",
    "record": "recording",
    "repeat_steps": "recording",
    "twice": "recording",
}

__all__ = [
    "Exponents",
    "Listing",
    "Op",
    "Provenance",
    "Stats",
    "Trace",
    "bisect_precision",
    "diff",
    "listing",
    "load",
    "provenance",
    "record",
    "repeat_steps",
    "save",
    "twice",
]

__getattr__, __dir__ = names_at_first_use(__name__, _HOMES, __all__)
