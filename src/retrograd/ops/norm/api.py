"""The public functions: documents and checks arguments and hands them to the autograd node."""

from __future__ import annotations

from typing import Any

import torch

from retrograd.compat.torch_autograd import in_forward_mode
from retrograd.compat.torch_dispatch import is_watched
from retrograd.ops import tensor_subclasses
from retrograd.ops.norm import custom_op, host, validation
from retrograd.ops.norm.arguments import NormArguments, NormTensors, WantedOutput
from retrograd.ops.norm.autograd import NormFunction
from retrograd.ops.norm.dispatch import resolve
from retrograd.ops.norm.shapes import two_dimensional
from retrograd.ops.tensor_subclasses import PLAIN
from retrograd.ops.types import Impl


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    prenorm: bool = False,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    weight_offset: float = 0.0,
    deterministic: bool = True,
    dw_parts: int | None = None,
    accumulate_main_grad: bool = False,
    impl: str | Impl | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Root-mean-square normalisation over the last dimension, with an optional residual addition before it.

    s = x + residual;  y = s / sqrt(mean(s^2) + eps) * (weight + weight_offset) + bias

    Args:
        x: [..., N], float32, float16 or bfloat16; float64 by torch. Any strides, any leading dimensions
            or none, and sizes of 0. A DTensor may be sharded over any dimension but the last.
        weight: [N], or [H, N] for x [..., H, N] of three dimensions or more (one row a head). Any of the narrow
            dtypes whatever x has, float64 beside float64 only. None is ones.
        bias: in shape like weight, in dtype free as weight. None is zeros.
        residual: in shape like x, in dtype free as weight. None adds nothing.
        eps: finite, 0 or more. With 0 a row of zeros gives NaN.
        prenorm: Return s too, for the next residual connection.
        residual_dtype: dtype of s. None is that of residual, or of x without one.
        out_dtype: dtype of y. None is that of x.
        weight_offset: added to weight in float32: 1.0 for weights stored around zero. Needs a weight.
        deterministic: Sum grad_weight and grad_bias over rows in a fixed order. False adds them atomically on
            impl="triton": last bits differ from run to run. The others are deterministic anyway.
        dw_parts: partial sums behind grad_weight and grad_bias on impl="triton". None chooses by GPU; a number
            gives the same bits on every GPU model.
        accumulate_main_grad: Add grad_weight and grad_bias to the float32 tensors weight.main_grad and
            bias.main_grad in the backward and set grad_added_to_main_grad on the parameters; their .grad stays as
            it is. Not inside a torch.compile graph (a call without fullgraph=True breaks the graph there), not for
            DTensors.
        impl: "triton", "native" (C on CPU, compiled when first used), "torch", or None: torch for float64; triton
            on CUDA; native on CPU where a compiler is found, else torch. An explicit choice never falls back.

    Returns:
        y [..., N], contiguous; with prenorm (y, s), where s is x itself without a residual and of its dtype.

    Raises:
        TypeError: A tensor has a dtype that is not supported, or a number is of the wrong type.
        ValueError: A shape or a device does not fit x, eps is negative or not finite, weight_offset lacks a
            weight, main_grad is missing, impl is unknown, or a DTensor's placement does not allow local rows.
        RuntimeError: deterministic=False under torch.use_deterministic_algorithms(True), impl="triton" on a
            CPU tensor outside `retrograd.cpu_triton`, impl="native" without a compiler, or a second derivative is
            asked for.

    Numerics: statistics, sums and products in float32 (float64 for float64), also under autocast, which changes no
    dtype here. s is rounded to its dtype and that rounded value is normalised. A row's y and gradient do not depend
    on the other rows. Gradients have the dtypes of their inputs; a weight that needs no gradient costs nothing in
    the backward.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """
    if not torch.compiler.is_compiling() and (entry := host.path.entry) is not None:
        done = entry(
            x, weight, bias, residual, eps, prenorm, residual_dtype, out_dtype, weight_offset, deterministic, dw_parts,
            accumulate_main_grad, impl, False,
        )  # fmt: skip
        if done is not NotImplemented:
            return done
    arguments = NormArguments(
        eps, weight_offset, deterministic, dw_parts, residual_dtype, out_dtype, impl, centered=False
    )
    return _norm(NormTensors(x, weight, bias, residual), arguments, prenorm, accumulate_main_grad)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    weight_offset: float = 0.0,
    deterministic: bool = True,
    dw_parts: int | None = None,
    accumulate_main_grad: bool = False,
    impl: str | Impl | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Layer normalisation over the last dimension, with an optional residual addition before it.

    s = x + residual;  y = (s - mean(s)) / sqrt(var(s) + eps) * (weight + weight_offset) + bias

    var is the mean of (s - mean(s))^2, without Bessel's correction. Arguments, errors and the handling of dtypes are
    those of `rms_norm`.

    Args:
        x: [..., N].
        weight: [N], [H, N] or None for ones.
        bias: like weight, or None for zeros.
        residual: in shape like x, or None.
        eps: finite, 0 or more. With 0 a constant row gives NaN.
        prenorm: Return s too.
        residual_dtype: dtype of s.
        out_dtype: dtype of y.
        weight_offset: added to weight in float32.
        deterministic: Sum grad_weight and grad_bias in a fixed order.
        dw_parts: partial sums behind grad_weight and grad_bias.
        accumulate_main_grad: Add grad_weight and grad_bias to main_grad.
        impl: "triton", "native", "torch" or None.

    Returns:
        y [..., N], contiguous; with prenorm (y, s).

    Raises:
        TypeError, ValueError, RuntimeError: as `rms_norm`.

    Numerics: as `rms_norm`; the variance is that of the centred row, so a large mean costs no more than its own
    rounding to float32.

    Source: Ba, Kiros and Hinton, Layer Normalization, 2016.
    """
    if not torch.compiler.is_compiling() and (entry := host.path.entry) is not None:
        done = entry(
            x, weight, bias, residual, eps, prenorm, residual_dtype, out_dtype, weight_offset, deterministic, dw_parts,
            accumulate_main_grad, impl, True,
        )  # fmt: skip
        if done is not NotImplemented:
            return done
    arguments = NormArguments(
        eps, weight_offset, deterministic, dw_parts, residual_dtype, out_dtype, impl, centered=True
    )
    return _norm(NormTensors(x, weight, bias, residual), arguments, prenorm, accumulate_main_grad)


