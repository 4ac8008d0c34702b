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
    from retrograd.fsdp.ordered import FixedOrder as FixedOrder
    from retrograd.fsdp.ordered import FixedOrderReduceScatter as FixedOrderReduceScatter
    from retrograd.fsdp.ordered import fixed_order as fixed_order
    from retrograd.fsdp.ordered import ordered_reduce_scatter as ordered_reduce_scatter
    from retrograd.fsdp.sharding import ShardPlan as ShardPlan
    from retrograd.fsdp.sharding import plan_by_size as plan_by_size
    from retrograd.fsdp.sharding import shard_by_size as shard_by_size

_HOMES = {
    "BucketPlan": "buckets",
    "Buckets": "bucketing",
    "FixedOrder": "ordered",
    "FixedOrderReduceScatter": "ordered",
    "ShardPlan": "sharding",
    "bucket_gradients": "bucketing",
    "fixed_order": "ordered",
    "ordered_reduce_scatter": "ordered",
    "plan_by_size": "sharding",
    "shard_by_size": "sharding",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"retrograd.fsdp.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'retrograd.fsdp' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
