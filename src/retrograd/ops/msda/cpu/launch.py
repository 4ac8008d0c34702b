"""Calling msda.cpp: makes results and scratch, fills the argument struct, knows no formula.

Struct, types and dtype numbers follow msda.cpp line by line.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from retrograd.errors import NativeBuildError
from retrograd.ops import tensor_subclasses
from retrograd.ops.msda.shapes import Levels, inner_dtype, levels_of_points
from retrograd.ops.msda.spec import MsdaSpec
from retrograd.runtime.cpp import build
from retrograd.runtime.cpp.memory import address

_SOURCE = Path(__file__).with_name("msda.cpp")
_NUMBERS = {torch.float64: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
# Below 32 Ki samples of a channel a second thread costs more than it saves.
_SERIAL_ELEMENTS = 32768

_Tensor = torch.Tensor | None


class _Strides(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in ("batch", "row", "head"))


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("value", "grad_out", "locations", "weights", "size", "start")),
        *((name, ctypes.c_void_p) for name in ("out", "grad_value", "grad_locations", "grad_weights", "scratch")),
        *((name, _Strides) for name in ("value_strides", "grad_strides")),
        *((name, ctypes.c_int64) for name in ("batch", "pixels", "heads", "channels", "queries", "points")),
        *((name, ctypes.c_int64) for name in ("threads", "parts", "border", "align_corners", "dtype")),
    )


def available() -> bool:
    """Whether the functions of this module can run; compiles them if this machine has not yet (about 4 s)."""
    return why_not() is None


@lru_cache(maxsize=1)
def why_not() -> str | None:
    """Why the functions of this module cannot run, or None if they can; asked once in a process."""
    try:
        _library()
    except NativeBuildError as error:
        return str(error)
    return None


def msda_fwd(
    value: torch.Tensor, levels: Levels, locations: torch.Tensor, weights: torch.Tensor, spec: MsdaSpec
) -> torch.Tensor:
    """Return out[b, q, h] = sum over k of weights[b, q, h, k] * sample[b, q, h, k].

    Args:
        value: [B, S, H, C] float32, float16, bfloat16 or float64, any strides.
        levels: sizes of the levels.
        locations: [B, Q, H, K, 2] (x, y) in [0, 1], any strides; value's dtype or float32.
        weights: [B, Q, H, K], any strides; value's dtype or float32.
        spec: how points outside are treated, and which points belong to which level.

    Returns:
        [B, Q, H, C], contiguous, in the dtype of value. Any size may be 0.

    Raises:
        NativeBuildError: there is no working C++ compiler.
        TypeError: value has another dtype, or a tensor has no memory.

    Numerics: inside float32, float64 for float64. x = fl(fl(p * w) - 0.5), or fl(p * (w - 1)) with align_corners,
    every step rounded on its own. The K terms are added to 0 in ascending order, by fused multiply-adds where the CPU
    has them. The number of threads changes no bit, and neither do the other queries.

    Memory: each thread has a copy of one head of one image, S * C numbers of the inner dtype, unless there are so few
    queries that not every pixel is read.
    """
    batch, _, heads, channels = value.shape
    out = value.new_empty(batch, locations.shape[1], heads, channels)
    if not value.numel() or not weights.numel():
        return out.zero_()
    _run({"value": value, "locations": locations, "weights": weights, "out": out}, levels, spec)
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
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return (grad_value, grad_locations, grad_weights) in closed form.

    Args:
        grad_out: [B, Q, H, C] in the dtype of value, any strides.
        value: and the next four as for `msda_fwd`.
        need_value: whether grad_value is computed; likewise need_locations, need_weights.

    Returns:
        Contiguous gradients in shape and dtype of their tensors; None for what was not asked for.

    Raises:
        NativeBuildError: there is no working C++ compiler.
        TypeError: value has another dtype, or a tensor has no memory.

    Numerics: inside float32, float64 for float64; grad_value is added up in it and rounded once. One thread adds to
    a head of grad_value, in ascending order of queries and points: the same bits every time, with any number of
    threads. What is asked for changes no bit of the others.

    Memory: as `msda_fwd`, and as much again for the sums of grad_value; these also with few queries, unless value is
    float32 or float64 with whole vectors of 32 bytes of channels. Locations and weights of 16 bits have copies in
    float32, and so have their gradients. No more than B * H threads run where grad_value is needed.
    """
    wanted = {
        "value": (need_value, value),
        "locations": (need_locations, locations),
        "weights": (need_weights, weights),
    }
    inner = inner_dtype(value)
    gradients = {
        f"grad_{name}": torch.empty(tensor.shape, dtype=value.dtype if name == "value" else inner, device=value.device)
        for name, (need, tensor) in wanted.items()
        if need
    }
    if not value.numel() or not weights.numel():
        for gradient in gradients.values():
            gradient.zero_()
    elif gradients:
        inputs = {"grad_out": grad_out.to(value.dtype), "value": value, "locations": locations, "weights": weights}
        _run(inputs | gradients, levels, spec)
    grad_value, grad_locations, grad_weights = (
        gradients[f"grad_{name}"].to(tensor.dtype) if need else None for name, (need, tensor) in wanted.items()
    )
    return grad_value, grad_locations, grad_weights


