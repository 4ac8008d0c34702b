"""Who offers deformable attention: this project, grid_sample, msda-triton, mmcv. All with zeros outside, not aligned.

Inputs by name: value [B, S, H, C], locations [B, Q, H, L, P, 2] and weights [B, Q, H, L, P]; result out [B, Q, H, C].
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from retrograd.bench.harness import Provider, Tensors, compiled_provider
from retrograd.bench.msda.shapes import Shape

LEAVES = ("value", "locations", "weights")
RESULTS = ("out",)


def by_grid_sample(
    value: torch.Tensor,
    levels: tuple[tuple[int, int], ...],
    locations: torch.Tensor,
    weights: torch.Tensor,
    padding_mode: str = "zeros",
    align_corners: bool = False,
) -> torch.Tensor:
    """Deformable attention as models write it without a kernel: one grid_sample a level, in the dtype of all three.

    The same steps as in transformers and in the tests of several libraries; 2 p - 1 included.
    """
    batch, _, heads, channels = value.shape
    queries, points = locations.shape[1], locations.shape[4]
    grids = 2 * locations - 1
    samples = []
    for i, image in enumerate(value.split([h * w for h, w in levels], dim=1)):
        image = image.permute(0, 2, 3, 1).reshape(batch * heads, channels, *levels[i])
        grid = grids[:, :, :, i].transpose(1, 2).reshape(batch * heads, queries, points, 2)
        samples.append(F.grid_sample(image, grid, padding_mode=padding_mode, align_corners=align_corners))
    stacked = torch.stack(samples, dim=-2).flatten(-2)  # [B * H, C, Q, L * P]
    shares = weights.transpose(1, 2).reshape(batch * heads, 1, queries, len(levels) * points)
    out = (stacked * shares).sum(-1)  # [B * H, C, Q]
    return out.view(batch, heads, channels, queries).permute(0, 3, 1, 2).contiguous()


def retrograd(shape: Shape, **options: Any) -> Provider:
    """This project's; `options` say in which mode."""
    attend = importlib.import_module("retrograd.ops").ms_deform_attn
    levels = list(shape.levels)
    return Provider(lambda t: (attend(t["value"], levels, t["locations"], t["weights"], **options),))


def compiled_retrograd(shape: Shape) -> Provider:
    """This project's in a graph of torch.compile."""
    return compiled_provider(retrograd(shape).call)


def users(shape: Shape, function: Callable[..., torch.Tensor]) -> Provider:
    """A person's function, called as `registry.CALLS` says; levels are (height, width)."""
    levels = list(shape.levels)
    return Provider(lambda t: (function(t["value"], levels, t["locations"], t["weights"]),))


def _single(function: Callable[..., torch.Tensor]) -> Callable[[Tensors], tuple[torch.Tensor, ...]]:
    """`function` in float32: what it needs where it takes one dtype only, since 16 bits do not place a point."""

    def call(t: Tensors) -> tuple[torch.Tensor, ...]:
        return (function(*(t[name].float() for name in LEAVES)).to(t["value"].dtype),)

    return call


def grid_sample(shape: Shape) -> Provider:
    """In float32 for 16-bit values, as under autocast."""
    return Provider(_single(lambda value, *beside: by_grid_sample(value, shape.levels, *beside)))


def compiled(shape: Shape) -> Provider:
    """grid_sample in a graph of torch.compile."""
    return compiled_provider(grid_sample(shape).call)


def msda_triton(shape: Shape) -> Provider:
    """float16 as it is; bfloat16 and mixed dtypes in float32: it would fall back to torch without a word."""
    function = importlib.import_module("msda_triton").multiscale_deformable_attention
    sizes: list[torch.Tensor] = []

    def attend(value: torch.Tensor, locations: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        sizes[:] = sizes or [torch.tensor(shape.levels, device=value.device)]
        return function(value, sizes[0], locations, weights, "zeros", False)

    in_single = _single(attend)

    def call(t: Tensors) -> tuple[torch.Tensor, ...]:
        plain = all(t[name].dtype == torch.float16 for name in LEAVES)
        return (attend(*(t[name] for name in LEAVES)),) if plain else in_single(t)

    return Provider(call)


def mmcv(shape: Shape) -> Provider:
    """The CUDA kernel of Deformable-DETR, in float32: with 16-bit values it would round locations to 16 bits."""
    function = importlib.import_module("mmcv.ops").MultiScaleDeformableAttnFunction
    tables: list[torch.Tensor] = []

    def attend(value: torch.Tensor, locations: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if not tables:
            sizes = torch.tensor(shape.levels, device=value.device)
            area = sizes.prod(1)
            tables.extend((sizes, area.cumsum(0) - area))
        # Batches are cut into pieces of at most the last argument, which must divide them.
        return function.apply(value, *tables, locations, weights, shape.batch).unflatten(-1, value.shape[2:])

    return Provider(_single(attend))
