"""Launchers of the kernels of deformable attention: `msda_fwd`, `msda_fwd_fused` and `msda_bwd`."""

# Which tensors there are follows from the spec of the norm or the flags beside them, which types cannot say.
# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl

from retrograd.ops.msda.plan import (
    SORTED_AT_ONCE,
    OrderedPlan,
    SamplePlan,
    ceil_div,
    logits_at_once,
    plan_backward,
    plan_dots,
    plan_forward,
    plan_ordered,
    segments,
)
from retrograd.ops.msda.shapes import Levels, tensor_of
from retrograd.ops.msda.spec import MsdaSpec
from retrograd.ops.msda.triton.backward import msda_bwd_kernel
from retrograd.ops.msda.triton.backward_ordered import msda_bwd_kernel_cells, msda_bwd_kernel_ordered
from retrograd.ops.msda.triton.forward import msda_fwd_kernel
from retrograd.ops.msda.triton.fused import msda_fwd_kernel_fused
from retrograd.ops.msda.triton.sampling import MAX_SIZES
from retrograd.runtime.triton.launch import KernelHandle, gpu_of, launch, on_device_of, relaunch, relaunchable

# Launches that have been compiled, by all that they depend on.
_FORWARD: dict[Any, tuple[KernelHandle, tuple[Any, ...]]] = {}
_FUSED: dict[Any, tuple[KernelHandle, tuple[Any, ...]]] = {}
_BACKWARD: dict[Any, tuple[KernelHandle, tuple[Any, ...]]] = {}
# One level's size as a kernel's argument, of 64 bits whatever the size: bit 62, height and width of 31 bits.
_NO_SIZE = 1 << 62


def msda_fwd(
    value: torch.Tensor,
    levels: Levels,
    locations: torch.Tensor,
    weights: torch.Tensor,
    spec: MsdaSpec,
    *,
    plan: SamplePlan | None = None,
) -> torch.Tensor:
    """Return out[b, q, h] = sum over k of weights[b, q, h, k] * sample[b, q, h, k].

    Args:
        value: [B, S, H, C] float32, float16 or bfloat16. This and the other tensors may have any strides; what is not
            contiguous is copied.
        levels: sizes of the levels; a tensor is read by the kernel, nobody waits for it.
        locations: [B, Q, H, K, 2] (x, y) in [0, 1]; value's dtype or float32.
        weights: [B, Q, H, K]; value's dtype or float32.
        spec: how points outside are treated, and which points belong to which level.
        plan: Launch plan; None asks `plan_forward`.

    Returns:
        [B, Q, H, C], contiguous, in the dtype of value. Any size may be 0.

    Raises:
        RuntimeError: value is on the CPU and kernels are not interpreted.

    Numerics: inside float32. x = fl(fl(p * w) - 0.5), or fl(p * (w - 1)) with align_corners, every step rounded on
    its own. The K terms are added to 0 in ascending order, each with one rounding.
    """
    batch, pixels, heads, channels = value.shape
    queries = locations.shape[1]
    if not value.numel() or not weights.numel():
        return value.new_zeros(batch, queries, heads, channels)
    value, locations, weights = value.contiguous(), _pairs(locations), weights.contiguous()
    out = value.new_empty(batch, queries, heads, channels)
    shapes, sizes = _sizes(levels, value)
    tensors = (value, shapes, locations, weights, out)
    key = _key(tensors, sizes, spec) if plan is None else None
    if key in _FORWARD:
        handle, rest = _FORWARD[key]
        relaunch(handle, (*tensors, *rest), value.device.index)
        return out
    plan = plan or plan_forward(queries, heads, channels, value.element_size(), gpu_of(value))
    rest = (
        queries, pixels, *sizes, heads, channels, spec.points, len(spec.points), sum(spec.points), spec.border,
        spec.align_corners, _index(value), plan.block_q, plan.block_c, plan.block_h, plan.unroll,
    )  # fmt: skip
    with on_device_of(value):
        handle = launch(msda_fwd_kernel, _grid(value, queries, plan), (*tensors, *rest), num_warps=plan.num_warps)
    if key is not None and handle is not None:
        _FORWARD[key] = (handle, rest)
    return out


