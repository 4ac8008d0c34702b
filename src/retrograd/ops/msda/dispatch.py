"""Implementation that a call takes, and its functions; implementations are imported when first run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch

from retrograd.ops.msda.shapes import Levels
from retrograd.ops.msda.spec import MsdaSpec
from retrograd.ops.types import Impl, resolve_impl

_IMPLS = (Impl.TRITON, Impl.CUDA, Impl.NATIVE, Impl.TORCH)


class Functions(NamedTuple):
    """What an implementation offers; `eager` documents arguments and results.

    Attributes:
        forward: `msda_fwd`.
        backward: `msda_bwd`.
        fused_forward: the forward from (value, levels, reference_points [B, Q, L, 2 or 4], offsets [B, Q, H, K, 2],
            logits [B, Q, H, K], spec); None where torch operations have to make locations and weights first.
    """

    forward: Callable[..., torch.Tensor]
    backward: Callable[..., tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]]
    fused_forward: Callable[..., torch.Tensor] | None = None


class MsdaCall(NamedTuple):
    """A call ready to run: what is computed, by which functions."""

    spec: MsdaSpec
    functions: Functions


@lru_cache(maxsize=1024)
def resolve(spec: MsdaSpec, impl: str | Impl | None, dtype: torch.dtype, device: torch.device) -> MsdaCall:
    """The call for a value of this dtype on this device; cached, since every forward asks.

    Raises:
        TypeError: the chosen implementation does not compute in this dtype.
        ValueError: impl is unknown, or does not run on the device.
        RuntimeError: impl="native" cannot be built here.
    """
    return MsdaCall(spec, functions_for(impl, dtype, device))


def functions_for(impl: str | Impl | None, dtype: torch.dtype, device: torch.device) -> Functions:
    """Those of `choose`; with None on a GPU, CUDA C++ where it computes a call of such sizes, else Triton."""
    chosen = choose(impl, dtype, device)
    return _by_sizes() if impl is None and chosen is Impl.TRITON else functions(chosen)


def choose(impl: str | Impl | None, dtype: torch.dtype, device: torch.device) -> Impl:
    """The implementation for a value of this dtype on this device; an explicit choice that cannot run raises."""
    if impl is None:
        if device.type == "cuda" and dtype != torch.float64:
            return Impl.TRITON
        return Impl.NATIVE if device.type == "cpu" and _why_no_native() is None else Impl.TORCH
    chosen = resolve_impl(impl, device, among=_IMPLS)
    if chosen in (Impl.TRITON, Impl.CUDA) and dtype == torch.float64:
        raise TypeError(
            "`value` has dtype torch.float64, expected float32, float16 or bfloat16 for "
            f"impl={chosen.value!r} (its kernels compute in float32); use impl='torch'"
        )
    if chosen is Impl.CUDA and device.type != "cuda":
        raise ValueError(f"`value` is on {device}, expected cuda for impl='cuda'; use impl='native' or 'torch'")
    if chosen is Impl.NATIVE:
        if device.type != "cpu":
            raise ValueError(f"`value` is on {device}, expected cpu for impl='native'; use impl='torch'")
        if (reason := _why_no_native()) is not None:
            raise RuntimeError(f"impl='native' cannot run here: {reason}; use impl='torch'")
    return chosen


@cache
def functions(impl: Impl) -> Functions:
    """The functions of an implementation that exists."""
    if impl is Impl.NATIVE:
        from retrograd.ops.msda.cpu import msda_bwd, msda_fwd

        return Functions(msda_fwd, msda_bwd)
    if impl is Impl.TRITON:
        from retrograd.ops.msda.triton import msda_bwd, msda_fwd, msda_fwd_fused

        return Functions(msda_fwd, msda_bwd, msda_fwd_fused)
    if impl is Impl.CUDA:
        from retrograd.ops.msda.cuda import msda_bwd, msda_fwd

        return Functions(msda_fwd, msda_bwd)
    from retrograd.ops.msda.torch_impl import msda_bwd, msda_fwd

    return Functions(msda_fwd, msda_bwd)


@cache
def _by_sizes() -> Functions:
    """CUDA C++ where it computes the call and is the faster one, else Triton."""
    from retrograd.ops.msda import cuda, triton

    def forward(
        value: torch.Tensor, levels: Levels, locations: torch.Tensor, weights: torch.Tensor, spec: MsdaSpec
    ) -> torch.Tensor:
        pays = cuda.why_not(value, locations, weights, spec) is None and cuda.forward_pays(value, locations, spec)
        chosen = cuda if pays else triton
        return chosen.msda_fwd(value, levels, locations, weights, spec)

    def backward(
        grad_out: torch.Tensor,
        value: torch.Tensor,
        levels: Levels,
        locations: torch.Tensor,
        weights: torch.Tensor,
        spec: MsdaSpec,
        *,
        need_value: bool,
        need_locations: bool,
        need_weights: bool,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        needs: dict[str, Any] = dict(need_value=need_value, need_locations=need_locations, need_weights=need_weights)
        pays = cuda.why_not(value, locations, weights, spec) is None and cuda.backward_pays(value, locations, spec)
        chosen = cuda if pays else triton
        return chosen.msda_bwd(grad_out, value, levels, locations, weights, spec, **needs)

    # CUDA C++ has no kernel for the fused form.
    return Functions(forward, backward, triton.msda_fwd_fused)


def _why_no_native() -> str | None:
    """Why native code cannot run, or None. While torch.compile traces that is open: the operator asks when it runs."""
    if torch.compiler.is_compiling():
        return None
    from retrograd.ops.msda import cpu

    return cpu.why_not()
