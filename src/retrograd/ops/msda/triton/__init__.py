"""Triton kernels of deformable attention and their launchers; importing this package imports triton."""

from retrograd.ops.msda.triton.launch import msda_bwd, msda_fwd, recipe

__all__ = ["msda_bwd", "msda_fwd", "recipe"]
