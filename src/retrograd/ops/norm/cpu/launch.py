"""Calling norm.cpp: makes results and scratch, fills the argument structs, knows no formula.

Structs, types and dtype numbers follow norm.cpp line by line.
"""

# Which tensors there are follows from the spec of the norm or the flags beside them, which types cannot say.
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from retrograd.ops.norm.arguments import BackwardTensors, NormGrads, NormResults, NormTensors, WantedGrads, WantedOutput
from retrograd.ops.norm.shapes import empty_results, has_own_s, heads_of, without_elements
from retrograd.ops.norm.spec import NormSpec
from retrograd.runtime.cpp import build
from retrograd.runtime.cpp.build import address

_SOURCE = Path(__file__).with_name("norm.cpp")
_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_PARTS = 64
_ROWS_PER_PART = 8
# Below 32 Ki elements a second thread costs more than it saves; at::parallel_for has the same grain.
_SERIAL_ELEMENTS = 32768
# s, grad_out, grad_s and grad_x of a group of 4 rows in float32.
_BACKWARD_SCRATCH_ROWS = 16

# Always named: torch's defaults may be another dtype and another device.
_FLOAT32 = {"dtype": torch.float32, "device": "cpu"}

_Tensor = torch.Tensor | None


class _Rows(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64), ("dtype", ctypes.c_int64))


class _ForwardCall(ctypes.Structure):
    _fields_ = (
        *((name, _Rows) for name in ("x", "residual", "y", "s")),
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "mean", "rstd", "scratch")),
        *((name, ctypes.c_int64) for name in ("m", "n", "heads", "threads", "centered", "in_double")),
        ("eps", ctypes.c_double),
    )


class _BackwardCall(ctypes.Structure):
    _fields_ = (
        *((name, _Rows) for name in ("grad_out", "s", "grad_s", "grad_x", "grad_residual")),
        *((name, _Rows) for name in ("grad_weight", "grad_bias")),
        *((name, ctypes.c_void_p) for name in ("weight", "mean", "rstd", "weight_sums", "bias_sums", "scratch")),
        *((name, ctypes.c_int64) for name in ("m", "n", "heads", "threads", "parts", "centered", "in_double")),
        *((name, ctypes.c_int64) for name in ("add_weight", "add_bias")),
        ("eps", ctypes.c_double),
    )


def why_not() -> str | None:
    """Why the functions of this module cannot run, or None if they can."""
    return build.why_not(_SOURCE)


def norm_fwd(tensors: NormTensors, spec: NormSpec, wanted: WantedOutput) -> NormResults:
    """y = (s - mean) * rstd * (weight + offset) + bias with s = x + residual; see `arguments`.

    Raises:
        NativeBuildError: there is no working C++ compiler.
        TypeError: a dtype is none of float32, float16 and bfloat16.

    Numerics: sums and products in float64 where x, residual, s or y is float32, else in float32. Neither the number of
    threads nor the other rows change a row's bits.
    """
    x, weight, bias, residual = tensors
    m, n = x.shape
    own_s = has_own_s(x, residual, wanted.s_dtype)
    results = empty_results(tensors, spec, wanted)
    y, s, mean, rstd = results
    if y.numel() == 0:
        _number(x.dtype)
        return without_elements(results, spec.empty_rstd)
    x, residual = _rows(x), _rows(residual)
    heads = heads_of(weight, bias)
    threads = _threads(m * n)
    dtypes = {x.dtype, wanted.s_dtype, y.dtype} | ({residual.dtype} if residual is not None else set())
    staged = own_s or x.dtype not in (torch.float32, y.dtype)
    vectors = {
        "weight": _vector(weight, heads, n, spec.weight_offset),  # [H, N]
        "bias": None if bias is None else _vector(bias, heads, n),  # [H, N]
        "scratch": torch.empty((threads, n), **_FLOAT32) if staged else None,
        **{"mean": mean, "rstd": rstd},
    }
    call = _ForwardCall(
        **{"x": _view(x), "residual": _view(residual), "y": _view(y), "s": _view(s, wanted.s_dtype)},
        **{name: _address(t) for name, t in vectors.items()},
        **{"m": m, "n": n, "heads": heads, "threads": threads},
        **{"centered": spec.centered, "in_double": torch.float32 in dtypes, "eps": spec.eps},
    )
    build.load(_SOURCE).retrograd_norm_forward(ctypes.byref(call))
    return results