def msda_fwd_fused(
    value: torch.Tensor,
    levels: Levels,
    reference_points: torch.Tensor,
    offsets: torch.Tensor,
    logits: torch.Tensor,
    spec: MsdaSpec,
    *,
    plan: SamplePlan | None = None,
) -> torch.Tensor:
    """Return what `msda_fwd` makes of the locations and weights of `ms_deform_attn_fused`.

    Args:
        value: and levels, spec and plan as for `msda_fwd`.
        reference_points: [B, Q, L, 2] (x, y), or [B, Q, L, 4] boxes (x, y, width, height). This and the next two in
            value's dtype or float32, of any strides.
        offsets: [B, Q, H, K, 2] (x, y) in pixels, or for boxes in parts of half a side.
        logits: [B, Q, H, K].

    Returns:
        [B, Q, H, C], contiguous, in the dtype of value. Any size may be 0.

    Raises:
        RuntimeError: value is on the CPU and kernels are not interpreted.

    Numerics: inside float32. Locations have the bits that torch operations in float32 give them, each step of
    reference + offset / (w, h), or of reference + offset / P_l * side * 0.5, rounded on its own. Weights are
    exp(logit - maximum) times the rounded 1 / sum, which is added up in an order that depends on K, C and the dtypes
    alone. Then as `msda_fwd`.
    """
    batch, pixels, heads, channels = value.shape
    queries = offsets.shape[1]
    if not value.numel() or not logits.numel():
        return value.new_zeros(batch, queries, heads, channels)
    value, logits = value.contiguous(), logits.contiguous()
    out = value.new_empty(batch, queries, heads, channels)
    shapes, sizes = _sizes(levels, value)
    tensors = (value, shapes, _pairs(reference_points), _pairs(offsets), logits, out)
    key = _key(tensors, sizes, spec) if plan is None else None
    if key in _FUSED:
        handle, rest = _FUSED[key]
        relaunch(handle, (*tensors, *rest), value.device.index)
        return out
    plan = plan or plan_forward(queries, heads, channels, value.element_size(), gpu_of(value))
    points, boxes = sum(spec.points), reference_points.shape[-1] == 4
    rest = (
        queries, pixels, *sizes, heads, channels, spec.points, len(spec.points), points, boxes, spec.border,
        spec.align_corners, _index(value), plan.block_q, plan.block_c, plan.block_h, logits_at_once(points),
        plan.unroll,
    )  # fmt: skip
    with on_device_of(value):
        handle = launch(msda_fwd_kernel_fused, _grid(value, queries, plan), (*tensors, *rest), num_warps=plan.num_warps)
    if key is not None and handle is not None:
        _FUSED[key] = (handle, rest)
    return out


