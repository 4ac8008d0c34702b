"""Comparing runs that are in memory or in files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from retrograd.errors import UsageError
from retrograd.trace.diffing.compare import compare
from retrograd.trace.diffing.schema import TraceDiff
from retrograd.trace.schema import Trace

Source = Trace | str | os.PathLike[str]


def diff(a: Source, b: Source, level: str | None = None) -> TraceDiff:
    """Name the first operator at which two runs differ by themselves, and why; what follows from it is counted.

    Operators are aligned first, so runs may differ in them: patience and Myers' algorithm over name, module, phase,
    arguments and sizes, then over less and less of these. An operator is a cause if its inputs are the same on both
    sides and its outputs are not; or if only one side has it; or if an input differs that no recorded operator made.

    Args:
        a, b: each a `Trace`, or a file that a recorder wrote.
        level: "bitwise": each bit counts. "attainable": what rounding explains does not (see `diffing.bounds` for the
            bound). None takes "bitwise" where both ran on the same kind of device in the same dtypes, otherwise
            "attainable".

    Returns:
        Causes in the order of the run, the neighbourhood of the first, counts. True if nothing differs.

    Raises:
        TraceError: a file is no trace, or damaged.
        UsageError: a file cannot be read, a trace is empty, or `level` is wrong or was not recorded.
    """
    (one, name), (other, other_name) = _loaded(a, "A"), _loaded(b, "B")
    return compare(one, other, level, (name, other_name))


def _loaded(source: Source, letter: str) -> tuple[Trace, str]:
    if isinstance(source, Trace):
        return source, f"run {letter}"
    if not isinstance(source, (str, os.PathLike)):
        raise UsageError(f"`{letter.lower()}` is {type(source).__name__}, expected a Trace or a file with one")
    from retrograd.trace.store import load

    return load(source), Path(source).name


def twice(step: Callable[..., Any], model: Any = None, *, state: Sequence[Any] = (), level: str = "full") -> TraceDiff:
    """Run a step twice from the same state and name the first operator that gave other bits the second time.

    Args:
        step: called with the model if it takes an argument, else without.
        model: a torch.nn.Module, whose parameters, buffers and gradients are put back before each run; without one,
            what the step changes stays changed.
        state: optimizers and what else has a state_dict that the step changes.
        level: what to record of the tensors, "full" or "fast" (see `retrograd.trace.record`).

    Returns:
        The comparison, bit for bit: true if the step is deterministic as far as two runs show. Generators of torch,
        Python and NumPy are put back, so a random operator that differs draws from one of its own.

    Raises:
        UsageError: an argument is wrong, or the step runs no operator.
        MissingExtraError: torch is not installed.
    """
    from retrograd.trace import record

    if level not in ("full", "fast"):
        raise UsageError(f"`level` is {level!r}, expected 'full' or 'fast': without values bits cannot be compared")
    recorders = [record(model, level=level) for _ in range(2)]
    from retrograd.trace.bisecting.replay import Replay

    replay = Replay(step, model, state)
    for recorder in recorders:
        replay.restore()
        with recorder:
            replay.call()
    replay.restore()
    return compare(recorders[0].trace, recorders[1].trace, "bitwise", ("first run", "second run"))
