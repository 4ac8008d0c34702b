"""Arguments that deformable attention accepts; messages say what was given, what was expected and how to mend it.

What is no tensor or of a wrong dtype raises TypeError, a shape, device or number that does not fit ValueError.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from retrograd.ops.msda.arguments import Levels, MsdaInputs, MsdaSpec
from retrograd.ops.tensor_subclasses import without_memory

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_PADDING = ("zeros", "border")


def _check_value(value: Any) -> None:
    """Check value on its own."""
    _check_tensor("value", value)
    if value.dtype not in _DTYPES:
        raise TypeError(
            f"`value` has dtype {value.dtype}, expected float32, float16, bfloat16 or float64; cast it with "
            "value.float()"
        )
    if value.dim() != 4:
        raise ValueError(
            f"`value` has shape {tuple(value.shape)}, expected [B, S, H, C] with S pixels of all levels; split the "
            "heads with value.unflatten(-1, (H, C))"
        )


def check_levels(spatial_shapes: Any, value: Any) -> Levels:
    """The sizes of the levels; what the host can see is held against S."""
    _check_value(value)
    if not isinstance(spatial_shapes, torch.Tensor):
        sizes = _pairs(spatial_shapes)
    else:
        if spatial_shapes.dtype not in (torch.int64, torch.int32):
            raise TypeError(
                f"`spatial_shapes` has dtype {spatial_shapes.dtype}, expected torch.int64 or torch.int32; cast it with "
                ".long()"
            )
        if spatial_shapes.dim() != 2 or spatial_shapes.shape[1] != 2:
            raise ValueError(
                f"`spatial_shapes` has shape {tuple(spatial_shapes.shape)}, expected [L, 2] of (height, width); use "
                ".reshape(-1, 2)"
            )
        on_host = spatial_shapes.device.type == "cpu"
        if not on_host and spatial_shapes.device != value.device:
            raise ValueError(
                f"`spatial_shapes` is on {spatial_shapes.device}, expected {value.device} like value or cpu; move it "
                "with .to(value.device), or pass a list"
            )
        if torch.compiler.is_compiling() or not on_host or without_memory(spatial_shapes):
            return Levels(None, spatial_shapes)
        sizes = tuple((h, w) for h, w in spatial_shapes.tolist())
    _check_sizes(sizes, value)
    return Levels(sizes)


def check_tensors(inputs: MsdaInputs, points_per_level: Sequence[int] | None) -> tuple[int, ...]:
    """Check locations and weights against value and the levels; the number of points of each level."""
    value, levels, locations, weights, _ = inputs
    _check_beside_value("sampling_locations", locations, value)
    _check_beside_value("attention_weights", weights, value)
    points, shape, names = _points_and_shape(locations, inputs, points_per_level)
    _check_shape("sampling_locations", locations, (*shape, 2), f"{names}, 2]")
    _check_shape("attention_weights", weights, shape, f"{names}]")
    return (locations.shape[-2],) * levels.count() if points is None else points


def check_fused_tensors(inputs: MsdaInputs, points_per_level: Sequence[int] | None) -> tuple[int, ...]:
    """Likewise references, offsets and logits."""
    value, levels, offsets, logits, references = inputs
    names = ("reference_points", "sampling_offsets", "attention_logits")
    for name, tensor in zip(names, (references, offsets, logits), strict=True):
        _check_beside_value(name, tensor, value)
    assert references is not None
    points, shape, names = _points_and_shape(offsets, inputs, points_per_level)
    _check_shape("sampling_offsets", offsets, (*shape, 2), f"{names}, 2]")
    points = (offsets.shape[-2],) * levels.count() if points is None else points
    _check_shape("attention_logits", logits, (*shape[:3], sum(points)), "[B, Q, H, points of all L]")
    last = references.shape[-1] if references.dim() == 4 and references.shape[-1] in (2, 4) else "2 or 4"
    _check_shape("reference_points", references, (*shape[:2], levels.count(), last), "[B, Q, L, 2 or 4]")
    if last == "2 or 4":
        raise ValueError(
            f"`reference_points` has shape {tuple(references.shape)}, expected [B, Q, L, 2] for points or "
            "[B, Q, L, 4] for boxes"
        )
    return points


def _points_and_shape(
    tensor: torch.Tensor, inputs: MsdaInputs, points_per_level: Sequence[int] | None
) -> tuple[tuple[int, ...] | None, tuple[Any, ...], str]:
    """(points of each level if they are told, shape of the weights that belong to [..., 2] `tensor`, its name)."""
    batch, _, heads, _ = inputs.value.shape
    queries = tensor.shape[1] if tensor.dim() > 1 else 0
    points = _check_points(points_per_level, inputs.levels)
    if points is not None:
        return points, (batch, queries, heads, sum(points)), "[B, Q, H, sum(points_per_level)"
    each = tensor.shape[-2] if tensor.dim() == 6 else "P"  # a letter only where the check of the shape raises
    return None, (batch, queries, heads, inputs.levels.count(), each), "[B, Q, H, L, P"


def _check_points(points_per_level: Sequence[int] | None, levels: Levels) -> tuple[int, ...] | None:
    """points_per_level as a tuple."""
    if points_per_level is None:
        return None
    try:
        points = tuple(operator.index(count) for count in points_per_level)
    except TypeError:
        raise TypeError(
            f"`points_per_level` is {points_per_level!r}, expected a list of ints, one a level, such as [4, 4, 2]"
        ) from None
    if len(points) != levels.count() or any(count < 0 for count in points):
        raise ValueError(
            f"`points_per_level` is {list(points)}, expected {levels.count()} numbers of 0 or more, one for each row "
            "of spatial_shapes"
        )
    return points


def _check_beside_value(name: str, tensor: Any, value: torch.Tensor) -> None:
    """Check dtype and device of a tensor that goes with value."""
    _check_tensor(name, tensor)
    fits = tensor.dtype == value.dtype or (tensor.dtype == torch.float32 and value.dtype != torch.float64)
    if not fits:
        wanted = "torch.float32" if value.dtype in (torch.float32, torch.float64) else f"{value.dtype} or torch.float32"
        wanted = "torch.float64" if value.dtype == torch.float64 else wanted
        raise TypeError(
            f"`{name}` has dtype {tensor.dtype}, expected {wanted} beside value of {value.dtype}; cast it with "
            f"{name}.to({wanted.rpartition(' ')[2]})"
        )
    if tensor.device != value.device:
        raise ValueError(
            f"`{name}` is on {tensor.device}, expected {value.device} like value; move it with {name}.to(value.device)"
        )


def _check_shape(name: str, tensor: torch.Tensor, shape: tuple[Any, ...], names: str) -> None:
    """Check a shape, in which a word stands for any size."""
    if tensor.shape == shape:
        return
    same = tensor.dim() == len(shape) and all(
        isinstance(want, str) or got == want for got, want in zip(tensor.shape, shape, strict=True)
    )
    if not same:
        wanted = ", ".join(map(str, shape))
        hint = "transpose or reshape it"
        if tensor.dim() != len(shape):
            hint = "with points_per_level levels and points share one dimension, without it they have two"
        raise ValueError(f"`{name}` has shape {tuple(tensor.shape)}, expected ({wanted}), that is {names}; {hint}")


def check_padding(padding_mode: Any) -> bool:
    """Whether the padding is that of the border."""
    if padding_mode not in _PADDING:
        raise ValueError(f"`padding_mode` is {padding_mode!r}, expected 'zeros' or 'border'")
    return padding_mode == "border"


def check_spec(points: tuple[int, ...], padding_mode: Any, align_corners: Any, deterministic: Any) -> MsdaSpec:
    """The arguments that are no tensors, put together."""
    border = check_padding(padding_mode)
    return MsdaSpec(points, border, bool(align_corners), _check_deterministic(deterministic))


def _check_deterministic(deterministic: Any) -> bool:
    """deterministic with None replaced by what torch.use_deterministic_algorithms says."""
    required = torch.are_deterministic_algorithms_enabled()
    if deterministic is None:
        return required
    if required and not deterministic:
        raise RuntimeError(
            "deterministic=False adds grad_value atomically, which torch.use_deterministic_algorithms(True) forbids; "
            "pass deterministic=None or True, or turn the torch setting off"
        )
    return bool(deterministic)


def _check_tensor(name: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"`{name}` is a {type(tensor).__name__}, expected a torch.Tensor")


def _pairs(spatial_shapes: Any) -> tuple[tuple[int, int], ...]:
    try:
        rows = tuple(tuple(map(_whole, row)) for row in spatial_shapes)
    except TypeError:
        raise TypeError(
            f"`spatial_shapes` is {spatial_shapes!r}, expected a tensor [L, 2] of (height, width) or a list such as "
            "[(64, 64), (32, 32)]"
        ) from None
    if any(len(row) != 2 for row in rows):
        raise ValueError(f"`spatial_shapes` is {list(rows)}, expected a pair (height, width) for each level")
    return rows  # pyright: ignore[reportReturnType]


def _whole(size: Any) -> Any:
    # An int under torch.compile may stand for any size; operator.index would fix it to this one.
    return size if isinstance(size, (int, torch.SymInt)) else operator.index(size)


def _check_sizes(sizes: tuple[tuple[int, int], ...], value: torch.Tensor) -> None:
    if any(h < 0 or w < 0 for h, w in sizes):
        raise ValueError(f"`spatial_shapes` is {list(sizes)}, expected heights and widths of 0 or more")
    total = sum(h * w for h, w in sizes)
    if total != value.shape[1]:
        raise ValueError(
            f"`spatial_shapes` is {list(sizes)}, {total} pixels in all, expected {value.shape[1]} to match "
            "value.shape[1]; list (height, width) of each level in the order in which they were concatenated"
        )
