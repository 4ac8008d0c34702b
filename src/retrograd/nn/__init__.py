"""Modules that compute with `retrograd.ops`; the norms have constructor, state_dict and class of torch's own."""

from retrograd.core import torch_installed  # noqa: F401 (first: it names the extra)
from retrograd.nn.msda import MSDeformAttn
from retrograd.nn.norm import LayerNorm, RMSNorm

__all__ = ["LayerNorm", "MSDeformAttn", "RMSNorm"]
