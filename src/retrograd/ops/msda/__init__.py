"""Multi-scale deformable attention; forward and backward."""

from retrograd.ops.msda.api import ms_deform_attn, ms_deform_attn_fused
from retrograd.ops.msda.reference import ms_deform_attn_reference

__all__ = ["ms_deform_attn", "ms_deform_attn_fused", "ms_deform_attn_reference"]
