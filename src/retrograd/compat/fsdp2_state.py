"""What FSDP2 keeps of a sharded module, under the private names that it has in torch 2.11 to 2.15. Loads no torch.

PyTorch says in public neither which parameters one `fully_shard` call gathers together nor whether their gradients have
been reduced. Whoever needs that asks here: the watcher of graphs, and everything in `fsdp`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def parameter_groups(state: Any) -> list[Any]:
    """Groups of parameters in the state of one `fully_shard` call: several from torch 2.12 on, in 2.11 one or none."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    one = getattr(state, "_fsdp_param_group", None)
    return [] if one is None else [one]


def leftovers(group: Any) -> Iterator[Any]:
    """Parameters of a group whose unreduced gradients are still there: they would be added to the next step's."""
    for param in group.fsdp_params:
        leaf = getattr(param, "_unsharded_param", None)
        if leaf is None:
            continue
        if leaf.grad is not None or getattr(param, "unsharded_accumulated_grad", None) is not None:
            yield param
