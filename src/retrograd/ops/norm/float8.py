"""The forward halves of the norms with y in float8 e4m3, for what multiplies in it; their backward is the usual one."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from retrograd.ops.norm import validation
from retrograd.ops.norm.arguments import Float8Results, NormArguments, NormTensors, WantedOutput
from retrograd.ops.norm.dispatch import FAMILY, functions
from retrograd.ops.norm.functional import checked
from retrograd.ops.norm.quantization import quantize
from retrograd.ops.norm.shapes import two_dimensional
from retrograd.ops.types import Impl


class Float8Norm(NamedTuple):
    """A norm in float8: y.float() * scale is what `rms_norm` or `layer_norm` returns, but for the rounding."""

    y: torch.Tensor  # [..., N] float8_e4m3fn, contiguous
    scale: torch.Tensor  # float32 [..., 1], or the scale that was given
    amax: torch.Tensor | None  # float32 []: the largest |y| before rounding, where a scale was given
    s: torch.Tensor  # [..., N]; x itself where nothing was added or cast
    mean: torch.Tensor | None  # float32 [...]; None for RMSNorm, or where it is not kept
    rstd: torch.Tensor | None  # float32 [...]; None where it is not kept


def rms_norm_float8_fwd(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    scale: torch.Tensor | None = None,
    eps: float = 1e-6,
    residual_dtype: torch.dtype | None = None,
    weight_offset: float = 0.0,
    store_rstd: bool = True,
    impl: str | Impl | None = None,
) -> Float8Norm:
    """The forward of `rms_norm` with y in float8 e4m3, as `torch._scaled_mm` takes it; autograd does not see it.

    Its backward is `rms_norm_bwd` with the gradient of the norm itself: rounding is passed over (straight through).

    Args:
        x: [..., N], float32, float16 or bfloat16. The other tensors are as of `rms_norm`.
        scale: float32 of one element, on x's device and above 0: the scale of the whole y. The next one follows from
            `amax` (delayed scaling: amax / 448). None computes a scale a row: its largest |y| / 448, at least 2^-126.
        eps, residual_dtype, weight_offset: as of `rms_norm`.
        store_rstd: Whether rstd is kept for `rms_norm_bwd`.
        impl: as of `rms_norm`. "native", and "triton" for rows of more than 16384 columns (32768 on AMD), computes y in
            float32, which torch rounds. None takes torch on NVIDIA GPUs before sm_89, which have no float8.

    Returns:
        A `Float8Norm`. An element beyond 448 times the scale is that, with its sign; NaN stays NaN and does not
        count for a scale or amax; infinity makes its row's scale infinite, and the row NaN once it is multiplied.

    Raises:
        TypeError, ValueError, RuntimeError: as `rms_norm`; TypeError too for float64, and for a scale that is no
            float32; ValueError for one of several elements, and for impl="triton" on a GPU without float8.

    Numerics: y in float32 as of `rms_norm`, times the rounded reciprocal of the scale, rounded once to float8, to even.
    A row's bits do not depend on the other rows, nor on the order in which programs run (amax is a maximum).

    Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022.
    """
    arguments = NormArguments(eps, weight_offset, residual_dtype=residual_dtype, impl=impl, centered=False)
    return _forward(NormTensors(x, weight, bias, residual), arguments, scale, store_rstd)


def layer_norm_float8_fwd(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    scale: torch.Tensor | None = None,
    eps: float = 1e-5,
    residual_dtype: torch.dtype | None = None,
    weight_offset: float = 0.0,
    store_stats: bool = True,
    impl: str | Impl | None = None,
) -> Float8Norm:
    """The forward of `layer_norm` with y in float8 e4m3; arguments, results and errors as `rms_norm_float8_fwd`.

    Its backward is `layer_norm_bwd`.

    Args:
        store_stats: Whether mean and rstd are kept for `layer_norm_bwd`.
    """
    arguments = NormArguments(eps, weight_offset, residual_dtype=residual_dtype, impl=impl, centered=True)
    return _forward(NormTensors(x, weight, bias, residual), arguments, scale, store_stats)


def _forward(
    tensors: NormTensors, arguments: NormArguments, scale: torch.Tensor | None, store_stats: bool
) -> Float8Norm:
    tensors, arguments, s_dtype = checked(tensors, arguments)
    x = tensors.x
    validation.check_float8(x, scale)
    wanted = WantedOutput(out_dtype=torch.float8_e4m3fn, s_dtype=s_dtype, store_stats=store_stats)
    with torch.no_grad():
        whole = None if scale is None else scale.detach().reshape(1)
        results = _run(two_dimensional(tensors), arguments, whole, wanted)
    rows = x.shape[:-1]
    mean, rstd = (None if t is None else t.view(rows) for t in (results.mean, results.rstd))
    return Float8Norm(
        y=results.y.view(x.shape),
        scale=results.scale.view(*rows, 1) if scale is None else scale,
        amax=None if results.amax is None else results.amax.view(()),
        s=x if results.s is None else results.s.view(x.shape),
        mean=mean,
        rstd=rstd,
    )


def _run(
    tensors: NormTensors, arguments: NormArguments, scale: torch.Tensor | None, wanted: WantedOutput
) -> Float8Results:
    x, spec = tensors.x, arguments.spec()
    impl = FAMILY.choose(arguments.impl, x.dtype, x.device)
    if arguments.impl is None and impl is Impl.TRITON and not _has_float8(x):
        impl = Impl.TORCH
    if impl is Impl.TRITON and x.numel():
        from retrograd.ops.norm.triton.float8 import norm_fwd_float8

        launched = norm_fwd_float8(tensors, scale, spec, wanted)
        if launched is not None:
            return launched
    y, s, mean, rstd = functions(impl)[0](tensors, spec, wanted._replace(out_dtype=torch.float32))
    y, scale, amax = quantize(y, scale)
    return Float8Results(y, scale, amax, s, mean, rstd)


def _has_float8(x: torch.Tensor) -> bool:
    """Whether kernels on x's GPU can round to float8; AMD's round in several instructions."""
    on_nvidia: Any = x.is_cuda and torch.version.hip is None
    return not on_nvidia or torch.cuda.get_device_capability(x.device) >= (8, 9)