def norm_bwd(tensors: BackwardTensors, spec: NormSpec, wanted: WantedGrads) -> NormGrads:
    """The gradients in closed form; see `arguments`.

    Raises:
        NativeBuildError: there is no working C++ compiler.
        TypeError: a dtype is none of float32, float16 and bfloat16.

    Numerics: in float32 where every tensor and result has the same 16-bit dtype. Else in float64, and mean and rstd
    are then computed again from s. Sums over rows are made of min(64, ceil(M / heads / 8)) (or `spec.parts`) shares
    of adjacent rows, each added up row by row, then share by share: the number of threads does not matter.
    """
    m, n = tensors.s.shape
    outs = {d: tensors.s.new_empty((m, n), dtype=d) for d in (wanted.x, wanted.residual) if d is not None}
    x, residual = outs.get(wanted.x), outs.get(wanted.residual)
    weight = _vector_out(wanted.weight, wanted.vector_shape(n), wanted.into_weight)
    bias = _vector_out(wanted.bias, wanted.vector_shape(n), wanted.into_bias)
    if m * n and (outs or weight is not None or bias is not None):
        _run_backward(tensors, NormGrads(x, weight, bias, residual), spec, wanted)
    weight, bias = weight if wanted.into_weight is None else None, bias if wanted.into_bias is None else None
    return NormGrads(x, weight, bias, residual)


def _run_backward(tensors: BackwardTensors, grads: NormGrads, spec: NormSpec, wanted: WantedGrads) -> None:
    """Fill `grads`; a gradient that is the buffer to add to is added to what is there."""
    rows = {"grad_out": _rows(tensors.grad_out), "s": _rows(tensors.s), "grad_s": _rows(tensors.grad_s)}
    results = {
        "grad_x": grads.x,
        "grad_residual": None if grads.residual is grads.x else grads.residual,
        "grad_weight": grads.weight,
        "grad_bias": grads.bias,
    }
    m, n, heads = *tensors.s.shape, wanted.heads
    vectors = {
        "weight": _vector(tensors.weight, heads, n, spec.weight_offset),  # [H, N]
        "mean": None if tensors.mean is None else tensors.mean.contiguous(),  # [M]
        "rstd": tensors.rstd.contiguous(),
    }
    in_double = len({t.dtype for t in (*rows.values(), tensors.weight, *results.values()) if t is not None}) > 1
    in_double = in_double or tensors.s.dtype == torch.float32
    parts = spec.parts or min(_PARTS, -(-m // heads // _ROWS_PER_PART))
    sums_dtype = torch.float64 if in_double else torch.float32
    sums = {
        f"{name}_sums": torch.empty((parts, heads, n), dtype=sums_dtype, device="cpu")
        for name in ("weight", "bias")
        if results[f"grad_{name}"] is not None
    }
    threads = _threads(m * n)
    big = [t for t in (*rows.values(), results["grad_x"], results["grad_residual"]) if t is not None]
    if len({t.dtype for t in big}) > 1:
        sums["scratch"] = torch.empty((threads, _BACKWARD_SCRATCH_ROWS, n), **_FLOAT32)
    call = _BackwardCall(
        **{name: _view(tensor) for name, tensor in (rows | results).items()},
        **{name: _address(t) for name, t in (vectors | sums).items()},
        **{"m": m, "n": n, "heads": heads, "threads": threads, "parts": parts},
        **{"centered": spec.centered, "in_double": in_double, "eps": spec.eps},
        **{"add_weight": grads.weight is wanted.into_weight, "add_bias": grads.bias is wanted.into_bias},
    )
    build.load(_SOURCE).retrograd_norm_backward(ctypes.byref(call))


def _number(dtype: torch.dtype) -> int:
    if dtype not in _NUMBERS:
        raise TypeError(f"impl='native' got {dtype}, expected float32, float16 or bfloat16; use impl='torch'")
    return _NUMBERS[dtype]


def _rows(tensor: _Tensor) -> _Tensor:
    """`tensor` [M, N] with neighbours in a row next to each other in memory; copied only if they are not."""
    if tensor is None or tensor.shape[1] == 1 or tensor.stride(1) == 1:
        return tensor
    # The gradient of a sum is one number expanded to [M, N]: one row of it is enough.
    return tensor[:1].contiguous().expand_as(tensor) if tensor.stride(0) == 0 else tensor.contiguous()


def _view(tensor: _Tensor, dtype: torch.dtype = torch.float32) -> _Rows:
    """What C sees of [M, N] rows or of one vector; `dtype` stands in where there is no tensor."""
    if tensor is None:
        return _Rows(None, 0, _number(dtype))
    return _Rows(_address(tensor), tensor.stride(0), _number(tensor.dtype))


def _address(tensor: _Tensor) -> int | None:
    return None if tensor is None else address(tensor)


def _vector(vector: _Tensor, heads: int, n: int, offset: float = 0.0) -> torch.Tensor:
    """[heads, N] float32, contiguous; None is ones, without the offset."""
    if vector is None:
        return torch.ones((heads, n), **_FLOAT32)
    _number(vector.dtype)
    vector = vector.float() + offset if offset else vector.float()
    return vector.expand(heads, n).contiguous()


def _vector_out(dtype: torch.dtype | None, shape: tuple[int, ...], into: _Tensor) -> _Tensor:
    if dtype is None:
        return None
    return torch.zeros(shape, dtype=dtype, device="cpu") if into is None else into


def _threads(elements: int) -> int:
    return 1 if elements < _SERIAL_ELEMENTS else torch.get_num_threads()
