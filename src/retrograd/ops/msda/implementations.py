"""Which implementation a call takes, and its functions; implementations are imported when first run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch

from retrograd.ops.msda.spec import MsdaSpec
from retrograd.ops.types import Impl, resolve_impl


class Functions(NamedTuple):
    """What an implementation offers; `eager` documents arguments and results.

    Attributes:
        forward: `msda_fwd`.
        backward: `msda_bwd`.
        fused_forward: `fused.Forward`: from reference points, offsets and logits; None where there is no such
            kernel, then torch operations make locations and weights.
        fused_backward: `fused.Backward`.
    """

    forward: Callable[..., torch.Tensor]
    backward: Callable[..., tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]]
    fused_forward: Callable[..., Any] | None = None
    fused_backward: Callable[..., Any] | None = None


class MsdaCall(NamedTuple):
    """A call ready to run: what is computed, by which functions."""

    spec: MsdaSpec
    functions: Functions


@lru_cache(maxsize=1024)
def resolve(spec: MsdaSpec, impl: str | Impl | None, dtype: torch.dtype, device: torch.device) -> MsdaCall:
    """The call for a value of this dtype on this device; cached, since every forward asks.

    Raises:
        ValueError: impl is unknown.
        RuntimeError: the implementation does not exist.
    """
    return MsdaCall(spec, functions(choose(impl, dtype, device)))


def choose(impl: str | Impl | None, dtype: torch.dtype, device: torch.device) -> Impl:
    """The implementation for a value of this dtype on this device; an explicit choice that cannot run raises."""
    if impl is None:
        return Impl.TORCH
    chosen = resolve_impl(impl, device)
    if (reason := _MISSING.get(chosen)) is not None:
        raise RuntimeError(f"impl={chosen.value!r} cannot run here: {reason}; use impl='torch'")
    return chosen


@cache
def functions(impl: Impl) -> Functions:
    """The functions of an implementation that exists."""
    assert impl is Impl.TORCH, impl
    from retrograd.ops.msda.eager import msda_bwd, msda_fwd

    return Functions(msda_fwd, msda_bwd)


_MISSING = {
    Impl.TRITON: "deformable attention has no Triton kernels yet",
    Impl.NATIVE: "deformable attention has no native code yet",
}
