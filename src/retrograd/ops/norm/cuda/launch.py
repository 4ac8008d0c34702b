"""Launcher of wide_forward.cu: plan, macros, arguments; knows no formula."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from retrograd.ops._cuda import driver, nvrtc
from retrograd.ops.norm.shapes import empty_results, heads_of, without_elements
from retrograd.ops.norm.spec import NormSpec

_SOURCE = Path(__file__).with_name("wide_forward.cu")
_NUMBERS = {None: -1, torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # enum Type
_SIZES = {None: 0, torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}
_CLUSTERS = (2, 4, 8, 16)  # above 8 not every GPU can place them
# A CTA has 227 KiB on sm_90; the struct Shared takes less than 3 of them.
_BUFFER_BYTES = 224 * 1024
_MAX_STAGES = 16
_HELPER_THREADS = 64  # producer and combiner
# What a thread needs beside weight and bias, without and with s in place; ptxas 13.0 spills at less.
_OWN_REGISTERS = (32, 40)


@dataclass(frozen=True)
class WidePlan:
    """How one kernel is compiled and launched.

    Attributes:
        cluster: CTAs that share a row.
        threads: that compute in a CTA; 64 more copy and combine.
        stages: rows of x in shared memory.
        residual_stages: rows of the residual there, 0 without one.
        look: rows between a row's sums and its use.
        vectors_shared: Whether weight and bias lie in shared memory, not in registers.
        shared_bytes: of dynamic shared memory.
    """

    cluster: int
    threads: int
    stages: int
    residual_stages: int
    look: int
    vectors_shared: bool
    shared_bytes: int


@dataclass(frozen=True)
class _Dtypes:
    x: torch.dtype
    residual: torch.dtype | None
    weight: torch.dtype | None
    bias: torch.dtype | None
    y: torch.dtype
    s: torch.dtype

    @property
    def vec(self) -> int:
        """Elements that a thread takes at once, as in wide_forward.cu."""
        return 16 // max(_SIZES[self.x], _SIZES[self.residual], _SIZES[self.y], _SIZES[self.s])

    @property
    def in_place(self) -> bool:
        """Whether s replaces x in shared memory."""
        return self.residual is not None and _SIZES[self.s] <= _SIZES[self.x]


def norm_fwd_wide(
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
    cluster: int | None = None,
    threads: int | None = None,
    stages: int | None = None,
    look: int | None = None,
    guard: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Launch the forward for wide rows and return (y, s, mean, rstd).

    Args:
        x: [M, N] float32, float16 or bfloat16 on a GPU of compute capability 9.0 or more; rows at any distance, 0
            included. Rows that do not start at multiples of 16 bytes are copied. N is a multiple of 8.
        weight: [N] or None for ones; any of these dtypes.
        bias: likewise; None is zeros.
        residual: [M, N] in any of these dtypes, or None.
        spec: which norm.
        out_dtype: dtype of y.
        s_dtype: dtype of s = x + residual, which is rounded before it is normalised.
        store_stats: Whether mean and rstd are written.
        store_s: Whether s is written where it is not x itself.
        cluster: CTAs that share a row: 2, 4, 8 or, where the GPU can place them, 16; None lets `plan_wide` choose.
        threads: that compute in a CTA, a multiple of 32; None likewise.
        stages: rows of x in shared memory; None takes as many as fit.
        look: rows between a row's sums and its use, 1 or 2; None is 1.
        guard: Whether a kernel that waits for a second prints where and goes on, for whoever debugs it.

    Returns:
        y [M, N]; s [M, N], or None if it was not to be stored or is x; mean [M] float32, None for RMSNorm; rstd [M]
        float32. None for statistics not stored.

    Raises:
        ValueError: N is no multiple of 8, a vector has heads, or the plan does not fit.
        RuntimeError: x is not on such a GPU.
        NativeBuildError: there is no NVRTC.

    Numerics: float32 inside; correctly rounded square root and divisions; LayerNorm's squares are about the mean of 32
    threads' elements and then combined. The same bits for a row whatever M is, for one plan.
    """
    rows, n = x.shape
    device = x.device
    if device.type != "cuda" or _capability(device.index)[0] < 9:
        raise RuntimeError(
            f"norm_fwd_wide got a tensor on {device}, expected a GPU of compute capability 9.0 or more; use "
            "impl='triton'"
        )
    outs = empty_results(x, residual, spec.centered, out_dtype, s_dtype, store_stats, store_s)
    if rows == 0 or n == 0:
        return without_elements(outs, spec.empty_rstd)
    if n % 8:
        raise ValueError(f"`x` has {n} columns, expected a multiple of 8; use impl='triton'")
    if heads_of(weight, bias) > 1:
        raise ValueError(f"`weight` or `bias` has {heads_of(weight, bias)} heads, expected one; use impl='triton'")
    x, residual = aligned_rows(x), aligned_rows(residual)
    weight, bias = aligned_vector(weight), aligned_vector(bias)
    types = (x, residual, weight, bias)
    dtypes = _Dtypes(*(None if t is None else t.dtype for t in types), out_dtype, s_dtype)  # type: ignore[arg-type]
    plan = plan_wide(n, dtypes, cluster, threads, stages, look)
    with torch.cuda.device(device):
        own_s = outs[1] is not None
        kernel = _kernel(device.index, n, dtypes, plan, spec.centered, own_s, spec.weight_offset != 0, guard)
        pointers = (x, residual, weight, bias, *outs)
        args = (
            *(ctypes.c_void_p(0 if t is None else t.data_ptr()) for t in pointers),
            *(ctypes.c_longlong(v) for v in (x.stride(0), 0 if residual is None else residual.stride(0), rows)),
            ctypes.c_float(spec.eps),
            ctypes.c_float(spec.weight_offset),
        )
        kernel.launch(min(rows, kernel.max_clusters), args)
    return outs


