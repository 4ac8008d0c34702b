"""Public ops, imported on first use so that `import retrograd.ops` loads neither torch nor triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrograd.core.loading import names_at_first_use

if TYPE_CHECKING:
    from retrograd.ops.msda import ms_deform_attn as ms_deform_attn
    from retrograd.ops.msda import ms_deform_attn_fused as ms_deform_attn_fused
    from retrograd.ops.norm import layer_norm as layer_norm
    from retrograd.ops.norm import layer_norm_bwd as layer_norm_bwd
    from retrograd.ops.norm import layer_norm_float8_fwd as layer_norm_float8_fwd
    from retrograd.ops.norm import layer_norm_fwd as layer_norm_fwd
    from retrograd.ops.norm import rms_norm as rms_norm
    from retrograd.ops.norm import rms_norm_bwd as rms_norm_bwd
    from retrograd.ops.norm import rms_norm_float8_fwd as rms_norm_float8_fwd
    from retrograd.ops.norm import rms_norm_fwd as rms_norm_fwd

__all__ = [
    "layer_norm",
    "layer_norm_bwd",
    "layer_norm_float8_fwd",
    "layer_norm_fwd",
    "ms_deform_attn",
    "ms_deform_attn_fused",
    "rms_norm",
    "rms_norm_bwd",
    "rms_norm_float8_fwd",
    "rms_norm_fwd",
]
_HOMES = {name: f"retrograd.ops.{'msda' if name.startswith('ms_') else 'norm'}" for name in __all__}

__getattr__, __dir__ = names_at_first_use(__name__, _HOMES, __all__)
