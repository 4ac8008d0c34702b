"""Sharded data parallelism: the same collectives and the same bits at every step and on every rank.

Names come when they are first used (PEP 562); `retrograd.fsdp.xla` repairs gradient buckets of torch_xla 2.9.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrograd.fsdp.bucketing import Buckets as Buckets
    from retrograd.fsdp.bucketing import bucket_gradients as bucket_gradients
    from retrograd.fsdp.buckets import BucketPlan as BucketPlan

_HOMES = {
    "BucketPlan": "buckets",
    "Buckets": "bucketing",
    "bucket_gradients": "bucketing",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"retrograd.fsdp.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'retrograd.fsdp' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
