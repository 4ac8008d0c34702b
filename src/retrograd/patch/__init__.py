"""Put our modules into a model that exists, and take them out again."""

from retrograd.patch.norm import Handle, norms
from retrograd.patch.recognition import LayerLike, RmsLike

__all__ = ["Handle", "LayerLike", "RmsLike", "norms"]
