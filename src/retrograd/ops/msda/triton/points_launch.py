"""Launchers of the kernels in `points`: the fused form's locations and weights, and the gradients through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from retrograd.ops.msda import fused
from retrograd.ops.msda import plan as plans
from retrograd.ops.msda.arguments import MsdaGrads, MsdaInputs, MsdaSpec, NeededGrads
from retrograd.ops.msda.shapes import flat
from retrograd.ops.msda.slots import Slot
from retrograd.ops.msda.triton.launches import kept_call, key_of, launch_kept, paired, relaunched, sizes_of
from retrograd.ops.msda.triton.points import msda_points_bwd_kernel, msda_points_kernel
from retrograd.runtime.cpp.recipe import Buffer, Recipe
from retrograd.runtime.triton.gpu import ceil_div
from retrograd.runtime.triton.launch import gpu_of

# Of the kernels' first arguments.
_POINTS_SLOTS = (Slot.REFERENCES, Slot.SHAPES, Slot.OFFSETS, Slot.LOGITS, Slot.LOCATIONS, Slot.WEIGHTS)
_BACKWARD_SLOTS = (
    *(Slot.REFERENCES, Slot.SHAPES, Slot.OFFSETS, Slot.WEIGHTS, Slot.GRAD_LOCATIONS, Slot.GRAD_WEIGHTS),
    *(Slot.GRAD_OFFSETS, Slot.GRAD_LOGITS, Slot.GRAD_REFERENCES),
)

_BETWEEN = (Slot.LOCATIONS, Slot.WEIGHTS, Slot.GRAD_LOCATIONS, Slot.GRAD_WEIGHTS)  # for the plain backward and by it

Recipes = Callable[[MsdaInputs, MsdaSpec, NeededGrads], Recipe | None]


def sampled(inputs: MsdaInputs, spec: MsdaSpec) -> MsdaInputs:
    """Locations [B, Q, H, K, 2] and weights [B, Q, H, K] in float32; see `fused.sampled`.

    Numerics: locations have the bits of `fused.sampled`. Weights are exp(logit - maximum) times the rounded 1 / sum,
    which is added up in an order that depends on K and the dtypes.
    """
    value, levels, offsets, logits, references = inputs = flat(inputs)
    if references is None or not references.numel() or not logits.numel():
        return fused.sampled(inputs, spec)
    references, offsets, logits = paired(references), paired(offsets), logits.contiguous()
    locations = torch.empty_like(offsets, dtype=torch.float32)
    weights = torch.empty_like(logits, dtype=torch.float32)
    shapes, sizes = sizes_of(levels, value)
    tensors = (references, shapes, offsets, logits, locations, weights)
    key = key_of("points", tensors, value.shape[1], sizes, spec.points)
    if not relaunched(key, tensors):
        rows = logits.shape[:3].numel()
        plan = plans.plan_points(logits.shape[2], sum(spec.points), gpu_of(value))
        rest = (rows, *_common(inputs, sizes, spec), plan.block_r, plan.block_k)
        launch_kept(msda_points_kernel, (ceil_div(rows, plan.block_r),), tensors, rest, key, plan.num_warps)
    return MsdaInputs(value, levels, locations, weights)


def sampled_bwd(
    grads: MsdaGrads, weights: torch.Tensor, inputs: MsdaInputs, spec: MsdaSpec, needed: NeededGrads
) -> MsdaGrads:
    """Gradients of offsets, logits and references; see `fused.sampled_bwd`.

    Numerics: inside float32. A reference's gradient is added up over heads, then over points, in an order that depends
    on H, K and the dtypes: the same bits every time.
    """
    value, levels, offsets, logits, references = inputs = flat(inputs)
    if not any(needed[1:]):
        return MsdaGrads(grads.value)
    if references is None or not references.numel() or not logits.numel():
        return fused.sampled_bwd(grads, weights, inputs, spec, needed)
    references, offsets = paired(references), paired(offsets)
    grad_offsets = torch.empty_like(offsets) if needed.locations else None
    grad_logits = torch.empty_like(logits, memory_format=torch.contiguous_format) if needed.weights else None
    grad_references = torch.empty_like(references) if needed.references else None
    shapes, sizes = sizes_of(levels, value)
    tensors = (
        *(references, shapes, offsets, weights, grads.locations, grads.weights),
        *(grad_offsets, grad_logits, grad_references),
    )
    key = key_of("points_bwd", tensors, value.shape[1], sizes, spec.points)
    if not relaunched(key, tensors):
        queries = logits.shape[:2].numel()
        plan = plans.plan_points(logits.shape[2], sum(spec.points), gpu_of(value))
        rest = (queries, *_common(inputs, sizes, spec), plan.block_q, plan.block_h, plan.block_k)
        launch_kept(msda_points_bwd_kernel, (ceil_div(queries, plan.block_q),), tensors, rest, key, plan.num_warps)
    return MsdaGrads(grads.value, grad_offsets, grad_logits, grad_references)


def _common(inputs: MsdaInputs, sizes: tuple[int, ...], spec: MsdaSpec) -> tuple[Any, ...]:
    value, _, _, logits, references = inputs
    boxes = references is not None and references.shape[-1] == 4
    return (value.shape[1], *sizes, logits.shape[2], spec.points, len(spec.points), sum(spec.points), boxes)


def recipe_of(inputs: MsdaInputs, spec: MsdaSpec, needed: NeededGrads, inner: Recipes) -> Recipe | None:
    """The launches of the fused form's backward, where all are kept; `inner` gives those of the plain one."""
    value, levels, offsets, logits, references = inputs
    shapes, sizes = sizes_of(levels, value)
    if shapes is not levels.shapes:
        return None
    locations, weights = (torch.empty(t.shape, dtype=torch.float32, device="meta") for t in (offsets, logits))
    through = fused.needed_of_points(needed)
    plain = inner(MsdaInputs(value, levels, locations, weights), spec, through)
    if plain is None:
        return None
    others = value.shape[1], sizes, spec.points
    tensors = references, shapes, offsets, logits, locations, weights
    grads = locations if through.locations else None, weights if through.weights else None
    results = (
        offsets if needed.locations else None,
        logits if needed.weights else None,
        references if needed.references else None,
    )
    calls = [kept_call(value.device, "points", tensors, _POINTS_SLOTS, *others), *plain.launches]
    if any(needed[1:]):
        read = references, shapes, offsets, weights, *grads
        calls.append(kept_call(value.device, "points_bwd", (*read, *results), _BACKWARD_SLOTS, *others))
    between = zip(_BETWEEN, (locations, weights, *grads), strict=True)
    buffers = tuple(Buffer(slot, t.dtype, t.shape) for slot, t in between if t is not None)
    known = tuple(call for call in calls if call is not None)
    return Recipe(known, buffers + plain.buffers) if len(known) == len(calls) else None
