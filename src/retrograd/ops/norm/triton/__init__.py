"""Triton kernels of the norms and their launchers; importing this package imports triton."""

from retrograd.ops.norm.triton.launch import norm_bwd, norm_fwd

__all__ = ["norm_bwd", "norm_fwd"]