def _norm(
    tensors: NormTensors, arguments: NormArguments, prenorm: bool, accumulate: bool
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    x, weight, bias, residual = tensors
    through_operators = False
    if not (type(x) in PLAIN and type(weight) in PLAIN and type(bias) in PLAIN and type(residual) in PLAIN):
        from retrograd.ops.norm import dtensor

        if dtensor.is_needed(tensors):
            return dtensor.run_locally(_norm, tensors, arguments, prenorm, accumulate)
        tensors = NormTensors(*map(tensor_subclasses.finished, tensors))
        through_operators = tensor_subclasses.without_memory(*tensors)
    validation.check_tensors(tensors)
    tensors = tensor_subclasses.as_stored(tensors)
    x, weight, bias, residual = tensors
    arguments = validation.check_arguments(arguments, x.dtype, weight is not None)
    own_s = residual is not None or arguments.residual_dtype not in (None, x.dtype)
    s_dtype = arguments.residual_dtype or (x if residual is None else residual).dtype
    if residual is None and not prenorm and s_dtype == torch.float32:
        s_dtype = x.dtype  # nobody sees s, and widening it changes no value
    parameters = (weight, bias) if accumulate else None
    y, s = _run(tensors, arguments, s_dtype, prenorm and own_s, parameters, through_operators)
    if not prenorm:
        return y
    return y, s if own_s else x


def _run(
    tensors: NormTensors,
    arguments: NormArguments,
    s_dtype: torch.dtype,
    return_s: bool,
    parameters: tuple[torch.Tensor | None, torch.Tensor | None] | None,
    through_operators: bool,
) -> tuple[torch.Tensor, Any]:
    if parameters is not None:
        validation.check_main_grad("weight", tensors.weight)
        validation.check_main_grad("bias", tensors.bias)
    if through_operators or torch.compiler.is_compiling() or (parameters is None and is_watched()):
        if parameters is not None:
            raise RuntimeError(
                "accumulate_main_grad=True adds to main_grad while the backward runs, which torch.compile cannot "
                "trace; pass accumulate_main_grad=False, or keep this call out with torch.compiler.disable"
            )
        return custom_op.norm(tensors, arguments, s_dtype, return_s)
    x = tensors.x
    call = resolve(arguments, x.dtype, s_dtype, x.device)
    if (torch.is_grad_enabled() and _any_requires_grad(tensors)) or in_forward_mode():
        out = NormFunction.apply(*tensors, call, return_s, parameters)
        return out if isinstance(out, tuple) else (out, None)
    shape = x.shape
    flat = len(shape) == 2
    wanted = WantedOutput(*call.dtypes, False, return_s)
    y, s, _, _ = call.forward(tensors if flat else two_dimensional(tensors), call.spec, wanted)
    return (y, s) if flat else (y.view(shape), None if s is None else s.view(shape))


def _any_requires_grad(tensors: NormTensors) -> bool:
    x, weight, bias, residual = tensors
    return (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
        or (residual is not None and residual.requires_grad)
    )