@cache
def plan_wide(
    n: int,
    dtypes: _Dtypes,
    cluster: int | None = None,
    threads: int | None = None,
    stages: int | None = None,
    look: int | None = None,
) -> WidePlan:
    """The plan for rows of n columns, with what is given and the rest chosen.

    Raises:
        ValueError: it does not fit into shared memory, or an argument is out of range.
    """
    look = look or 1
    if cluster is None:
        # The smallest that leaves room for four rows ahead; else the smallest of 8 and 16 that fits.
        fitting = {}
        for size in _CLUSTERS[:3]:
            try:
                fitting[size] = plan_wide(n, dtypes, size, threads, stages, look)
            except ValueError:
                continue
            if fitting[size].stages >= look + 4:
                return fitting[size]
        cluster = 8 if 8 in fitting and (threads or _roomy(64 * -(-n // 512), dtypes)) else 16
    slice_n = 64 * -(-n // (64 * cluster))
    if threads is None:
        threads = _roomy(slice_n, dtypes) or 384
    if cluster not in _CLUSTERS or threads % 32 or not 32 <= threads <= 960 or look not in (1, 2):
        raise ValueError(
            f"cluster={cluster}, threads={threads}, look={look} is no plan; expected cluster in {_CLUSTERS}, threads a "
            "multiple of 32 up to 960, look 1 or 2"
        )
    vectors_shared = _held(slice_n, threads, dtypes) > _room(threads, dtypes)
    fixed = slice_n * (_SIZES[dtypes.weight] + _SIZES[dtypes.bias]) if vectors_shared else 0
    x_bytes, residual_bytes = slice_n * _SIZES[dtypes.x], slice_n * _SIZES[dtypes.residual]

    def residual_rows(x_rows: int) -> int:
        # Where s replaces x the residual is free again `look` steps before.
        return 0 if dtypes.residual is None else x_rows - look if dtypes.in_place else x_rows

    def bytes_of(x_rows: int) -> int:
        return fixed + x_rows * x_bytes + residual_rows(x_rows) * residual_bytes

    if stages is None:
        stages = max((k for k in range(look + 1, _MAX_STAGES + 1) if bytes_of(k) <= _BUFFER_BYTES), default=look + 1)
    if stages <= look or bytes_of(stages) > _BUFFER_BYTES:
        raise ValueError(
            f"{stages} stages of a slice of {slice_n} columns take {bytes_of(stages)} bytes of shared memory, expected "
            f"at most {_BUFFER_BYTES} and more than look={look} stages; take a larger cluster"
        )
    return WidePlan(cluster, threads, stages, residual_rows(stages), look, vectors_shared, bytes_of(stages))


def _roomy(slice_n: int, dtypes: _Dtypes) -> int | None:
    """The most threads that have room for their columns; where none has, 16 bytes a thread spill."""
    columns = {t: slice_n // t for t in (512, 384, 256)}
    return next((t for t, e in columns.items() if _held(slice_n, t, dtypes) + e // 2 + 8 <= _room(t, dtypes)), None)


def _held(slice_n: int, threads: int, dtypes: _Dtypes) -> int:
    """Registers of a thread that hold its columns' weight and bias."""
    vecs = -(-slice_n // (dtypes.vec * threads))
    return vecs * dtypes.vec * (_SIZES[dtypes.weight] + _SIZES[dtypes.bias]) // 4


def _room(threads: int, dtypes: _Dtypes) -> int:
    """Registers of a thread that are free for them; warps get registers by fours."""
    registers = min(248, 65536 // (-(-(threads + _HELPER_THREADS) // 128) * 128) // 8 * 8)
    return registers - _OWN_REGISTERS[dtypes.in_place]


def aligned_rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """`tensor`, copied only if its rows are not contiguous or do not start at multiples of 16 bytes."""
    if tensor is None:
        return None
    fits = (tensor.stride(0) * tensor.element_size()) % 16 == 0 or tensor.shape[0] <= 1
    if tensor.stride(-1) == 1 and fits and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def aligned_vector(vector: torch.Tensor | None) -> torch.Tensor | None:
    """`vector`, copied if it is not contiguous or does not start at a multiple of 16 bytes."""
    if vector is None or (vector.is_contiguous() and vector.data_ptr() % 16 == 0):
        return vector
    return vector.clone(memory_format=torch.contiguous_format)


def options_of(
    n: int, dtypes: _Dtypes, plan: WidePlan, centered: bool, own_s: bool, offset: bool, guard: bool
) -> tuple[str, ...]:
    """The macros of wide_forward.cu."""
    macros = dict(
        N=n, CLUSTER=plan.cluster, THREADS=plan.threads, STAGES=plan.stages, RESIDUAL_STAGES=plan.residual_stages,
        LOOK=plan.look, CENTERED=int(centered), X_TYPE=_NUMBERS[dtypes.x], RESIDUAL_TYPE=_NUMBERS[dtypes.residual],
        WEIGHT_TYPE=_NUMBERS[dtypes.weight], BIAS_TYPE=_NUMBERS[dtypes.bias], Y_TYPE=_NUMBERS[dtypes.y],
        S_TYPE=_NUMBERS[dtypes.s], STORE_S=int(own_s), HAS_OFFSET=int(offset),
        VECTORS_SHARED=int(plan.vectors_shared), GUARD=int(guard),
    )  # fmt: skip
    return tuple(f"-D{name}={value}" for name, value in macros.items())


@cache
def _capability(device_index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device_index)


@cache
def _kernel(
    device_index: int,
    n: int,
    dtypes: _Dtypes,
    plan: WidePlan,
    centered: bool,
    own_s: bool,
    offset: bool,
    guard: bool,
) -> driver.Kernel:
    major, minor = _capability(device_index)
    options = (f"--gpu-architecture=sm_{major}{minor}", "--std=c++17")
    cubin = nvrtc.compile_cubin(_SOURCE, options + options_of(n, dtypes, plan, centered, own_s, offset, guard))
    return driver.load(
        cubin,
        "wide_forward",
        device_index,
        cluster=plan.cluster,
        threads=plan.threads + _HELPER_THREADS,
        shared_bytes=plan.shared_bytes,
    )
