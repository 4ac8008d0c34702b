"""The public functions: documents and checks arguments and hands them to the autograd node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from retrograd.compat.torch_autograd import in_forward_mode
from retrograd.compat.torch_dispatch import is_watched
from retrograd.ops import tensor_subclasses
from retrograd.ops.msda import custom_op, fused, host, validation
from retrograd.ops.msda.arguments import MsdaInputs, MsdaSpec
from retrograd.ops.msda.autograd import MsdaFunction, attend
from retrograd.ops.msda.dispatch import resolve
from retrograd.ops.types import Impl

SpatialShapes = torch.Tensor | Sequence[Sequence[int]]


def ms_deform_attn(
    value: torch.Tensor,
    spatial_shapes: SpatialShapes,
    sampling_locations: torch.Tensor,
    attention_weights: torch.Tensor,
    *,
    padding_mode: str = "zeros",
    align_corners: bool = False,
    points_per_level: Sequence[int] | None = None,
    deterministic: bool | None = None,
    impl: str | Impl | None = None,
) -> torch.Tensor:
    """Multi-scale deformable attention: each query sums a few weighted bilinear samples of feature maps.

    out[b, q, h] = sum over l, p of attention_weights[b, q, h, l, p] * bilinear(value_l[b, :, h], x, y)
    x = p_x * w_l - 0.5, with align_corners p_x * (w_l - 1); y alike with h_l

    Args:
        value: [B, S, H, C], the levels' pixels row by row, one level after the other; float32, float16, bfloat16 or
            float64. Like the other tensors of any strides; sizes of 0 are fine.
        spatial_shapes: [L, 2] (height, width) of the levels: a list, or an int64 or int32 tensor. A list and a tensor
            on the CPU are held against S. A tensor on a GPU is used there without waiting for it, hence not
            checked; a level that does not fit into S counts as empty.
        sampling_locations: [B, Q, H, L, P, 2], (x, y) where 0 and 1 are the outer edges of a level, with
            align_corners the centres of its outermost pixels. In the dtype of value or float32 (float64 with
            float64). Points may lie outside.
        attention_weights: [B, Q, H, L, P], used as they are; dtype as for sampling_locations.
        padding_mode: "zeros": a level is surrounded by zeros. "border": points outside are moved to the nearest
            pixel centre.
        align_corners: see sampling_locations.
        points_per_level: number of points of each level; then sampling_locations is [B, Q, H, sum(P_l), 2] and
            attention_weights [B, Q, H, sum(P_l)].
        deterministic: Add the gradient of value in a fixed order: the same bits every time. False may add
            atomically on a GPU. None is what torch.are_deterministic_algorithms_enabled() says. On CPU the order
            is fixed anyway, and so are all other results everywhere. A GPU may add in another order where
            spatial_shapes is a tensor on it than where the host knows the sizes.
        impl: "triton", "cuda" (CUDA C++ for GPUs of compute capability 9 and 10, compiled by NVRTC when first used, C
            a power of two up to 128), both without float64; "native" (C++ on CPU, compiled when first used); "torch".
            None: on a GPU cuda or triton, whichever computes such sizes and is the faster one; native on CPU where a
            compiler is found; else torch. An explicit choice never falls back.

    Returns:
        [B, Q, H, C], contiguous, in the dtype of value.

    Raises:
        TypeError: A tensor has a dtype that is not supported or does not go with that of value, or a number is of
            the wrong type.
        ValueError: A shape or a device does not fit, padding_mode or impl is unknown.
        RuntimeError: impl names what does not exist here; deterministic=False under
            torch.use_deterministic_algorithms(True).

    Derivative: bilinear interpolation bends where x or y is an integer. There the gradient of a location is the
    derivative to the right (of the cell floor(x), floor(y)). With zeros this holds for the image with its surrounding
    zeros too: at x = -1 and x = w - 1 the derivative is that towards the next pixel, at x = w it is 0. With border
    it is 0 for x <= 0 and x >= w - 1, as in torch's grid_sample. A point at NaN or infinity samples 0 and has
    gradient 0; far finite points are outside. A NaN weight makes its output NaN wherever its point is.

    Numerics: positions, samples and sums in float32 (float64 for float64), whatever the dtypes, also under autocast,
    which changes no dtype here. x is rounded after the product and after the subtraction, with no fused
    multiply-add: the cell of a point is the same in every implementation. The terms are added in the order of levels
    and points. Gradients have the dtypes of their inputs; one that is not needed is not computed. Gradients with
    create_graph=True, which can be differentiated again, come from `ms_deform_attn_reference`, with its memory.

    Source: Zhu et al., Deformable DETR, 2021.
    """
    key = None
    if not torch.compiler.is_compiling() and (entry := host.path.entry) is not None:
        key = entry(
            value, spatial_shapes, sampling_locations, attention_weights, None, padding_mode, align_corners,
            points_per_level, deterministic, impl,
        )  # fmt: skip
        if isinstance(key, torch.Tensor):
            return key
    value, locations, weights = map(tensor_subclasses.finished, (value, sampling_locations, attention_weights))
    inputs = MsdaInputs(value, validation.check_levels(spatial_shapes, value), locations, weights)
    points = validation.check_tensors(inputs, points_per_level)
    return _run(inputs, validation.check_spec(points, padding_mode, align_corners, deterministic), impl, key)


def ms_deform_attn_fused(
    value: torch.Tensor,
    spatial_shapes: SpatialShapes,
    reference_points: torch.Tensor,
    sampling_offsets: torch.Tensor,
    attention_logits: torch.Tensor,
    *,
    padding_mode: str = "zeros",
    align_corners: bool = False,
    points_per_level: Sequence[int] | None = None,
    deterministic: bool | None = None,
    impl: str | Impl | None = None,
) -> torch.Tensor:
    """`ms_deform_attn` with locations from reference points and offsets, and weights from a softmax.

    attention_weights = softmax(attention_logits) over all points of all levels
    sampling_locations = reference_xy + offset / (w_l, h_l), or for boxes reference_xy + offset / P_l * box_wh * 0.5

    Args:
        value: [B, S, H, C], as for `ms_deform_attn`.
        spatial_shapes: [L, 2] (height, width), as for `ms_deform_attn`.
        reference_points: [B, Q, L, 2] (x, y), or [B, Q, L, 4] boxes (x, y, width, height), in units of the level.
            This and the next two are in the dtype of value or float32 (float64 with float64).
        sampling_offsets: [B, Q, H, L, P, 2] (x, y) in pixels of the level; for boxes P_l is half a side of the box.
        attention_logits: [B, Q, H, L * P].
        padding_mode: "zeros" or "border".
        align_corners: as for `ms_deform_attn`.
        points_per_level: number of points P_l of each level; then sampling_offsets is [B, Q, H, sum(P_l), 2] and
            attention_logits [B, Q, H, sum(P_l)].
        deterministic: as for `ms_deform_attn`.
        impl: as for `ms_deform_attn`.

    Returns:
        [B, Q, H, C], contiguous, in the dtype of value.

    Raises:
        TypeError, ValueError, RuntimeError: as `ms_deform_attn`.

    Derivative: as `ms_deform_attn`, of which the location is the sum above.

    Numerics: locations and softmax in float32 (float64 for float64), whatever the dtypes, also under autocast, every
    step of the sum above rounded on its own and from left to right; then as `ms_deform_attn`. Locations, hence cells,
    have the same bits in every implementation and in traced graphs; weights may differ in their last bits.

    Memory: for the backward value, reference_points, sampling_offsets and attention_logits are saved as they are given
    and nothing else. The Triton kernels make no location and no weight in memory in the forward; the other
    implementations do and drop them after it. The backward makes both again, 12 bytes a point (24 for float64), and
    as many for their gradients, as far as they are needed. Traced graphs (torch.compile, torch.export) decide
    themselves what they save: they see the operations one by one.

    Source: Zhu et al., Deformable DETR, 2021; points per level: Lv et al., RT-DETRv2, 2024.
    """
    key = None
    if not torch.compiler.is_compiling() and (entry := host.path.entry) is not None:
        key = entry(
            value, spatial_shapes, sampling_offsets, attention_logits, reference_points, padding_mode, align_corners,
            points_per_level, deterministic, impl,
        )  # fmt: skip
        if isinstance(key, torch.Tensor):
            return key
    tensors = (value, sampling_offsets, attention_logits, reference_points)
    value, offsets, logits, references = map(tensor_subclasses.finished, tensors)
    inputs = MsdaInputs(value, validation.check_levels(spatial_shapes, value), offsets, logits, references)
    points = validation.check_fused_tensors(inputs, points_per_level)
    return _run(inputs, validation.check_spec(points, padding_mode, align_corners, deterministic), impl, key)


def _run(inputs: MsdaInputs, spec: MsdaSpec, impl: str | Impl | None, key: Any) -> torch.Tensor:
    """By Python; `key` are the bytes by which C++ wants to know the launches, or something else."""
    value, levels, locations, weights, references = inputs
    tensors = value, locations, weights, references
    if tensor_subclasses.without_memory(*tensors) or torch.compiler.is_compiling() or is_watched():
        # Who sees operators sees those that make locations and weights, and then the one of `ms_deform_attn`.
        plain = inputs if references is None else fused.sampled(inputs, spec)
        return custom_op.attend(plain, spec, impl)
    call = resolve(spec, impl, value.dtype, value.device)
    stored = value, locations, weights, references = tensor_subclasses.as_stored(tensors)
    needed = value.requires_grad or locations.requires_grad or weights.requires_grad
    needed = needed or (references is not None and references.requires_grad)
    if (needed and torch.is_grad_enabled()) or in_forward_mode():
        out = MsdaFunction.apply(*stored, levels.shapes, levels.sizes, call)
    else:
        out = attend(inputs if stored is tensors else MsdaInputs(value, levels, locations, weights, references), call)
    if type(key) is bytes:
        host.recipes.learn(host.path.module, key, inputs, call)
    return out
