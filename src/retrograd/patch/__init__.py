"""Put our modules and ops into a model that exists, and take them out again."""

from retrograd.core import torch_installed  # noqa: F401 (first: it names the extra)
from retrograd.patch.handle import Handle
from retrograd.patch.msda import msda
from retrograd.patch.norm import norms
from retrograd.patch.recognition import LayerLike, RmsLike

__all__ = ["Handle", "LayerLike", "RmsLike", "msda", "norms"]
