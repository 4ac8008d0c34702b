"""Specs of the shipped norms: what `retrograd verify rms_norm` proves."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from retrograd.check.spec import op, tensor
from retrograd.ops.norm.api import rms_norm as kernel
from retrograd.ops.norm.reference import rms_norm_reference

# 1e-2 is there to show whether eps is honoured: 1e-6 is below the attainable error at ordinary inputs.
_EPS = [1e-6, 1e-2]
_DTYPES = ("float32", "float16", "bfloat16")


def reference(*args: Any, **kwargs: Any) -> torch.Tensor:
    """The reference's y alone."""
    return rms_norm_reference(*args, **kwargs)[0]


rms_norm = op(
    partial(kernel, impl="triton"),
    reference,
    dict(x=tensor("M... N"), weight=tensor("N")),
    params=dict(eps=_EPS),
    dtypes=_DTYPES,
    compute="float32",
    deterministic=True,
    name="rms_norm",
)

rms_norm_atomic = op(
    partial(kernel, impl="triton", deterministic=False),
    reference,
    dict(x=tensor("M... N"), weight=tensor("N")),
    params=dict(eps=_EPS),
    dtypes=_DTYPES,
    compute="float32",
    deterministic=False,
    name="rms_norm_atomic",
)

rms_norm_residual = op(
    partial(kernel, impl="triton", prenorm=True),
    rms_norm_reference,
    dict(x=tensor("M... N"), weight=tensor("N"), bias=tensor("N"), residual=tensor("M... N")),
    params=dict(eps=_EPS),
    dtypes=_DTYPES,
    deterministic=True,
    name="rms_norm_residual",
)

rms_norm_cpu = op(
    partial(kernel, impl="torch"),
    reference,
    dict(x=tensor("M... N"), weight=tensor("N")),
    params=dict(eps=_EPS),
    dtypes=_DTYPES,
    compute="float32",
    deterministic=True,
    name="rms_norm_cpu",
)
