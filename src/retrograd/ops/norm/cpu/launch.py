"""Calling norm.cpp: makes results and scratch, fills the argument structs, knows no formula.

Structs, types and dtype numbers follow norm.cpp line by line.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

import torch

from retrograd.errors import NativeBuildError
from retrograd.ops.norm.shapes import empty_results, has_own_s, without_elements
from retrograd.ops.norm.spec import NormSpec
from retrograd.runtime.cpp import build
from retrograd.runtime.cpp.memory import address

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


class _Forward(ctypes.Structure):
    _fields_ = (
        *((name, _Rows) for name in ("x", "residual", "y", "s")),
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "mean", "rstd", "scratch")),
        *((name, ctypes.c_int64) for name in ("m", "n", "heads", "threads", "centered", "in_double")),
        ("eps", ctypes.c_double),
    )


class _Backward(ctypes.Structure):
    _fields_ = (
        *((name, _Rows) for name in ("grad_out", "s", "grad_s", "grad_x", "grad_residual")),
        *((name, _Rows) for name in ("grad_weight", "grad_bias")),
        *((name, ctypes.c_void_p) for name in ("weight", "mean", "rstd", "weight_sums", "bias_sums", "scratch")),
        *((name, ctypes.c_int64) for name in ("m", "n", "heads", "threads", "parts", "centered", "in_double")),
        *((name, ctypes.c_int64) for name in ("add_weight", "add_bias")),
        ("eps", ctypes.c_double),
    )


def available() -> bool:
    """Whether the functions of this module can run; compiles them if this machine has not yet (about 5 s)."""
    return why_not() is None


@lru_cache(maxsize=1)
def why_not() -> str | None:
    """Why the functions of this module cannot run, or None if they can; asked once in a process."""
    try:
        build.load(_SOURCE)
    except NativeBuildError as error:
        return str(error)
    return None


def norm_fwd(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    spec: NormSpec,
    *,
    out_dtype: torch.dtype,
    s_dtype: torch.dtype,
    store_stats: bool = True,
    store_s: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return (y, s, mean, rstd) of y = (s - mean) * rstd * (weight + offset) + bias with s = x + residual.

    Args:
        x: [M, N] float32, float16 or bfloat16, rows at any distance, 0 included.
        weight: [N], or [H, N] with row r using weight[r % H]; any of these dtypes. None is ones.
        bias: shapes and dtypes as weight. None is zeros.
        residual: [M, N], any of these dtypes. None adds nothing.
        spec: what is computed.
        out_dtype: dtype of y.
        s_dtype: dtype that s is rounded to before it is normalised.
        store_stats: Whether mean and rstd are kept.
        store_s: Whether s is kept where it is not x itself.

    Returns:
        y [M, N]; s [M, N], None where it is x itself or not kept; mean [M] float32, None unless spec.centered; rstd
        [M] float32. The statistics are None if not kept.

    Raises:
        NativeBuildError: there is no working C++ compiler.
        TypeError: a dtype is none of the three.

    Numerics: sums and products in float64 where x, residual, s or y is float32, else in float32. Neither the number of
    threads nor the other rows change a row's bits.
    """
    m, n = x.shape
    own_s = has_own_s(x, residual, s_dtype)
    results = empty_results(x, residual, spec.centered, out_dtype, s_dtype, store_stats, store_s)
    y, s, mean, rstd = results
    if y.numel() == 0:
        _number(x.dtype)
        return without_elements(results, spec.empty_rstd)
    x, residual = _rows(x), _rows(residual)
    heads = max(t.shape[0] if t is not None and t.dim() == 2 else 1 for t in (weight, bias))
    threads = _threads(m * n)
    dtypes = {x.dtype, s_dtype, out_dtype} | ({residual.dtype} if residual is not None else set())
    staged = own_s or x.dtype not in (torch.float32, out_dtype)
    vectors = {
        "weight": _vector(weight, heads, n, spec.weight_offset),  # [H, N]
        "bias": None if bias is None else _vector(bias, heads, n),  # [H, N]
        "scratch": torch.empty((threads, n), **_FLOAT32) if staged else None,
        **{"mean": mean, "rstd": rstd},
    }
    call = _Forward(
        **{"x": _view(x), "residual": _view(residual), "y": _view(y), "s": _view(s, s_dtype)},
        **{name: _address(t) for name, t in vectors.items()},
        **{"m": m, "n": n, "heads": heads, "threads": threads},
        **{"centered": spec.centered, "in_double": torch.float32 in dtypes, "eps": spec.eps},
    )
    build.load(_SOURCE).retrograd_norm_forward(ctypes.byref(call))
    return results


