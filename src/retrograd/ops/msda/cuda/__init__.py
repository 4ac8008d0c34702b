"""Deformable attention on NVIDIA GPUs by kernels in CUDA C++, compiled at first use."""

from retrograd.ops.msda.cuda.launch import msda_bwd, msda_fwd, why_not

__all__ = ["msda_bwd", "msda_fwd", "why_not"]
