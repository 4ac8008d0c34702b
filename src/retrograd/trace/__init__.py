"""Every operator of a training step with what its tensors held: NaN provenance, first divergence, precision."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from retrograd.trace.filters import Listing, listing
from retrograd.trace.nan_provenance import Provenance, provenance
from retrograd.trace.schema import Exponents, Op, Stats, Trace
from retrograd.trace.store import load, save

if TYPE_CHECKING:
    from retrograd.trace.bisecting.precision import bisect_precision as bisect_precision
    from retrograd.trace.diffing.api import diff as diff
    from retrograd.trace.diffing.api import twice as twice
    from retrograd.trace.nan_breakpoint import Stop
    from retrograd.trace.recorder import Recorder

# Loaded when they are first used: recording needs no comparison, and reading a file needs no torch.
_HOMES = {
    "bisect_precision": "bisecting.precision",
    "diff": "diffing.api",
    "twice": "diffing.api",
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
    "save",
    "twice",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return _loaded(name)
    raise AttributeError(f"module 'retrograd.trace' has no attribute {name!r}; it has {', '.join(__all__)}")


def _loaded(name: str) -> Any:
    import importlib

    from retrograd.errors import MissingExtraError

    try:
        return getattr(importlib.import_module(f"retrograd.trace.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "numpy"):
            raise
        raise MissingExtraError(error.name, "torch", f"retrograd.trace.{name}") from None


def record(
    model: Any = None,
    *,
    level: str = "fast",
    out: str | os.PathLike[str] | None = None,
    steps: int | None = None,
    compiled: str = "keep",
    breakpoint_on: str | None = None,
    then: Callable[[Stop], None] | None = None,
    engine: str = "auto",
) -> Recorder:
    """Record every operator that runs inside `with`, forward and backward, with statistics of its tensors.

    Results, gradients and random numbers are those of the same run without a recorder, to the bit. Steps end with
    `recorder.step()`, or, as long as it is never called, with each call of an optimizer. The recorded operators are in
    `recorder.trace`, also after an exception.

    Args:
        model: names of modules and parameters are those of this torch.nn.Module; None takes the outermost at work.
        level: "names" reads no numbers. "fast" measures each value once: results when they are made, other values when
            they are first read; views that show the elements of another tensor in another order have no digest of their
            own, and of an optimizer's results only parameters are measured. "full" measures everything, and counts
            elements by sign and binary exponent (`Stats.exponents`).
        out: Also write to this file, .trace or .jsonl.gz, step by step; with several ranks to `x.rank0.trace`, ...
        steps: Stop recording after so many; None records all.
        compiled: what torch.compile has compiled. "keep" lets it run as it is and warns that its operators are not
            seen; "eager" runs it eagerly, which may change last bits; "refuse" raises.
        breakpoint_on: "nan", "inf" or "bad" (either): stop at the first operator with such a result. Waits for the
            device after every operator.
        then: called there with a `Stop`; None opens the debugger of `breakpoint()`.
        engine: "tape" notes operators in compiled code and makes records of them after the step; it is compiled at its
            first use, as by `retrograd.trace.tape.build()`, and stops at nothing. "python" needs no compiler. "auto" is
            the tape where it has been built and where there is a GPU, unless it stops; `recorder.engine` and
            `trace.meta["engine"]` say which it was.

    Raises:
        UsageError: an argument is wrong, or the file cannot be written.
        MissingExtraError: torch is not installed.

    Numerics: no operator is replaced. `rms` is added in float64 (float32 on devices without it); digests and counts are
    integers, so they are the same at every run.
    """
    from retrograd.errors import MissingExtraError

    try:
        from retrograd.trace.recorder import Recorder
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "numpy"):
            raise
        raise MissingExtraError(error.name, "torch", "recording a trace") from None
    return Recorder(
        model,
        level=level,
        out=out,
        steps=steps,
        compiled=compiled,
        breakpoint_on=breakpoint_on,
        then=then,
        engine=engine,
    )
