"""Multi-scale deformable attention as a module: parameters, names and initialisation are those of Deformable-DETR."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from retrograd.ops import ms_deform_attn_fused


class MSDeformAttn(torch.nn.Module):
    """Deformable attention of queries to the pixels of several feature maps, with its four projections.

    Args:
        d_model: features of query, value and output; a multiple of n_heads.
        n_levels: number of feature maps L.
        n_heads: number of heads H.
        n_points: points a head samples in each level, or a list with the number for each level.
        padding_mode: "zeros" or "border", as for `retrograd.ops.ms_deform_attn`; likewise the next three.
        align_corners: as there.
        deterministic: as there.
        impl: as there.
        device: of the parameters.
        dtype: of the parameters.

    Attributes:
        sampling_offsets, attention_weights, value_proj, output_proj: torch.nn.Linear, named as in Deformable-DETR, so
            that its state_dict fits.

    Raises:
        ValueError: d_model is no multiple of n_heads, or n_points has not one number of 1 or more for each level.

    Numerics: the projections in their dtype, under autocast in that of autocast; locations, softmax and sampling in
    float32 (float64 for float64). The output has the dtype of output_proj's result.

    Source: Zhu et al., Deformable DETR, 2021; the initialisation is section A.4 there.
    """

    def __init__(
        self,
        d_model: int = 256,
        n_levels: int = 4,
        n_heads: int = 8,
        n_points: int | Sequence[int] = 4,
        *,
        padding_mode: str = "zeros",
        align_corners: bool = False,
        deterministic: bool | None = None,
        impl: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if d_model % n_heads:
            raise ValueError(f"`d_model` is {d_model}, expected a multiple of n_heads, {n_heads}")
        points = (n_points,) * n_levels if isinstance(n_points, int) else tuple(n_points)
        if len(points) != n_levels or any(count < 1 for count in points):
            raise ValueError(
                f"`n_points` is {n_points}, expected a number of 1 or more, or {n_levels} of them, one for each level"
            )
        self.d_model, self.n_levels, self.n_heads, self.n_points = d_model, n_levels, n_heads, n_points
        self.padding_mode, self.align_corners = padding_mode, align_corners
        self.deterministic, self.impl = deterministic, impl
        self._points = points
        total = n_heads * sum(points)
        self.sampling_offsets = torch.nn.Linear(d_model, 2 * total, device=device, dtype=dtype)
        self.attention_weights = torch.nn.Linear(d_model, total, device=device, dtype=dtype)
        self.value_proj = torch.nn.Linear(d_model, d_model, device=device, dtype=dtype)
        self.output_proj = torch.nn.Linear(d_model, d_model, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start as the paper does: points on rays, one direction a head, 1, 2, ... pixels out; uniform attention."""
        for layer in (self.sampling_offsets, self.attention_weights, self.value_proj, self.output_proj):
            torch.nn.init.zeros_(layer.bias)
        torch.nn.init.zeros_(self.sampling_offsets.weight)
        torch.nn.init.zeros_(self.attention_weights.weight)
        torch.nn.init.xavier_uniform_(self.value_proj.weight)
        torch.nn.init.xavier_uniform_(self.output_proj.weight)
        bias = self.sampling_offsets.bias
        angle = torch.arange(self.n_heads, dtype=torch.float32, device=bias.device) * (2 * math.pi / self.n_heads)
        ray = torch.stack([angle.cos(), angle.sin()], dim=-1)
        ray = ray / ray.abs().amax(dim=-1, keepdim=True)  # [H, 2] on the unit square
        steps = torch.cat([torch.arange(1, n + 1, device=bias.device) for n in self._points])  # [K]
        with torch.no_grad():
            bias.copy_((ray[:, None, :] * steps[:, None]).flatten())

    def forward(
        self,
        query: torch.Tensor,
        reference_points: torch.Tensor,
        value: torch.Tensor,
        spatial_shapes: torch.Tensor | Sequence[Sequence[int]],
        padding_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return what each query gathers.

        Args:
            query: [B, Q, d_model], positions added.
            reference_points: [B, Q, L, 2] (x, y) in [0, 1], or [B, Q, L, 4] boxes (x, y, width, height).
            value: [B, S, d_model], the levels' pixels, one level after the other.
            spatial_shapes: [L, 2] (height, width); a list is checked and never waits for a GPU.
            padding_mask: [B, S] bool, True where a pixel is padding: its projected value counts as 0.

        Returns:
            [B, Q, d_model].

        Raises:
            TypeError, ValueError, RuntimeError: as `retrograd.ops.ms_deform_attn_fused`.
        """
        batch, queries, _ = query.shape
        heads, points = self.n_heads, sum(self._points)
        projected = self.value_proj(value)
        if padding_mask is not None:
            projected = projected.masked_fill(padding_mask[..., None], 0.0)
        attended = ms_deform_attn_fused(
            projected.unflatten(-1, (heads, self.d_model // heads)),
            spatial_shapes,
            reference_points,
            self.sampling_offsets(query).view(batch, queries, heads, points, 2),
            self.attention_weights(query).view(batch, queries, heads, points),
            padding_mode=self.padding_mode,
            align_corners=self.align_corners,
            points_per_level=self._points,
            deterministic=self.deterministic,
            impl=self.impl,
        )
        return self.output_proj(attended.flatten(2))

    def extra_repr(self) -> str:
        """Sizes and the options that are not the usual ones."""
        shown = [f"{name}={getattr(self, name)}" for name in ("d_model", "n_levels", "n_heads", "n_points")]
        usual = dict(padding_mode="zeros", align_corners=False, deterministic=None, impl=None)
        shown += [f"{name}={getattr(self, name)}" for name, value in usual.items() if getattr(self, name) != value]
        return ", ".join(shown)
