"""Deformable attention from what a network predicts: reference points, offsets in pixels or boxes, logits.

It documents and checks arguments and hands them to the autograd node; see `fused_autograd`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from retrograd.compat.torch_autograd import in_forward_mode
from retrograd.compat.torch_dispatch import is_watched
from retrograd.ops import tensor_subclasses
from retrograd.ops.msda import validation
from retrograd.ops.msda.api import SpatialShapes, run
from retrograd.ops.msda.dispatch import resolve
from retrograd.ops.msda.fused_autograd import MsdaFusedFunction, attend_fused, sampled
from retrograd.ops.msda.shapes import Levels
from retrograd.ops.msda.spec import MsdaSpec
from retrograd.ops.types import Impl


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
    tensors = (value, reference_points, sampling_offsets, attention_logits)
    value, references, offsets, logits = map(tensor_subclasses.finished, tensors)
    levels = validation.check_levels(spatial_shapes, value)
    points = _check(value, references, offsets, logits, levels, points_per_level)
    border = validation.check_padding(padding_mode)
    spec = MsdaSpec(points, border, bool(align_corners), validation.check_deterministic(deterministic))
    return _run(value, levels, references, offsets, logits, spec, impl)


def _run(
    value: torch.Tensor,
    levels: Levels,
    references: torch.Tensor,
    offsets: torch.Tensor,
    logits: torch.Tensor,
    spec: MsdaSpec,
    impl: str | Impl | None,
) -> torch.Tensor:
    """`ms_deform_attn_fused` of checked arguments."""
    inputs = (value, references, offsets, logits)
    if tensor_subclasses.without_memory(*inputs) or torch.compiler.is_compiling() or is_watched():
        # Who sees operators sees those that make locations and weights, and then the one of `ms_deform_attn`.
        return run(value, levels, *sampled(inputs, levels, spec.points), spec, impl)
    call = resolve(spec, impl, value.dtype, value.device)
    inputs = tensor_subclasses.as_stored(inputs)
    needed = any(t.requires_grad for t in inputs)
    if (needed and torch.is_grad_enabled()) or in_forward_mode():
        return MsdaFusedFunction.apply(*inputs, levels.shapes, levels.sizes, call)
    return attend_fused(inputs, levels, call)


def _check(
    value: torch.Tensor,
    references: Any,
    offsets: Any,
    logits: Any,
    levels: Levels,
    points_per_level: Sequence[int] | None,
) -> tuple[int, ...]:
    for name, tensor in (
        ("reference_points", references),
        ("sampling_offsets", offsets),
        ("attention_logits", logits),
    ):
        validation.check_beside_value(name, tensor, value)
    batch, _, heads, _ = value.shape
    count = levels.count()
    queries = offsets.shape[1] if offsets.dim() > 1 else 0
    points = validation.check_points(points_per_level, levels)
    if points is None:
        each: Any = offsets.shape[4] if offsets.dim() == 6 else "P"  # a letter only where the check below raises
        validation.check_shape(
            "sampling_offsets", offsets, (batch, queries, heads, count, each, 2), "[B, Q, H, L, P, 2]"
        )
        points = (each,) * count
    else:
        wanted = (batch, queries, heads, sum(points), 2)
        validation.check_shape("sampling_offsets", offsets, wanted, "[B, Q, H, sum(points_per_level), 2]")
    validation.check_shape(
        "attention_logits", logits, (batch, queries, heads, sum(points)), "[B, Q, H, points of all L]"
    )
    last = references.shape[-1] if references.dim() == 4 and references.shape[-1] in (2, 4) else "2 or 4"
    validation.check_shape("reference_points", references, (batch, queries, count, last), "[B, Q, L, 2 or 4]")
    if last == "2 or 4":
        raise ValueError(
            f"`reference_points` has shape {tuple(references.shape)}, expected [B, Q, L, 2] for points or "
            "[B, Q, L, 4] for boxes"
        )
    return points
