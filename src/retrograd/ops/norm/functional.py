"""The two halves of each norm without autograd, for callers who bring their own: [..., N] tensors in and out."""

from __future__ import annotations

from typing import Any

import torch

from retrograd.ops import tensor_subclasses
from retrograd.ops.norm import validation
from retrograd.ops.norm.dispatch import NormCall, Options, resolve
from retrograd.ops.norm.shapes import heads_of, in_shape, rows_of, two_dimensional
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
    options = Options(False, eps, weight_offset, True, None, residual_dtype, out_dtype, impl)
    y, s, _, rstd = _forward((x, weight, bias, residual), options, store_rstd)
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
    options = Options(True, eps, weight_offset, True, None, residual_dtype, out_dtype, impl)
    return _forward((x, weight, bias, residual), options, store_stats)


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
    options = Options(False, eps, weight_offset, deterministic, dw_parts, None, None, impl)
    wanted = (need_x, x_dtype, need_weight, bias_dtype)
    return _backward((grad_out, s, weight, None, rstd, grad_s), options, wanted)


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
    options = Options(True, eps, weight_offset, deterministic, dw_parts, None, None, impl)
    wanted = (need_x, x_dtype, need_weight, bias_dtype)
    return _backward((grad_out, s, weight, mean, rstd, grad_s), options, wanted)


def _forward(tensors: tuple[Any, Any, Any, Any], options: Options, store_stats: bool) -> tuple[Any, ...]:
    tensors = tuple(map(tensor_subclasses.finished, tensors))
    validation.check_tensors(*tensors)
    x, weight, _, residual = tensors = tensor_subclasses.as_stored(*tensors)
    options = validation.check_options(options, x.dtype, weight is not None)
    s_dtype = options.residual_dtype or (x if residual is None else residual).dtype
    call = resolve(options, x.dtype, s_dtype, x.device)
    with torch.no_grad():
        y, s, mean, rstd = call.forward(
            *two_dimensional(*tensors),
            call.spec,
            out_dtype=call.out_dtype,
            s_dtype=s_dtype,
            store_stats=store_stats,
            store_s=True,
        )
    mean, rstd = (None if t is None else t.view(x.shape[:-1]) for t in (mean, rstd))
    return y.view(x.shape), x if s is None else s.view(x.shape), mean, rstd


def _backward(
    tensors: tuple[Any, ...], options: Options, wanted: tuple[bool, torch.dtype | None, bool, torch.dtype | None]
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    tensors = tuple(map(tensor_subclasses.finished, tensors))
    grad_out, s, weight, mean, rstd, grad_s = tensors
    validation.check_tensors(s, weight, None, None, name="s")
    validation.check_shape_and_device("grad_out", grad_out, s)
    if grad_s is not None:
        validation.check_shape_and_device("grad_s", grad_s, s)
    for name, statistic in (("mean", mean), ("rstd", rstd)):
        if statistic is not None:
            validation.check_statistic(name, statistic, s)
    grad_out, s, weight, mean, rstd, grad_s = tensor_subclasses.as_stored(grad_out, s, weight, mean, rstd, grad_s)
    options = validation.check_options(options, s.dtype, weight is not None)
    need_x, x_dtype, need_weight, bias_dtype = wanted
    call: NormCall = resolve(options, s.dtype, s.dtype, s.device)
    flat, vector, _, flat_grad_s = two_dimensional(s, weight, None, grad_s)
    with torch.no_grad():
        grad_x, _, grad_weight, grad_bias = call.backward(
            rows_of(grad_out),
            flat,
            vector,
            None if mean is None else mean.reshape(-1).contiguous(),
            rstd.reshape(-1).contiguous(),
            flat_grad_s,
            call.spec,
            x_dtype=(x_dtype or s.dtype) if need_x else None,
            residual_dtype=None,
            weight_dtype=weight.dtype if need_weight and weight is not None else None,
            bias_dtype=bias_dtype,
            heads=heads_of(vector),
        )
    return (
        None if grad_x is None else grad_x.view(s.shape),
        None if weight is None else in_shape(grad_weight, weight.shape),
        grad_bias if weight is None else in_shape(grad_bias, weight.shape),
    )
