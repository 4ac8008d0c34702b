"""The two halves of each norm without autograd, for callers who bring their own: [..., N] tensors in and out."""

from __future__ import annotations

from typing import Any

import torch

from retrograd.ops import tensor_subclasses
from retrograd.ops.norm import validation
from retrograd.ops.norm.arguments import BackwardTensors, NormArguments, NormTensors, WantedGrads, WantedOutput
from retrograd.ops.norm.dispatch import resolve
from retrograd.ops.norm.shapes import heads_of, in_shape, rows_of, two_dimensional, vector_of
from retrograd.ops.types import Impl


def rms_norm_fwd(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    weight_offset: float = 0.0,
    store_rstd: bool = True,
    impl: str | Impl | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The forward of `rms_norm`, whose docstring describes the arguments; autograd does not see it.

    Args:
        store_rstd: Whether rstd is kept for `rms_norm_bwd`.

    Returns:
        y [..., N]; s [..., N], x itself where nothing was added or cast; rstd [...], float32 (float64 for float64),
        or None.

    Raises:
        TypeError, ValueError, RuntimeError: as `rms_norm`.
    """
    arguments = NormArguments(
        eps, weight_offset, residual_dtype=residual_dtype, out_dtype=out_dtype, impl=impl, centered=False
    )
    y, s, _, rstd = _forward(NormTensors(x, weight, bias, residual), arguments, store_rstd)
    return y, s, rstd


def layer_norm_fwd(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    weight_offset: float = 0.0,
    store_stats: bool = True,
    impl: str | Impl | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The forward of `layer_norm`, whose docstring describes the arguments; autograd does not see it.

    Args:
        store_stats: Whether mean and rstd are kept for `layer_norm_bwd`.

    Returns:
        y [..., N]; s [..., N], x itself where nothing was added or cast; mean and rstd [...], float32 (float64 for
        float64), or None.

    Raises:
        TypeError, ValueError, RuntimeError: as `layer_norm`.
    """
    arguments = NormArguments(
        eps, weight_offset, residual_dtype=residual_dtype, out_dtype=out_dtype, impl=impl, centered=True
    )
    return _forward(NormTensors(x, weight, bias, residual), arguments, store_stats)


def rms_norm_bwd(
    grad_out: torch.Tensor,
    s: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    grad_s: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    need_x: bool = True,
    need_weight: bool = True,
    bias_dtype: torch.dtype | None = None,
    x_dtype: torch.dtype | None = None,
    deterministic: bool = True,
    dw_parts: int | None = None,
    impl: str | Impl | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The backward of `rms_norm_fwd`.

    Args:
        grad_out: [..., N], gradient of y, any strides.
        s: [..., N] from the forward.
        weight: the forward's weight.
        rstd: [...] from the forward.
        grad_s: [..., N] gradient that reached s by another way, or None.
        eps: the forward's; impl="native" computes rstd of float32 rows again, in float64.
        weight_offset: the forward's.
        need_x: Whether grad_x is computed; the gradient of a residual is the same.
        need_weight: Whether grad_weight is computed, where there is a weight.
        bias_dtype: dtype of grad_bias; None skips it.
        x_dtype: dtype of grad_x; None is that of s.
        deterministic: as `rms_norm`, as are dw_parts and impl.

    Returns:
        grad_x [..., N], grad_weight (shape and dtype of weight), grad_bias in the shape of weight,
        [N] without one; None for what was skipped.

    Raises:
        TypeError, ValueError, RuntimeError: as `rms_norm`.
    """
    arguments = NormArguments(eps, weight_offset, deterministic, dw_parts, impl=impl, centered=False)
    tensors = BackwardTensors(grad_out, s, weight, mean=None, rstd=rstd, grad_s=grad_s)
    return _backward(tensors, arguments, need_x, x_dtype, need_weight, bias_dtype)


def layer_norm_bwd(
    grad_out: torch.Tensor,
    s: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    grad_s: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    need_x: bool = True,
    need_weight: bool = True,
    bias_dtype: torch.dtype | None = None,
    x_dtype: torch.dtype | None = None,
    deterministic: bool = True,
    dw_parts: int | None = None,
    impl: str | Impl | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The backward of `layer_norm_fwd`; arguments, results and errors as `rms_norm_bwd`.

    Args:
        mean: [...] from the forward.
    """
    arguments = NormArguments(eps, weight_offset, deterministic, dw_parts, impl=impl, centered=True)
    tensors = BackwardTensors(grad_out, s, weight, mean, rstd, grad_s)
    return _backward(tensors, arguments, need_x, x_dtype, need_weight, bias_dtype)


def checked(tensors: NormTensors, arguments: NormArguments) -> tuple[NormTensors, NormArguments, torch.dtype]:
    """What a forward was given, checked and with its numbers in memory, and the dtype of s."""
    tensors = NormTensors(*map(tensor_subclasses.finished, tensors))
    validation.check_tensors(tensors)
    tensors = tensor_subclasses.as_stored(tensors)
    x, residual = tensors.x, tensors.residual
    arguments = validation.check_arguments(arguments, x.dtype, tensors.weight is not None)
    return tensors, arguments, arguments.residual_dtype or (x if residual is None else residual).dtype


def _forward(tensors: NormTensors, arguments: NormArguments, store_stats: bool) -> tuple[Any, ...]:
    tensors, arguments, s_dtype = checked(tensors, arguments)
    x = tensors.x
    call = resolve(arguments, x.dtype, s_dtype, x.device)
    with torch.no_grad():
        wanted = WantedOutput(*call.dtypes, store_stats)
        y, s, mean, rstd = call.forward(two_dimensional(tensors), call.spec, wanted)
    mean, rstd = (None if t is None else t.view(x.shape[:-1]) for t in (mean, rstd))
    return y.view(x.shape), x if s is None else s.view(x.shape), mean, rstd


def _backward(
    tensors: BackwardTensors,
    arguments: NormArguments,
    need_x: bool,
    x_dtype: torch.dtype | None,
    need_weight: bool,
    bias_dtype: torch.dtype | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    tensors = BackwardTensors(*map(tensor_subclasses.finished, tensors))
    _check(tensors)
    grad_out, s, weight, mean, rstd, grad_s = tensor_subclasses.as_stored(tensors)
    arguments = validation.check_arguments(arguments, s.dtype, weight is not None)
    call = resolve(arguments, s.dtype, s.dtype, s.device)
    vector = vector_of(weight)
    rows = BackwardTensors(
        grad_out=rows_of(grad_out),
        s=rows_of(s),
        weight=vector,
        mean=None if mean is None else mean.reshape(-1).contiguous(),
        rstd=rstd.reshape(-1).contiguous(),
        grad_s=None if grad_s is None else rows_of(grad_s),
    )
    wanted = WantedGrads(
        x=(x_dtype or s.dtype) if need_x else None,
        weight=weight.dtype if need_weight and weight is not None else None,
        bias=bias_dtype,
        heads=heads_of(vector),
    )
    with torch.no_grad():
        grads = call.backward(rows, call.spec, wanted)
    return (
        None if grads.x is None else grads.x.view(s.shape),
        None if weight is None else in_shape(grads.weight, weight.shape),
        grads.bias if weight is None else in_shape(grads.bias, weight.shape),
    )


def _check(tensors: BackwardTensors) -> None:
    s = tensors.s
    validation.check_tensors(NormTensors(x=s, weight=tensors.weight), name="s")
    validation.check_shape_and_device("grad_out", tensors.grad_out, s)
    if tensors.grad_s is not None:
        validation.check_shape_and_device("grad_s", tensors.grad_s, s)
    for name in ("mean", "rstd"):
        if (statistic := getattr(tensors, name)) is not None:
            validation.check_statistic(name, statistic, s)
