"""The autograd node of the norms: what is saved, which gradients are computed.

The node takes [..., N] tensors and reshapes inside: views outside would be nodes of their own, three a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from retrograd.ops import tensor_subclasses
from retrograd.ops.norm.dispatch import NormCall
from retrograd.ops.norm.shapes import Tensors, heads_of, in_shape, inner_dtype, rows_of, two_dimensional, vector_of
from retrograd.ops.norm.spec import NormSpec

ONCE_ONLY = (
    "the gradient of rms_norm and layer_norm cannot be differentiated again: their backward is a kernel without a "
    "derivative; for second derivatives use torch.nn.functional, or rms_norm_reference and layer_norm_reference of "
    "retrograd.ops.norm"
)
Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class NormFunction(torch.autograd.Function):
    """(y, s), or y where s is x, of x [..., N], weight, bias and residual; not differentiable twice."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        call: NormCall,
        return_s: bool,
        parameters: tuple[torch.Tensor | None, torch.Tensor | None] | None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute y; keep what the gradients need. `parameters` own the main_grad to add to, if any."""
        need_x, need_weight, _, need_residual = ctx.needs_input_grad[:4]
        need_stats = need_x or need_weight or need_residual
        shape = x.shape
        flat = len(shape) == 2
        y, s, mean, rstd = call.forward(
            *((x, weight, bias, residual) if flat else two_dimensional(x, weight, bias, residual)),
            call.spec,
            out_dtype=call.out_dtype,
            s_dtype=call.s_dtype,
            store_stats=need_stats,
            store_s=return_s or need_stats,
        )
        if not flat:
            # Not .view(): a view made in here could not be modified in place by the caller.
            y = y.resize_(shape)
            s = None if s is None else s.resize_(shape)
        ctx.backward_function = call.backward if parameters is None else _adding_anywhere(call.backward)
        ctx.parameters = parameters
        remember(ctx, (x, weight, bias, residual), call.spec, (s, mean, rstd))
        # As a result, s stays tied to x and residual, so that a second derivative is noticed.
        return y if s is None else (y, s)

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor | None, grad_s: torch.Tensor | None = None) -> tuple[Any, ...]:
        """Gradients of x, weight, bias and residual."""
        if not (type(grad_y) in tensor_subclasses.PLAIN and type(grad_s) in tensor_subclasses.PLAIN):
            grad_y, grad_s = tensor_subclasses.finished(grad_y), tensor_subclasses.finished(grad_s)
        grad_y, grad_s = tensor_subclasses.as_stored(grad_y, grad_s)
        if not torch.is_grad_enabled():
            return (*gradients(ctx, ctx.backward_function, grad_y, grad_s), None, None, None)
        # create_graph=True: the gradients are handed out behind a node that says why it cannot go on.
        with torch.no_grad():
            grads = gradients(ctx, ctx.backward_function, grad_y, grad_s)
        leaves = [t for t in (grad_y, grad_s, *ctx.saved_tensors) if t is not None]
        given = [g for g in grads if g is not None]
        guarded = iter(_OnceOnly.apply(len(given), *given, *leaves))
        return (*(None if g is None else next(guarded) for g in grads), None, None, None)


class _OnceOnly(torch.autograd.Function):
    """Passes gradients on; raises where they are differentiated."""

    @staticmethod
    def forward(_ctx: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(_ctx: Any, *_grads: Any) -> Any:
        refuse_second_derivative()


def refuse_second_derivative(*_: Any) -> None:
    """Raise what a person sees who differentiates a gradient of a norm."""
    raise RuntimeError(ONCE_ONLY)


def remember(ctx: Any, inputs: Tensors, spec: NormSpec, results: tuple[torch.Tensor | None, ...]) -> None:
    """Keep on `ctx` what `gradients` reads; results are s, mean, rstd."""
    x, weight, bias, residual = inputs
    s, mean, rstd = results
    need_x, need_weight, _, need_residual = ctx.needs_input_grad[:4]
    ctx.set_materialize_grads(False)
    ctx.spec = spec
    ctx.shape = x.shape
    ctx.heads = heads_of(weight, bias)
    vector = bias if weight is None else weight
    ctx.vector_shape = None if vector is None else vector.shape
    ctx.dtypes = (
        x.dtype,
        None if residual is None else residual.dtype,
        None if weight is None else weight.dtype,
        None if bias is None else bias.dtype,
    )
    if need_x or need_weight or need_residual:
        # The weight scales grad_out on the way to x; the gradient of the weight itself does not need it.
        kept = weight if need_x or need_residual else None
        ctx.save_for_backward(x if s is None else s, kept, mean, rstd)


def gradients(
    ctx: Any, backward: Callable[..., Any], grad_y: torch.Tensor | None, grad_s: torch.Tensor | None
) -> Gradients:
    """Gradients of x, weight, bias and residual, in that order; None where none is needed or none arrives."""
    need_x, need_weight, need_bias, need_residual = ctx.needs_input_grad[:4]
    x_dtype, residual_dtype, weight_dtype, bias_dtype = ctx.dtypes
    if grad_y is None:
        if grad_s is None:
            return None, None, None, None
        grad_x = grad_s.to(x_dtype) if need_x else None
        return grad_x, None, None, grad_s.to(residual_dtype) if need_residual else None
    into_weight, into_bias = _main_grads(ctx) if ctx.parameters is not None else (None, None)
    if not (need_x or need_weight or need_residual):
        # Only the bias: no statistics were kept, and its gradient needs none.
        return None, None, _bias_gradient(ctx, grad_y, into_bias), None
    s, weight, mean, rstd = ctx.saved_tensors
    flat = len(ctx.shape) == 2
    if not flat:
        s, weight, _, grad_s = two_dimensional(s, weight, None, grad_s)
        grad_y = rows_of(grad_y)
    grad_x, grad_residual, grad_weight, grad_bias = backward(
        grad_y,
        s,
        weight,
        mean,
        rstd,
        grad_s,
        ctx.spec,
        x_dtype=x_dtype if need_x else None,
        residual_dtype=residual_dtype if need_residual else None,
        weight_dtype=weight_dtype if need_weight else None,
        bias_dtype=bias_dtype if need_bias else None,
        heads=ctx.heads,
        into_weight=into_weight,
        into_bias=into_bias,
    )
    grad_weight, grad_bias = in_shape(grad_weight, ctx.vector_shape), in_shape(grad_bias, ctx.vector_shape)
    if flat:
        return grad_x, grad_weight, grad_bias, grad_residual
    # One tensor for both stays one: autograd would take two views of a storage for two gradients it may write to.
    shared = grad_residual is grad_x
    grad_x = None if grad_x is None else grad_x.view(ctx.shape)
    if not shared and grad_residual is not None:
        grad_residual = grad_residual.view(ctx.shape)
    return grad_x, grad_weight, grad_bias, grad_x if shared else grad_residual


def _bias_gradient(ctx: Any, grad_y: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor | None:
    shape, inner = ctx.vector_shape, inner_dtype(grad_y)
    if shape.numel():
        total = grad_y.reshape(-1, *shape).sum(dim=0, dtype=inner)
    else:
        total = grad_y.new_zeros(shape, dtype=inner)
    if into is None:
        return total.to(ctx.dtypes[3])
    into.add_(total.view(into.shape))
    return None


def _adding_anywhere(backward: Callable[..., Any]) -> Callable[..., Any]:
    """`backward` for main_grads of any strides: implementations add to contiguous ones."""

    def added(*args: Any, into_weight: Any, into_bias: Any, **wanted: Any) -> Any:
        targets = (into_weight, into_bias)
        dense = [t if t is None or t.is_contiguous() else t.new_zeros(t.shape) for t in targets]
        results = backward(*args, into_weight=dense[0], into_bias=dense[1], **wanted)
        for target, sums in zip(targets, dense, strict=True):
            if target is not sums:
                target.add_(sums)
        return results

    return added


def _main_grads(ctx: Any) -> list[torch.Tensor | None]:
    """The main_grad of weight and bias as [N] or [H, N], where they need a gradient; marks their owners."""
    found: list[torch.Tensor | None] = []
    for parameter, needed in zip(ctx.parameters, ctx.needs_input_grad[1:3], strict=True):
        if parameter is None or not needed:
            found.append(None)
            continue
        parameter.grad_added_to_main_grad = True
        found.append(vector_of(parameter.main_grad))
    return found
