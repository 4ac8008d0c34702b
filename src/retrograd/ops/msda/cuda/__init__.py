"""Deformable attention on NVIDIA GPUs by kernels in CUDA C++, compiled at first use."""

from retrograd.ops.msda.cuda.launch import backward_pays, forward_pays, msda_bwd, msda_fwd, recipe, why_not

__all__ = ["backward_pays", "forward_pays", "msda_bwd", "msda_fwd", "recipe", "why_not"]
