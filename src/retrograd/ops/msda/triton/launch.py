"""Launchers of the kernels of deformable attention: `msda_fwd` and `msda_bwd`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from retrograd.ops.msda import plan as plans
from retrograd.ops.msda.arguments import MsdaGrads, MsdaInputs, MsdaSpec, NeededGrads, zero_grads
from retrograd.ops.msda.plan import OrderedPlan, SamplePlan
from retrograd.ops.msda.slots import Slot
from retrograd.ops.msda.triton import points_launch
from retrograd.ops.msda.triton.backward import msda_bwd_kernel
from retrograd.ops.msda.triton.backward_ordered import msda_bwd_kernel_cells, msda_bwd_kernel_ordered
from retrograd.ops.msda.triton.forward import msda_fwd_kernel, msda_fwd_kernel_few
from retrograd.ops.msda.triton.launches import index_of, kept_call, key_of, launch_kept, paired, relaunched, sizes_of
from retrograd.runtime.cpp.recipe import Buffer, Recipe
from retrograd.runtime.triton.gpu import ceil_div, next_power_of_2
from retrograd.runtime.triton.launch import gpu_of, launch, on_device_of


def msda_fwd(inputs: MsdaInputs, spec: MsdaSpec) -> torch.Tensor:
    """The output, of references too; see `arguments`.

    What is not contiguous is copied; a tensor of levels is read by the kernel, nobody waits for it.

    Raises:
        RuntimeError: value is on the CPU outside `retrograd.cpu_triton`.

    Numerics: inside float32; each term is added with one rounding, or where queries are few (`plan.plan_forward`)
    rounded and added to others in a fixed order. In the fused form locations have the bits that torch operations in
    float32 give them, each step of reference + offset / (w, h), or of reference + offset / P_l * side * 0.5, rounded on
    its own. Weights are exp(logit - maximum) times the rounded 1 / sum, which is added up in an order that depends on
    K, C, the dtypes and whether queries are few.
    """
    value, levels, locations, weights, references = inputs
    batch, pixels, heads, channels = value.shape
    queries = locations.shape[1]
    if not value.numel() or not weights.numel():
        return value.new_zeros(batch, queries, heads, channels)
    value, locations, weights = value.contiguous(), paired(locations), weights.contiguous()
    references = None if references is None else paired(references)
    out = value.new_empty(batch, queries, heads, channels)
    shapes, sizes = sizes_of(levels, value)
    tensors = (value, shapes, references, locations, weights, out)
    key = key_of("forward", tensors, sizes, spec)
    if relaunched(key, tensors):
        return out
    points, boxes = sum(spec.points), references is not None and references.shape[-1] == 4
    plan = plans.plan_forward(channels, value.element_size(), points, batch * queries * heads, gpu_of(value))
    block_k = next_power_of_2(points) if plan.together else plans.logits_at_once(points)
    rest = (
        queries, pixels, *sizes, heads, channels, spec.points, len(spec.points), points, boxes, spec.border,
        spec.align_corners, index_of(value), plan.block_q, plan.block_c, block_k,
    )  # fmt: skip
    kernel = msda_fwd_kernel_few if plan.together else msda_fwd_kernel
    launch_kept(kernel, _grid(value, queries, plan), tensors, rest, key, plan.num_warps)
    return out


def msda_bwd(
    grad_out: torch.Tensor,
    inputs: MsdaInputs,
    spec: MsdaSpec,
    needed: NeededGrads,
    *,
    ordered: OrderedPlan | None = None,
) -> MsdaGrads:
    """The gradients; see `arguments`. `ordered`: plan of the deterministic grad_value, None asks `plan_ordered`.

    Raises:
        RuntimeError: value is on the CPU outside `retrograd.cpu_triton`.

    Numerics: inside float32. grad_value is added atomically, terms below 2^-126 may count as 0 on NVIDIA. Where
    spec.deterministic the samples of a pixel are added in their order in memory, in a number of partial sums that
    depends on C alone, whatever else the batch holds: the same bits every time.

    Memory besides the gradients: grad_value in float32 for 16-bit values. Where spec.deterministic instead of that,
    for up to `plan.SORTED_AT_ONCE` samples or one image, whatever is more, at once: a sample 16 bytes, with what
    sorting takes about 32, and 8 bytes a pixel and head.
    """
    value, levels, locations, weights, _ = inputs
    if not value.numel() or not weights.numel():
        return zero_grads(inputs, needed)
    value, locations, weights = value.contiguous(), paired(locations), weights.contiguous()
    call = _BackwardInputs(grad_out.contiguous(), value, *sizes_of(levels, value), locations, weights, spec)
    grad_value = None
    if needed.value and spec.deterministic:
        grad_value = _gather(call, ordered)
    elif needed.value:
        grad_value = torch.zeros(value.shape, dtype=torch.float32, device=value.device)
    grad_locations = locations.new_empty(locations.shape) if needed.locations else None
    grad_weights = weights.new_empty(weights.shape) if needed.weights else None
    for grads in _in_turn(MsdaGrads(None if spec.deterministic else grad_value, grad_locations, grad_weights), value):
        _scatter(call, grads)
    return MsdaGrads(None if grad_value is None else grad_value.to(value.dtype), grad_locations, grad_weights)


class _BackwardInputs(NamedTuple):
    """The inputs of a backward, contiguous; `shapes` and `sizes` as `_sizes` gives them."""

    grad_out: torch.Tensor
    value: torch.Tensor
    shapes: torch.Tensor | None
    sizes: tuple[int, ...]
    locations: torch.Tensor
    weights: torch.Tensor
    spec: MsdaSpec


def _in_turn(grads: MsdaGrads, value: torch.Tensor) -> tuple[MsdaGrads, ...]:
    """The gradients that one launch of `_scatter` fills, and the next one."""
    reads = grads.locations is not None or grads.weights is not None
    if grads.value is not None and reads and value.element_size() < 4:
        # A thread would have eight channels of a corner but add four at once: their threads differ.
        return MsdaGrads(grads.value), grads._replace(value=None)
    return (grads,) if grads.value is not None or reads else ()


def _scatter(call: _BackwardInputs, grads: MsdaGrads) -> None:
    """Fill the gradients that are there, adding to grad_value atomically."""
    grad_out, value, shapes, sizes, locations, weights, spec = call
    tensors = (grad_out, value, shapes, locations, weights, *grads[:3])
    key = key_of("backward", tensors, sizes, spec)
    if relaunched(key, tensors):
        return
    _, pixels, heads, channels = value.shape
    queries = locations.shape[1]
    dots = grads.value is None
    rows = value.shape[0] * queries * heads
    plan = plans.plan_backward(channels, value.element_size() if dots else 4, rows, gpu_of(value), dots=dots)
    apart = len(spec.points) if plan.apart and len(set(spec.points)) == 1 else 0
    rest = (
        queries, pixels, *sizes, heads, channels, plans.segments(spec.points[: 1 if apart else None], plan.block_c),
        sum(spec.points), spec.border, spec.align_corners, index_of(value), plan.block_q, plan.block_c, apart,
    )  # fmt: skip
    launch_kept(msda_bwd_kernel, _grid(value, queries, plan, apart or 1), tensors, rest, key, plan.num_warps)


def _grid(value: torch.Tensor, queries: int, plan: SamplePlan, levels: int = 1) -> tuple[int, int]:
    batch, _, heads, _ = value.shape
    return batch * ceil_div(queries, plan.block_q) * heads, levels


def _gather(call: _BackwardInputs, plan: OrderedPlan | None) -> torch.Tensor:
    """grad_value in a fixed order, as many images at once as may be sorted at once."""
    value, spec = call.value, call.spec
    batch, pixels, heads, channels = value.shape
    plan = plan or plans.plan_ordered(channels, value.element_size(), gpu_of(value))
    grad_value = torch.empty_like(value)
    step = max(1, min(plans.SORTED_AT_ONCE // call.weights[0].numel(), (2**31 - 2) // (heads * pixels)))
    for first in range(0, batch, step):
        part = slice(first, min(first + step, batch))
        tensors = (call.grad_out[part], call.shapes, call.locations[part], call.weights[part])
        with on_device_of(value):
            _gather_part(tensors, grad_value[part], call.sizes, spec, plan)
    return grad_value


def _gather_part(
    tensors: tuple[Any, ...], grad_value: torch.Tensor, sizes: tuple[int, ...], spec: MsdaSpec, plan: OrderedPlan
) -> None:
    grad_out, shapes, locations, weights = tensors
    batch, pixels, heads, channels = grad_value.shape
    queries, samples, past = weights.shape[1], weights.numel(), batch * heads * pixels
    points, index = sum(spec.points), index_of(grad_value)
    keys = torch.empty(samples, dtype=torch.int32 if past < 2**31 else torch.int64, device=weights.device)
    launch(
        msda_bwd_kernel_cells,
        (ceil_div(samples, plans.CELL_BLOCK),),
        (
            shapes, locations, keys, samples, queries, pixels, past, *sizes, heads, spec.points, points, spec.border,
            spec.align_corners, index, plans.CELL_BLOCK,
        ),
    )  # fmt: skip
    keys, order = torch.sort(keys, stable=True)
    begins = torch.searchsorted(
        keys, torch.arange(past + 1, dtype=keys.dtype, device=keys.device), out_int32=samples < 2**31
    )
    launch(
        msda_bwd_kernel_ordered,
        (batch * ceil_div(pixels, plan.block_p) * heads,),
        (
            grad_out, shapes, locations, weights, order, begins, grad_value, queries, pixels, *sizes, heads, channels,
            len(spec.points), points, spec.border, spec.align_corners, index, plan.block_p, plan.block_c, plan.entries,
        ),
        num_warps=1,
    )  # fmt: skip


# Of the kernels' first arguments.
_FORWARD_SLOTS = (Slot.VALUE, Slot.SHAPES, Slot.REFERENCES, Slot.LOCATIONS, Slot.WEIGHTS, Slot.OUT)
_BACKWARD_SLOTS = (
    *(Slot.GRAD_OUT, Slot.VALUE, Slot.SHAPES, Slot.LOCATIONS, Slot.WEIGHTS),
    *(Slot.GRAD_VALUE, Slot.GRAD_LOCATIONS, Slot.GRAD_WEIGHTS),
)


def recipe(inputs: MsdaInputs, spec: MsdaSpec, needed: NeededGrads | None = None) -> Recipe | None:
    """The launches of `msda_fwd`, or of `msda_bwd` for what is `needed`, where they are kept.

    None where they are not, or where the call does more than launch: makes a table of levels, sorts.
    """
    value, levels, locations, weights, references = inputs
    if needed is not None and references is not None:
        return points_launch.recipe_of(inputs, spec, needed, recipe)
    shapes, sizes = sizes_of(levels, value)
    if shapes is not levels.shapes or (needed is not None and needed.value and spec.deterministic):
        return None
    out = torch.empty((*locations.shape[:3], value.shape[3]), dtype=value.dtype, device="meta")
    device = value.device
    if needed is None:
        tensors = (value, shapes, references, locations, weights, out)
        calls, buffers = [kept_call(device, "forward", tensors, _FORWARD_SLOTS, sizes, spec)], ()
    else:
        added = torch.empty(value.shape, dtype=torch.float32, device="meta") if needed.value else None
        buffers = (Buffer(Slot.GRAD_VALUE, torch.float32, value.shape, zeros=True),) if needed.value else ()
        grads = MsdaGrads(added, locations if needed.locations else None, weights if needed.weights else None)
        read = (out, value, shapes, locations, weights)  # grad_out is like out
        launches = [(*read, *some[:3]) for some in _in_turn(grads, value)]
        calls = [kept_call(device, "backward", each, _BACKWARD_SLOTS, sizes, spec) for each in launches]
    known = tuple(call for call in calls if call is not None)
    return Recipe(known, buffers) if len(known) == len(calls) else None
