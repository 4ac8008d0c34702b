"""The norms as torch.library operators, for torch.compile and torch.export: schemas, fakes, derivative. No kernels.

A result that does not exist is an empty tensor of one dimension, since an operator's results are all tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from retrograd.ops.norm import autograd
from retrograd.ops.norm.arguments import (
    BackwardTensors,
    NormArguments,
    NormGrads,
    NormResults,
    NormTensors,
    WantedGrads,
    WantedOutput,
)
from retrograd.ops.norm.dispatch import FAMILY, functions
from retrograd.ops.norm.shapes import empty_results, has_own_s, two_dimensional
from retrograd.ops.norm.spec import NormSpec

_SPEC = "bool centered, float eps, float weight_offset, bool deterministic, int? parts"
_LIBRARY = torch.library.Library("retrograd", "FRAGMENT")
_LIBRARY.define(
    f"norm_fwd(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, {_SPEC}, ScalarType out_dtype, "
    "ScalarType s_dtype, bool store_stats, bool store_s, str impl) -> (Tensor y, Tensor s, Tensor mean, Tensor rstd)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    f"norm_bwd(Tensor grad_out, Tensor s, Tensor? weight, Tensor? mean, Tensor rstd, Tensor? grad_s, {_SPEC}, "
    "ScalarType? x_dtype, ScalarType? residual_dtype, ScalarType? weight_dtype, ScalarType? bias_dtype, int heads, "
    "str impl) -> (Tensor grad_x, Tensor grad_residual, Tensor grad_weight, Tensor grad_bias)",
    tags=(torch.Tag.pt2_compliant_tag,),
)

# `impl` of an operator that chooses by device when it runs: a traced graph may run elsewhere than it was traced.
_BY_DEVICE = ""


def norm(
    tensors: NormTensors, arguments: NormArguments, s_dtype: torch.dtype, return_s: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, s) of [..., N] tensors through the operator; s is empty unless `return_s`."""
    shape = tensors.x.shape
    x, weight, bias, residual = two_dimensional(tensors)
    need_stats = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, residual))
    impl = _BY_DEVICE if arguments.impl is None else getattr(arguments.impl, "value", arguments.impl)
    spec, out_dtype = arguments.spec(), arguments.out_dtype or x.dtype
    options = (spec.centered, spec.eps, spec.weight_offset, spec.deterministic, spec.parts)
    stored = (need_stats, return_s or need_stats)
    y, s, _, _ = torch.ops.retrograd.norm_fwd(x, weight, bias, residual, *options, out_dtype, s_dtype, *stored, impl)
    return y.view(shape), s.view(shape) if return_s else s


def _run_fwd(*operands: Any) -> tuple[torch.Tensor, ...]:
    tensors, spec, wanted, impl = _forward_operands(*operands)
    forward, _ = functions(FAMILY.choose(impl or None, tensors.x.dtype, tensors.x.device))
    return _all_tensors(forward(tensors, spec, wanted), tensors.x)


def _fake_fwd(*operands: Any) -> tuple[torch.Tensor, ...]:
    tensors, spec, wanted, _ = _forward_operands(*operands)
    return _all_tensors(empty_results(tensors, spec, wanted), tensors.x)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    tensors, spec, wanted, impl = _forward_operands(*inputs)
    y, s, mean, rstd = output
    own_s = wanted.store_s and has_own_s(tensors.x, tensors.residual, wanted.s_dtype)
    ctx.mark_non_differentiable(mean, rstd, *(() if own_s else (s,)))
    ctx.impl, ctx.parameters, ctx.own_s = impl, None, own_s
    results = NormResults(y=y, s=s if own_s else None, mean=mean if spec.centered else None, rstd=rstd)
    autograd.remember(ctx, tensors, spec, results)


def _differentiate(ctx: Any, grad_y: torch.Tensor | None, grad_s: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
    backward = partial(_call_bwd, ctx.impl)
    return (*autograd.gradients(ctx, backward, grad_y, grad_s if ctx.own_s else None), *[None] * 10)


def _call_bwd(impl: str, tensors: BackwardTensors, spec: NormSpec, wanted: WantedGrads) -> NormGrads:
    # An operator may not return one tensor twice, as implementations do for equal dtypes.
    shared = wanted.x is not None and wanted.x == wanted.residual
    dtypes = (wanted.x, None if shared else wanted.residual, wanted.weight, wanted.bias)
    options = (spec.centered, spec.eps, spec.weight_offset, spec.deterministic, spec.parts)
    results = torch.ops.retrograd.norm_bwd(*tensors, *options, *dtypes, wanted.heads, impl)
    x, residual, weight, bias = (None if dtype is None else grad for grad, dtype in zip(results, dtypes, strict=True))
    return NormGrads(x=x, weight=weight, bias=bias, residual=x if shared else residual)


def _run_bwd(*operands: Any) -> tuple[torch.Tensor, ...]:
    tensors, spec, wanted, impl = _backward_operands(*operands)
    _, backward = functions(FAMILY.choose(impl or None, tensors.s.dtype, tensors.s.device))
    grads = backward(tensors, spec, wanted)
    residual = grads.residual
    if residual is not None and residual is grads.x:
        residual = residual.clone()
    return _all_tensors((grads.x, residual, grads.weight, grads.bias), tensors.s)


def _fake_bwd(*operands: Any) -> tuple[torch.Tensor, ...]:
    tensors, _, wanted, _ = _backward_operands(*operands)
    s, vector = tensors.s, wanted.vector_shape(tensors.s.shape[1])
    wanted_each = ((wanted.x, s.shape), (wanted.residual, s.shape), (wanted.weight, vector), (wanted.bias, vector))
    return _all_tensors((None if dtype is None else s.new_empty(shape, dtype=dtype) for dtype, shape in wanted_each), s)


def _forward_operands(*operands: Any) -> tuple[NormTensors, NormSpec, WantedOutput, str]:
    """The operands of norm_fwd in the order of its schema, put together."""
    *wanted, impl = operands[9:]
    return NormTensors(*operands[:4]), NormSpec(*operands[4:9]), WantedOutput(*wanted), impl


def _backward_operands(*operands: Any) -> tuple[BackwardTensors, NormSpec, WantedGrads, str]:
    """The operands of norm_bwd in the order of its schema, put together."""
    x, residual, weight, bias, heads, impl = operands[11:]
    wanted = WantedGrads(x, weight, bias, residual, heads)
    return BackwardTensors(*operands[:6]), NormSpec(*operands[6:11]), wanted, impl


def _all_tensors(results: Iterable[torch.Tensor | None], like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(like.new_empty(0) if t is None else t for t in results)


for _name, _run, _fake, _setup, _derivative in (
    ("norm_fwd", _run_fwd, _fake_fwd, _remember, _differentiate),
    ("norm_bwd", _run_bwd, _fake_bwd, None, autograd.refuse_second_derivative),
):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"retrograd::{_name}", _fake, lib=_LIBRARY)
    torch.library.register_autograd(f"retrograd::{_name}", _derivative, setup_context=_setup, lib=_LIBRARY)
