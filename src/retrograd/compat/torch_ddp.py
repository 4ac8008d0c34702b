"""Buckets of DistributedDataParallel: the order of parameters in its reducer, which is C++."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from retrograd.compat.registry import part, works

_REBUILT, _READY = "rebuilt_per_bucket_param_indices", "prev_iteration_grad_ready_order_indices"


class BucketOrders(NamedTuple):
    """Orders in which DDP may reduce parameters, the likeliest first, and whether that is its last."""

    orders: list[list[int]]
    final: bool


def bucket_orders(model: Any, *, ask: bool = True) -> BucketOrders:
    """Numbers of trainable parameters in the orders that DDP may use.

    Args:
        model: a DistributedDataParallel.
        ask: inside backward do not: the reducer holds the lock that the answer needs.
    """
    count = sum(p.requires_grad for p in model.module.parameters())
    logged = _logged(type(model), model) if ask and works(PART) else {}
    orders = [[int(word) for word in str(logged.get(key, "")).replace(",", " ").split()] for key in (_REBUILT, _READY)]
    orders = [order for order in orders if sorted(order) == list(range(count))]
    return BucketOrders([*orders, list(range(count))[::-1]], _REBUILT in logged)


def _logged(ddp: type, model: Any) -> dict[str, Any]:
    return ddp._get_ddp_logging_data(model)


@contextmanager
def around_rebuilding(context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Have DDP make its buckets anew in a context of its own: C++ writes their order to memory by its address."""
    reducer = getattr(torch.distributed, "Reducer", None)
    stock: Any = getattr(reducer, "_rebuild_buckets", None)
    if reducer is None or stock is None:
        yield
        return

    def rebuild(self: Any) -> Any:
        with context():
            return stock(self)

    reducer._rebuild_buckets = rebuild
    try:
        yield
    finally:
        reducer._rebuild_buckets = stock


def has_comm_hook(model: Any) -> bool:
    """Whether something else than DDP decides what becomes of its buckets; True where that cannot be told."""
    return not works(HOOKS) or bool(model._comm_hooks)


@part(
    "torch.ddp.hooks",
    "asks DDP whether something else decides what becomes of its buckets",
    "copies of DDP's parameters and gradients are not compared by `trace repeat --ranks`",
    names=("DistributedDataParallel._comm_hooks",),
)
def HOOKS() -> str:
    """Registering a hook writes the list; without a process group there is no model to ask."""
    ddp = torch.nn.parallel.DistributedDataParallel
    writes = all("_comm_hooks" in function.__code__.co_names for function in (ddp.__init__, ddp.register_comm_hook))
    return "" if writes else "DDP does not keep a list of its hooks"


@part(
    "torch.ddp",
    "asks DDP for the order of its buckets",
    "all-reduces of DDP are named by the reversed order of parameters, which is that of its first step",
    names=("DistributedDataParallel._get_ddp_logging_data",),
)
def PART() -> str:
    """The method joins what the reducer's logger says; without a process group there is no reducer to ask."""
    data = SimpleNamespace(strs_map={_REBUILT: "1, 0"}, ints_map={"rank": 0})
    model = SimpleNamespace(logger=SimpleNamespace(_get_ddp_logging_data=lambda: data))
    logged = _logged(torch.nn.parallel.DistributedDataParallel, model)
    return "" if logged.get(_REBUILT) == "1, 0" else f"it has {', '.join(map(str, logged))}"
