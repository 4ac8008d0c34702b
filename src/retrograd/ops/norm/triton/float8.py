"""The forward kernel of the norms whose y is float8 e4m3, with a scale a row or a tensor, and its launcher."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from retrograd.ops.norm.arguments import Float8Results, NormTensors, WantedOutput
from retrograd.ops.norm.plan import ForwardPlan, Kind, plan_forward_float8
from retrograd.ops.norm.quantization import LARGEST, LEAST_SCALE
from retrograd.ops.norm.shapes import empty_results, heads_of
from retrograd.ops.norm.spec import NormSpec
from retrograd.ops.norm.triton.arithmetic import store_columns, wait_for_kernels_ahead
from retrograd.ops.norm.triton.backward_launch import unit_of
from retrograd.ops.norm.triton.forward import normalized_tile
from retrograd.ops.norm.triton.launch import TL_DTYPES, dense_rows
from retrograd.runtime.triton.gpu import Backend
from retrograd.runtime.triton.launch import gpu_of, launch, on_device_of

_LARGEST = tl.constexpr(LARGEST)
_LEAST_SCALE = tl.constexpr(LEAST_SCALE)


@triton.jit(do_not_specialize=["M"])
def norm_fwd_float8_kernel(
    x_ptr,  # [M * H, N]
    residual_ptr,  # [M * H, N] or None
    weight_ptr,  # [H, N] or None
    bias_ptr,  # [H, N] or None
    y_ptr,  # [M * H, N] contiguous, float8 e4m3
    s_ptr,  # [M * H, N] contiguous, or None
    mean_ptr,  # [M * H] float32, or None
    rstd_ptr,  # [M * H] float32, or None
    scale_ptr,  # float32 [M * H] to be written, or [1] to be read where there is amax_ptr
    amax_ptr,  # float32 [1], at least 0, or None
    x_stride,
    residual_stride,
    M,
    N,
    H,
    eps,
    UNIT: tl.constexpr,
    weight_offset: tl.constexpr,
    CENTERED: tl.constexpr,
    S_DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LOADS: tl.constexpr,
    STORES: tl.constexpr,
    EARLY: tl.constexpr,
    WIDTH: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """As `norm_fwd_kernel`, with y / scale in float8; amax_ptr: one scale of all rows, else one a row is computed."""
    if PDL:
        wait_for_kernels_ahead()
    y, mean, rstd, all_rows, _, exists = normalized_tile(  # pyright: ignore[reportGeneralTypeIssues]
        *(x_ptr, residual_ptr, weight_ptr, bias_ptr, s_ptr, x_stride, residual_stride, M, N, H, eps),
        *(UNIT, weight_offset, CENTERED, S_DTYPE, BLOCK_M, BLOCK_N, LOADS, STORES, EARLY, WIDTH, PTX),
    )
    inverse = inverse_scale(tl.max(tl.abs(y), axis=1), scale_ptr, amax_ptr, all_rows)  # [BLOCK_M]
    WHOLE: tl.constexpr = WIDTH == BLOCK_N
    N = WIDTH if WIDTH else N * UNIT
    # The compiler is told that a load's 16 bytes are neighbours and no more: with 16 bytes of float8 a thread all would
    # be laid out so, and weight and bias pass through shared memory (RMSNorm 32768 x 4096 on an H200 135 us).
    offsets = all_rows[:, None] * N + tl.arange(0, BLOCK_N)[None, :]
    offsets = tl.max_contiguous(offsets, [1, 128 // S_DTYPE.primitive_bitwidth])
    store_columns(y_ptr + offsets, in_float8(y, inverse, y_ptr, amax_ptr), exists[None, :], WHOLE, STORES, "")
    if CENTERED:  # noqa: SIM102
        if mean_ptr is not None:
            tl.store(mean_ptr + all_rows, mean)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + all_rows, rstd)


@triton.jit
def inverse_scale(largest, scale_ptr, amax_ptr, all_rows):
    """1 / scale [BLOCK_M] from the largest |y| of each row: of all rows where there is `amax_ptr`, else their own.

    A maximum passes over NaN, so that one in a row leaves the others their scale; of nothing else it is NaN.
    """
    largest = tl.where(largest == largest, largest, 0.0)
    if amax_ptr is None:
        scale = tl.maximum(tl.div_rn(largest, _LARGEST), _LEAST_SCALE)
        tl.store(scale_ptr + all_rows, scale)
        return tl.div_rn(1.0, scale)
    else:
        tl.atomic_max(amax_ptr, tl.max(largest, axis=0), sem="relaxed")
        return tl.div_rn(1.0, tl.load(scale_ptr)) + tl.zeros_like(largest)


@triton.jit
def in_float8(y, inverse, y_ptr, amax_ptr):
    """y / scale rounded to the dtype of `y_ptr`; beyond its largest number it is that number, NaN stays."""
    scaled = y * inverse[:, None]
    if amax_ptr is not None:  # with a scale a row nothing is beyond 448 (1 + 2^-22), which is rounded to 448
        scaled = tl.clamp(scaled, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return scaled.to(y_ptr.dtype.element_ty)


def norm_fwd_float8(
    tensors: NormTensors,
    scale: torch.Tensor | None,
    spec: NormSpec,
    wanted: WantedOutput,
    plan: ForwardPlan | None = None,
) -> Float8Results | None:
    """Launch the forward over x [M, N] with M * N > 0; None, and nothing is done, where no tile holds a row.

    Args:
        scale: [1] float32 for all rows, or None for one a row.
        tensors, spec, wanted: see `arguments`.
        plan: launch plan, None asks `plan_forward_float8`.

    Raises:
        RuntimeError: x is on the CPU outside `retrograd.cpu_triton`.
        ValueError: the GPU has no float8 e4m3.

    Numerics: as `triton.launch.norm_fwd`, then one division a row, and one product and one rounding an element.
    """
    gpu = gpu_of(tensors.x)
    if gpu.backend is Backend.CUDA and gpu.arch < 89:
        raise ValueError(
            f"`x` is on a GPU of architecture sm_{gpu.arch}, which has no float8 e4m3 (sm_89 and later have); use "
            "impl='torch'"
        )
    x, weight, bias, residual = dense = dense_rows(tensors)
    rows, n = x.shape
    heads = heads_of(weight, bias)
    itemsize, streams = max(x.element_size(), wanted.s_dtype.itemsize), 1 if residual is None else 2
    plan = plan or plan_forward_float8(rows // heads, n, itemsize, gpu, streams=streams)
    if plan.kind is not Kind.TILE:
        return None
    y, s, mean, rstd = empty_results(dense, spec, wanted)
    scales = x.new_empty(rows, dtype=torch.float32) if scale is None else scale  # [M] or [1]
    amax = None if scale is None else torch.zeros_like(scale)  # [1]
    x_stride, residual_stride = x.stride(0), 0 if residual is None else residual.stride(0)
    unit = unit_of(n, x_stride, residual_stride)
    args = (
        x, residual, weight, bias, y, s, mean, rstd, scales, amax,
        x_stride // unit, residual_stride // unit, rows // heads, n // unit, heads, spec.eps, unit,
        spec.weight_offset, spec.centered, TL_DTYPES[wanted.s_dtype], plan.block_m, plan.block_n,
        plan.loads, plan.stores, plan.early, n if plan.static_n or n == plan.block_n else 0,
        gpu.backend is Backend.CUDA, gpu.pdl,
    )  # fmt: skip
    with on_device_of(x):
        launch(norm_fwd_float8_kernel, (plan.programs, heads), args, num_warps=plan.num_warps, pdl=gpu.pdl)
    return Float8Results(y, scale=scales, amax=amax, s=s, mean=mean, rstd=rstd)
