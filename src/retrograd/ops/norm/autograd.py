"""The autograd node of the norms: what is saved, which gradients are computed.

The node takes [..., N] tensors and reshapes inside: views outside would be nodes of their own, three a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from retrograd.ops import tensor_subclasses
from retrograd.ops.norm.arguments import BackwardTensors, NormGrads, NormResults, NormTensors, WantedGrads, WantedOutput
from retrograd.ops.norm.dispatch import NormCall
from retrograd.ops.norm.shapes import heads_of, in_shape, rows_of, two_dimensional, vector_of
from retrograd.ops.norm.spec import NormSpec
from retrograd.ops.types import inner_dtype

ONCE_ONLY = (
    "the gradient of rms_norm and layer_norm cannot be differentiated again: their backward is a kernel without a "
    "derivative; for second derivatives use torch.nn.functional, or rms_norm_reference and layer_norm_reference of "
    "retrograd.ops.norm"
)


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
        tensors = NormTensors(x, weight, bias, residual)
        wanted = WantedOutput(*call.dtypes, need_stats, return_s or need_stats)
        results: NormResults = call.forward(tensors if flat else two_dimensional(tensors), call.spec, wanted)
        y, s, _, _ = results
        if not flat:
            # Not .view(): a view made in here could not be modified in place by the caller.
            y.resize_(shape)
            if s is not None:
                s.resize_(shape)
        ctx.backward_function = call.backward if parameters is None else _adding_anywhere(call.backward)
        ctx.parameters = parameters
        remember(ctx, tensors, call.spec, results)
        # As a result, s stays tied to x and residual, so that a second derivative is noticed.
        return y if s is None else (y, s)

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor | None, grad_s: torch.Tensor | None = None) -> tuple[Any, ...]:
        """Gradients of x, weight, bias and residual."""
        if not (type(grad_y) in tensor_subclasses.PLAIN and type(grad_s) in tensor_subclasses.PLAIN):
            grad_y, grad_s = tensor_subclasses.finished(grad_y), tensor_subclasses.finished(grad_s)
        grad_y, grad_s = tensor_subclasses.as_stored((grad_y, grad_s))
        if not torch.is_grad_enabled():
            return (*gradients(ctx, ctx.backward_function, grad_y, grad_s), None, None, None)
        # create_graph=True: the gradients are handed out behind a node that says why it cannot go on.
        with torch.no_grad():
            grads = gradients(ctx, ctx.backward_function, grad_y, grad_s)
        leaves = [t for t in (grad_y, grad_s, *ctx.saved_tensors) if t is not None]
        present = [g for g in grads if g is not None]
        guarded = iter(_OnceOnly.apply(len(present), *present, *leaves))
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


def remember(ctx: Any, tensors: NormTensors, spec: NormSpec, results: NormResults) -> None:
    """Keep on `ctx` what `gradients` reads."""
    x, weight, bias, residual = tensors
    _, s, mean, rstd = results
    need_x, need_weight, _, need_residual = ctx.needs_input_grad[:4]
    ctx.set_materialize_grads(False)
    ctx.spec = spec
    ctx.shape = x.shape
    ctx.heads = heads_of(weight, bias)
    vector = bias if weight is None else weight
    ctx.vector_shape = None if vector is None else vector.shape
    ctx.dtypes = (
        x.dtype,
        None if weight is None else weight.dtype,
        None if bias is None else bias.dtype,
        None if residual is None else residual.dtype,
    )
    if need_x or need_weight or need_residual:
        # The weight scales grad_out on the way to x; the gradient of the weight itself does not need it.
        kept = weight if need_x or need_residual else None
        ctx.save_for_backward(x if s is None else s, kept, mean, rstd)


def gradients(
    ctx: Any, backward: Callable[..., NormGrads], grad_y: torch.Tensor | None, grad_s: torch.Tensor | None
) -> NormGrads:
    """The gradients of the inputs; None where none is needed or none arrives."""
    need_x, need_weight, need_bias, need_residual = ctx.needs_input_grad[:4]
    x_dtype, weight_dtype, bias_dtype, residual_dtype = ctx.dtypes
    if grad_y is None:
        if grad_s is None:
            return NormGrads()
        return NormGrads(
            x=grad_s.to(x_dtype) if need_x else None, residual=grad_s.to(residual_dtype) if need_residual else None
        )
    into_weight, into_bias = _main_grads(ctx) if ctx.parameters is not None else (None, None)
    if not (need_x or need_weight or need_residual):
        # Only the bias: no statistics were kept, and its gradient needs none.
        return NormGrads(bias=_bias_gradient(ctx, grad_y, into_bias))
    grad_out = grad_y
    s, weight, mean, rstd = ctx.saved_tensors
    flat = len(ctx.shape) == 2
    if not flat:
        s, weight = rows_of(s), vector_of(weight)
        grad_out, grad_s = rows_of(grad_out), None if grad_s is None else rows_of(grad_s)
    tensors = BackwardTensors(grad_out, s, weight, mean, rstd, grad_s)
    x, weight = x_dtype if need_x else None, weight_dtype if need_weight else None
    bias, residual = bias_dtype if need_bias else None, residual_dtype if need_residual else None
    heads = ctx.heads
    grads = backward(tensors, ctx.spec, WantedGrads(x, weight, bias, residual, heads, into_weight, into_bias))
    # The operator's rows are flat, but its vectors may have heads.
    if flat and (ctx.vector_shape is None or len(ctx.vector_shape) == 1):
        return grads
    return _in_shape_of_inputs(ctx, grads)


def _in_shape_of_inputs(ctx: Any, grads: NormGrads) -> NormGrads:
    x = None if grads.x is None else grads.x.view(ctx.shape)
    # One tensor for both stays one: autograd would take two views of a storage for two gradients it may write to.
    residual = x
    if grads.residual is not grads.x:
        residual = None if grads.residual is None else grads.residual.view(ctx.shape)
    return NormGrads(
        x=x,
        weight=in_shape(grads.weight, ctx.vector_shape),
        bias=in_shape(grads.bias, ctx.vector_shape),
        residual=residual,
    )


def _bias_gradient(ctx: Any, grad_y: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor | None:
    shape, inner = ctx.vector_shape, inner_dtype(grad_y)
    if shape.numel():
        total = grad_y.reshape(-1, *shape).sum(dim=0, dtype=inner)
    else:
        total = grad_y.new_zeros(shape, dtype=inner)
    if into is None:
        return total.to(ctx.dtypes[2])
    into.add_(total.view(into.shape))
    return None


def _adding_anywhere(backward: Callable[..., NormGrads]) -> Callable[..., NormGrads]:
    """`backward` for main_grads of any strides: implementations add to contiguous ones."""

    def adding(tensors: BackwardTensors, spec: NormSpec, wanted: WantedGrads) -> NormGrads:
        targets = (wanted.into_weight, wanted.into_bias)
        dense = [t if t is None or t.is_contiguous() else t.new_zeros(t.shape) for t in targets]
        grads = backward(tensors, spec, wanted._replace(into_weight=dense[0], into_bias=dense[1]))
        for target, sums in zip(targets, dense, strict=True):
            if target is not None and sums is not None and target is not sums:
                target.add_(sums)
        return grads

    return adding


def _main_grads(ctx: Any) -> list[torch.Tensor | None]:
    """The main_grad of weight and bias as [N] or [H, N], where they need a gradient; marks their owners."""
    buffers: list[torch.Tensor | None] = []
    for parameter, needed in zip(ctx.parameters, ctx.needs_input_grad[1:3], strict=True):
        if parameter is None or not needed:
            buffers.append(None)
            continue
        parameter.grad_added_to_main_grad = True
        buffers.append(vector_of(parameter.main_grad))
    return buffers
