"""Cache of compiled launches of the norms: their keys, which `host` tells C++ too, and what is kept of each launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from retrograd.ops.norm.arguments import BackwardTensors, NormResults, NormTensors, WantedGrads, WantedOutput
from retrograd.ops.norm.spec import NormSpec

_MOST_LAUNCHES = 4096


# What a launch depends on in a tensor, beside its alignment: dtype, shape, strides.
Layout = tuple[torch.dtype, torch.Size, tuple[int, ...]]


class ForwardKey(NamedTuple):
    """All that a forward launch depends on; host.cpp makes the same numbers in the order of these fields."""

    device: int | None
    x: Layout | None
    residual: Layout | None
    weight: Layout | None
    bias: Layout | None
    out_dtype: torch.dtype
    s_dtype: torch.dtype
    own_s: bool
    store_stats: bool
    spec: NormSpec


class BackwardKey(NamedTuple):
    """All that a backward launch depends on; host.cpp likewise, but for the buffers, which it does not know."""

    device: int | None
    s: Layout | None
    grad_out: Layout | None
    weight: Layout | None
    grad_s: Layout | None
    x_dtype: torch.dtype | None
    residual_dtype: torch.dtype | None
    weight_dtype: torch.dtype | None
    bias_dtype: torch.dtype | None
    heads: int
    spec: NormSpec
    into_weight: Layout | None = None
    into_bias: Layout | None = None


class CompiledLaunch(NamedTuple):
    """A compiled launch, of a forward or of the kernel that adds up partial sums, and its arguments behind tensors."""

    handle: Any
    rest: tuple[Any, ...]


class KeptBackward(NamedTuple):
    """The same of a backward, with its number of partial sums (None: it has none) and the kernel that adds them up."""

    handle: Any
    rest: tuple[Any, ...]
    parts: int | None
    finalizer: CompiledLaunch | None


# Plain tuples find named ones, to which they are equal; making a named one takes 1.3 us more at every call.
FORWARD: dict[tuple[Any, ...], CompiledLaunch] = {}
BACKWARD: dict[tuple[Any, ...], KeptBackward] = {}
# Called with each launch that is kept from now on.
on_keep: Callable[[Any, Any], None] | None = None


def forward_key(tensors: NormTensors, outs: NormResults, spec: NormSpec, wanted: WantedOutput) -> tuple[Any, ...]:
    """The fields of a `ForwardKey`."""
    x, weight, bias, residual = tensors
    return (
        x.device.index, (x.dtype, x.shape, x.stride()), _layout(residual), _layout(weight), _layout(bias),
        wanted.out_dtype, wanted.s_dtype, outs.s is not None, outs.rstd is not None, spec,
    )  # fmt: skip


def backward_key(tensors: BackwardTensors, wanted: WantedGrads, spec: NormSpec) -> tuple[Any, ...]:
    """The fields of a `BackwardKey`."""
    grad_out, s, weight, _, _, grad_s = tensors
    x_dtype, weight_dtype, bias_dtype, residual_dtype, heads, into_weight, into_bias = wanted
    return (
        s.device.index, (s.dtype, s.shape, s.stride()), _layout(grad_out), _layout(weight), _layout(grad_s),
        x_dtype, residual_dtype, weight_dtype, bias_dtype, heads, spec, _layout(into_weight), _layout(into_bias),
    )  # fmt: skip


def _layout(tensor: torch.Tensor | None) -> tuple[Any, ...] | None:
    return None if tensor is None else (tensor.dtype, tensor.shape, tensor.stride())


def keep(key: tuple[Any, ...] | None, launch: CompiledLaunch | KeptBackward) -> None:
    """Remember a launch, of not too many; none without a key, or where nothing was compiled."""
    if key is None or launch.handle is None:
        return
    forward = isinstance(launch, CompiledLaunch)
    cache: dict[Any, Any] = FORWARD if forward else BACKWARD
    if len(cache) >= _MOST_LAUNCHES:
        cache.clear()
    named = ForwardKey(*key) if forward else BackwardKey(*key)
    cache[named] = launch
    if on_keep is not None:
        on_keep(named, launch)
