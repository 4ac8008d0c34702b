"""Implementation that a call takes, and its two functions; implementations are imported when first run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch

from retrograd.ops.norm.arguments import NormArguments, NormGrads, NormResults
from retrograd.ops.norm.spec import NormSpec
from retrograd.ops.types import Impl, resolve_impl


class NormCall(NamedTuple):
    """A norm ready to run: what is computed, by which functions."""

    spec: NormSpec
    out_dtype: torch.dtype
    s_dtype: torch.dtype
    forward: Callable[..., NormResults]
    backward: Callable[..., NormGrads]


@lru_cache(maxsize=1024)
def resolve(arguments: NormArguments, x_dtype: torch.dtype, s_dtype: torch.dtype, device: torch.device) -> NormCall:
    """The call for inputs of these dtypes on this device; cached, since every forward asks.

    Raises:
        TypeError: the chosen implementation does not compute in the dtype of x.
        ValueError: impl is unknown, or does not run on the device.
        RuntimeError: impl="native" cannot be built here.
    """
    forward, backward = functions(choose(arguments.impl, x_dtype, device))
    return NormCall(arguments.spec(), arguments.out_dtype or x_dtype, s_dtype, forward, backward)


def choose(impl: str | Impl | None, x_dtype: torch.dtype, device: torch.device) -> Impl:
    """`resolve_impl` for the norms, torch for float64; an explicit choice that cannot run raises."""
    if impl is None and x_dtype == torch.float64:
        return Impl.TORCH
    chosen = resolve_impl(impl, device, native=lambda: _native().available())
    if chosen is not Impl.TORCH and x_dtype == torch.float64:
        raise TypeError(
            f"`x` has dtype torch.float64, expected float32, float16 or bfloat16 for impl={chosen.value!r} (its "
            "kernels compute in float32); use impl='torch'"
        )
    if chosen is Impl.NATIVE:
        if device.type != "cpu":
            raise ValueError(f"`x` is on {device}, expected cpu for impl='native'; use impl='triton' or 'torch'")
        if (reason := _native().why_not()) is not None:
            raise RuntimeError(f"impl='native' cannot run here: {reason}; use impl='torch'")
    return chosen


@cache
def functions(impl: Impl) -> tuple[Callable[..., NormResults], Callable[..., NormGrads]]:
    """(norm_fwd, norm_bwd) of an implementation."""
    if impl is Impl.TRITON:
        from retrograd.ops.norm.triton import norm_bwd, norm_fwd
    elif impl is Impl.NATIVE:
        from retrograd.ops.norm.cpu import norm_bwd, norm_fwd
    else:
        from retrograd.ops.norm.torch_impl import norm_bwd, norm_fwd
    return norm_fwd, norm_bwd


def _native() -> Any:
    from retrograd.ops.norm import cpu

    return cpu
