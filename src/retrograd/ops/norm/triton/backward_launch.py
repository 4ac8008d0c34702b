"""Launches of a backward by kind of plan: the kernels over the rows, and the one that adds up their partial sums."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from retrograd.ops.norm.arguments import WantedGrads
from retrograd.ops.norm.launch_cache import CompiledLaunch
from retrograd.ops.norm.plan import DW_BLOCK_M, DW_BLOCK_N, BackwardPlan, Kind, finalizer_tile
from retrograd.ops.norm.triton.backward import (
    norm_bwd_kernel,
    norm_bwd_kernel_dw_columns,
    norm_bwd_kernel_dx_looped,
    norm_bwd_kernel_finalize,
)
from retrograd.ops.norm.triton.backward_few import norm_bwd_kernel_few
from retrograd.ops.norm.triton.backward_sliced import norm_bwd_kernel_slices
from retrograd.runtime.triton.gpu import Backend, Gpu, ceil_div, next_power_of_2
from retrograd.runtime.triton.launch import KernelHandle, launch, relaunch

Pair = tuple[torch.Tensor | None, torch.Tensor | None]  # of weight and bias


class RowsKernel(NamedTuple):
    """Arguments of the kernels over the rows."""

    tensors: tuple[torch.Tensor | None, ...]  # those of `BackwardTensors` and `_Outputs`
    # strides of grad_out, s and grad_s, rows a head, columns; in `unit` elements where they are elements
    sizes: tuple[int, ...]
    heads: int  # H
    unit: int  # see `unit_of`
    weight_offset: float  # added to the weight
    add: bool  # sums are added to one part by atomics; FEW: to the gradients that are there


# What may be launched again, and its arguments behind the tensors.
_Launched = tuple[KernelHandle | None, tuple[Any, ...]]


def _launch_tiles(call: RowsKernel, plan: BackwardPlan, gpu: Gpu) -> _Launched:
    """Programs that hold whole rows."""
    rest = (
        *call.sizes, call.heads, call.unit, call.weight_offset, call.add, plan.block_m, plan.block_n,
        plan.num_stages, gpu.backend is Backend.CUDA, gpu.pdl,
    )  # fmt: skip
    grid, args = (plan.programs, call.heads), (*call.tensors, *rest)
    return launch(norm_bwd_kernel, grid, args, num_warps=plan.num_warps, pdl=gpu.pdl), rest


def _launch_few(call: RowsKernel, plan: BackwardPlan, gpu: Gpu) -> _Launched:
    """Programs that hold whole rows, and behind them those that add up columns."""
    n, block_c = call.sizes[4] * call.unit, plan.finalize_block_n
    vectors = any(tensor is not None for tensor in call.tensors[-2:])
    rest = (
        *call.sizes, call.heads, call.unit, call.weight_offset, call.add, plan.block_m, plan.block_n,
        plan.finalize_block_p, block_c, gpu.backend is Backend.CUDA, gpu.pdl,
    )  # fmt: skip
    grid = (plan.programs + vectors * ceil_div(n, block_c), call.heads)
    args = (*call.tensors, *rest)
    return launch(norm_bwd_kernel_few, grid, args, num_warps=plan.num_warps, pdl=gpu.pdl), rest


def _launch_slices(call: RowsKernel, plan: BackwardPlan, _gpu: Gpu) -> _Launched:
    """Programs that share rows and exchange their sums; every launch needs words of its own."""
    rows, n = call.sizes[3], call.sizes[4] * call.unit
    grad_out = call.tensors[0]
    words = torch.full((rows, plan.slices), -1, dtype=torch.int64, device=grad_out.device)  # nobody has written yet
    args = (
        *call.tensors, words, *call.sizes, plan.slice_n, call.unit, call.weight_offset, plan.slices,
        next_power_of_2(plan.slices), plan.block_n, n == plan.slices * plan.block_n, plan.num_stages, plan.ahead,
    )  # fmt: skip
    together = dict(launch_cooperative_grid=True, maxnreg=plan.max_registers)
    launch(norm_bwd_kernel_slices, (plan.programs,), args, num_warps=plan.num_warps, **together)
    return None, ()


def _launch_walk(call: RowsKernel, plan: BackwardPlan, gpu: Gpu) -> _Launched:
    """The two kernels of a LOOPED plan: the gradients of the rows, the sums for the vectors."""
    grad_out, s, _, mean, rstd, _, grad_x, grad_residual, weight_parts, bias_parts = call.tensors
    sizes, heads, unit, pdl = call.sizes, call.heads, call.unit, gpu.pdl
    if grad_x is not None or grad_residual is not None:
        args = (*call.tensors[:8], *sizes, heads, unit, call.weight_offset, plan.block_m, plan.block_n, pdl)
        launch(norm_bwd_kernel_dx_looped, (plan.programs, heads), args, num_warps=plan.num_warps, pdl=pdl)
    if weight_parts is not None or bias_parts is not None:
        columns = ceil_div(sizes[4] * unit, DW_BLOCK_N)
        args = (
            grad_out, s, mean, rstd, weight_parts, bias_parts, *sizes[:2], *sizes[3:], heads, unit, call.add,
            DW_BLOCK_M, DW_BLOCK_N, pdl,
        )  # fmt: skip
        launch(norm_bwd_kernel_dw_columns, (columns, heads, plan.parts), args, num_warps=4, pdl=pdl)
    return None, ()


LAUNCHERS = {
    Kind.TILE: _launch_tiles,
    Kind.SLICES: _launch_slices,
    Kind.LOOPED: _launch_walk,
    Kind.FEW: _launch_few,
}


def finalize(
    weight_parts: torch.Tensor | None,
    bias_parts: torch.Tensor | None,
    wanted: WantedGrads,
    *,
    tile: tuple[int, int] | None = None,
    finalizer: CompiledLaunch | None = None,
    pdl: bool = False,
) -> tuple[Pair, CompiledLaunch | None]:
    """Add up the parts, cast or added to what is there; the gradients that were not added elsewhere.

    `tile` of parts and columns is the plan's; None is the best for so many. `finalizer` is launched again.
    """
    some = bias_parts if weight_parts is None else weight_parts
    if some is None:
        return (None, None), None
    weight, bias = vectors(some, some.shape[1] // wanted.heads, wanted)
    tensors = (weight_parts, bias_parts, weight, bias)
    if finalizer is not None:
        relaunch(finalizer.handle, (*tensors, *finalizer.rest), some.device.index)
    else:
        parts, columns = some.shape
        tile = tile or finalizer_tile(parts)
        unit = unit_of(columns)
        rest = (parts, columns // unit, unit, wanted.accumulates, *tile, pdl)
        grid = (ceil_div(columns, tile[1]), 1 if weight_parts is None or bias_parts is None else 2)
        handle = launch(norm_bwd_kernel_finalize, grid, (*tensors, *rest), num_warps=4, pdl=pdl)
        finalizer = CompiledLaunch(handle, rest)
    return handed_out(weight, bias, wanted), finalizer


def vectors(like: torch.Tensor, n: int, wanted: WantedGrads) -> Pair:
    """The gradients of weight and bias to write to: those to add to, or new ones for n columns."""
    shape = wanted.vector_shape(n)
    wants = ((wanted.weight, wanted.into_weight), (wanted.bias, wanted.into_bias))
    weight, bias = (
        None if dtype is None else like.new_empty(shape, dtype=dtype) if into is None else into for dtype, into in wants
    )
    return weight, bias


def handed_out(weight: torch.Tensor | None, bias: torch.Tensor | None, wanted: WantedGrads) -> Pair:
    """What was not added to a gradient that the caller has."""
    return None if wanted.into_weight is not None else weight, None if wanted.into_bias is not None else bias


def unit_of(*sizes: int) -> int:
    """8, 4 or 1: what divides every size. Kernels take sizes in this unit.

    Triton itself only learns whether an argument is divisible by 16; 16-byte loads need 8 elements of 16 bits.
    """
    together = math.gcd(*sizes)
    return 8 if together % 8 == 0 else 4 if together % 4 == 0 else 1
