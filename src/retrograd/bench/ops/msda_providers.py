"""Implementations of deformable attention: this project's, the formula by grid_sample, and those of other libraries."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from retrograd.bench.benchmark import CPU, GPU, Implementation, Provider, Tensors, UnavailableError, build_host_path
from retrograd.bench.ops.msda import FUSED, FUSED_LEAVES, LEAVES, OP, Shape, sides

if TYPE_CHECKING:
    import torch


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
    import torch

    batch, _, heads, channels = value.shape
    queries, points = locations.shape[1], locations.shape[4]
    grids = 2 * locations - 1
    samples = []
    for i, image in enumerate(value.split([h * w for h, w in levels], dim=1)):
        image = image.permute(0, 2, 3, 1).reshape(batch * heads, channels, *levels[i])
        grid = grids[:, :, :, i].transpose(1, 2).reshape(batch * heads, queries, points, 2)
        samples.append(
            torch.nn.functional.grid_sample(image, grid, padding_mode=padding_mode, align_corners=align_corners)
        )
    stacked = torch.stack(samples, dim=-2).flatten(-2)  # [B * H, C, Q, L * P]
    shares = weights.transpose(1, 2).reshape(batch * heads, 1, queries, len(levels) * points)
    out = (stacked * shares).sum(-1)  # [B * H, C, Q]
    return out.view(batch, heads, channels, queries).permute(0, 3, 1, 2).contiguous()


def retrograd(shape: Shape, **options: Any) -> Implementation:
    """This project's; `options` say in which mode."""
    attend = importlib.import_module("retrograd.ops").ms_deform_attn
    build_host_path("retrograd.ops.msda.host")
    levels = list(shape.levels)
    return Implementation(lambda t: (attend(t["value"], levels, t["locations"], t["weights"], **options),))


def fused(shape: Shape, **options: Any) -> Implementation:
    """This project's fused form."""
    attend = importlib.import_module("retrograd.ops").ms_deform_attn_fused
    build_host_path("retrograd.ops.msda.host")
    levels, names = list(shape.levels), ("references", "offsets", "logits")
    return Implementation(lambda t: (attend(t["value"], levels, *(t[name] for name in names), **options),))


def from_offsets(shape: Shape, make: Callable[[Shape], Implementation]) -> Implementation:
    """The fused form by what takes locations and weights: torch makes these first, as modules do."""
    plain = make(shape)

    def call(t: Tensors) -> tuple[torch.Tensor, ...]:
        weights = t["logits"].softmax(-1).view(t["offsets"].shape[:-1])
        return plain.call({"value": t["value"], "locations": _locations(shape, t), "weights": weights})

    return Implementation(call)


_SIDES: dict[Any, torch.Tensor] = {}


def _locations(shape: Shape, t: Tensors) -> torch.Tensor:
    key = shape.levels, t["value"].device
    if key not in _SIDES:
        _SIDES[key] = sides(shape, t["value"].device)
    return t["references"][:, :, None, :, None] + t["offsets"] / _SIDES[key]


def _single(function: Callable[..., torch.Tensor]) -> Callable[[Tensors], tuple[torch.Tensor, ...]]:
    """`function` in float32: what it needs where it takes one dtype only, since 16 bits do not place a point."""

    def call(t: Tensors) -> tuple[torch.Tensor, ...]:
        return (function(*(t[name].float() for name in LEAVES)).to(t["value"].dtype),)

    return call


def grid_sample(shape: Shape) -> Implementation:
    """In float32 for 16-bit values, as under autocast."""
    return Implementation(_single(lambda value, *beside: by_grid_sample(value, shape.levels, *beside)))


