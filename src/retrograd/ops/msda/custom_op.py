"""Deformable attention as torch.library operators, for torch.compile and torch.export: schemas, fakes, derivative.

A gradient that is not asked for is an empty tensor of one dimension, since an operator's results are all tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from retrograd.ops.msda import validation
from retrograd.ops.msda.arguments import Levels, MsdaInputs, MsdaSpec, NeededGrads
from retrograd.ops.msda.autograd import differentiable_gradients
from retrograd.ops.msda.dispatch import FAMILY, functions_for
from retrograd.ops.msda.shapes import flat
from retrograd.ops.types import Impl

# `shapes` is [L, 2]; None where `sizes` has the heights and widths, one after the other.
_INPUTS = "Tensor value, Tensor? shapes, SymInt[] sizes, Tensor locations, Tensor weights"
_SPEC = "int[] points, bool border, bool align_corners, bool deterministic"
_LIBRARY = torch.library.Library("retrograd", "FRAGMENT")
_LIBRARY.define(
    f"ms_deform_attn_fwd({_INPUTS}, {_SPEC}, str impl) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    f"ms_deform_attn_bwd(Tensor grad_out, {_INPUTS}, {_SPEC}, bool need_value, bool need_locations, "
    "bool need_weights, str impl) -> (Tensor grad_value, Tensor grad_locations, Tensor grad_weights)",
    tags=(torch.Tag.pt2_compliant_tag,),
)

# `impl` of an operator that chooses by device when it runs: a traced graph may run elsewhere than it was traced.
_BY_DEVICE = ""


def attend(inputs: MsdaInputs, spec: MsdaSpec, impl: str | Impl | None) -> torch.Tensor:
    """[B, Q, H, C] through the operator."""
    value, levels, locations, weights, _ = flat(inputs)
    sizes = [] if levels.sizes is None else [n for size in levels.sizes for n in size]
    name = _BY_DEVICE if impl is None else getattr(impl, "value", impl)
    FAMILY.choose(impl, value.dtype, value.device)
    options = (list(spec.points), spec.border, spec.align_corners, spec.deterministic)
    return torch.ops.retrograd.ms_deform_attn_fwd(value, levels.shapes, sizes, locations, weights, *options, name)


def _operands(
    value: Any, shapes: Any, sizes: Any, locations: Any, weights: Any, points: Any, *rest: Any
) -> tuple[MsdaInputs, MsdaSpec, tuple[Any, ...]]:
    """The operands in the order of the schemas, put together, and those behind them."""
    levels = Levels(None, shapes) if shapes is not None else Levels(tuple(zip(sizes[::2], sizes[1::2], strict=True)))
    return MsdaInputs(value, levels, locations, weights), MsdaSpec(tuple(points), *rest[:3]), rest[3:]


def _at_run(inputs: MsdaInputs) -> MsdaInputs:
    """A tensor of levels on the host, not read while tracing, is read and checked now."""
    shapes = inputs.levels.shapes
    return inputs if shapes is None else inputs._replace(levels=validation.check_levels(shapes, inputs.value))


def _run_fwd(*operands: Any) -> torch.Tensor:
    inputs, spec, (impl,) = _operands(*operands)
    return functions_for(impl or None, inputs.value.dtype, inputs.value.device).forward(_at_run(inputs), spec)


def _fake_fwd(value: torch.Tensor, _shapes: Any, _sizes: Any, locations: torch.Tensor, *_: Any) -> torch.Tensor:
    batch, _rows, heads, channels = value.shape  # [B, S, H, C]
    return value.new_empty(batch, locations.shape[1], heads, channels)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    value, shapes, ctx.sizes, locations, weights, *ctx.rest = inputs
    ctx.save_for_backward(value, shapes, locations, weights)


def _differentiate(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
    value, shapes, locations, weights = ctx.saved_tensors
    operands = (value, shapes, ctx.sizes, locations, weights, *ctx.rest)
    needed = NeededGrads(*(ctx.needs_input_grad[i] for i in (0, 3, 4)))  # value, locations, weights
    if torch.is_grad_enabled():
        inputs, spec, _ = _operands(*operands)
        grads = differentiable_gradients(grad_out, inputs, spec, needed)
    else:
        *operands, impl = operands
        results = torch.ops.retrograd.ms_deform_attn_bwd(grad_out, *operands, *needed[:3], impl)
        grads = [t if need else None for t, need in zip(results, needed[:3], strict=True)]
    return grads[0], None, None, grads[1], grads[2], *[None] * 5


def _run_bwd(grad_out: torch.Tensor, *operands: Any) -> tuple[torch.Tensor, ...]:
    inputs, spec, (*needed, impl) = _operands(*operands)
    value = inputs.value
    backward = functions_for(impl or None, value.dtype, value.device).backward
    grads = backward(grad_out, _at_run(inputs), spec, NeededGrads(*needed))
    return tuple(value.new_empty(0) if t is None else t for t in grads[:3])


def _fake_bwd(_grad_out: torch.Tensor, *operands: Any) -> tuple[torch.Tensor, ...]:
    (value, _, locations, weights, _), _, (*needed, _) = _operands(*operands)
    tensors = zip((value, locations, weights), needed, strict=True)
    return tuple(t.new_empty(t.shape) if need else value.new_empty(0) for t, need in tensors)


_LIBRARY.impl("ms_deform_attn_fwd", _run_fwd, "CompositeExplicitAutograd")
_LIBRARY.impl("ms_deform_attn_bwd", _run_bwd, "CompositeExplicitAutograd")
torch.library.register_fake("retrograd::ms_deform_attn_fwd", _fake_fwd, lib=_LIBRARY)
torch.library.register_fake("retrograd::ms_deform_attn_bwd", _fake_bwd, lib=_LIBRARY)
torch.library.register_autograd("retrograd::ms_deform_attn_fwd", _differentiate, setup_context=_remember, lib=_LIBRARY)