def _run(tensors: dict[str, torch.Tensor], levels: Levels, spec: MsdaSpec) -> None:
    """Fill the results among `tensors`: the forward where "out" is there, else the backward."""
    library = _library()
    value, grad_out = (_dense_channels(tensors.get(name)) for name in ("value", "grad_out"))
    assert value is not None
    if value.dtype not in _NUMBERS:
        raise TypeError(f"impl='native' got {value.dtype}, expected {', '.join(map(str, _NUMBERS))}; use impl='torch'")
    inner = inner_dtype(value)
    locations, weights = (_dense(tensors[name], inner) for name in ("locations", "weights"))
    batch, pixels, heads, channels = value.shape
    queries, points = weights.shape[1], weights.shape[3]
    size, start = _level_arrays(levels, spec.points, pixels)
    threads, tasks = torch.get_num_threads(), batch * heads
    if weights.numel() * channels < _SERIAL_ELEMENTS:
        threads = 1
    # grad_value has one owner a head; all else may be split into queries.
    parts = 1 if "grad_value" in tensors else min(-(-threads // tasks), queries)
    threads = min(threads, tasks * parts)
    memory = tensors | {"value": value, "locations": locations, "weights": weights}
    if grad_out is not None:
        memory["grad_out"] = grad_out
    call = _Call(
        **{name: address(tensor) for name, tensor in memory.items()},
        **{"size": ctypes.addressof(size), "start": ctypes.addressof(start)},
        **{"value_strides": _strides(value), "grad_strides": _strides(grad_out)},
        **{"batch": batch, "pixels": pixels, "heads": heads, "channels": channels},
        **{"queries": queries, "points": points, "threads": threads, "parts": parts},
        **{"border": spec.border, "align_corners": spec.align_corners, "dtype": _NUMBERS[value.dtype]},
    )
    scratch = torch.empty(
        threads * library.retrograd_msda_scratch(ctypes.byref(call)), dtype=torch.uint8, device=value.device
    )
    call.scratch = address(scratch)
    library.retrograd_msda(ctypes.byref(call))


def _level_arrays(levels: Levels, points: tuple[int, ...], pixels: int) -> tuple[Any, Any]:
    """`shapes.levels_of_points` as C arrays, [K, 2] and [K]."""
    if levels.sizes is not None:
        return _known_level_arrays(levels.sizes, points, pixels)
    where = levels_of_points(levels, points, pixels, torch.device("cpu"))
    flat = where.size.flatten().tolist(), where.start.tolist()
    return tuple((ctypes.c_int64 * len(numbers))(*numbers) for numbers in flat)  # pyright: ignore[reportReturnType]


@lru_cache(maxsize=256)
def _known_level_arrays(sizes: tuple[tuple[int, int], ...], points: tuple[int, ...], pixels: int) -> tuple[Any, Any]:
    # Making them takes 0.1 ms, two thirds of a small call.
    shapes = torch.tensor(sizes, dtype=torch.int64, device="cpu").view(-1, 2)
    return _level_arrays(Levels(None, shapes), points, pixels)


def _library() -> ctypes.CDLL:
    library = build.load(_SOURCE)
    library.retrograd_msda_scratch.restype = ctypes.c_int64
    return library


def _dense_channels(tensor: _Tensor) -> _Tensor:
    """`tensor` [B, S or Q, H, C] with the channels next to each other in memory; copied only if they are not."""
    (tensor,) = tensor_subclasses.as_stored((tensor,))
    return tensor if tensor is None or tensor.shape[3] == 1 or tensor.stride(3) == 1 else tensor.contiguous()


def _dense(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Contiguous, in `dtype`."""
    (stored,) = tensor_subclasses.as_stored((tensor,))
    return stored.to(dtype).contiguous()


def _strides(tensor: _Tensor) -> _Strides:
    return _Strides() if tensor is None else _Strides(*tensor.stride()[:3])
