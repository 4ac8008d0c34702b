"""RMSNorm and LayerNorm in C++ for the CPU, compiled at first use; importing this package compiles nothing."""

from retrograd.ops.norm.cpu.launch import norm_bwd, norm_fwd, why_not

__all__ = ["norm_bwd", "norm_fwd", "why_not"]
