"""Specs of deformable attention: what `retrograd verify ms_deform_attn` proves. One name an option.

`ms_deform_attn_border` runs what is chosen for the device, `ms_deform_attn_border_cpu` the native code,
`ms_deform_attn_border_torch` the torch operations.

Points keep a tenth of a pixel away from integer positions, where the derivative jumps and float64 may find itself in
another cell than float32; what holds exactly there is for tests, since a spec cannot say it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from retrograd.catalog import msda_names
from retrograd.check.spec import OpSpec, op
from retrograd.ops.msda import ms_deform_attn, ms_deform_attn_fused, ms_deform_attn_reference
from retrograd.ops.msda.arguments import Levels
from retrograd.ops.msda.fused import locations_of

_HALVES = ("float16", "bfloat16")
# Locations in bfloat16 move by up to 0.05 pixels in a level of 23: less than the tenth that is kept free.
# With B = 3 and Q = 40 as the ordinary sizes, every run of the reference took three times as long.
_SIZES = dict(B=(0, 3, 2), Q=(0, 40, 13), H=[1, 2, 8, 3], C=(0, 64), P=(0, 5), W=(0, 23))
_MARGIN, _OUTSIDE = 0.1, 2


@dataclass(frozen=True)
class _MsdaVariant:
    """How a variant differs from zeros, align_corners=False and P points in each level."""

    options: Mapping[str, Any] = field(default_factory=dict)  # of the op and of its reference
    kernel: Mapping[str, Any] = field(default_factory=dict)  # options of the op alone
    dtypes: tuple[str, ...] = ("float32", *_HALVES)  # of value
    beside: torch.dtype | None = None  # dtype of the other tensors where it is not that of value
    uneven: bool = False  # whether levels have different numbers of points
    boxes: bool | None = None  # for the fused op, whether reference points are boxes; None is the plain op


_BORDER, _ALIGNED = dict(padding_mode="border"), dict(align_corners=True)
_VARIANTS = {
    "": _MsdaVariant(),
    "border": _MsdaVariant(_BORDER),
    "aligned": _MsdaVariant(_ALIGNED),
    "border_aligned": _MsdaVariant({**_BORDER, **_ALIGNED}),
    "points": _MsdaVariant(uneven=True),
    "mixed": _MsdaVariant(dtypes=_HALVES, beside=torch.float32),
    "deterministic": _MsdaVariant(kernel=dict(deterministic=True)),
    "fused": _MsdaVariant(beside=torch.float32, boxes=False),
    "fused_boxes": _MsdaVariant(beside=torch.float32, boxes=True),
}


def _levels(sizes: Mapping[str, int]) -> list[tuple[int, int]]:
    """A level of width W and one about half as wide; with W = 0 the first is empty."""
    return [(5, sizes["W"]), (sizes["W"] // 2 + 1, 3)]


def _points(sizes: Mapping[str, int], uneven: bool) -> list[int]:
    return [sizes["P"], sizes["P"] + 1] if uneven else [sizes["P"]] * 2


def _uniform(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def _pixel_positions(
    generator: torch.Generator, shape: tuple[int, ...], levels: list[tuple[int, int]], points: list[int]
) -> torch.Tensor:
    """[*shape, K, 2] (x, y) in pixels, inside and up to two pixels outside, none near an integer."""
    drawn = []
    for (height, width), count in zip(levels, points, strict=True):
        cells = torch.tensor((width, height)) + 2 * _OUTSIDE
        cell = (_uniform(generator, *shape, count, 2) * cells).floor() - _OUTSIDE
        drawn.append(cell + _MARGIN + (1 - 2 * _MARGIN) * _uniform(generator, *shape, count, 2))
    return torch.cat(drawn, dim=-2)


def _per_point(levels: list[tuple[int, int]], points: list[int]) -> torch.Tensor:
    """[K, 2] (width, height) of the level of each point; 1 for an empty level, in which any location will do."""
    sizes = torch.tensor(levels).flip(1).clamp_min(1)
    return sizes.repeat_interleave(torch.tensor(points), dim=0)


def _inputs(variant: _MsdaVariant, seed: int, dtype: torch.dtype, sizes: dict[str, int]) -> dict[str, Any]:
    """Inputs of the op by name."""
    generator = torch.Generator().manual_seed(seed)
    levels, points = _levels(sizes), _points(sizes, variant.uneven)
    shape = (sizes["B"], sizes["Q"], sizes["H"])
    value_shape = (sizes["B"], sum(h * w for h, w in levels), sizes["H"], sizes["C"])
    value = torch.randn(value_shape, generator=generator, dtype=torch.float64).to(dtype)
    position = _pixel_positions(generator, shape, levels, points)
    size = _per_point(levels, points)
    aligned = variant.options.get("align_corners")
    locations = position / (size - 1).clamp_min(1) if aligned else (position + 0.5) / size
    weights = torch.randn((*shape, sum(points)), generator=generator, dtype=torch.float64)
    beside = variant.beside or dtype
    inputs: dict[str, Any] = {"value": value, "spatial_shapes": levels}
    if variant.boxes is None:
        parts = {"sampling_locations": locations, "attention_weights": weights.softmax(dim=-1)}
    else:
        parts = _before_fusion(generator, locations, levels, points, variant.boxes) | {"attention_logits": weights}
    if not variant.uneven:
        parts = {name: _with_levels(name, tensor, len(levels)) for name, tensor in parts.items()}
    return inputs | {name: tensor.to(beside) for name, tensor in parts.items()}


def _with_levels(name: str, tensor: torch.Tensor, count: int) -> torch.Tensor:
    """[B, Q, H, K, ...] as [B, Q, H, L, P, ...] for the arguments that have both dimensions."""
    if name in ("reference_points", "attention_logits"):
        return tensor
    return tensor.unflatten(3, (count, tensor.shape[3] // count))


def _before_fusion(
    generator: torch.Generator, locations: torch.Tensor, levels: list[tuple[int, int]], points: list[int], boxes: bool
) -> dict[str, torch.Tensor]:
    """Reference points and offsets that lead to these locations but for rounding."""
    batch, queries = locations.shape[:2]
    reference = 0.25 + 0.5 * _uniform(generator, batch, queries, len(levels), 4 if boxes else 2)
    each = reference.repeat_interleave(torch.tensor(points), dim=2)[:, :, None]  # [B, Q, 1, K, 2 or 4]
    away = locations - each[..., :2]
    if not boxes:
        return {"reference_points": reference, "sampling_offsets": away * _per_point(levels, points)}
    count = torch.tensor([n for n in points for _ in range(n)]).view(-1, 1)
    return {"reference_points": reference, "sampling_offsets": away * 2 * count / each[..., 2:]}


def _fused_reference(
    value: torch.Tensor,
    spatial_shapes: list[tuple[int, int]],
    reference_points: torch.Tensor,
    sampling_offsets: torch.Tensor,
    attention_logits: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """The plain op's reference after the sums and the softmax."""
    points = (sampling_offsets.shape[4],) * len(spatial_shapes)
    offsets = sampling_offsets.flatten(3, 4)
    locations = locations_of(reference_points, offsets, Levels(tuple(spatial_shapes)), points)
    weights = attention_logits.softmax(dim=-1)
    return ms_deform_attn_reference(value, spatial_shapes, locations, weights, points_per_level=points, **options)


