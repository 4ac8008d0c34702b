"""Deformable attention under the names and signatures of other libraries, so that one import line is all to change.

`MSDeformAttnFunction` (Deformable-DETR), `MultiScaleDeformableAttnFunction` (mmcv), `MultiScaleDeformableAttention`
(Hugging Face kernels and transformers) and `multiscale_deformable_attention` (msda-triton).
"""

from __future__ import annotations

from typing import Any

import torch

from retrograd.ops.msda.api import ms_deform_attn
from retrograd.ops.msda.shapes import beside


class MSDeformAttnFunction:
    """What Deformable-DETR's autograd function of this name computes; only `apply` exists."""

    @staticmethod
    def apply(
        value: torch.Tensor,
        value_spatial_shapes: torch.Tensor,
        value_level_start_index: torch.Tensor,
        sampling_locations: torch.Tensor,
        attention_weights: torch.Tensor,
        im2col_step: int = 64,
    ) -> torch.Tensor:
        """[N, Q, M * D] of value [N, S, M, D], with zeros outside and align_corners=False.

        Args:
            value: [N, S, M, D].
            value_spatial_shapes: [L, 2] (height, width).
            value_level_start_index: [L] first pixel of each level. Levels lie one after the other, so it follows
                from the shapes; where both are on the CPU this is checked.
            sampling_locations: [N, Q, M, L, P, 2]; a dtype that does not go with value is cast to float32 (float64
                for float64).
            attention_weights: [N, Q, M, L, P], alike.
            im2col_step: without effect: any batch is computed at once.

        Returns:
            [N, Q, M * D].

        Raises:
            TypeError, ValueError, RuntimeError: as `retrograd.ops.ms_deform_attn`.
            ValueError: the levels overlap or leave pixels out.
        """
        del im2col_step
        _check_start(value_level_start_index, value_spatial_shapes)
        locations, weights = beside(sampling_locations, value), beside(attention_weights, value)
        return ms_deform_attn(value, value_spatial_shapes, locations, weights).flatten(2)


class MultiScaleDeformableAttnFunction(MSDeformAttnFunction):
    """mmcv's name for the same function; unlike there 32-bit locations beside 16-bit values keep their bits."""


class MultiScaleDeformableAttention(torch.nn.Module):
    """The layer of this name in transformers and in Hugging Face's kernels: no parameters, only a forward."""

    def forward(
        self,
        value: torch.Tensor,
        value_spatial_shapes: torch.Tensor,
        value_spatial_shapes_list: list[tuple[int, int]],
        level_start_index: torch.Tensor,
        sampling_locations: torch.Tensor,
        attention_weights: torch.Tensor,
        im2col_step: int,
    ) -> torch.Tensor:
        """[N, Q, M * D]; arguments as for `MSDeformAttnFunction.apply`.

        Args:
            value: [N, S, M, D].
            value_spatial_shapes: [L, 2] (height, width); not looked at where the list is given.
            value_spatial_shapes_list: the same as a list, which no device has to be waited for; may be None.
            level_start_index: not looked at, since it follows from the shapes.
            sampling_locations: [N, Q, M, L, P, 2].
            attention_weights: [N, Q, M, L, P].
            im2col_step: without effect.

        Returns:
            [N, Q, M * D].

        Raises:
            TypeError, ValueError, RuntimeError: as `retrograd.ops.ms_deform_attn`.
        """
        shapes = value_spatial_shapes if value_spatial_shapes_list is None else value_spatial_shapes_list
        locations, weights = beside(sampling_locations, value), beside(attention_weights, value)
        return ms_deform_attn(value, shapes, locations, weights).flatten(2)


def multiscale_deformable_attention(
    img: torch.Tensor,
    img_shapes: torch.Tensor,
    sampling_points: torch.Tensor,
    attention_weights: torch.Tensor,
    padding_mode: str,
    align_corners: bool,
) -> torch.Tensor:
    """msda-triton's function: [B, N, H, C] of img [B, I, H, C].

    Args:
        img: [B, I, H, C].
        img_shapes: [L, 2] (height, width).
        sampling_points: [B, N, H, L, P, 2]; a dtype that does not go with img is cast as for the others.
        attention_weights: [B, N, H, L, P], alike.
        padding_mode: "border" or "zeros".
        align_corners: as for `retrograd.ops.ms_deform_attn`.

    Returns:
        [B, N, H, C] in the dtype of img, also under autocast.

    Raises:
        TypeError, ValueError, RuntimeError: as `retrograd.ops.ms_deform_attn`; nothing falls back silently.
    """
    points, weights = beside(sampling_points, img), beside(attention_weights, img)
    return ms_deform_attn(img, img_shapes, points, weights, padding_mode=padding_mode, align_corners=align_corners)


def _check_start(start: Any, shapes: Any) -> None:
    tensors = (start, shapes)
    if torch.compiler.is_compiling() or not all(
        isinstance(t, torch.Tensor) and t.device.type == "cpu" for t in tensors
    ):
        return
    area = shapes.prod(dim=-1)
    follows = (area.cumsum(0) - area).tolist()
    if start.tolist() != follows:
        raise ValueError(
            f"`value_level_start_index` is {start.tolist()}, expected {follows} as value_spatial_shapes says; "
            "concatenate the levels one after the other"
        )
