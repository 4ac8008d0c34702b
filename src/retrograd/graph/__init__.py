"""Computation graphs of training steps: read them, count them, compare them, and say in words why one changed.

Works on dumps (HLO of torch_xla and JAX, StableHLO, FX of torch.compile) without torch.
"""

from __future__ import annotations
