"""Public ops, imported on first use so that `import retrograd.ops` loads neither torch nor triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrograd.ops.msda import ms_deform_attn as ms_deform_attn
    from retrograd.ops.msda import ms_deform_attn_fused as ms_deform_attn_fused
    from retrograd.ops.norm import layer_norm as layer_norm
    from retrograd.ops.norm import layer_norm_bwd as layer_norm_bwd
    from retrograd.ops.norm import layer_norm_fwd as layer_norm_fwd
    from retrograd.ops.norm import rms_norm as rms_norm
    from retrograd.ops.norm import rms_norm_bwd as rms_norm_bwd
    from retrograd.ops.norm import rms_norm_fwd as rms_norm_fwd

__all__ = [
    "layer_norm",
    "layer_norm_bwd",
    "layer_norm_fwd",
    "ms_deform_attn",
    "ms_deform_attn_fused",
    "rms_norm",
    "rms_norm_bwd",
    "rms_norm_fwd",
]
_HOME = {name: f"retrograd.ops.{'msda' if name.startswith('ms_') else 'norm'}" for name in __all__}


def __getattr__(name: str) -> Any:
    from retrograd.core.loading import first_use

    return first_use(__name__, _HOME, name, sorted(_HOME))


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
