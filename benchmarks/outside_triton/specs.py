"""Specs of other people's Triton ops, with references of our own: where they are collected, and what they share.

The libraries are imported when an op is called, so that the list needs neither them nor a GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import retrograd as rg
from retrograd.check.spec import OpSpec

HALVES = ("float32", "bfloat16")
SINGLE = ("float32",)


class Registry:
    """Specs of a library by name.

    Attributes:
        library: what pip calls it, with its version.
        specs: by name, in the order in which they were added.
    """

    def __init__(self, library: str) -> None:
        self.library = library
        self.specs: dict[str, OpSpec] = {}

    def add(
        self,
        name: str,
        function: Callable[..., Any],
        reference: Callable[..., Any],
        inputs: Mapping[str, Any],
        *,
        dtypes: tuple[str, ...] = HALVES,
        **more: Any,
    ) -> None:
        """Describe an op; `more` is for `retrograd.op`."""
        assert name not in self.specs, f"two specs are called {name}"
        self.specs[name] = rg.op(function, reference, inputs, name=name, dtypes=dtypes, **more)


def registries(libraries: Mapping[str, str]) -> dict[str, Registry]:
    """Empty registries by the short names of libraries."""
    return {short: Registry(library) for short, library in libraries.items()}


def of(module: str, name: str) -> Callable[..., Any]:
    """A function of a library that is imported at its first call."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return call


def apply(module: str, name: str) -> Callable[..., Any]:
    """`apply` of an autograd.Function of a library that is imported at its first call."""

    def call(*args: Any) -> Any:
        return getattr(importlib.import_module(module), name).apply(*args)

    return call


def apart(function: Callable[..., Any], *overwritten: int) -> Callable[..., Any]:
    """The function on copies of these arguments and of grad_out, for one that writes over them by design."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*(x.clone() if i in overwritten else x for i, x in enumerate(args)), **kwargs)
        return tuple(y * 1 for y in result) if isinstance(result, tuple) else result * 1

    return call


def rms(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """x over its root mean square, by the last dimension."""
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def softmax(x: Tensor) -> Tensor:
    """Along the last dimension, as a formula; -inf counts nothing."""
    e = (x - x.amax(-1, keepdim=True).detach()).exp()
    return e / e.sum(-1, keepdim=True)


def log_softmax(x: Tensor) -> Tensor:
    """Along the last dimension."""
    return x - x.logsumexp(-1, keepdim=True)


def causal(scores: Tensor) -> Tensor:
    """Scores [..., T, T] with -inf where the key comes after the query."""
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, -torch.inf)
