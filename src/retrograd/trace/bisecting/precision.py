"""Bisection of precision: the smallest part of a step that matters if it is replayed in higher precision."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from retrograd.errors import UsageError
from retrograd.trace.bisecting.ddmin import minimise
from retrograd.trace.bisecting.replay import Replay
from retrograd.trace.bisecting.schema import Bisection, Culprit
from retrograd.trace.bisecting.upcasting import PRECISIONS, Candidate, UpcastMode
from retrograd.trace.value_ids import dtype_name

BY = ("module", "operator")
_DEFAULT_FRACTION = 10.0  # without a tolerance the error must fall to a tenth of what it is


def bisect_precision(
    step: Callable[..., Any],
    model: nn.Module,
    reference: Any = None,
    tolerance: float | None = None,
    *,
    precision: str = "float64",
    by: str = "operator",
    state: Sequence[Any] = (),
    target: str = "",
) -> Bisection:
    """Find the operators whose precision makes a step miss its reference.

    The step is run again and again from the same state. Operators of a part are computed in `precision`, and hand each
    other their results unrounded; all others stay as they are, and are given results rounded to the dtype they had. By
    delta debugging the smallest such part is found with which the error is within tolerance: first of modules, then of
    their operators. No single culprit is assumed; of several smallest parts one is found.

    Args:
        step: runs forward and, if wanted, backward; called with the model if it takes an argument. Returns a tensor, or
            tensors in a mapping or sequence; None stands for the gradients of the model's parameters, by name.
        model: parameters, buffers and gradients are put back before each run.
        reference: what the step should return, in the same form and any dtype, or a function that returns it; None is
            the step with every operator in `precision`.
        tolerance: most that |got - want| / |want| may be for each result; None is a tenth of the error as it is.
        precision: "float64" or "float32".
        by: "operator", or "module" to stop there.
        state: optimizers and what else has a state_dict that the step changes.
        target: what to call it.

    Returns:
        The culprits in the order of the step, with errors before and after.

    Raises:
        UsageError: an argument is wrong, or the step returns nothing that can be compared.
        UndecidedError: the step does not repeat.

    Numerics: errors are computed in float64. Random operators, views and kernels outside of aten stay as they are.
    """
    began = time.perf_counter()
    _check(precision, by, tolerance)
    replay = Replay(step, model, state)
    search = _Search(replay, model, PRECISIONS[precision])
    search.prepare(reference)
    before, worst = search.error(frozenset())
    everything, _ = search.error(search.all)
    limit = before / _DEFAULT_FRACTION if tolerance is None else tolerance
    positions: list[int] = []
    verdict = "within" if before <= limit else "undecided" if everything > limit else "found"
    if verdict == "found":
        positions = search.smallest(limit, by)
    after = search.error(frozenset(positions))[0]
    culprits = search.culprits(positions, by)
    replay.restore()  # everything is as it was before
    return Bisection(
        target,
        verdict,  # type: ignore[arg-type]
        precision,
        by,
        limit,
        before,
        after,
        everything,
        worst,
        culprits,
        len(search.all),
        search.runs,
        search.notes(),
        time.perf_counter() - began,
    )


def _check(precision: str, by: str, tolerance: float | None) -> None:
    if precision not in PRECISIONS:
        raise UsageError(f"`precision` is {precision!r}, expected one of {', '.join(map(repr, PRECISIONS))}")
    if by not in BY:
        raise UsageError(f"`by` is {by!r}, expected 'module' or 'operator'")
    if tolerance is not None and not (isinstance(tolerance, (int, float)) and tolerance >= 0):
        raise UsageError(f"`tolerance` is {tolerance!r}, expected a relative error, 0 or more, or None")


class _Search:
    """Runs the step with parts in higher precision; each part once."""

    def __init__(self, replay: Replay, model: nn.Module, precision: torch.dtype) -> None:
        self._replay, self._model, self._precision = replay, model, precision
        self.runs = 0
        self._errors: dict[frozenset[int], tuple[float, str]] = {}
        self._refused: set[int] = set()
        self._want: dict[str, torch.Tensor] = {}
        self.seen: list[Candidate] = []
        self.all: frozenset[int] = frozenset()

    def prepare(self, reference: Any) -> None:
        """Run once to see the operators, and get the reference."""
        mode = UpcastMode(self._model, self._precision)
        got = self._run(mode)
        self.seen = mode.seen
        self.all = frozenset(c.index for c in self.seen if c.upcastable)
        if not self.all:
            raise UsageError(f"`step` runs no operator that could be computed in {self._precision}")
        if reference is None:
            raised = UpcastMode(self._model, self._precision, self.seen, self.all)
            self._want = self._run(raised)
            self._refused |= raised.refused
        else:
            self._want = results(reference() if callable(reference) else reference, None, "reference")
        _same_form(got, self._want)

    def _run(self, mode: UpcastMode) -> dict[str, torch.Tensor]:
        self._replay.restore()
        with mode:
            got = self._replay.call()
        self.runs += 1
        return results(got, self._model, "step")

    def error(self, part: frozenset[int]) -> tuple[float, str]:
        """The largest relative error of a result with a part in higher precision, and whose it is."""
        if part not in self._errors:
            mode = UpcastMode(self._model, self._precision, self.seen, part)
            got = self._run(mode)
            self._refused |= mode.refused
            errors = {name: _relative(got[name], want) for name, want in self._want.items()}
            worst = max(errors, key=lambda name: errors[name])
            self._errors[part] = (errors[worst], worst)
        return self._errors[part]

    def smallest(self, limit: float, by: str) -> list[int]:
        """Positions of a 1-minimal part: of modules, then of operators of these."""
        groups = self._grouped(sorted(self.all), "module")
        kept = minimise(
            list(groups), lambda part: self.error(frozenset(k for g in part for k in groups[g]))[0] <= limit
        )
        positions = sorted(k for g in kept for k in groups[g])
        return (
            positions if by == "module" else minimise(positions, lambda part: self.error(frozenset(part))[0] <= limit)
        )

    def _grouped(self, positions: Sequence[int], by: str) -> dict[Any, list[int]]:
        groups: dict[Any, list[int]] = {}
        for k in positions:
            first = self.seen[k]
            groups.setdefault((first.module, first.phase) if by == "module" else k, []).append(k)
        return groups

    def culprits(self, positions: Sequence[int], by: str) -> tuple[Culprit, ...]:
        """One culprit for each operator or module, with the errors that show how much each of them matters."""
        everything = frozenset(positions)
        groups = self._grouped(positions, by)
        culprits = []
        for members in groups.values():
            first, part = self.seen[members[0]], frozenset(members)
            name = (
                (f"module {first.module}" if first.module else "outside of modules") if by == "module" else first.name
            )
            alone, without = self.error(part)[0], self.error(everything - part)[0]
            culprits.append(
                Culprit(name, first.module, first.phase, alone, without, len(members), first.place, first.code)
            )
        return tuple(culprits)

    def notes(self) -> tuple[str, ...]:
        """Operators that could not be upcast."""
        names = ", ".join(sorted({self.seen[k].name for k in self._refused}))
        return (f"cannot be computed in {dtype_name(self._precision)}, left as is: {names}",) * bool(names)


def results(value: Any, model: nn.Module | None, argument: str) -> dict[str, torch.Tensor]:
    """The results of a step as float64 tensors on CPU by name; gradients where it returned None.

    Raises:
        UsageError: there is no tensor in it, or something else.
    """
    if value is None and model is not None:
        named = {f"gradient of {k}": p.grad for k, p in model.named_parameters() if p.grad is not None}
    elif isinstance(value, torch.Tensor):
        named = {"result": value}
    elif isinstance(value, Mapping):
        named = {str(k): v for k, v in value.items()}
    elif isinstance(value, Sequence) and not isinstance(value, str):
        named = {f"result {k}": v for k, v in enumerate(value)}
    else:
        raise UsageError(
            f"`{argument}` gives {type(value).__name__}, expected a tensor, or a mapping or sequence of them"
        )
    odd = next((k for k, v in named.items() if not isinstance(v, torch.Tensor)), None)
    if odd is not None:
        raise UsageError(f"`{argument}` gives {type(named[odd]).__name__} as {odd!r}, expected a tensor")
    if not named:
        raise UsageError(f"`{argument}` gives nothing to compare; return tensors, or call backward() and return None")
    return {k: v.detach().to("cpu", torch.float64) for k, v in named.items()}


def _same_form(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> None:
    missing = [name for name in want if name not in got]
    if missing:
        raise UsageError(f"`reference` has {missing[0]!r}, which the step does not give; it gives {', '.join(got)}")
    for name, tensor in want.items():
        if tensor.shape != got[name].shape:
            raise UsageError(
                f"`reference` has {name!r} of shape {tuple(tensor.shape)}, the step gives {tuple(got[name].shape)}"
            )


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    error, size = float((got - want).norm()), float(want.norm())
    if not math.isfinite(error):
        return math.inf
    return error / size if size else (math.inf if error else 0.0)
