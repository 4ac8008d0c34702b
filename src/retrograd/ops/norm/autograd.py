"""The autograd node of RMSNorm: what is saved, which gradients are computed. Shapes are 2-D here."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from retrograd.ops.types import Impl


class RmsNormFunction(torch.autograd.Function):
    """y (or y and s) of x [M, N], weight [N], bias [N] and residual [M, N]; not differentiable twice."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        eps: float,
        return_s: bool,
        deterministic: bool,
        impl: Impl,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute y; keep s (or x), weight and rstd if a gradient needs them."""
        need_x, need_weight, _, need_residual = ctx.needs_input_grad[:4]
        need_stats = need_x or need_weight or need_residual
        if impl is Impl.TRITON:
            from retrograd.ops.norm.triton import rms_norm_fwd as fwd
        else:
            from retrograd.ops.norm.eager import eager_fwd as fwd
        y, s, rstd = fwd(x, weight, bias, residual, eps, store_rstd=need_stats, store_s=return_s or need_stats)
        ctx.set_materialize_grads(False)
        ctx.deterministic, ctx.impl = deterministic, impl
        ctx.weight_dtype = None if weight is None else weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        if need_stats:
            # The weight scales grad_out on the way to x; the gradient of the weight itself does not need it.
            kept_weight = weight if need_x or need_residual else None
            ctx.save_for_backward(x if residual is None else s, kept_weight, rstd)
        return (y, s) if return_s else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Gradients of x, weight, bias and residual; the last equals that of x."""
        need_x, need_weight, need_bias, need_residual = ctx.needs_input_grad[:4]
        grad_out = grads[0]
        grad_s = grads[1] if len(grads) > 1 else None
        if grad_out is None:
            ds = grad_s
            return (ds if need_x else None, None, None, ds if need_residual else None, *[None] * 4)
        if not (need_x or need_weight or need_residual):
            # Only the bias: no statistics were kept, and its gradient needs none.
            inner = torch.float64 if grad_out.dtype == torch.float64 else torch.float32
            return (None, None, grad_out.sum(dim=0, dtype=inner).to(ctx.bias_dtype), *[None] * 5)
        s, weight, rstd = ctx.saved_tensors
        wanted = {
            "need_grad_x": need_x or need_residual,
            "weight_dtype": ctx.weight_dtype if need_weight else None,
            "bias_dtype": ctx.bias_dtype if need_bias else None,
        }
        if ctx.impl is Impl.TRITON:
            from retrograd.ops.norm.triton import rms_norm_bwd

            ds, grad_weight, grad_bias = rms_norm_bwd(
                grad_out, s, weight, rstd, grad_s, deterministic=ctx.deterministic, **wanted
            )
        else:
            from retrograd.ops.norm.eager import eager_bwd

            ds, grad_weight, grad_bias = eager_bwd(grad_out, s, weight, rstd, grad_s, **wanted)
        return (ds if need_x else None, grad_weight, grad_bias, ds if need_residual else None, *[None] * 4)
