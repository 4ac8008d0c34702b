"""The norms as torch.library operators, for torch.compile and torch.export: schemas, fakes, derivative. No kernels.

A result that does not exist is an empty tensor of one dimension, since an operator's results are all tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from retrograd.ops.norm import autograd
from retrograd.ops.norm.dispatch import Options, choose, functions, spec_of
from retrograd.ops.norm.shapes import Tensors, empty_results, has_own_s, two_dimensional
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
    tensors: Tensors,
    options: Options,
    s_dtype: torch.dtype,
    return_s: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, s) of x [..., N], weight, bias and residual through the operator; s is empty unless `return_s`."""
    shape = tensors[0].shape
    x, weight, bias, residual = two_dimensional(*tensors)
    need_stats = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, residual))
    impl = _BY_DEVICE if options.impl is None else getattr(options.impl, "value", options.impl)
    y, s, _, _ = torch.ops.retrograd.norm_fwd(
        x,
        weight,
        bias,
        residual,
        options.centered,
        options.eps,
        options.weight_offset,
        options.deterministic,
        options.parts,
        options.out_dtype or x.dtype,
        s_dtype,
        need_stats,
        return_s or need_stats,
        impl,
    )
    return y.view(shape), s.view(shape) if return_s else s


def _run_fwd(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    *rest: Any,
) -> tuple[torch.Tensor, ...]:
    *spec, out_dtype, s_dtype, store_stats, store_s, impl = rest
    forward, _ = functions(choose(impl or None, x.dtype, x.device))
    results = forward(
        x,
        weight,
        bias,
        residual,
        spec_of(Options(*spec)),
        out_dtype=out_dtype,
        s_dtype=s_dtype,
        store_stats=store_stats,
        store_s=store_s,
    )
    return tuple(x.new_empty(0) if t is None else t for t in results)


def _fake_fwd(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    *rest: Any,
) -> tuple[torch.Tensor, ...]:
    centered, *_, out_dtype, s_dtype, store_stats, store_s, _ = rest
    results = empty_results(x, residual, centered, out_dtype, s_dtype, store_stats, store_s)
    return tuple(x.new_empty(0) if t is None else t for t in results)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weight, bias, residual, *spec, _, s_dtype, _, store_s, impl = inputs
    _, s, mean, rstd = output
    own_s = store_s and has_own_s(x, residual, s_dtype)
    ctx.mark_non_differentiable(mean, rstd, *(() if own_s else (s,)))
    ctx.impl, ctx.parameters, ctx.own_s = impl, None, own_s
    options = spec_of(Options(*spec))
    autograd.remember(
        ctx, (x, weight, bias, residual), options, (s if own_s else None, mean if options.centered else None, rstd)
    )


def _differentiate(ctx: Any, grad_y: torch.Tensor | None, grad_s: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
    def backward(*args: Any, **wanted: Any) -> autograd.Gradients:
        return _call_bwd(ctx.impl, *args, **wanted)

    return (*autograd.gradients(ctx, backward, grad_y, grad_s if ctx.own_s else None), *[None] * 10)


def _call_bwd(impl: str, *args: Any, heads: int, into_weight: None, into_bias: None, **dtypes: Any) -> Any:
    *tensors, spec = args
    x_dtype, residual_dtype = dtypes["x_dtype"], dtypes["residual_dtype"]
    # An operator may not return one tensor twice, as implementations do for equal dtypes.
    shared = x_dtype is not None and x_dtype == residual_dtype
    results = torch.ops.retrograd.norm_bwd(
        *tensors,
        *_spec_values(spec),
        x_dtype,
        None if shared else residual_dtype,
        dtypes["weight_dtype"],
        dtypes["bias_dtype"],
        heads,
        impl,
    )
    grads = [t if wanted is not None else None for t, wanted in zip(results, dtypes.values(), strict=True)]
    return (grads[0], grads[0], *grads[2:]) if shared else tuple(grads)


def _spec_values(spec: NormSpec) -> tuple[Any, ...]:
    return spec.centered, spec.eps, spec.weight_offset, spec.deterministic, spec.parts


def _run_bwd(
    grad_out: torch.Tensor,
    s: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    grad_s: torch.Tensor | None,
    *rest: Any,
) -> tuple[torch.Tensor, ...]:
    *spec, x_dtype, residual_dtype, weight_dtype, bias_dtype, heads, impl = rest
    _, backward = functions(choose(impl or None, s.dtype, s.device))
    grad_x, grad_residual, *vectors = backward(
        grad_out,
        s,
        weight,
        mean,
        rstd,
        grad_s,
        spec_of(Options(*spec)),
        x_dtype=x_dtype,
        residual_dtype=residual_dtype,
        weight_dtype=weight_dtype,
        bias_dtype=bias_dtype,
        heads=heads,
    )
    if grad_residual is not None and grad_residual is grad_x:
        grad_residual = grad_x.clone()
    return tuple(s.new_empty(0) if t is None else t for t in (grad_x, grad_residual, *vectors))


def _fake_bwd(
    grad_out: torch.Tensor,
    s: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    grad_s: torch.Tensor | None,
    *rest: Any,
) -> tuple[torch.Tensor, ...]:
    *_, x_dtype, residual_dtype, weight_dtype, bias_dtype, heads, _ = rest
    vector = (heads, s.shape[1]) if heads > 1 else (s.shape[1],)
    shapes = (s.shape, s.shape, vector, vector)
    dtypes = (x_dtype, residual_dtype, weight_dtype, bias_dtype)
    return tuple(
        s.new_empty(0) if dtype is None else s.new_empty(shape, dtype=dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )


for _name, _run, _fake, _setup, _derivative in (
    ("norm_fwd", _run_fwd, _fake_fwd, _remember, _differentiate),
    ("norm_bwd", _run_bwd, _fake_bwd, None, autograd.refuse_second_derivative),
):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"retrograd::{_name}", _fake, lib=_LIBRARY)
    torch.library.register_autograd(f"retrograd::{_name}", _derivative, setup_context=_setup, lib=_LIBRARY)
