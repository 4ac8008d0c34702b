"""RMSNorm with a fused residual addition; forward and backward."""

from retrograd.ops.norm.api import rms_norm

__all__ = ["rms_norm"]
