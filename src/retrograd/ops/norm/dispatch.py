"""Implementation that a call takes, and its two functions; implementations are imported when first run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import NamedTuple

import torch

from retrograd.ops.norm.arguments import NormArguments, NormGrads, NormResults
from retrograd.ops.norm.spec import NormSpec
from retrograd.ops.types import Family, Impl

FAMILY = Family("retrograd.ops.norm", "x", (Impl.TRITON, Impl.NATIVE, Impl.TORCH), (Impl.TORCH,))


class NormCall(NamedTuple):
    """A norm ready to run: what is computed, the dtypes of y and s, by which functions."""

    spec: NormSpec
    dtypes: tuple[torch.dtype, torch.dtype]
    forward: Callable[..., NormResults]
    backward: Callable[..., NormGrads]


@lru_cache(maxsize=1024)
def resolve(arguments: NormArguments, x_dtype: torch.dtype, s_dtype: torch.dtype, device: torch.device) -> NormCall:
    """The call for inputs of these dtypes on this device; cached, since every forward asks. See `Family.choose`."""
    forward, backward = functions(FAMILY.choose(arguments.impl, x_dtype, device))
    return NormCall(arguments.spec(), (arguments.out_dtype or x_dtype, s_dtype), forward, backward)


@cache
def functions(impl: Impl) -> tuple[Callable[..., NormResults], Callable[..., NormGrads]]:
    """(norm_fwd, norm_bwd) of an implementation."""
    module = FAMILY.module(impl)
    return module.norm_fwd, module.norm_bwd