def msda_bwd(
    grad_out: torch.Tensor,
    value: torch.Tensor,
    levels: Levels,
    locations: torch.Tensor,
    weights: torch.Tensor,
    spec: MsdaSpec,
    *,
    need_value: bool,
    need_locations: bool,
    need_weights: bool,
    plan: SamplePlan | None = None,
    ordered: OrderedPlan | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return (grad_value, grad_locations, grad_weights) in closed form.

    With g = grad_out, corners v00 v01 (upper), v10 v11 (lower) and fractions tx, ty: grad_weights = <g, sample>,
    grad_x = weight * w * <g, (1 - ty) (v01 - v00) + ty (v11 - v10)> with w - 1 for w under align_corners, grad_y
    alike, grad_value[corner] += weight * (share of the corner) * g.

    Args:
        grad_out: [B, Q, H, C], any strides.
        value: and the next four as for `msda_fwd`.
        need_value: whether grad_value is computed; likewise need_locations, need_weights.
        plan: Launch plan; None asks `plan_backward`, `plan_dots` without grad_value.
        ordered: Launch plan of the deterministic grad_value; None asks `plan_ordered`.

    Returns:
        Contiguous gradients in shape and dtype of their tensors; None for what was not asked for.

    Raises:
        RuntimeError: value is on the CPU and kernels are not interpreted.

    Numerics: inside float32; grad_value is added up in it and rounded once. It is added atomically, terms below
    2^-126 may count as 0 on NVIDIA. Where spec.deterministic the samples of a pixel are added in their order in
    memory, in a number of partial sums that depends on C alone, whatever else the batch holds: the same bits every
    time.

    Memory besides the gradients: grad_value in float32 for 16-bit values. Where spec.deterministic instead of that,
    for up to `plan.SORTED_AT_ONCE` samples or one image, whatever is more, at once: a sample 16 bytes, with what
    sorting takes about 32, and 8 bytes a pixel and head.
    """
    grad_value = grad_locations = grad_weights = None
    if not value.numel() or not weights.numel():
        grad_value = value.new_zeros(value.shape) if need_value else None
        grad_locations = locations.new_zeros(locations.shape) if need_locations else None
        grad_weights = weights.new_zeros(weights.shape) if need_weights else None
        return grad_value, grad_locations, grad_weights
    value, locations, weights = value.contiguous(), _pairs(locations), weights.contiguous()
    call = _BackwardInputs(grad_out.contiguous(), value, *_sizes(levels, value), locations, weights, spec)
    if need_value and spec.deterministic:
        grad_value = _gather(call, ordered)
    elif need_value:
        grad_value = torch.zeros(value.shape, dtype=torch.float32, device=value.device)
    grad_locations = locations.new_empty(locations.shape) if need_locations else None
    grad_weights = weights.new_empty(weights.shape) if need_weights else None
    added = None if spec.deterministic else grad_value
    reads = need_locations or need_weights
    if added is not None and reads and value.element_size() < 4:
        # A thread would have eight channels of a corner but add four at once: their threads differ.
        _scatter(call, added, None, None, plan)
        added = None
    if added is not None or reads:
        _scatter(call, added, grad_locations, grad_weights, plan)
    return None if grad_value is None else grad_value.to(value.dtype), grad_locations, grad_weights


class _BackwardInputs(NamedTuple):
    """The inputs of a backward, contiguous; `shapes` and `sizes` as `_sizes` gives them."""

    grad_out: torch.Tensor
    value: torch.Tensor
    shapes: torch.Tensor | None
    sizes: tuple[int, ...]
    locations: torch.Tensor
    weights: torch.Tensor
    spec: MsdaSpec


def _scatter(
    call: _BackwardInputs,
    grad_value: torch.Tensor | None,
    grad_locations: torch.Tensor | None,
    grad_weights: torch.Tensor | None,
    plan: SamplePlan | None,
) -> None:
    """Fill the gradients that are there, adding to grad_value atomically."""
    grad_out, value, shapes, sizes, locations, weights, spec = call
    tensors = (grad_out, value, shapes, locations, weights, grad_value, grad_locations, grad_weights)
    key = _key(tensors, sizes, spec) if plan is None else None
    if key in _BACKWARD:
        handle, rest = _BACKWARD[key]
        relaunch(handle, (*tensors, *rest), value.device.index)
        return
    _, pixels, heads, channels = value.shape
    queries = locations.shape[1]
    if plan is None and grad_value is not None:
        plan = plan_backward(queries, heads, channels, gpu_of(value))
    plan = plan or plan_dots(queries, heads, channels, value.element_size(), gpu_of(value))
    rest = (
        queries, pixels, *sizes, heads, channels, segments(spec.points, plan.block_c), sum(spec.points), spec.border,
        spec.align_corners, _index(value), plan.block_q, plan.block_c, plan.block_h, plan.unroll,
    )  # fmt: skip
    with on_device_of(value):
        handle = launch(msda_bwd_kernel, _grid(value, queries, plan), (*tensors, *rest), num_warps=plan.num_warps)
    if key is not None and handle is not None:
        _BACKWARD[key] = (handle, rest)


def _gather(call: _BackwardInputs, plan: OrderedPlan | None) -> torch.Tensor:
    """grad_value in a fixed order, as many images at once as may be sorted at once."""
    value, spec = call.value, call.spec
    batch, pixels, heads, channels = value.shape
    plan = plan or plan_ordered(pixels, heads, channels, value.element_size(), gpu_of(value))
    grad_value = torch.empty_like(value)
    step = max(1, min(SORTED_AT_ONCE // call.weights[0].numel(), (2**31 - 2) // (heads * pixels)))
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
    points, index = sum(spec.points), _index(grad_value)
    keys = torch.empty(samples, dtype=torch.int32 if past < 2**31 else torch.int64, device=weights.device)
    launch(
        msda_bwd_kernel_cells,
        (ceil_div(samples, plan.block_n),),
        (
            shapes, locations, keys, samples, queries, pixels, past, *sizes, heads, spec.points, points, spec.border,
            spec.align_corners, index, plan.block_n,
        ),
    )  # fmt: skip
    keys, order = torch.sort(keys, stable=True)
    begins = torch.searchsorted(
        keys, torch.arange(past + 1, dtype=keys.dtype, device=keys.device), out_int32=samples < 2**31
    )
    launch(
        msda_bwd_kernel_ordered,
        (batch * ceil_div(pixels * plan.block_h, plan.block_p) * (heads // plan.block_h),),
        (
            grad_out, shapes, locations, weights, order, begins, grad_value, queries, pixels, *sizes, heads, channels,
            len(spec.points), points, spec.border, spec.align_corners, index, plan.block_p, plan.block_c,
            plan.block_h, plan.entries,
        ),
        num_warps=plan.num_warps,
    )  # fmt: skip


def _pairs(locations: torch.Tensor) -> torch.Tensor:
    """Contiguous, with pairs that one load can read."""
    locations = locations.contiguous()
    return locations.clone() if locations.data_ptr() % (2 * locations.element_size()) else locations


def _sizes(levels: Levels, value: torch.Tensor) -> tuple[torch.Tensor | None, tuple[int, ...]]:
    """([L, 2] on the device, MAX_SIZES arguments), one of the two without content."""
    nothing = (_NO_SIZE,) * MAX_SIZES
    if levels.sizes is None or len(levels.sizes) > MAX_SIZES:
        return tensor_of(levels, value.device).contiguous(), nothing
    # A level without pixels may be as wide as it likes.
    packed = tuple(_NO_SIZE | h << 31 | w if h * w else _NO_SIZE for h, w in levels.sizes)
    return None, packed + nothing[len(packed) :]


def _index(value: torch.Tensor) -> tl.dtype:
    """What holds a position, and the distance of an element from the first of its image and head."""
    _, pixels, heads, channels = value.shape
    return tl.int32 if pixels < 2**30 and pixels * heads * channels < 2**31 else tl.int64


def _grid(value: torch.Tensor, queries: int, plan: SamplePlan) -> tuple[int]:
    batch, _, heads, _ = value.shape
    return (batch * ceil_div(queries * plan.block_h, plan.block_q) * (heads // plan.block_h),)


def _key(tensors: tuple[torch.Tensor | None, ...], sizes: tuple[int, ...], spec: MsdaSpec) -> Any:
    """All that a launch depends on; None if it has to go through Triton."""
    if not relaunchable(*tensors):
        return None
    return (tensors[0].device.index, sizes, spec, *(None if t is None else (t.dtype, t.shape) for t in tensors))
