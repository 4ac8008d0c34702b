"""Recording of runs: of what runs inside `with`, and of a step that is run twice and compared bit for bit."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec

import torch

from retrograd.errors import UsageError
from retrograd.trace.bisecting.replay import Replay
from retrograd.trace.diffing.compare import compare
from retrograd.trace.diffing.schema import TraceDiff
from retrograd.trace.nan_breakpoint import Stop
from retrograd.trace.recorder import Recorder
from retrograd.trace.repeating.steps import StepRepeater

LEVELS = ("names", "fast", "full")


_Arguments = ParamSpec("_Arguments")


def _file_by_name(function: Callable[_Arguments, Recorder]) -> Callable[_Arguments, Recorder]:
    """`record`, which says how a file is named where one comes behind the model."""

    @wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Recorder:
        if len(args) > 1:
            raise UsageError(
                f"`record` has one argument without a name, the model; write record(model, out={args[1]!r})"
            )
        return function(*args, **kwargs)

    return call


@_file_by_name
def record(
    model: torch.nn.Module | None = None,
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
            the tape where it has been built, unless it stops; else it is built, at once where there is a GPU, elsewhere
            in the background for later. `recorder.engine` and `trace.meta["engine"]` say which it was.

    Raises:
        UsageError: an argument is wrong, or the file cannot be written.
        MissingExtraError: torch is not installed.

    Numerics: no operator is replaced. `rms` is added in float64; digests and counts are
    integers, so they are the same at every run.
    """
    _check(model, level, steps, breakpoint_on)
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
    if level not in ("full", "fast"):
        raise UsageError(f"`level` is {level!r}, expected 'full' or 'fast': without values bits cannot be compared")
    recorders = [record(model, level=level) for _ in range(2)]
    replay = Replay(step, model, state)
    for recorder in recorders:
        replay.restore()
        with recorder:
            replay.call()
    replay.restore()
    return compare(recorders[0].trace, recorders[1].trace, "bitwise", ("first run", "second run"))


def repeat_steps(every: int = 100, *, ranks: bool = False, steps: int | None = None) -> StepRepeater:
    """Execute the operators of sampled steps of a long run twice, inside `with`, and compare them bit for bit.

    A device that now and then computes something else, a race, memory that goes bad: they show before the optimizer
    steps, and nothing of them reaches a checkpoint. Of two executions that differ four more say what it is a case of.
    Results, gradients and random numbers of the program stay what they are, to the bit. A sampled step needs memory for
    one result and for what an operator writes once more, and waits for the device after each operator: small operators
    take ten times as long, large ones little more than twice.

    Steps end with each call of an optimizer. Executed once are collectives, kernels that torch.compile has fused or
    that are launched beside operators, operators that are not PyTorch's own, and copies between devices; the outcome
    counts them.

    Args:
        every: sample the first step and then each of so many; 1 samples all.
        ranks: of a job of several ranks: all of them end before the same update, with what each has found; and copies
            of parameters on several ranks (DDP, replicated DTensors) and their reduced gradients are compared. All
            ranks must give this, and step their optimizers alike.
        steps: sample none after so many steps; None has no end.

    Returns:
        A context manager, whose `outcome` is what has been shown (`RepeatedSteps`).

    Raises:
        UsageError: an argument is wrong.
        ExecutionsDifferError: in the program, before the update: an operator gave other bits, or copies are not equal.
            Operators whose bits may vary, as those that add with atomics on a GPU, are in the outcome alone.
    """
    for name, value in (("every", every), ("steps", 1 if steps is None else steps)):
        if not isinstance(value, int) or value < 1:
            raise UsageError(f"`{name}` is {value!r}, expected a positive integer")
    return StepRepeater(every, ranks, steps)


def _check(model: Any, level: str, steps: int | None, breakpoint_on: str | None) -> None:
    if model is not None and not isinstance(model, torch.nn.Module):
        hint = f"; a file is named by out={model!r}" if isinstance(model, (str, os.PathLike)) else ""
        raise UsageError(f"`model` is a {type(model).__name__}, expected a torch.nn.Module, or None{hint}")
    if level not in LEVELS:
        raise UsageError(f"`level` is {level!r}, expected one of {', '.join(map(repr, LEVELS))}")
    if steps is not None and (not isinstance(steps, int) or steps < 1):
        raise UsageError(f"`steps` is {steps!r}, expected a positive integer, or None for all")
    if breakpoint_on is not None and level == "names":
        raise UsageError("`breakpoint_on` needs numbers, but level='names' reads none; use level='fast'")
