"""Calling msda.cpp: makes results and scratch, fills the argument struct, knows no formula.

Struct, types and dtype numbers follow msda.cpp line by line.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from retrograd.ops import tensor_subclasses
from retrograd.ops.msda.arguments import Levels, MsdaGrads, MsdaInputs, MsdaSpec, NeededGrads, zero_grads
from retrograd.ops.msda.shapes import levels_of_points
from retrograd.ops.types import inner_dtype
from retrograd.runtime.cpp import build
from retrograd.runtime.cpp.build import address

_SOURCE = Path(__file__).with_name("msda.cpp")
_NUMBERS = {torch.float64: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
# Below 32 Ki samples of a channel a second thread costs more than it saves.
_SERIAL_ELEMENTS = 32768


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


def why_not() -> str | None:
    """Why the functions of this module cannot run, or None if they can."""
    return build.why_not(_SOURCE)


def msda_fwd(inputs: MsdaInputs, spec: MsdaSpec) -> torch.Tensor:
    """The output; see `arguments`.

    Raises:
        NativeBuildError: there is no working C++ compiler.
        TypeError: value has another dtype, or a tensor has no memory.

    Numerics: inside float32, float64 for float64; terms are added by fused multiply-adds where the CPU has them. The
    number of threads changes no bit, and neither do the other queries.

    Memory: each thread has a copy of one head of one image, S * C numbers of the inner dtype, unless there are so few
    queries that not every pixel is read.
    """
    value, _, locations, weights, _ = inputs
    batch, _, heads, channels = value.shape
    out = value.new_empty(batch, locations.shape[1], heads, channels)
    if not value.numel() or not weights.numel():
        return out.zero_()
    _run(inputs, spec, {"out": out})
    return out


def msda_bwd(grad_out: torch.Tensor, inputs: MsdaInputs, spec: MsdaSpec, needed: NeededGrads) -> MsdaGrads:
    """The gradients; see `arguments`.

    Raises:
        NativeBuildError: there is no working C++ compiler.
        TypeError: value has another dtype, or a tensor has no memory.

    Numerics: inside float32, float64 for float64. One thread adds to a head of grad_value, in ascending order of
    queries and points: the same bits every time, with any number of threads.

    Memory: as `msda_fwd`, and as much again for the sums of grad_value; these also with few queries, unless value is
    float32 or float64 with whole vectors of 32 bytes of channels. Locations and weights of 16 bits have copies in
    float32, and so have their gradients. No more than B * H threads run where grad_value is needed.
    """
    value, _, locations, weights, _ = inputs
    if not value.numel() or not weights.numel():
        return zero_grads(inputs, needed)
    inner = inner_dtype(value)
    grads = MsdaGrads(
        value=torch.empty(value.shape, dtype=value.dtype, device=value.device) if needed.value else None,
        locations=torch.empty(locations.shape, dtype=inner, device=value.device) if needed.locations else None,
        weights=torch.empty(weights.shape, dtype=inner, device=value.device) if needed.weights else None,
    )
    results = {f"grad_{name}": grad for name, grad in grads._asdict().items() if grad is not None}
    if results:
        _run(inputs, spec, results, _dense_channels(grad_out.to(value.dtype)))
    pairs = zip(grads, inputs.tensors(), strict=False)
    return MsdaGrads(*(None if grad is None else grad.to(tensor.dtype) for grad, tensor in pairs))


def _run(
    inputs: MsdaInputs, spec: MsdaSpec, results: dict[str, torch.Tensor], grad_out: torch.Tensor | None = None
) -> None:
    """Fill the results: the forward where "out" is there, else the backward."""
    library = _library()
    value, levels, *_ = inputs
    if value.dtype not in _NUMBERS:
        raise TypeError(f"impl='native' got {value.dtype}, expected {', '.join(map(str, _NUMBERS))}; use impl='torch'")
    value, inner = _dense_channels(value), inner_dtype(value)
    memory = {"value": value, "locations": _dense(inputs.locations, inner), "weights": _dense(inputs.weights, inner)}
    if grad_out is not None:
        memory["grad_out"] = grad_out
    batch, pixels, heads, channels = value.shape
    _, queries, _, points = inputs.weights.shape
    size, start = _level_arrays(levels, spec.points, pixels)
    threads, tasks = torch.get_num_threads(), batch * heads
    if inputs.weights.numel() * channels < _SERIAL_ELEMENTS:
        threads = 1
    # grad_value has one owner a head; all else may be split into queries.
    parts = 1 if "grad_value" in results else min(-(-threads // tasks), queries)
    threads = min(threads, tasks * parts)
    call = _Call(
        **{name: address(tensor) for name, tensor in (memory | results).items()},
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


def _dense_channels(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` [B, S or Q, H, C] with the channels next to each other in memory; copied only if they are not."""
    (tensor,) = tensor_subclasses.as_stored((tensor,))
    return tensor if tensor.shape[3] == 1 or tensor.stride(3) == 1 else tensor.contiguous()


def _dense(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Contiguous, in `dtype`."""
    (stored,) = tensor_subclasses.as_stored((tensor,))
    return stored.to(dtype).contiguous()


def _strides(tensor: torch.Tensor | None) -> _Strides:
    return _Strides() if tensor is None else _Strides(*tensor.stride()[:3])
