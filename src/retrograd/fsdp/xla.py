"""Repair of torch_xla 2.9's FSDP with `reduce_scatter_bucket_size_mb`: buckets are emptied before backward ends.

Each XlaFullyShardedDataParallel has a bucket of gradients that is flushed when it is full, or when a counter of hooks
reaches 0 while one fires. A module that is used twice in a forward sets the counter anew and takes it below 0; a
parameter that is unused leaves it above. Then the rest of the bucket is not reduced in this backward: the optimizer
misses these gradients, the next step reduces them though they are stale, and each step compiles another graph
(pytorch/xla#4160).

Nothing here imports torch_xla: modules are known by `reduce_scatter_op.flush`.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

from retrograd.compat.torch_xla import END_OF_BACKWARD, buckets, is_fsdp_root
from retrograd.errors import UsageError


class FlushHandle:
    """Takes the repair away again."""

    def __init__(self, module: Any) -> None:
        self._module: Any = module

    def remove(self) -> None:
        """Leave the model as it was; a second call does nothing."""
        if self._module is not None:
            self._module.__dict__.pop(END_OF_BACKWARD, None)
            self._module = None


def flush_before_end_of_backward(model: Any) -> FlushHandle:
    """Flush every bucket in a model before the end of each backward.

        model = FSDP(Net(), reduce_scatter_bucket_size_mb=25)
        handle = retrograd.fsdp.xla.flush_before_end_of_backward(model)

    Recorded with torch_xla 2.9 (three blocks, one used twice, bucket of 0.3 MB, 6 steps on 2 devices): 4 different step
    graphs and wrong losses without it; with it 2 graphs, and losses bit-equal to those without buckets. The order of
    reductions inside a backward stays as it is; a bucket that is already empty costs nothing.

    Args:
        model: the root module: the XlaFullyShardedDataParallel on which forward is called.

    Returns:
        A handle whose `remove()` undoes it.

    Raises:
        UsageError: the model is no root of torch_xla's FSDP, has no buckets, or is repaired already.
    """
    if not callable(getattr(type(model), END_OF_BACKWARD, None)):
        raise UsageError(
            f"`model` is {type(model).__name__}, expected the root XlaFullyShardedDataParallel of torch_xla 2.9, the "
            "module on which forward is called; FSDP2 of torch needs no such repair"
        )
    # None until the first forward: then nobody knows yet.
    if is_fsdp_root(model) is False:
        raise UsageError("`model` is not the root of its FSDP modules; give the module on which forward is called")
    if END_OF_BACKWARD in vars(model):
        raise UsageError("`model` is repaired already; remove() the first handle to do it anew")
    if not buckets(model):
        raise UsageError(
            "`model` has no module with reduce_scatter_op.flush, as torch_xla 2.9 has; without it nothing is bucketed"
        )
    end = getattr(model, END_OF_BACKWARD)

    def flush_and_end(*args: Any, **kwargs: Any) -> Any:
        torch = sys.modules.get("torch")
        with torch.no_grad() if torch is not None else nullcontext():
            for op in buckets(model):
                op.flush()
        return end(*args, **kwargs)

    # In the instance, past Module.__setattr__: the class and other models stay as they are.
    model.__dict__[END_OF_BACKWARD] = flush_and_end
    return FlushHandle(model)