def _uneven(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`function` for P points in the first level and one more in the second."""

    def called(value: Any, shapes: Any, locations: torch.Tensor, weights: torch.Tensor, **options: Any) -> torch.Tensor:
        first = weights.shape[-1] // 2
        points = (first, weights.shape[-1] - first)
        return function(value, shapes, locations, weights, points_per_level=points, **options)

    return called


_IMPLS = {"": None, "cpu": "native", "torch": "torch"}
# As for the norms: torch.func has no rule for custom operators.
_TRANSFORMS = {"": ("compile",), "cpu": ("compile",), "torch": ("compile", "vmap")}


def _spec(name: str, variant: str, impl: str) -> OpSpec:
    v = _VARIANTS[variant]
    function, reference = ms_deform_attn, ms_deform_attn_reference
    if v.boxes is not None:
        function, reference = ms_deform_attn_fused, _fused_reference
    if v.uneven:
        function, reference = _uneven(function), _uneven(reference)
    return op(
        partial(function, impl=_IMPLS[impl], **v.options, **v.kernel),
        partial(reference, **v.options),
        partial(_inputs, v),
        sizes=_SIZES,
        dtypes=v.dtypes,
        compute="float32",
        deterministic=v.kernel.get("deterministic", impl == "cpu"),  # kernels for GPUs add grad_value atomically
        transforms=_TRANSFORMS[impl],
        name=name,
    )


SPECS = {name: _spec(name, *parts) for name, parts in msda_names().items()}
globals().update(SPECS)
