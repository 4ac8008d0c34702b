"""Launcher of wide_backward.cu: macros, arguments; knows no formula. The plan is `plan_clusters`."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from retrograd.ops.norm.arguments import BackwardTensors
from retrograd.ops.norm.cuda.inputs import NUMBERS, SIZES, aligned_rows, aligned_vector, load, require_clusters
from retrograd.ops.norm.plan import BackwardPlan
from retrograd.ops.norm.spec import NormSpec
from retrograd.runtime.cuda import driver

SOURCE = Path(__file__).with_name("wide_backward.cu")


class BackwardKind(NamedTuple):
    """What a kernel is compiled for, beside its plan: dtypes, and which sums are kept."""

    s: torch.dtype
    grad_out: torch.dtype
    weight: torch.dtype | None
    grad: torch.dtype
    centered: bool
    weight_sum: bool
    bias_sum: bool
    offset: bool


def norm_bwd_wide(
    tensors: BackwardTensors,
    spec: NormSpec,
    plan: BackwardPlan,
    *,
    dtype: torch.dtype,
    weight_sum: bool,
    bias_sum: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Launch the backward for wide rows and return the gradient of s and the parts of the sums for weight and bias.

    Args:
        tensors: without heads and without grad_s, M >= 1. Rows that do not start at multiples of 16 bytes are copied.
        spec: which norm.
        plan: of `plan_clusters`.
        dtype: of the gradient.
        weight_sum: Whether the sums of grad_out * xhat are wanted.
        bias_sum: Whether the sums of grad_out are wanted.

    Returns:
        the gradient [M, N]; the parts [P, N] float32 of both sums, None for those not wanted, P being the number of
        clusters that the GPU holds at a time, or M if that is less.

    Raises:
        RuntimeError: s is not on a GPU of compute capability 9.0 or more, or no such cluster fits there.
        NativeBuildError: there is no NVRTC.

    Numerics: float32 inside. The same bits for a row whatever M is, for one plan; the parts depend on P, in a fixed
    order.
    """
    rows, n = tensors.s.shape
    device = tensors.s.device
    require_clusters("norm_bwd_wide", device)
    grad_out, s, weight = aligned_rows(tensors.grad_out), aligned_rows(tensors.s), aligned_vector(tensors.weight)
    mean, rstd = tensors.mean, tensors.rstd
    kind = BackwardKind(
        s=s.dtype, grad_out=grad_out.dtype, weight=None if weight is None else weight.dtype, grad=dtype,
        centered=spec.centered, weight_sum=weight_sum, bias_sum=bias_sum, offset=spec.weight_offset != 0,
    )  # fmt: skip
    with torch.cuda.device(device):
        kernel = _kernel(device.index, n, kind, plan)
        groups = min(rows, kernel.max_clusters)
        grad = s.new_empty((rows, n), dtype=dtype)
        weight_parts = rstd.new_empty((groups, n)) if weight_sum else None
        bias_parts = rstd.new_empty((groups, n)) if bias_sum else None
        pointers = (grad_out, s, weight, mean, rstd, grad, weight_parts, bias_parts)
        args = (
            *(ctypes.c_void_p(0 if t is None else t.data_ptr()) for t in pointers),
            *(ctypes.c_longlong(t.stride(0)) for t in (grad_out, s)),
            ctypes.c_int(rows),
            ctypes.c_float(spec.weight_offset),
        )
        kernel.launch(groups, args)
    return grad, weight_parts, bias_parts


def options_of(n: int, kind: BackwardKind, plan: BackwardPlan) -> tuple[str, ...]:
    """For NVRTC, all but the architecture."""
    macros = dict(
        N=n, CLUSTER=plan.slices, THREADS=32 * plan.num_warps, SLOTS=plan.num_stages, CENTERED=int(kind.centered),
        S_TYPE=NUMBERS[kind.s], GRAD_OUT_TYPE=NUMBERS[kind.grad_out], WEIGHT_TYPE=NUMBERS[kind.weight],
        GRAD_TYPE=NUMBERS[kind.grad], WEIGHT_SUM=int(kind.weight_sum), BIAS_SUM=int(kind.bias_sum),
        HAS_OFFSET=int(kind.offset),
    )  # fmt: skip
    return ("--std=c++17", "-default-device", *(f"-D{name}={value}" for name, value in macros.items()))


def shared_bytes(n: int, kind: BackwardKind, plan: BackwardPlan) -> int:
    """Of dynamic shared memory in a CTA."""
    return plan.num_stages * n // plan.slices * (SIZES[kind.s] + SIZES[kind.grad_out])


@cache
def _kernel(device_index: int, n: int, kind: BackwardKind, plan: BackwardPlan) -> driver.LoadedKernel:
    return load(
        SOURCE, options_of(n, kind, plan), device_index,
        cluster=plan.slices, threads=32 * plan.num_warps, shared_bytes=shared_bytes(n, kind, plan),
    )  # fmt: skip
