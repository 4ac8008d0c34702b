"""RMSNorm and LayerNorm with a fused residual addition; forward and backward."""

from retrograd.ops.norm.api import layer_norm, rms_norm
from retrograd.ops.norm.float8 import Float8Norm, layer_norm_float8_fwd, rms_norm_float8_fwd
from retrograd.ops.norm.functional import layer_norm_bwd, layer_norm_fwd, rms_norm_bwd, rms_norm_fwd
from retrograd.ops.norm.reference import layer_norm_reference, rms_norm_reference

__all__ = [
    "Float8Norm",
    "layer_norm",
    "layer_norm_bwd",
    "layer_norm_float8_fwd",
    "layer_norm_fwd",
    "layer_norm_reference",
    "rms_norm",
    "rms_norm_bwd",
    "rms_norm_float8_fwd",
    "rms_norm_fwd",
    "rms_norm_reference",
]
