"""Parameter groups of FSDP2: states, groups, parameters, and where a step is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from retrograd.compat.fsdp2 import leftovers, parameter_groups
from retrograd.compat.fsdp2.names import HOME, module
from retrograd.errors import UsageError


def states_of(model: Any) -> list[Any]:
    """The states of `fully_shard` in a model, each once, in the order of its modules; the root's first.

    Raises:
        UsageError: the model is not sharded by `fully_shard`, or is not the root of what is.
    """
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(model, FSDPModule):
        own = {
            "FullyShardedDataParallel": "; FSDP1 is not supported",
            "DistributedDataParallel": "; DDP has buckets of its own, bucket_cap_mb says how large",
        }
        raise UsageError(
            f"`model` is {type(model).__name__}, which fully_shard was not called on; give the root module after "
            f"fully_shard(model){own.get(type(model).__name__, '')}"
        )
    by_id: dict[int, Any] = {}
    for part in model.modules():  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(part, FSDPModule):
            state = part._get_fsdp_state()
            by_id.setdefault(id(state), state)
    states = list(by_id.values())
    if states[0]._is_root is False:
        raise UsageError("`model` is part of a larger sharded model; give the module on which forward is called")
    return states


def groups_of(states: Sequence[Any]) -> list[Any]:
    return [group for state in states for group in parameter_groups(state)]


def names_of(model: Any, groups: Sequence[Any]) -> list[str]:
    """A name for each group: its modules as the root calls them, without what wrappers add."""
    names: list[str] = []
    for modules in modules_of(model, groups):
        name = "+".join(module or "(root)" for module in modules)
        names.append(f"{name}#{names.count(name)}" if name in names else name)
    return names


def modules_of(model: Any, groups: Sequence[Any]) -> list[tuple[str, ...]]:
    """The names of each group's modules, without what wrappers add; "" for the root."""
    fqn = {id(module): _bare(name) for name, module in model.named_modules()}
    return [tuple(fqn[id(module)] for module in group.modules if id(module) in fqn) for group in groups]


def _bare(name: str) -> str:
    for wrapper in ("_orig_mod", "_checkpoint_wrapped_module"):
        name = name.replace(f"{wrapper}.", "").replace(f".{wrapper}", "")
    return name


def parameter_names(model: Any, groups: Sequence[Any]) -> dict[int, str]:
    """Names of parameters by the id of their FSDPParam."""
    named = {id(param): _bare(name) for name, param in model.named_parameters()}
    return {
        id(param): named.get(id(param.sharded_param)) or named.get(id(getattr(param, "_unsharded_param", None))) or "?"
        for group in groups
        for param in group.fsdp_params
    }


def shadow(thing: Any, name: str, method: Callable[..., Any], *arguments: Any) -> None:
    """Replace a method in one instance by another, which gets these arguments, then the method as it was."""
    thing.__dict__[name] = partial(method, *arguments, getattr(thing, name))


def unshadow(thing: Any, name: str) -> None:
    """Undo `shadow`; nothing if it was undone."""
    thing.__dict__.pop(name, None)


def forward_order(state: Any) -> list[Any]:
    """Groups in the order in which they ended their forwards since the last backward, with repetitions."""
    return list(state._comm_ctx.post_forward_order)


# Whether FSDP2 has seen a backward begin and not end: the one that runs, or where none runs, one that failed.
failed = begun = attrgetter("_state_ctx.post_backward_final_callback_queued")


def manual(state: Any) -> bool:
    """Whether the user ends backward by hand (2.15)."""
    return bool(getattr(state._state_ctx, "manual_backward_finalization", False))


def ranks_of(groups: Sequence[Any]) -> list[int]:
    """The ranks that take part in reductions of any of the groups."""
    return sorted({rank for group in groups for rank in group.mesh_info.mesh.mesh.flatten().tolist()})


def shape_of_mesh(group: Any) -> str:
    """How a group's gradients are spread, as text that is equal on all ranks."""
    return "x".join(str(size) for size in group.mesh_info.mesh.shape)


def trainable(group: Any) -> list[Any]:
    """Parameters of a group that want gradients now."""
    return [param for param in group.fsdp_params if param.sharded_param.requires_grad]


def grad_dtype(param: Any) -> torch.dtype:
    """The dtype in which autograd makes this parameter's gradient."""
    return getattr(param, "unsharded_grad_dtype", None) or param.param_dtype or param.orig_dtype


def no_gradient(param: Any, group: Any, dtype: torch.dtype) -> torch.Tensor:
    """Zeros where a parameter got no gradient."""
    return torch.zeros(param._orig_size, dtype=dtype, device=group.device)


def wire_numel(param: Any, group: Any) -> int:
    """Elements of a parameter's gradient as it is sent: each rank's shard of the first dimension padded alike."""
    world = getattr(group.mesh_info, "shard_mesh_size", 1)
    size = param._orig_size
    if param.fsdp_placement.dim != 0:  # FSDP2 wants these to divide evenly
        return size.numel()
    return -(-size[0] // world) * world * size[1:].numel()


def look_again(groups: Sequence[Any]) -> None:
    """Let FSDP2, which ends a backward now, see gradients that came after it was done with their group.

    A block that is used twice under reentrant checkpointing gets no second post-backward (2.13): gradients of its
    earlier use are not reduced in this step, and added to the next step's. FSDP2 looks at every group again when
    backward ends, unless the group's state says that this was done.
    """
    common = module("_fsdp_common").TrainingState
    for group in groups:
        if group.reduce_grads and group._training_state == common.POST_BACKWARD and any(leftovers(group)):
            group._training_state = common.PRE_BACKWARD


def forget(state: Any, groups: Sequence[Any]) -> None:
    """Clear what a backward that ended in an exception left behind.

    `reset_iter_state` of 2.13 keeps gradients of the unsharded parameters: the next backward would add to them.
    """
    state._reset_iter_state()
    drop_gradients(groups)


def drop_gradients(groups: Sequence[Any]) -> None:
    for group in groups:
        for param in leftovers(group):
            param._unsharded_param.grad = None
            if getattr(param, "unsharded_accumulated_grad", None) is not None:
                param.unsharded_accumulated_grad = None


def buffers_in_flight(state: Any) -> int:
    """How many inputs of reduce-scatters may be alive at once: the user's choice (2.13), or 1."""
    return getattr(state._comm_ctx, "reduce_scatter_max_input_buffers", 1)


def inputs_kept(state: Any) -> int:
    """How many inputs of reduce-scatters FSDP2 itself keeps until they are reduced."""
    context = state._comm_ctx
    kept = getattr(context, "reduce_scatter_states", None)  # 2.11 and 2.12 keep one
    kept = [context.reduce_scatter_state] if kept is None else kept
    return sum(getattr(entry, "reduce_scatter_input", None) is not None for entry in kept)


def wait_for_offload(group: Any) -> None:
    """Gradients that go to the CPU are there when backward has ended."""
    for param in group.fsdp_params:
        if getattr(param, "grad_offload_event", None) is not None:
            param.grad_offload_event.synchronize()
            param.grad_offload_event = None


def custom_comms(groups: Sequence[Any]) -> str:
    """Which groups have a reduce-scatter that is not PyTorch's own, in words; empty when none has."""
    comms = {
        f"{type(group._reduce_scatter_comm).__name__} of {group._module_fqn or 'a module'}"
        for group in groups
        if type(group._reduce_scatter_comm).__module__ != f"{HOME}._fsdp_collectives"
    }
    return ", ".join(sorted(comms))
