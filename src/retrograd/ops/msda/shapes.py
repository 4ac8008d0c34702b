"""Sizes of the levels and of each point's level as tensors, and locations and weights with one dimension of points."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from retrograd.ops.msda.arguments import Levels, MsdaInputs
from retrograd.ops.types import inner_dtype

_TABLES: dict[tuple[Any, ...], torch.Tensor] = {}
_MOST_TABLES = 1024  # of 512 bytes; images of more sizes than that are copied in each call


class PointLevels(NamedTuple):
    """For each of K points the level it lies in."""

    size: torch.Tensor  # [K, 2] int64 (width, height), in the order of (x, y)
    start: torch.Tensor  # [K] int64 first pixel of the level in S


def tensor_of(levels: Levels, device: torch.device) -> torch.Tensor:
    """[L, 2] int64 (height, width) on `device`, without waiting for it."""
    if levels.shapes is not None:
        # While a graph is traced they may be a tensor on the host, which nobody has read.
        return levels.shapes.to(device, torch.int64, non_blocking=True)
    host = torch.tensor(levels.sizes, dtype=torch.int64, device="cpu").view(-1, 2)
    return host.to(device, non_blocking=True)


def beside_tensor(rows: tuple[Any, ...], dtype: torch.dtype, other: torch.Tensor) -> torch.Tensor:
    """Numbers that the host knows, on the device of another tensor.

    They are kept there, and never freed, so that a graph that is captured in a later call copies nothing from the host.
    """
    device = other.device
    if type(other) is torch.Tensor and device.type == "cuda" and not torch.compiler.is_compiling():
        key = rows, dtype, device
        if key not in _TABLES and len(_TABLES) < _MOST_TABLES:
            with torch.inference_mode(False):  # a backward may save it
                _TABLES[key] = torch.tensor(rows, dtype=dtype, device="cpu").to(device)
            torch.cuda.current_stream(device).synchronize()  # other streams read it next time
        if key in _TABLES:
            return _TABLES[key]
    return torch.tensor(rows, dtype=dtype, device="cpu").to(device, non_blocking=True)


def level_of(points: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """[K] int64 on `device`, the level of each point, without waiting for it."""
    host = [level for level, count in enumerate(points) for _ in range(count)]
    return torch.tensor(host, dtype=torch.int64, device="cpu").to(device, non_blocking=True)


def levels_of_points(levels: Levels, points: tuple[int, ...], pixels: int, device: torch.device) -> PointLevels:
    """The level of each point; one that does not fit into `pixels` (S) counts as empty, since nobody may read it."""
    if levels.sizes is not None and type(pixels) is int:  # a size that is a symbol would ask for guards
        return _known_levels(levels.sizes, points, pixels, device)
    sizes = tensor_of(levels, device)
    area = sizes.prod(dim=1)
    end = area.cumsum(dim=0)
    fits = (sizes >= 0).all(dim=1) & (end >= area) & (end <= pixels)
    level = level_of(points, device)
    return PointLevels((sizes.flip(1) * fits[:, None])[level], (end - area)[level])


def _known_levels(
    sizes: tuple[tuple[int, int], ...], points: tuple[int, ...], pixels: int, device: torch.device
) -> PointLevels:
    """`levels_of_points` where the host knows the sizes: two operators instead of 17."""
    size, start, end = list[tuple[int, int]](), list[int](), 0
    for (height, width), count in zip(sizes, points, strict=True):
        first, end = end, end + height * width
        fits = min(height, width) >= 0 and end <= pixels
        size += [(width, height) if fits else (0, 0)] * count
        start += [first if fits else 0] * count
    shape = torch.tensor(size, dtype=torch.int64, device="cpu").view(-1, 2)
    at = torch.tensor(start, dtype=torch.int64, device="cpu")
    return PointLevels(shape.to(device, non_blocking=True), at.to(device, non_blocking=True))


def flat(inputs: MsdaInputs) -> MsdaInputs:
    """With locations [B, Q, H, K, 2] and weights [B, Q, H, K], from [B, Q, H, L, P, ...] or as they are."""
    value, levels, locations, weights, references = inputs
    if locations.dim() == 6:
        locations = locations.flatten(3, 4)
    if weights.dim() == 5:
        weights = weights.flatten(3)
    return MsdaInputs(value, levels, locations, weights, references)


def beside(tensor: Any, value: Any) -> Any:
    """`tensor` in a dtype that goes with `value`; what is no tensor is left to the checks."""
    if not (isinstance(tensor, torch.Tensor) and isinstance(value, torch.Tensor)):
        return tensor
    inner = inner_dtype(value)
    return tensor if tensor.dtype in (value.dtype, inner) else tensor.to(inner)
