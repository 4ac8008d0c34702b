"""Sharded data parallelism. `retrograd.fsdp.xla` repairs gradient buckets of torch_xla 2.9."""

from __future__ import annotations
