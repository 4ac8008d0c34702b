"""Wide rows that go to the clustered kernels of `ops/norm/cuda`."""

from __future__ import annotations

import torch

from retrograd.ops.norm.arguments import BackwardTensors, NormTensors, WantedGrads
from retrograd.ops.norm.plan import BackwardPlan, plan_clusters
from retrograd.ops.norm.shapes import heads_of
from retrograd.runtime.triton.gpu import Backend
from retrograd.runtime.triton.launch import gpu_of


def forward_by_clusters(tensors: NormTensors) -> bool:
    """Whether wide rows of x go to the clustered kernel, which reads them once."""
    x, weight, bias, residual = tensors
    if x.shape[1] % 8 or heads_of(weight, bias) > 1 or not has_clusters(x):
        return False
    from retrograd.ops.norm.cuda import fits_wide

    return fits_wide(x.shape[1], x.dtype, None if residual is None else residual.dtype)


def plan_by_clusters(tensors: BackwardTensors, wanted: WantedGrads) -> BackwardPlan | None:
    """The plan of the clustered kernel, which reads wide rows once and writes one gradient; None where it cannot."""
    dtypes = {dtype for dtype in (wanted.x, wanted.residual) if dtype is not None}
    if tensors.grad_s is not None or len(dtypes) != 1 or not has_clusters(tensors.s):
        return None
    itemsize = max(tensors.s.itemsize, tensors.grad_out.itemsize, dtypes.pop().itemsize)
    return plan_clusters(tensors.s.shape[1], itemsize)


def has_clusters(tensor: torch.Tensor) -> bool:
    """Whether it is on a GPU for which the clustered kernels are written, and their compiler is there."""
    if not tensor.is_cuda:
        return False
    gpu = gpu_of(tensor)
    # From sm_120 on a program has 99 KiB of shared memory; the kernels' slices take up to 220.
    if gpu.backend is not Backend.CUDA or not 90 <= gpu.arch < 120:
        return False
    from retrograd.runtime.cuda import nvrtc

    # Without its compiler the row is walked or sliced: slower, but LayerNorm of 8200 columns is nothing unusual.
    return nvrtc.is_there()
