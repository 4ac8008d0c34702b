"""Randomly rounded runs of a reference, or such with moved inputs: many at once along a batch dimension, or in turn.

A recurrence of 64 steps has thousands of operators, each of a few numbers: what a run takes is calling them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from retrograd.check import inputs as make
from retrograd.check import tolerance
from retrograd.check.constraints import constrained, project
from retrograd.check.last_run import LastRun
from retrograd.check.outputs import as_real, inexact, promoted
from retrograd.check.own_mistakes import may_refuse
from retrograd.check.reference import DerivativeOrder, Reference, Results, first_order
from retrograd.check.rounding import Float64
from retrograd.check.seeds import derive
from retrograd.compat.torch_dispatch import is_functorch_wrapped, tree_leaves, tree_map_only

_MOST_AT_ONCE = 1 << 25  # elements that the operators of all runs of a batch make: at most 256 MiB
_MOST_KEPT = 1 << 23  # elements that the operators of a run make whose operands are kept for another: some 200 MiB
_CHAIN = 4  # runs that take operands from the one before
_ALIKE = 2.0**-26  # of the largest element, by which a batch may differ from the truth: half of float64's digits


class _ApartError(Exception):
    """Runs at once would not be what each of them is alone."""


class _Apart(TorchFunctionMode):
    """Gives each run of a batch its own copy of floats that do not come from inputs: each rounds them its own way.

    Args:
        true: a number for each run.
    """

    def __init__(self, true: torch.Tensor) -> None:
        super().__init__()
        self._true = true

    def _own(self, t: torch.Tensor) -> torch.Tensor:
        return t if is_functorch_wrapped(t) else torch.where(self._true, t, t)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        # This runs at each operator, most of which give a single tensor of all runs.
        leaves = (out,) if isinstance(out, torch.Tensor) else tree_leaves(out)
        if not any(inexact(t) and not is_functorch_wrapped(t) for t in leaves):
            return out
        if not any(isinstance(t, torch.Tensor) for t in tree_leaves((args, kwargs))):
            return tree_map_only(torch.Tensor, self._own, out)
        name = getattr(func, "__name__", "")
        if name.startswith(("__i", "__set")) or (name.endswith("_") and not name.startswith("__")):
            raise _ApartError(f"{name} changes a constant in place")
        args, kwargs = tree_map_only(torch.Tensor, self._own, (args, kwargs))
        return func(*args, **kwargs)


def rounded_runs(
    reference: Reference, exact: Results, unit: float, accumulate: float, runs: range,
    order: DerivativeOrder = first_order,
) -> Iterator[Results]:  # fmt: skip
    """Results of the randomly rounded runs of these numbers, several along a first dimension; raises what it raises.

    `exact` is what the reference gives in float64 without rounding.
    """
    done = runs.start
    batching, together = reference.batching, 2 if reference.tf32 else 1  # in pairs, see rounding.py
    at_once = min(len(runs), _MOST_AT_ONCE // max(reference.elements, 1)) // together * together
    while batching.allowed and order not in batching.refused and at_once > 1 and done < runs.stop:
        count = min(at_once, runs.stop - done)
        batch = None
        with (
            may_refuse()
        ):  # it asks for a value, or changes something in place; what is wrong with it a single run says
            _check_batches(reference, exact, order)
            batch = _batch(reference, unit, accumulate, derive(reference.seed, "noise", done), count, order)
        if batch is None:
            batching.allowed &= order is not first_order
            batching.refused.add(order)
            break
        yield batch
        done += count
    last = None
    for k in range(done, runs.stop):
        if reference.tf32 and reference.elements <= _MOST_KEPT and k % _CHAIN == 0:
            last = LastRun(reference.apart)  # with other factors
        yield alone(reference.rounded(unit, accumulate, derive(reference.seed, "noise", k), order, last=last))
        if last is not None:
            last.end()


def alone(results: Results) -> Results:
    """Results of one run along a first dimension of 1."""
    return {name: None if t is None else t[None] for name, t in results.items()}


def _check_batches(reference: Reference, exact: Results, order: DerivativeOrder = first_order) -> None:
    """_ApartError where runs at once are wrong, as the gradient of select_scatter is under vmap in torch 2.13.

    Their distance from the truth would be taken for rounding, and anything allowed. Operators and shapes decide that,
    so once for all values.
    """
    if (key := _key(reference, order)) in reference.batching.checked:
        return
    sizes = {
        n: float(t.detach().abs().nan_to_num(0.0, 0.0, 0.0).max())
        for n, t in exact.items()
        if t is not None and t.numel()
    }
    most = max(sizes.values(), default=0.0)
    runs = _batch(reference, 0.0, 0.0, 0, 2, order)
    for name, size in sizes.items():
        got, want = runs.get(name), exact[name]
        assert want is not None
        if got is None:  # inside vmap no tensor says that it requires a gradient, and a reference may ask
            raise _ApartError(f"there is no {name}")
        want, finite = want.detach(), want.isfinite()
        # Of a tensor of zeros, where terms cancel, what is left is as small beside the others.
        allowed = _ALIKE * (size if size > tolerance.ZERO * most else most)
        if not bool((torch.where(finite, got.detach() - want, 0.0).abs() <= allowed).all()):
            raise _ApartError(f"{name} is another one there")
    reference.batching.checked[key] = reference.elements


def _key(reference: Reference, order: DerivativeOrder = first_order) -> Any:
    return reference.case.params, reference.case.sizes, order


def runs_at_once(reference: Reference) -> bool:
    """Whether several runs of the reference at its case have been found to be what each is alone."""
    return reference.batching.allowed and _key(reference) in reference.batching.checked


def rounded_at_once(reference: Reference, unit: float, accumulate: float, seed: int, runs: int) -> list[Results]:
    """Results of so many randomly rounded runs along a first dimension; [] where they can only be made in turn."""
    if reference.batching.allowed and not reference.tf32:
        with may_refuse():  # it asks for a value, or refuses these: a single run says so
            at_once = _at_once(reference)
            counts = (min(at_once, runs - start) for start in range(0, runs, at_once))
            return [
                _batch(reference, unit, accumulate, derive(seed, "batch", number), count, first_order)
                for number, count in enumerate(counts)
            ]
    return []


def _at_once(reference: Reference) -> int:
    """How many runs at once keep within memory; raises what refuses them."""
    if _key(reference) not in reference.batching.checked:
        plain = Float64()
        exact = reference.run(torch.float64, plain)
        _check_batches(replace(reference, elements=plain.elements), exact)
    return max(_MOST_AT_ONCE // max(reference.batching.checked[_key(reference)], 1), 1)


def moved_runs(
    reference: Reference, shifts: Sequence[dict[str, torch.Tensor]], order: DerivativeOrder = first_order
) -> list[Results]:
    """Results in float64 with the inputs moved by each of these, which name the same, several along a first dimension.

    Raises what the reference does. Their last bits may differ from those of one after the other.
    """
    if reference.batching.allowed:
        with may_refuse():  # it asks for a value, or refuses these: a single run says so
            at_once = _at_once(reference)
            parts = [shifts[start : start + at_once] for start in range(0, len(shifts), at_once)]
            return [_moved_batch(reference, part, order) for part in parts]
    return [alone(reference.run(torch.float64, reference.exactly(), order, shift)) for shift in shifts]


def _moved_batch(reference: Reference, shifts: Sequence[dict[str, torch.Tensor]], order: DerivativeOrder) -> Results:
    wide = _wide(reference.inputs(), len(shifts))
    moves = {name: torch.stack([shift[name] for shift in shifts]) for name in shifts[0]}
    inputs = {n: value + moves[n] if n in moves else value.contiguous() for n, value in wide.items()}
    return _results(reference, reference.exactly(), inputs, len(shifts), order, nullcontext)


def _batch(
    reference: Reference, unit: float, accumulate: float, seed: int, runs: int, order: DerivativeOrder
) -> Results:
    """Results of several rounded runs, computed along a dimension of their own."""
    mode = reference.rounding(unit, accumulate, seed, runs=runs)
    wide = _wide(reference.inputs(), runs)
    return _results(reference, mode, {n: v * (1 + mode.unit * mode.noise(v)) for n, v in wide.items()}, runs, order)


def _wide(inputs: dict[str, Any], runs: int) -> dict[str, torch.Tensor]:
    """The inputs with digits after the point, in float64, once for each run."""
    wide = {n: v.contiguous().to(promoted(v.dtype, torch.float64)) for n, v in inputs.items() if inexact(v)}
    return {name: value.expand(runs, *value.shape) for name, value in wide.items()}


def _results(
    reference: Reference, mode: Float64, each: dict[str, torch.Tensor], runs: int, order: DerivativeOrder,
    constants: Callable[[torch.Tensor], AbstractContextManager[Any]] = _Apart,
) -> Results:  # fmt: skip
    """Results of several runs whose inputs stand along a first dimension; without rounding they share `constants`."""
    inputs = reference.inputs()
    names = make.differentiable(reference.spec, inputs)
    batched = {name: value.detach().requires_grad_(name in names) for name, value in each.items()}
    wider = (g.to(promoted(g.dtype, torch.float64)) for g in reference.grad_outs())
    gs = [g.expand(runs, *g.shape).contiguous() for g in wider]

    def forward(own: dict[str, torch.Tensor], true: torch.Tensor) -> dict[str, torch.Tensor]:
        with constants(true):
            return reference.call({**inputs, **own}).inexact

    true = torch.ones(runs, dtype=torch.bool, device=reference.device)
    with warnings.catch_warnings(), reference.without_traces(), sdpa_kernel(SDPBackend.MATH), mode:
        warnings.simplefilter("ignore")  # operators that vmap has to loop over
        outs = torch.vmap(forward)(batched, true)
        results = order(reference.case, reference.seed, outs, {n: batched[n] for n in names}, gs, runs)
    for name in (n for n in names if n in constrained(reference.spec)):
        if (grads := results.get(f"grad {name}")) is not None:
            pairs = zip(grads, batched[name], strict=True)
            results[f"grad {name}"] = torch.stack([project(reference.spec, name, *pair) for pair in pairs])
    return {name: None if t is None else as_real(t) for name, t in results.items()}
