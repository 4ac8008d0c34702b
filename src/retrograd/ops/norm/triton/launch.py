"""Launchers of the norm kernels: `norm_fwd` and `norm_bwd` over 2-D tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton.language as tl

from retrograd.ops.norm.plan import (
    BACKWARD_TILE_LIMIT,
    FORWARD_TRITON_LIMIT,
    BackwardPlan,
    ForwardPlan,
    Kind,
    ceil_div,
    finalizer_tile,
    next_power_of_2,
    plan_backward,
    plan_forward,
)
from retrograd.ops.norm.shapes import empty_results, heads_of, without_elements
from retrograd.ops.norm.spec import NormSpec
from retrograd.ops.norm.triton import clusters
from retrograd.ops.norm.triton.backward import (
    norm_bwd_kernel,
    norm_bwd_kernel_dw_columns,
    norm_bwd_kernel_dx_looped,
    norm_bwd_kernel_finalize,
)
from retrograd.ops.norm.triton.backward_sliced import norm_bwd_kernel_slices
from retrograd.ops.norm.triton.forward import norm_fwd_kernel, norm_fwd_kernel_looped
from retrograd.runtime.triton.gpu import Backend
from retrograd.runtime.triton.launch import Handle, gpu_of, launch, on_device_of, relaunch, relaunchable

# Launches of the TILE kernels that have been compiled, by all that they depend on.
_FORWARD: dict[Any, tuple[Handle, tuple[Any, ...]]] = {}
_BACKWARD: dict[Any, tuple[Handle, tuple[Any, ...], int, Any]] = {}
# Called with the dictionary, the key and the entry of each launch that is held from now on; see norm/host.
on_keep: Callable[[dict[Any, Any], Any, Any], None] | None = None
_TL_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


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
    plan: ForwardPlan | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Launch the forward and return (y, s, mean, rstd).

    Args:
        x: [M, N] float32, float16 or bfloat16; rows at any distance, 0 included.
        weight: [N], [H, N] (row r uses weight[r % H]) or None for ones; any of these dtypes.
        bias: likewise; None is zeros.
        residual: [M, N] in any of these dtypes, or None.
        spec: which norm.
        out_dtype: dtype of y.
        s_dtype: dtype of s = x + residual, which is rounded before it is normalised.
        store_stats: Whether mean and rstd are written.
        store_s: Whether s is written where it is not x itself.
        plan: Launch plan; None asks `plan_forward`.

    Returns:
        y [M, N]; s [M, N], or None if it was not to be stored or is x; mean [M] float32, None for RMSNorm; rstd [M]
        float32. None for statistics not stored.

    Raises:
        RuntimeError: x is on the CPU and kernels are not interpreted.

    Numerics: float32 inside; square root and divisions correctly rounded where s is float32, else within 2 ulp;
    two-pass variance.
    """
    rows, n = x.shape
    widest = FORWARD_TRITON_LIMIT[spec.centered, residual is not None]
    if n > widest and plan is None and clusters.forward_by_clusters(x, weight, bias, residual):
        from retrograd.ops.norm.cuda import norm_fwd_wide

        return norm_fwd_wide(
            x, weight, bias, residual, spec,
            out_dtype=out_dtype, s_dtype=s_dtype, store_stats=store_stats, store_s=store_s,
        )  # fmt: skip
    device = x.device
    outs = empty_results(x, residual, spec.centered, out_dtype, s_dtype, store_stats, store_s)
    key = held = None
    if plan is None and relaunchable(x, residual, weight, bias):
        given = [None if t is None else (t.dtype, t.shape, t.stride()) for t in (x, residual, weight, bias)]
        key = (device.index, *given, out_dtype, s_dtype, outs[1] is not None, store_stats, spec)
        held = _FORWARD.get(key)
        if held is not None:
            relaunch(held[0], (x, residual, weight, bias, *outs, *held[1]), device.index)
            return outs
    gpu = gpu_of(x)
    if rows == 0 or n == 0:
        return without_elements(outs, spec.empty_rstd)
    tensors = (x, residual, weight, bias)
    x, residual = unit_last_stride(x), unit_last_stride(residual)
    weight, bias = contiguous(weight), contiguous(bias)
    if any(new is not old for new, old in zip((x, residual, weight, bias), tensors, strict=True)):
        key = None  # launched with copies
    heads = heads_of(weight, bias)
    if plan is None:
        itemsize = max(x.element_size(), s_dtype.itemsize)
        streams = 1 if residual is None else 2
        plan = plan_forward(rows // heads, n, heads, itemsize, gpu, centered=spec.centered, streams=streams)
    x_stride, residual_stride = x.stride(0), 0 if residual is None else residual.stride(0)
    unit = _unit(n, x_stride, residual_stride)
    tile = plan.kind is Kind.TILE
    how = (plan.loads, plan.stores, plan.early, n == plan.block_n) if tile else (n % plan.block_n == 0, plan.unroll)
    rest = (
        x_stride // unit, residual_stride // unit, rows // heads, n // unit, heads, spec.eps, unit,
        spec.weight_offset, spec.centered, _TL_DTYPES[s_dtype], plan.block_m, plan.block_n, *how,
        gpu.backend is Backend.CUDA, gpu.pdl,
    )  # fmt: skip
    with on_device_of(x):
        kernel = norm_fwd_kernel if tile else norm_fwd_kernel_looped
        tensors = (x, residual, weight, bias, *outs)
        handle = launch(kernel, (plan.programs, heads), (*tensors, *rest), num_warps=plan.num_warps, pdl=gpu.pdl)
        _keep(_FORWARD, key, (handle, rest), handle)
    return outs


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
    plan: BackwardPlan | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Launch the backward and return (grad_x, grad_residual, grad_weight, grad_bias).

    With h = (s - mean) * rstd and g = grad_out * (weight + weight_offset): the gradient of s is
    rstd * (g - h * mean(g * h) - [mean(g)]) + grad_s, and those of the vectors are sums over the rows of
    grad_out * h and of grad_out.

    Args:
        grad_out: [M, N]; rows at any distance, 0 included.
        s: [M, N], what the forward normalised.
        weight: [N], [H, N] or None.
        mean: [M] float32 of the forward; None for RMSNorm.
        rstd: [M] float32 of the forward.
        grad_s: [M, N] gradient that reached s by another way; or None.
        spec: which norm.
        x_dtype: dtype of grad_x; None skips it.
        residual_dtype: dtype of grad_residual; None skips it.
        weight_dtype: dtype of grad_weight; None skips it and everything it costs.
        bias_dtype: dtype of grad_bias; None skips it.
        heads: H.
        into_weight: float32 [H, N] or [N] to add grad_weight to; then None is returned for it.
        into_bias: likewise.
        plan: Launch plan; None asks `plan_backward`.

    Returns:
        grad_x [M, N] and grad_residual [M, N], the same tensor where the dtypes are equal; grad_weight and grad_bias
        [N], or [H, N] if H > 1. None for what was not asked for.

    Raises:
        RuntimeError: s is on the CPU and kernels are not interpreted.

    Numerics: float32 inside. With spec.deterministic the sums over rows have a fixed order, which depends on
    spec.parts, or, where that is None, on how many programs or clusters the GPU holds.
    """
    rows, n = s.shape
    shape = (heads, n) if heads > 1 else (n,)
    into = (into_weight, into_bias)
    if plan is None and rows > 0 and n > BACKWARD_TILE_LIMIT[Backend.CUDA] and heads == 1 and spec.parts is None:
        plan = clusters.plan_by_clusters(s, grad_out, grad_s, x_dtype, residual_dtype)
    if plan is not None and plan.kind is Kind.CLUSTERS:
        from retrograd.ops.norm.cuda import norm_bwd_wide

        dtype = residual_dtype if x_dtype is None else x_dtype
        sums = dict(weight_sum=weight_dtype is not None, bias_sum=bias_dtype is not None)
        grad, *both = norm_bwd_wide(grad_out, s, weight, mean, rstd, spec, plan, dtype=dtype, **sums)
        with on_device_of(s):
            vectors = _finalize(both[0], both[1], (weight_dtype, bias_dtype), into, shape, None, None, gpu_of(s).pdl)[0]
        return None if x_dtype is None else grad, None if residual_dtype is None else grad, *vectors
    grad_x = s.new_empty((rows, n), dtype=x_dtype) if x_dtype is not None else None
    grad_residual = None
    if residual_dtype is not None and residual_dtype != x_dtype:
        grad_residual = s.new_empty((rows, n), dtype=residual_dtype)
    shared = residual_dtype is not None and residual_dtype == x_dtype
    key = None
    if plan is None and spec.deterministic and relaunchable(s, grad_out, weight, grad_s, mean, rstd, *into):
        given = [None if t is None else (t.dtype, t.shape, t.stride()) for t in (s, grad_out, weight, grad_s, *into)]
        key = (s.device.index, *given, x_dtype, residual_dtype, weight_dtype, bias_dtype, heads, spec)
        held = _BACKWARD.get(key)
        if held is not None:
            handle, rest, parts, finalizer = held
            weight_parts = None if weight_dtype is None else _parts(parts, heads * n, rstd)
            bias_parts = None if bias_dtype is None else _parts(parts, heads * n, rstd)
            tensors = (grad_out, s, weight, mean, rstd, grad_s, grad_x, grad_residual, weight_parts, bias_parts)
            relaunch(handle, (*tensors, *rest), s.device.index)
            vectors = _finalize(weight_parts, bias_parts, (weight_dtype, bias_dtype), into, shape, None, finalizer)[0]
            return grad_x, grad_x if shared else grad_residual, *vectors
    gpu = gpu_of(s)
    if rows == 0 or n == 0:
        zeros = [
            None if dtype is None or into is not None else torch.zeros(shape, dtype=dtype, device=s.device)
            for dtype, into in ((weight_dtype, into_weight), (bias_dtype, into_bias))
        ]
        return grad_x, grad_x if shared else grad_residual, zeros[0], zeros[1]
    tensors = (s, grad_out, grad_s, weight)
    s, grad_out, grad_s = unit_last_stride(s), unit_last_stride(grad_out), unit_last_stride(grad_s)
    weight = contiguous(weight)
    if any(new is not old for new, old in zip((s, grad_out, grad_s, weight), tensors, strict=True)):
        key = None  # launched with copies
    if plan is None:
        itemsize = max(s.element_size(), grad_out.element_size())
        plan = plan_backward(
            rows // heads, n, heads, itemsize, gpu,
            centered=spec.centered, streams=2 if grad_s is None else 3, parts=spec.parts,
        )  # fmt: skip
    parts = plan.parts if spec.deterministic or plan.kind is Kind.SLICES else 0
    weight_parts = None if weight_dtype is None else _parts(parts, heads * n, rstd)
    bias_parts = None if bias_dtype is None else _parts(parts, heads * n, rstd)
    strides = (grad_out.stride(0), s.stride(0), 0 if grad_s is None else grad_s.stride(0))
    unit = _unit(n, *strides)
    sizes = (*(stride // unit for stride in strides), rows // heads, n // unit)
    tensors = (grad_out, s, weight, mean, rstd, grad_s, grad_x, grad_residual, weight_parts, bias_parts)
    handle, rest = None, ()
    with on_device_of(s):
        if plan.kind is Kind.TILE:
            rest = (
                *sizes, heads, unit, spec.weight_offset, parts == 0, plan.block_m, plan.block_n, plan.num_stages,
                gpu.backend is Backend.CUDA, gpu.pdl,
            )  # fmt: skip
            grid, warps = (plan.programs, heads), plan.num_warps
            handle = launch(norm_bwd_kernel, grid, (*tensors, *rest), num_warps=warps, pdl=gpu.pdl)
        elif plan.kind is Kind.SLICES:
            args = (
                *tensors, _words(rows, plan.slices, s.device), *sizes, plan.slice_n, unit, spec.weight_offset,
                plan.slices, next_power_of_2(plan.slices), plan.block_n, n == plan.slices * plan.block_n,
                plan.num_stages, plan.ahead,
            )  # fmt: skip
            together = dict(launch_cooperative_grid=True, maxnreg=plan.max_registers)
            launch(norm_bwd_kernel_slices, (plan.programs,), args, num_warps=plan.num_warps, **together)
        else:
            _walk(tensors, sizes, heads, unit, spec, plan, parts == 0, gpu.pdl)
        tile = plan.finalize_block_p, plan.finalize_block_n
        # Behind a kernel that is not launched so itself it takes 0.1 to 0.9 us longer in a graph (H200).
        pdl = gpu.pdl and plan.kind is not Kind.SLICES
        dtypes = weight_dtype, bias_dtype
        vectors, finalizer = _finalize(weight_parts, bias_parts, dtypes, into, shape, tile, None, pdl)
    if finalizer is None or finalizer[0] is not None:
        _keep(_BACKWARD, key, (handle, rest, parts, finalizer), handle)
    return grad_x, grad_x if shared else grad_residual, *vectors


def _walk(
    tensors: tuple[torch.Tensor | None, ...],
    sizes: tuple[int, ...],
    heads: int,
    unit: int,
    spec: NormSpec,
    plan: BackwardPlan,
    atomic: bool,
    pdl: bool,
) -> None:
    """Launch the two kernels of a LOOPED plan: the gradients of the rows, the sums for the vectors."""
    grad_out, s, _, mean, rstd, _, grad_x, grad_residual, weight_parts, bias_parts = tensors
    if grad_x is not None or grad_residual is not None:
        args = (*tensors[:8], *sizes, heads, unit, spec.weight_offset, plan.block_m, plan.block_n, pdl)
        launch(norm_bwd_kernel_dx_looped, (plan.programs, heads), args, num_warps=plan.num_warps, pdl=pdl)
    if weight_parts is not None or bias_parts is not None:
        columns = ceil_div(sizes[4] * unit, plan.dw_block_n)
        args = (
            grad_out, s, mean, rstd, weight_parts, bias_parts, *sizes[:2], *sizes[3:], heads, unit, atomic,
            plan.dw_block_m, plan.dw_block_n, pdl,
        )  # fmt: skip
        launch(norm_bwd_kernel_dw_columns, (columns, heads, plan.parts), args, num_warps=4, pdl=pdl)


_Finalizer = tuple[Handle | None, tuple[Any, ...]]
_Pair = tuple[torch.Tensor | None, torch.Tensor | None]


def _finalize(
    weight_parts: torch.Tensor | None,
    bias_parts: torch.Tensor | None,
    dtypes: tuple[torch.dtype | None, torch.dtype | None],
    into: _Pair,
    shape: tuple[int, ...],
    tile: tuple[int, int] | None,
    finalizer: _Finalizer | None,
    pdl: bool = False,
) -> tuple[_Pair, _Finalizer | None]:
    """Add up the parts, cast to `dtypes` or add to `into`; the gradients that were not added elsewhere.

    `tile` of parts and columns is the plan's; None is the best for so many.
    """
    some = bias_parts if weight_parts is None else weight_parts
    if some is None:
        return (None, None), None
    outs = [
        None if held is None else (there if there is not None else some.new_empty(shape, dtype=dtype))
        for held, dtype, there in zip((weight_parts, bias_parts), dtypes, into, strict=True)
    ]
    tensors = (weight_parts, bias_parts, outs[0], outs[1])
    if finalizer is not None and finalizer[0] is not None:
        relaunch(finalizer[0], (*tensors, *finalizer[1]), some.device.index)
    else:
        parts, columns = some.shape
        tile = tile or finalizer_tile(parts, columns, gpu_of(some))
        unit = _unit(columns)
        accumulate = into[0] is not None or into[1] is not None
        rest = (parts, columns // unit, unit, accumulate, *tile, pdl)
        vectors = sum(held is not None for held in (weight_parts, bias_parts))
        grid = (ceil_div(columns, tile[1]), vectors)
        finalizer = (launch(norm_bwd_kernel_finalize, grid, (*tensors, *rest), num_warps=4, pdl=pdl), rest)
    return (None if into[0] is not None else outs[0], None if into[1] is not None else outs[1]), finalizer


def _keep(held: dict[Any, Any], key: Any, entry: Any, handle: Handle | None) -> None:
    """Remember a launch, of not too many."""
    if key is not None and handle is not None:
        if len(held) >= 4096:
            held.clear()
        held[key] = entry
        if on_keep is not None:
            on_keep(held, key, entry)


def unit_last_stride(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """`tensor`, copied only if neighbours in its last dimension are not neighbours in memory."""
    if tensor is None or tensor.stride(-1) == 1 or tensor.shape[-1] <= 1:
        return tensor
    return tensor.contiguous()


def contiguous(vector: torch.Tensor | None) -> torch.Tensor | None:
    """`vector`, copied if it is not contiguous."""
    return vector if vector is None or vector.is_contiguous() else vector.contiguous()


def _unit(*sizes: int) -> int:
    """8, 4 or 1: what divides every size. Kernels take sizes in this unit.

    Triton itself only learns whether an argument is divisible by 16; 16-byte loads need 8 elements of 16 bits.
    """
    together = math.gcd(*sizes)
    return 8 if together % 8 == 0 else 4 if together % 4 == 0 else 1


def _words(rows: int, slices: int, device: torch.device) -> torch.Tensor:
    """[rows, slices] words that nobody has written yet."""
    return torch.full((rows, slices), -1, dtype=torch.int64, device=device)


def _parts(parts: int, columns: int, like: torch.Tensor) -> torch.Tensor:
    """The float32 sums over rows: [parts, columns] to be overwritten, or [1, columns] zeros to be added to."""
    if parts == 0:
        return like.new_zeros((1, columns))
    return like.new_empty((parts, columns))
