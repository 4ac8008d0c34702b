"""Triton kernels of RMSNorm and their low-level launchers; importing this package imports triton."""

from retrograd.ops.norm.triton.backward import rms_norm_bwd
from retrograd.ops.norm.triton.forward import rms_norm_fwd

__all__ = ["rms_norm_bwd", "rms_norm_fwd"]
