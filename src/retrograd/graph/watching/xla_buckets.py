"""Gradients that are left in the buckets of torch_xla's XlaFullyShardedDataParallel. By attributes; imports nothing."""

from __future__ import annotations

from typing import Any


def modules(model: Any) -> list[tuple[str, Any]]:
    """The parts of a model that reduce gradients through a bucket, by name."""
    named = model.named_modules() if hasattr(model, "named_modules") else ()
    return [(name, m) for name, m in named if hasattr(getattr(m, "reduce_scatter_op", None), "flush")]


def left(model: Any) -> tuple[tuple[str, int], ...]:
    """The parts with gradients in their bucket: name and how many; a bucket that several parts share counts once."""
    seen: set[int] = set()
    found: list[tuple[str, int]] = []
    for name, module in modules(model):
        op = module.reduce_scatter_op
        waiting = len(getattr(op, "bucket", None) or ())
        if waiting and id(op) not in seen:
            found.append((name, waiting))
        seen.add(id(op))
    return tuple(found)
