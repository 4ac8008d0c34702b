"""FSDP2's private names: what it keeps of a sharded module (here), and how it reduces gradients. Loads no torch.

FSDP2 offers no public hook between "the gradients of a group are ready" and "reduce them": a custom reduce-scatter is
called too late, what follows it divides, casts and hands out. So one global name of
`torch.distributed.fsdp._fully_shard._fsdp_param_group` is replaced: `foreach_reduce`, which copies gradients in,
reduces, casts and hands out, for any list of parameters. Calls for models without buckets pass through. Read in
2.11.0, 2.12.1, 2.13.0, 2.14.1 and 2.15.0; what differs between them stands in `names`.

PyTorch says in public neither which parameters one `fully_shard` call gathers together nor whether their gradients have
been reduced. Whoever needs that asks here: the watcher of graphs, and everything in `fsdp`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

from retrograd.compat.registry import in_fresh_thread, part


def parameter_groups(state: Any) -> list[Any]:
    """Groups of parameters in the state of one `fully_shard` call: several from torch 2.12 on, in 2.11 one or none."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    single = getattr(state, "_fsdp_param_group", None)
    return [] if single is None else [single]


def leftovers(group: Any) -> Iterator[Any]:
    """Parameters of a group whose unreduced gradients are still there: they would be added to the next step's."""
    for param in group.fsdp_params:
        leaf = getattr(param, "_unsharded_param", None)
        if leaf is None:
            continue
        if leaf.grad is not None or getattr(param, "unsharded_accumulated_grad", None) is not None:
            yield param


def param_group_class() -> Any:
    """The class of FSDP2's parameter groups, whose frames issue its collectives; None while nobody has loaded FSDP2.

    Loading it takes seconds (5 s on 2 cores, torch 2.13), which a program that does not use it need not wait for.
    """
    home = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    return getattr(home, "FSDPParamGroup", None)


# The modules of a parameter group.
modules_of: Callable[[Any], tuple[Any, ...]] = attrgetter("modules")
# The object by which a group reduces and scatters: torch can set one and not tell it.
reduce_scatter_of: Callable[[Any], Any] = attrgetter("_reduce_scatter_comm")
# Sums of a group that are reduced and scattered, and not all-reduced yet; None if there are none.
partial_sums: Callable[[Any], Any] = attrgetter("_partial_reduce_output")


def module_names(group: Any) -> tuple[str, ...] | None:
    """Their names; None before the first forward of their root, until which FSDP2 has none."""
    fqn = group._module_fqn
    return None if fqn is None else tuple(fqn.split(", "))


def module_parameters(group: Any) -> list[Any]:
    """What the modules of a group hold as its parameters now: sharded ones, or while they compute whole ones."""
    infos = [param._module_info for param in group.fsdp_params]
    return [getattr(info.module, info.param_name, None) for info in infos]


def set_partial_sums(group: Any, sums: Any) -> None:
    """Leave such sums for FSDP2's next reduction."""
    group._partial_reduce_output = sums


@part(
    "torch.fsdp2.state",
    "asks FSDP2 which parameters it gathers together and which gradients are not reduced yet",
    "collectives of FSDP2 are named by the module that calls them, and gradients that were never reduced are not "
    "found; bucket_gradients refuses, retrograd.fsdp.shard_by_size needs no private name",
    names=(
        "FSDPState._fsdp_param_groups", "FSDPState._fsdp_param_group", "FSDPParamGroup.fsdp_params",
        "FSDPParamGroup._module_fqn", "FSDPParamGroup.modules", "FSDPParam._unsharded_param",
        "FSDPParam.unsharded_accumulated_grad", "FSDPParam._module_info", "FSDPParamGroup._reduce_scatter_comm",
        "FSDPParamGroup._partial_reduce_output",
    ),
)  # fmt: skip
@in_fresh_thread
def STATE() -> str:
    """A parameter group that was never set up: FSDP2's own properties must find what is put under these names."""
    torch = importlib.import_module("torch")
    home = importlib.import_module("torch.distributed.fsdp._fully_shard")
    state, group_class = home._fsdp_state.FSDPState(), home._fsdp_param_group.FSDPParamGroup
    if parameter_groups(state):
        return "the state of no module has parameter groups"
    if not hasattr(state, "_fsdp_param_groups") and not hasattr(state, "_fsdp_param_group"):
        return "FSDPState has neither _fsdp_param_groups nor _fsdp_param_group"
    group, param = object.__new__(group_class), object.__new__(home._fsdp_param.FSDPParam)
    leaf = torch.ones(2, device="cpu", requires_grad=True)
    param._unsharded_param, group.fsdp_params, group._module_fqn = leaf, [param], "a, b"
    if param.unsharded_param is not leaf:
        return "unsharded parameters are kept under another name than _unsharded_param"
    if "_module_fqn" not in group_class._with_fqn.__code__.co_names or module_names(group) != ("a", "b"):
        return "a group's modules are named otherwise than by _module_fqn"
    lacking = {"fsdp_params", "modules", "_reduce_scatter_comm", "_partial_reduce_output"}
    if lacking := lacking - {*group_class.__init__.__code__.co_names}:
        return f"FSDPParamGroup has no {', '.join(sorted(lacking))}"
    if "_module_info" not in home._fsdp_param.FSDPParam.__init__.__code__.co_names:
        return "FSDPParam has no _module_info"
    if list(leftovers(group)):
        return "a gradient is left where there is none"
    leaf.grad = torch.ones(2, device="cpu")
    if list(leftovers(group)) != [param]:
        return "gradients of unsharded parameters are kept elsewhere"
    return ""