def norm_bwd(
    grad_out: torch.Tensor,
    s: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    grad_s: torch.Tensor | None,
    spec: NormSpec,
    *,
    x_dtype: torch.dtype | None,
    residual_dtype: torch.dtype | None,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    heads: int = 1,
    into_weight: torch.Tensor | None = None,
    into_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return (grad_x, grad_residual, grad_weight, grad_bias).

    Args:
        grad_out: [M, N], any of the dtypes and strides.
        s: [M, N], what the forward normalised.
        weight: [N], [heads, N] or None.
        mean: [M] float32, or None if not centered.
        rstd: [M] float32.
        grad_s: [M, N] gradient that reached s by another way, or None.
        spec: what was computed.
        x_dtype: dtype of grad_x; None skips it.
        residual_dtype: dtype of grad_residual; None skips it.
        weight_dtype: dtype of grad_weight; None skips it.
        bias_dtype: dtype of grad_bias; None skips it.
        heads: rows of the weight and of the bias.
        into_weight: float32 with heads * N elements; grad_weight is added to it and not returned.
        into_bias: the same for grad_bias.

    Returns:
        grad_x and grad_residual [M, N], one tensor where their dtypes agree; grad_weight and grad_bias [N], or
        [heads, N] if heads > 1; None for what was skipped.

    Raises:
        NativeBuildError: there is no working C++ compiler.
        TypeError: a dtype is none of the three.

    Numerics: in float32 where every tensor and result has the same 16-bit dtype. Else in float64, and mean and rstd
    are then computed again from s. Sums over rows are made of min(64, ceil(M / heads / 8)) (or `spec.parts`) shares
    of adjacent rows, each added up row by row, then share by share: the number of threads does not matter.
    """
    m, n = s.shape
    outs = {dtype: s.new_empty((m, n), dtype=dtype) for dtype in (x_dtype, residual_dtype) if dtype is not None}
    grad_x, grad_residual = outs.get(x_dtype), outs.get(residual_dtype)  # [M, N]
    grad_weight = _vector_out(weight_dtype, heads, n, into_weight)  # [N] or [H, N]
    grad_bias = _vector_out(bias_dtype, heads, n, into_bias)
    if m * n and (outs or grad_weight is not None or grad_bias is not None):
        inputs = {"grad_out": grad_out, "s": s, "grad_s": grad_s, "weight": weight, "mean": mean, "rstd": rstd}
        results = {"grad_x": grad_x, "grad_residual": None if grad_residual is grad_x else grad_residual}
        results |= {"grad_weight": grad_weight, "grad_bias": grad_bias}
        added = {"add_weight": grad_weight is into_weight, "add_bias": grad_bias is into_bias}
        _run_backward(inputs, results, added, spec, heads)
    return grad_x, grad_residual, _deliver(grad_weight, into_weight), _deliver(grad_bias, into_bias)


def _run_backward(
    inputs: dict[str, _Tensor], results: dict[str, _Tensor], added: dict[str, bool], spec: NormSpec, heads: int
) -> None:
    """Fill `results`; where `added` says so, the gradient of weight or bias is added to what is there."""
    rows = {name: _rows(inputs[name]) for name in ("grad_out", "s", "grad_s")}
    m, n = rows["s"].shape
    vectors = {
        "weight": _vector(inputs["weight"], heads, n, spec.weight_offset),  # [H, N]
        **{name: None if inputs[name] is None else inputs[name].contiguous() for name in ("mean", "rstd")},  # [M]
    }
    in_double = len({t.dtype for t in (*rows.values(), inputs["weight"], *results.values()) if t is not None}) > 1
    in_double = in_double or rows["s"].dtype == torch.float32
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
    call = _Backward(
        **{name: _view(tensor) for name, tensor in (rows | results).items()},
        **{name: _address(t) for name, t in (vectors | sums).items()},
        **{"m": m, "n": n, "heads": heads, "threads": threads, "parts": parts},
        **{"centered": spec.centered, "in_double": in_double, "eps": spec.eps, **added},
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


def _vector_out(dtype: torch.dtype | None, heads: int, n: int, into: _Tensor) -> _Tensor:
    if dtype is None:
        return None
    if into is None:
        return torch.zeros((heads, n) if heads > 1 else (n,), dtype=dtype, device="cpu")
    return into if into.is_contiguous() else torch.zeros((heads, n), **_FLOAT32)


def _deliver(gradient: _Tensor, into: _Tensor) -> _Tensor:
    """What the caller gets of a gradient; None where it was added to `into`."""
    if gradient is None or into is None:
        return gradient
    if gradient is not into:
        into.add_(gradient.view(into.shape))
    return None


def _threads(elements: int) -> int:
    return 1 if elements < _SERIAL_ELEMENTS else torch.get_num_threads()
