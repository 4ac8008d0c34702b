"""Computation graphs of training steps: read them, count them, compare them, and say in words why one changed.

Works on dumps (HLO of torch_xla and JAX, StableHLO, FX of torch.compile) without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrograd.graph.watching.gradients import check_gradients as check_gradients
    from retrograd.graph.watching.watch import step as step
    from retrograd.graph.watching.watch import watch as watch

_HOMES = {
    "check_gradients": "retrograd.graph.watching.gradients",
    "step": "retrograd.graph.watching.watch",
    "watch": "retrograd.graph.watching.watch",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'retrograd.graph' has no attribute {name!r}")
