"""Sharded data parallelism: the same collectives and the same bits at every step and on every rank.

`record_collectives` records and verifies a run; `fixed_order` reduces in rank order; `shard_by_size` and
`bucket_gradients` make fewer, larger collectives in a fixed order; `retrograd.fsdp.xla` repairs torch_xla 2.9.
Names come when they are first used (PEP 562), and torch with those that need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrograd.core.loading import names_at_first_use

if TYPE_CHECKING:
    from retrograd.fsdp.attribution import naming as naming
    from retrograd.fsdp.bucket_plan import BucketPlan as BucketPlan
    from retrograd.fsdp.bucketing import Buckets as Buckets
    from retrograd.fsdp.bucketing import bucket_gradients as bucket_gradients
    from retrograd.fsdp.check_command import assert_same_order as assert_same_order
    from retrograd.fsdp.log_diff import diff as diff
    from retrograd.fsdp.ordered_reduce import FixedOrder as FixedOrder
    from retrograd.fsdp.ordered_reduce import FixedOrderReduceScatter as FixedOrderReduceScatter
    from retrograd.fsdp.ordered_reduce import fixed_order as fixed_order
    from retrograd.fsdp.ordered_reduce import ordered_reduce_scatter as ordered_reduce_scatter
    from retrograd.fsdp.recorder import CollectiveLog as CollectiveLog
    from retrograd.fsdp.recorder import StepChangedWarning as StepChangedWarning
    from retrograd.fsdp.recorder import record_collectives as record_collectives
    from retrograd.fsdp.schema import Collective as Collective
    from retrograd.fsdp.schema import Log as Log
    from retrograd.fsdp.sharding import ShardPlan as ShardPlan
    from retrograd.fsdp.sharding import plan_by_size as plan_by_size
    from retrograd.fsdp.sharding import shard_by_size as shard_by_size

_HOMES = {
    "BucketPlan": "bucket_plan",
    "Buckets": "bucketing",
    "Collective": "schema",
    "CollectiveLog": "recorder",
    "FixedOrder": "ordered_reduce",
    "FixedOrderReduceScatter": "ordered_reduce",
    "Log": "schema",
    "ShardPlan": "sharding",
    "StepChangedWarning": "recorder",
    "assert_same_order": "check_command",
    "bucket_gradients": "bucketing",
    "diff": "log_diff",
    "fixed_order": "ordered_reduce",
    "naming": "attribution",
    "ordered_reduce_scatter": "ordered_reduce",
    "plan_by_size": "sharding",
    "record_collectives": "recorder",
    "shard_by_size": "sharding",
}

__all__ = sorted(_HOMES)

__getattr__, __dir__ = names_at_first_use(__name__, _HOMES, __all__)
