"""Public ops, imported on first use so that `import retrograd.ops` loads neither torch nor triton."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrograd.ops.norm import rms_norm

_HOME = {"rms_norm": "retrograd.ops.norm"}

__all__ = ["rms_norm"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