def msda_triton(shape: Shape) -> Implementation:
    """float16 as it is; bfloat16 and mixed dtypes in float32: it would fall back to torch without a word."""
    import torch

    function = importlib.import_module("msda_triton").multiscale_deformable_attention
    sizes: list[torch.Tensor] = []

    def attend(value: torch.Tensor, locations: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        sizes[:] = sizes or [torch.tensor(shape.levels, device=value.device)]
        return function(value, sizes[0], locations, weights, "zeros", False)

    in_single = _single(attend)

    def call(t: Tensors) -> tuple[torch.Tensor, ...]:
        half = all(t[name].dtype == torch.float16 for name in LEAVES)
        return (attend(*(t[name] for name in LEAVES)),) if half else in_single(t)

    return Implementation(call)


def mmcv(shape: Shape) -> Implementation:
    """The CUDA kernel of Deformable-DETR."""
    return _im2col(shape, importlib.import_module("mmcv.ops").MultiScaleDeformableAttnFunction)


def deformable_detr(shape: Shape) -> Implementation:
    """The same kernel as `kernels` loads it from the Hub; UnavailableError where it has none for this machine."""
    kernels = importlib.import_module("kernels")
    try:
        layers = kernels.get_kernel("kernels-community/deformable-detr").layers
    except Exception as error:
        raise UnavailableError(f"deformable-detr is not on this machine and not loaded from the Hub: {error}") from None
    return _im2col(shape, layers.MultiScaleDeformableAttentionFunction)


def _im2col(shape: Shape, function: Any) -> Implementation:
    """In float32: with 16-bit values these kernels would round locations to 16 bits."""
    tables = _tables(shape)

    def attend(value: torch.Tensor, locations: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        # Batches are cut into pieces of at most the last argument, which must divide them.
        out = function.apply(value, *tables(value), locations, weights, shape.batch)
        return out.unflatten(-1, value.shape[2:])

    return Implementation(_single(attend))


def dcnv4(shape: Shape) -> Implementation:
    """Locations and logits in one tensor, the softmax inside; in float32, since its backward knows no bfloat16."""
    import torch

    function = importlib.import_module("DCNv4.functions").FlashDeformAttnFunction
    tables = _tables(shape)

    def call(t: Tensors) -> tuple[torch.Tensor, ...]:
        value, offsets, logits = (t[name].float() for name in FUSED_LEAVES)
        locations = _locations(shape, {"value": value, "references": t["references"].float(), "offsets": offsets})
        both = torch.cat([locations.flatten(3), logits], dim=-1)
        out = function.apply(value, *tables(value), both, shape.batch, shape.points)
        return (out.unflatten(-1, value.shape[2:]).to(t["value"].dtype),)

    return Implementation(call)


def _tables(shape: Shape) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    """Sizes of the levels and where each begins, on the device of a tensor, made once."""
    import torch

    kept: list[torch.Tensor] = []

    def tables(beside: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not kept:
            sizes = torch.tensor(shape.levels, device=beside.device)
            area = sizes.prod(1)
            kept.extend((sizes, area.cumsum(0) - area))
        return tuple(kept)

    return tables


# In the order in which tables show them; torch.compile of what people write comes last.
PROVIDERS = (
    Provider("retrograd", (OP,), retrograd),
    Provider("retrograd-deterministic", (OP,), retrograd, {"deterministic": True}, usual=GPU),
    Provider("retrograd-triton", (OP,), retrograd, {"impl": "triton"}, devices=GPU, usual=GPU),
    Provider("retrograd-cuda", (OP,), retrograd, {"impl": "cuda"}, devices=GPU, usual=()),
    Provider("retrograd-native", (OP,), retrograd, {"impl": "native"}, devices=CPU, usual=()),
    # Torch operations on blocks of queries, for machines without kernels: a second a call at the large shapes.
    Provider("retrograd-torch", (OP,), retrograd, {"impl": "torch"}, usual=()),
    Provider("retrograd-compile", (OP,), retrograd, usual=(), compiled=True),
    Provider("grid_sample", (OP,), grid_sample, package="torch"),
    Provider("msda-triton", (OP,), msda_triton, package="msda-triton", devices=GPU, usual=GPU),
    Provider("mmcv", (OP,), mmcv, package="mmcv", devices=GPU, usual=GPU),
    Provider("deformable-detr", (OP,), deformable_detr, package="kernels", devices=GPU, usual=GPU),
    Provider("grid_sample-compile", (OP,), grid_sample, package="torch", usual=GPU, compiled=True),
    Provider("retrograd", (FUSED,), fused),
    Provider("retrograd-deterministic", (FUSED,), fused, {"deterministic": True}, usual=GPU),
    Provider("grid_sample", (FUSED,), from_offsets, {"make": grid_sample}, package="torch"),
    *(
        Provider(name, (FUSED,), from_offsets, {"make": make}, package=package, devices=GPU, usual=GPU)
        for name, make, package in (
            ("msda-triton", msda_triton, "msda-triton"),
            ("mmcv", mmcv, "mmcv"),
            ("deformable-detr", deformable_detr, "kernels"),
        )
    ),
    Provider("dcnv4", (FUSED,), dcnv4, package="dcnv4", devices=GPU, usual=GPU),
    Provider("grid_sample-compile", (FUSED,), from_offsets, {"make": grid_sample}, "torch", usual=GPU, compiled=True),
)
