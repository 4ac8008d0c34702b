"""RMSNorm and LayerNorm with a fused residual addition; forward and backward."""

from retrograd.ops.norm.api import layer_norm, rms_norm
from retrograd.ops.norm.functional import layer_norm_bwd, layer_norm_fwd, rms_norm_bwd, rms_norm_fwd
from retrograd.ops.norm.reference import layer_norm_reference, rms_norm_reference

__all__ = [
    "layer_norm",
    "layer_norm_bwd",
    "layer_norm_fwd",
    "layer_norm_reference",
    "rms_norm",
    "rms_norm_bwd",
    "rms_norm_fwd",
    "rms_norm_reference",
]
