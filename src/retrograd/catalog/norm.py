"""Specs of the shipped norms: what `retrograd verify rms_norm` proves. One name an option, on GPU kernels and on CPU.

`rms_norm_heads` runs the Triton kernels (executed on the CPU without a GPU), `rms_norm_heads_cpu` the native
code, `rms_norm_heads_torch` the torch operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from retrograd.catalog import norm_names
from retrograd.check.spec import OpSpec, TensorSpec, op, tensor
from retrograd.ops.norm import layer_norm, layer_norm_reference, rms_norm, rms_norm_reference

# 1e-2 is there to show whether eps is honoured: 1e-6 is below the attainable error at ordinary inputs.
_EPS = [1e-6, 1e-2]
_HALVES = ("float16", "bfloat16")

_X, _VECTOR = tensor("M... N"), tensor("N")
_WIDE_VECTOR, _STREAM = tensor("N", dtype="float32"), tensor("M... N", dtype="float32")
_HEADS, _HEAD_VECTOR = tensor("M", "H", "N"), tensor("H", "N")


@dataclass(frozen=True)
class _NormVariant:
    """How a variant differs from x and weight with every option at its default."""

    inputs: Mapping[str, TensorSpec | None] = field(default_factory=lambda: dict(x=_X, weight=_VECTOR))  # by name
    options: Mapping[str, Any] = field(default_factory=dict)  # of the op and of its reference
    kernel: Mapping[str, Any] = field(default_factory=dict)  # options of the op alone
    dtypes: tuple[str, ...] = ("float32", *_HALVES)  # of x
    rounds_once: bool = True  # Whether 16-bit inputs are rounded once at the end; not so where s is rounded before
    sizes: Mapping[str, tuple[int, int] | list[int]] = field(default_factory=dict)  # limits to named dimensions


_VARIANTS = {
    "": _NormVariant(),
    "bias": _NormVariant(dict(x=_X, weight=_VECTOR, bias=_VECTOR)),
    "residual": _NormVariant(
        dict(x=_X, weight=_VECTOR, bias=_VECTOR, residual=_X), kernel=dict(prenorm=True), rounds_once=False
    ),
    # Partial sums, as of many rows: of few, which is all that is swept, another kernel takes care.
    "mixed": _NormVariant(
        dict(x=_X, weight=_WIDE_VECTOR, bias=_WIDE_VECTOR, residual=_STREAM),
        kernel=dict(prenorm=True, dw_parts=3),
        dtypes=_HALVES,
    ),
    "no_weight": _NormVariant(dict(x=_X)),
    "bias_alone": _NormVariant(dict(x=_X, weight=None, bias=_VECTOR)),
    "offset": _NormVariant(options=dict(weight_offset=1.0)),
    # M times H rows: few of each, as without a GPU every one is executed.
    "heads": _NormVariant(
        dict(x=_HEADS, weight=_HEAD_VECTOR, bias=_HEAD_VECTOR), sizes=dict(M=(0, 17), H=[0, 1, 2, 8, 3])
    ),
    "float32_out": _NormVariant(options=dict(out_dtype=torch.float32), dtypes=_HALVES),
    "parts": _NormVariant(kernel=dict(dw_parts=3)),
    "atomic": _NormVariant(kernel=dict(deterministic=False)),
}

_OPS = {"rms_norm": (rms_norm, rms_norm_reference), "layer_norm": (layer_norm, layer_norm_reference)}
_IMPLS = {"": "triton", "cpu": "native", "torch": "torch"}
# Kernels are custom operators, which torch.compile sees and torch.func has no rule for; torch operations have one.
_TRANSFORMS = {"": ("compile",), "cpu": ("compile",), "torch": ("compile", "vmap")}


def _first(reference: Callable[..., tuple[torch.Tensor, ...]], *args: Any, **kwargs: Any) -> torch.Tensor:
    """The reference's y alone."""
    return reference(*args, **kwargs)[0]


def _spec(name: str, norm: str, variant: str, impl: str) -> OpSpec:
    function, reference = _OPS[norm]
    v = _VARIANTS[variant]
    kernel = dict(v.kernel)
    return op(
        partial(function, impl=_IMPLS[impl], **v.options, **kernel),
        partial(reference if kernel.get("prenorm") else partial(_first, reference), **v.options),
        v.inputs,
        params=dict(eps=_EPS),
        sizes=v.sizes,
        dtypes=v.dtypes,
        compute="float32" if v.rounds_once else None,
        deterministic=kernel.get("deterministic", True),
        transforms=_TRANSFORMS[impl],
        name=name,
    )


SPECS = {name: _spec(name, *parts) for name, parts in norm_names().items()}
globals().update(SPECS)
