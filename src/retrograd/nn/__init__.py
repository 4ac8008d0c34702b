"""Modules that stand in for torch's own: same constructors, same state_dict, instances of the torch classes."""

from retrograd.nn.norm import LayerNorm, RMSNorm

__all__ = ["LayerNorm", "RMSNorm"]
