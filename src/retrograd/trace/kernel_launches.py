"""Triton kernels that are launched beside operators, as in an autograd.Function: seen where Triton is asked to run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from retrograd.core.import_hook import AfterImport

if TYPE_CHECKING:
    from retrograd.trace.recorder import Recorder
    from retrograd.trace.value_ids import Value

_RUNS = {"triton.runtime.jit": "JITFunction", "triton.runtime.interpreter": "InterpretedFunction"}


class Kernel:
    """A Triton kernel in the place of an operator."""

    launch, silent, random, makes_memory, view = True, False, False, False, ""

    def __init__(self, name: str) -> None:
        self.name = f"triton::{name}"


@cache
def kernel(name: str) -> Any:
    """The kernel of this name, as an operator."""
    return Kernel(name)


@contextmanager
def seen(recorder: Recorder) -> Iterator[None]:
    """Launches of Triton's kernels pass by the recorder, also where Triton is imported later."""
    replaced: list[tuple[Any, Any]] = []
    ended: list[bool] = []

    def replace(name: str) -> None:
        if ended:
            return
        kind = getattr(sys.modules.get(name), _RUNS[name], None)
        if kind is not None:
            replaced.append((kind, kind.run))
            kind.run = _watched(kind.run, recorder)

    # To import Triton here would be too early for a program that sets TRITON_INTERPRET itself.
    later = AfterImport([name for name in _RUNS if name not in sys.modules], replace)
    for name in _RUNS:
        replace(name)
    sys.meta_path.insert(0, later)
    try:
        yield
    finally:
        ended.append(True)
        with suppress(ValueError):
            sys.meta_path.remove(later)
        for kind, run in reversed(replaced):
            kind.run = run


def _watched(run: Any, recorder: Recorder) -> Any:
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("warmup"):
            return run(self, *args, **kwargs)
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
        function = getattr(self, "fn", self)
        name = getattr(function, "__name__", type(self).__name__)
        return recorder.launch(name, tensors, lambda: run(self, *args, **kwargs), sys._getframe(1))

    return watched


def sides(before: list[Value], after: list[Value]) -> tuple[list[Value], list[Value]]:
    """Inputs and outputs of a launch, from what its tensors held before and after: what changed is an output.

    Memory that nobody had written before is no input if it was written now.
    """
    inputs, outputs = [], []
    for old, new in zip(before, after, strict=False):
        # A level that reads nothing cannot tell; memory that was fresh was made for the result.
        changed = new.fresh if old.row is None or new.row is None else old.row != new.row
        if changed:
            outputs.append(new)
        if not (changed and new.fresh):
            inputs.append(old)
    return inputs, outputs
