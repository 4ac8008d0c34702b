"""Replay of a step from the same state: parameters, buffers, gradients, optimizers, generators."""

from __future__ import annotations

import copy
import inspect
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from retrograd.errors import UsageError


class Replay:
    """A step with the state before it, which `restore` puts back.

    Args:
        step: called with the model if it takes an argument, else without.
        model: its parameters, buffers and gradients are put back, and whether its modules are training.
        state: anything else with `state_dict` and `load_state_dict`: optimizers, schedulers, scalers.
    """

    def __init__(self, step: Callable[..., Any], model: nn.Module | None = None, state: Sequence[Any] = ()) -> None:
        if not callable(step):
            raise UsageError(f"`step` is {type(step).__name__}, expected a function that runs one training step")
        if model is not None and not isinstance(model, nn.Module):
            raise UsageError(f"`model` is {type(model).__name__}, expected a torch.nn.Module")
        for item in state:
            if not hasattr(item, "state_dict") or not hasattr(item, "load_state_dict"):
                raise UsageError(f"`state` has a {type(item).__name__}, which has no state_dict; expected optimizers")
        self.model = model
        self._step, self._state = step, [(item, copy.deepcopy(item.state_dict())) for item in state]
        self._tensors = _tensors(model)
        self._gradients = {} if model is None else {p: _copied(p.grad) for p in model.parameters()}
        self._training = {} if model is None else {m: m.training for m in model.modules()}
        self._generators = _generators()

    def call(self) -> Any:
        """Run the step from the present state."""
        takes = bool(self.model is not None and _takes_argument(self._step))
        return self._step(self.model) if takes else self._step()

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, held in self._tensors:
                tensor.copy_(held)
        for parameter, gradient in self._gradients.items():
            parameter.grad = _copied(gradient)
        for module, training in self._training.items():
            module.training = training
        for item, held in self._state:
            item.load_state_dict(copy.deepcopy(held))
        for put, held in self._generators:
            put(held)


def _tensors(model: nn.Module | None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if model is None:
        return []
    return [(t, t.detach().clone()) for t in (*model.parameters(), *model.buffers())]


def _copied(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _takes_argument(step: Callable[..., Any]) -> bool:
    try:
        kinds = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in kinds)


def _generators() -> list[tuple[Callable[[Any], Any], Any]]:
    """The setter of each generator that a step may draw from, with its state now."""
    generators: list[tuple[Callable[[Any], Any], Any]] = [
        (torch.set_rng_state, torch.get_rng_state()),
        (random.setstate, random.getstate()),
    ]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        generators.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        generators.append((numpy.set_state, numpy.get_state()))
    return generators
