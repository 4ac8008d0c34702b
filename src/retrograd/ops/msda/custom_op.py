"""Deformable attention as torch.library operators, for torch.compile and torch.export: schemas, fakes, derivative.

A gradient that is not asked for is an empty tensor of one dimension, since an operator's results are all tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from retrograd.ops.msda import validation
from retrograd.ops.msda.autograd import differentiable_gradients
from retrograd.ops.msda.dispatch import Functions, choose, functions_for
from retrograd.ops.msda.shapes import Levels, flat
from retrograd.ops.msda.spec import MsdaSpec
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


def attend(
    value: torch.Tensor,
    levels: Levels,
    locations: torch.Tensor,
    weights: torch.Tensor,
    spec: MsdaSpec,
    impl: str | Impl | None,
) -> torch.Tensor:
    """[B, Q, H, C] through the operator."""
    sizes = [] if levels.sizes is None else [n for size in levels.sizes for n in size]
    name = _BY_DEVICE if impl is None else getattr(impl, "value", impl)
    choose(impl, value.dtype, value.device)
    return torch.ops.retrograd.ms_deform_attn_fwd(
        value, levels.shapes, sizes, *flat(locations, weights), *_spec_values(spec), name
    )


def _spec_values(spec: MsdaSpec) -> tuple[Any, ...]:
    return list(spec.points), spec.border, spec.align_corners, spec.deterministic


def _spec_of(points: list[int], border: bool, align_corners: bool, deterministic: bool) -> MsdaSpec:
    return MsdaSpec(tuple(points), border, align_corners, deterministic)


def _levels_of(shapes: torch.Tensor | None, sizes: list[int]) -> Levels:
    return Levels(None, shapes) if shapes is not None else Levels(tuple(zip(sizes[::2], sizes[1::2], strict=True)))


def _levels_at_run(value: torch.Tensor, shapes: torch.Tensor | None, sizes: list[int]) -> Levels:
    """The levels when the operator runs: a tensor on the host, not read while tracing, is read and checked now."""
    return validation.check_levels(shapes, value) if shapes is not None else _levels_of(shapes, sizes)


def _functions(impl: str, value: torch.Tensor) -> Functions:
    return functions_for(impl or None, value.dtype, value.device)


def _run_fwd(
    value: torch.Tensor,
    shapes: torch.Tensor | None,
    sizes: list[int],
    locations: torch.Tensor,
    weights: torch.Tensor,
    *rest: Any,
) -> torch.Tensor:
    *spec, impl = rest
    levels = _levels_at_run(value, shapes, sizes)
    return _functions(impl, value).forward(value, levels, locations, weights, _spec_of(*spec))


def _fake_fwd(
    value: torch.Tensor, shapes: torch.Tensor | None, sizes: list[int], locations: torch.Tensor, *_: Any
) -> torch.Tensor:
    batch, _rows, heads, channels = value.shape  # [B, S, H, C]
    return value.new_empty(batch, locations.shape[1], heads, channels)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    value, shapes, sizes, locations, weights, *spec, impl = inputs
    ctx.sizes, ctx.spec, ctx.impl = sizes, spec, impl
    ctx.save_for_backward(value, shapes, locations, weights)


def _differentiate(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
    value, shapes, locations, weights = ctx.saved_tensors
    needed = tuple(ctx.needs_input_grad[i] for i in (0, 3, 4))  # value, locations, weights
    if torch.is_grad_enabled():
        levels, spec = _levels_of(shapes, ctx.sizes), _spec_of(*ctx.spec)
        grads = differentiable_gradients(grad_out, (value, locations, weights), levels, spec, needed)
    else:
        results = torch.ops.retrograd.ms_deform_attn_bwd(
            grad_out, value, shapes, ctx.sizes, locations, weights, *ctx.spec, *needed, ctx.impl
        )
        grads: Any = tuple(t if need else None for t, need in zip(results, needed, strict=True))
    return grads[0], None, None, grads[1], grads[2], *[None] * 5


def _run_bwd(
    grad_out: torch.Tensor,
    value: torch.Tensor,
    shapes: torch.Tensor | None,
    sizes: list[int],
    locations: torch.Tensor,
    weights: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, ...]:
    *spec, need_value, need_locations, need_weights, impl = rest
    grads = _functions(impl, value).backward(
        grad_out,
        value,
        _levels_at_run(value, shapes, sizes),
        locations,
        weights,
        _spec_of(*spec),
        need_value=need_value,
        need_locations=need_locations,
        need_weights=need_weights,
    )
    return tuple(value.new_empty(0) if t is None else t for t in grads)


def _fake_bwd(
    grad_out: torch.Tensor,
    value: torch.Tensor,
    shapes: torch.Tensor | None,
    sizes: list[int],
    locations: torch.Tensor,
    weights: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, ...]:
    *_, need_value, need_locations, need_weights, _ = rest
    return tuple(
        t.new_empty(t.shape) if need else value.new_empty(0)
        for t, need in ((value, need_value), (locations, need_locations), (weights, need_weights))
    )


_LIBRARY.impl("ms_deform_attn_fwd", _run_fwd, "CompositeExplicitAutograd")
_LIBRARY.impl("ms_deform_attn_bwd", _run_bwd, "CompositeExplicitAutograd")
torch.library.register_fake("retrograd::ms_deform_attn_fwd", _fake_fwd, lib=_LIBRARY)
torch.library.register_fake("retrograd::ms_deform_attn_bwd", _fake_bwd, lib=_LIBRARY)
torch.library.register_autograd("retrograd::ms_deform_attn_fwd", _differentiate, setup_context=_remember, lib=_LIBRARY)
