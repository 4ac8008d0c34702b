"""Launchers of the norm kernels: `norm_fwd` and `norm_bwd` over 2-D tensors."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
import triton.language as tl

from retrograd.ops.norm import launch_cache
from retrograd.ops.norm.arguments import BackwardTensors, NormGrads, NormResults, NormTensors, WantedGrads, WantedOutput
from retrograd.ops.norm.launch_cache import CompiledLaunch, KeptBackward, backward_key, forward_key
from retrograd.ops.norm.plan import (
    BACKWARD_TILE_LIMIT,
    BackwardPlan,
    ForwardPlan,
    Kind,
    plan_backward,
    plan_forward,
    stays_with_triton,
)
from retrograd.ops.norm.shapes import empty_results, heads_of, without_elements
from retrograd.ops.norm.spec import NormSpec
from retrograd.ops.norm.triton import clusters
from retrograd.ops.norm.triton.backward_launch import (
    LAUNCHERS,
    Pair,
    RowsKernel,
    finalize,
    handed_out,
    unit_of,
    vectors,
)
from retrograd.ops.norm.triton.forward import norm_fwd_kernel, norm_fwd_kernel_looped
from retrograd.runtime.triton.gpu import Backend
from retrograd.runtime.triton.launch import gpu_of, launch, on_device_of, relaunch, relaunchable

TL_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

_Tensors = TypeVar("_Tensors", NormTensors, BackwardTensors)


def norm_fwd(
    tensors: NormTensors, spec: NormSpec, wanted: WantedOutput, *, plan: ForwardPlan | None = None
) -> NormResults:
    """Launch the forward; see `arguments`. `plan`: launch plan, None asks `plan_forward`.

    Raises:
        RuntimeError: x is on the CPU outside `retrograd.cpu_triton`.

    Numerics: float32 inside; square root and divisions correctly rounded where s is float32, else within 2 ulp;
    two-pass variance.
    """
    x, weight, bias, residual = tensors
    stays = stays_with_triton(x.shape[1], centered=spec.centered, residual=residual is not None)
    if not stays and plan is None and clusters.forward_by_clusters(tensors):
        from retrograd.ops.norm.cuda import norm_fwd_wide

        return norm_fwd_wide(tensors, spec, wanted)
    outs = empty_results(tensors, spec, wanted)
    key = None
    if plan is None and relaunchable(x, residual, weight, bias):
        key = forward_key(tensors, outs, spec, wanted)
        kept = launch_cache.FORWARD.get(key)
        if kept is not None:
            relaunch(kept.handle, (x, residual, weight, bias, *outs, *kept.rest), key[0])
            return outs
    _first_forward(tensors, outs, spec, wanted.s_dtype, plan, key)
    return outs


def _first_forward(
    tensors: NormTensors,
    outs: NormResults,
    spec: NormSpec,
    s_dtype: torch.dtype,
    plan: ForwardPlan | None,
    key: tuple[Any, ...] | None,
) -> None:
    """Plan, compile and launch, and keep the launch under `key`."""
    gpu = gpu_of(tensors.x)
    rows, n = tensors.x.shape
    if rows == 0 or n == 0:
        without_elements(outs, spec.empty_rstd)
        return
    dense = dense_rows(tensors)
    key = key if dense is tensors else None  # launched with copies
    x, weight, bias, residual = dense
    heads = heads_of(weight, bias)
    if plan is None:
        itemsize = max(x.element_size(), s_dtype.itemsize)
        streams = 1 if residual is None else 2
        plan = plan_forward(rows // heads, n, itemsize, gpu, centered=spec.centered, streams=streams)
    x_stride, residual_stride = x.stride(0), 0 if residual is None else residual.stride(0)
    unit = unit_of(n, x_stride, residual_stride)
    tile = plan.kind is Kind.TILE
    width = n if plan.static_n or n == plan.block_n else 0
    how = (plan.loads, plan.stores, plan.early, width) if tile else (n % plan.block_n == 0, plan.unroll)
    rest = (
        x_stride // unit, residual_stride // unit, rows // heads, n // unit, heads, spec.eps, unit,
        spec.weight_offset, spec.centered, TL_DTYPES[s_dtype], plan.block_m, plan.block_n, *how,
        gpu.backend is Backend.CUDA, gpu.pdl,
    )  # fmt: skip
    with on_device_of(x):
        kernel = norm_fwd_kernel if tile else norm_fwd_kernel_looped
        args = (x, residual, weight, bias, *outs, *rest)
        handle = launch(kernel, (plan.programs, heads), args, num_warps=plan.num_warps, pdl=gpu.pdl)
    launch_cache.keep(key, CompiledLaunch(handle, rest))


def norm_bwd(
    tensors: BackwardTensors, spec: NormSpec, wanted: WantedGrads, *, plan: BackwardPlan | None = None
) -> NormGrads:
    """Launch the backward; see `arguments`. `plan`: launch plan, None asks `plan_backward`.

    With h = (s - mean) * rstd and g = grad_out * (weight + weight_offset): the gradient of s is
    rstd * (g - h * mean(g * h) - [mean(g)]) + grad_s, and those of the vectors are sums over the rows of
    grad_out * h and of grad_out.

    Raises:
        RuntimeError: s is on the CPU outside `retrograd.cpu_triton`.

    Numerics: float32 inside. With spec.deterministic the sums over rows have a fixed order, which depends on
    spec.parts, or, where that is None, on how many programs or clusters the GPU holds.
    """
    rows, n = tensors.s.shape
    if plan is None and rows > 0 and n > BACKWARD_TILE_LIMIT[Backend.CUDA] and wanted.heads == 1 and spec.parts is None:
        plan = clusters.plan_by_clusters(tensors, wanted)
    if plan is not None and plan.kind is Kind.CLUSTERS:
        return _backward_by_clusters(tensors, spec, wanted, plan)
    into = (wanted.into_weight, wanted.into_bias)
    grad_out, s, weight, mean, rstd, grad_s = tensors
    key = None
    if plan is None and spec.deterministic and relaunchable(s, grad_out, weight, grad_s, mean, rstd, *into):
        key = backward_key(tensors, wanted, spec)
        kept = launch_cache.BACKWARD.get(key)
        if kept is not None:
            outputs = _outputs(tensors, wanted, kept.parts)
            relaunch(kept.handle, (*tensors, *outputs, *kept.rest), key[0])
            if kept.parts is None:
                return _grads(outputs, wanted, handed_out(*outputs[2:], wanted))
            sums, _ = finalize(outputs.weight_parts, outputs.bias_parts, wanted, finalizer=kept.finalizer)
            return _grads(outputs, wanted, sums)
    return _first_backward(tensors, spec, wanted, plan, key)


def _backward_by_clusters(
    tensors: BackwardTensors, spec: NormSpec, wanted: WantedGrads, plan: BackwardPlan
) -> NormGrads:
    from retrograd.ops.norm.cuda import norm_bwd_wide

    dtype: Any = wanted.residual if wanted.x is None else wanted.x  # one of them is asked for, or nobody comes here
    sums = dict(weight_sum=wanted.weight is not None, bias_sum=wanted.bias is not None)
    grad, weight_parts, bias_parts = norm_bwd_wide(tensors, spec, plan, dtype=dtype, **sums)
    with on_device_of(tensors.s):
        (weight, bias), _ = finalize(weight_parts, bias_parts, wanted, pdl=gpu_of(tensors.s).pdl)
    return NormGrads(
        x=None if wanted.x is None else grad,
        weight=weight,
        bias=bias,
        residual=None if wanted.residual is None else grad,
    )


def _first_backward(
    tensors: BackwardTensors,
    spec: NormSpec,
    wanted: WantedGrads,
    plan: BackwardPlan | None,
    key: tuple[Any, ...] | None,
) -> NormGrads:
    """Plan, compile and launch, and keep the launch under `key`."""
    gpu = gpu_of(tensors.s)
    rows, n = tensors.s.shape
    if rows == 0 or n == 0:
        return _without_rows(tensors, wanted)
    dense = dense_rows(tensors)
    key = key if dense is tensors else None  # launched with copies
    heads = wanted.heads
    if plan is None:
        itemsize = max(dense.s.element_size(), dense.grad_out.element_size())
        streams = 2 if dense.grad_s is None else 3
        plan = plan_backward(
            rows // heads, n, heads, itemsize, gpu, centered=spec.centered, streams=streams, parts=spec.parts,
            few=spec.deterministic,
        )  # fmt: skip
    few = plan.kind is Kind.FEW
    parts = None if few else plan.parts if spec.deterministic or plan.kind is Kind.SLICES else 0
    outputs = _outputs(dense, wanted, parts)
    strides = (dense.grad_out.stride(0), dense.s.stride(0), 0 if dense.grad_s is None else dense.grad_s.stride(0))
    unit = unit_of(n, *strides)
    sizes = (*(stride // unit for stride in strides), rows // heads, n // unit)
    add = parts == 0 or (few and wanted.accumulates)
    rows_kernel = RowsKernel((*dense, *outputs), sizes, heads, unit, spec.weight_offset, add)
    with on_device_of(dense.s):
        handle, rest = LAUNCHERS[plan.kind](rows_kernel, plan, gpu)
        if few:
            sums, finalizer = handed_out(*outputs[2:], wanted), None
        else:
            tile = plan.finalize_block_p, plan.finalize_block_n
            # Behind a kernel that is not launched so itself it takes 0.1 to 0.9 us longer in a graph (H200).
            pdl = gpu.pdl and plan.kind is not Kind.SLICES
            sums, finalizer = finalize(outputs.weight_parts, outputs.bias_parts, wanted, tile=tile, pdl=pdl)
    if finalizer is None or finalizer.handle is not None:
        launch_cache.keep(key, KeptBackward(handle, rest, parts, finalizer))
    return _grads(outputs, wanted, sums)


class _Outputs(NamedTuple):
    """What the kernels over the rows write: gradients [M, N], partial sums [parts, H * N] float32 or whole ones."""

    grad_x: torch.Tensor | None
    grad_residual: torch.Tensor | None  # None where it is grad_x
    weight_parts: torch.Tensor | None
    bias_parts: torch.Tensor | None


def _outputs(tensors: BackwardTensors, wanted: WantedGrads, parts: int | None) -> _Outputs:
    s, rstd = tensors.s, tensors.rstd
    rows, n = s.shape
    own_residual = wanted.residual is not None and wanted.residual != wanted.x
    grad_x = None if wanted.x is None else s.new_empty((rows, n), dtype=wanted.x)
    grad_residual = s.new_empty((rows, n), dtype=wanted.residual) if own_residual else None
    if parts is None:
        return _Outputs(grad_x, grad_residual, *vectors(rstd, n, wanted))
    weight_parts = None if wanted.weight is None else _parts(parts, wanted.heads * n, rstd)
    bias_parts = None if wanted.bias is None else _parts(parts, wanted.heads * n, rstd)
    return _Outputs(grad_x, grad_residual, weight_parts, bias_parts)


def _grads(outputs: _Outputs, wanted: WantedGrads, sums: Pair) -> NormGrads:
    shared = wanted.residual is not None and wanted.residual == wanted.x
    x, (weight, bias) = outputs.grad_x, sums
    residual = x if shared else outputs.grad_residual
    return NormGrads(x, weight, bias, residual)


def _without_rows(tensors: BackwardTensors, wanted: WantedGrads) -> NormGrads:
    """The gradients over M * N = 0 elements, which no kernel visits."""
    shape = wanted.vector_shape(tensors.s.shape[1])
    weight, bias = [
        None if dtype is None or into is not None else torch.zeros(shape, dtype=dtype, device=tensors.s.device)
        for dtype, into in ((wanted.weight, wanted.into_weight), (wanted.bias, wanted.into_bias))
    ]
    return _grads(_outputs(tensors, wanted, 1), wanted, (weight, bias))


def dense_rows(tensors: _Tensors) -> _Tensors:
    """Rows whose neighbours are neighbours in memory, contiguous vectors; `tensors` itself where nothing is copied."""
    dense = [
        _unit_last_stride(tensor) if tensor is None or name not in ("weight", "bias") else tensor.contiguous()
        for name, tensor in zip(tensors._fields, tensors, strict=True)
    ]
    return tensors if all(a is b for a, b in zip(dense, tensors, strict=True)) else tensors._make(dense)


def _unit_last_stride(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """`tensor`, copied only if neighbours in its last dimension are not neighbours in memory."""
    if tensor is None or tensor.stride(-1) == 1 or tensor.shape[-1] <= 1:
        return tensor
    return tensor.contiguous()


def _parts(parts: int, columns: int, like: torch.Tensor) -> torch.Tensor:
    """The float32 sums over rows: [parts, columns] to be overwritten, or [1, columns] zeros to be added to."""
    if parts == 0:
        return like.new_zeros((1, columns))
    return like.new_empty((parts, columns))
