"""Calls of FSDP2's `foreach_reduce`: taken over, held back, made for several groups at once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from retrograd.errors import UsageError
from retrograd.fsdp.private.versions import HOME, module, original, replaced, version

_OWNER = "_retrograd_reduce"  # on each FSDPParam that has buckets: who takes its gradients


class Call:
    """One call of `foreach_reduce` that was held back, or that is made up for a group without gradients."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.params: list[Any] = list(arguments["fsdp_params"])
        self.grads: list[torch.Tensor] = list(arguments["unsharded_grads"])
        self.stream: Any = self.device_handle.current_stream()
        self.event: Any = self.stream.record_event()
        self.partial: Any = arguments["partial_reduce_output"]

    @classmethod
    def of(cls, group: Any) -> Call:
        """The call that FSDP2 would make for a group, with no gradients yet.

        Raises:
            UsageError: the group holds sums that are not all-reduced yet, which 2.15 lays out anew for each call.
        """
        facts = version()
        pending = group._partial_reduce_output
        if pending is not None and "orig_dtype" not in facts.arguments:
            raise UsageError(
                f"{group._module_fqn} has sums that wait for set_requires_all_reduce(True), and brought no gradient "
                "now; reduce it without all-reduce only in backwards in which it is used"
            )
        sharded = hasattr(group.mesh_info, "shard_process_group")
        replicated = hasattr(group.mesh_info, "replicate_process_group")
        hook_stream = None if replicated else group._all_reduce_hook_stream
        return cls(
            {
                "fsdp_params": [],
                "unsharded_grads": [],
                "reduce_scatter_group": group._reduce_scatter_process_group if sharded else None,
                "reduce_scatter_stream": group.comm_ctx.reduce_scatter_stream,
                "reduce_scatter_comm": group._reduce_scatter_comm,
                "orig_dtype": getattr(group, "_orig_dtype", None),
                "reduce_dtype": group._reduce_dtype,
                "device": group.device,
                "gradient_divide_factor": group.gradient_divide_factor,
                "all_reduce_group": group._all_reduce_process_group if replicated else None,
                "all_reduce_stream": hook_stream or group.comm_ctx.all_reduce_stream,
                "all_reduce_grads": group.all_reduce_grads,
                "partial_reduce_output": pending,
                "all_reduce_hook": group._all_reduce_hook,
                "force_sum_reduction_for_comms": group.force_sum_reduction_for_comms,
                "prepare_reduce_scatter_inputs": getattr(group, "_prepare_reduce_scatter_inputs", None),
            }
        )

    @property
    def device_handle(self) -> Any:
        """The module of streams and events: torch.cuda, or torch.cpu, where both do nothing."""
        return torch.get_device_module(self.arguments["device"])

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """The dtype on the wire; None for that of the gradients."""
        return self.arguments["reduce_dtype"]

    @property
    def alone(self) -> bool:
        """Sums that are not all-reduced yet belong to one group: they cannot be computed with another's."""
        given = self.arguments
        return given["all_reduce_group"] is not None and (not given["all_reduce_grads"] or self.partial is not None)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Calls of equal kind can be one."""
        given = self.arguments
        dtype = self.reduce_dtype or (self.grads[0].dtype if self.grads else None)
        names = (
            "reduce_scatter_group reduce_scatter_stream all_reduce_group all_reduce_stream all_reduce_hook "
            "prepare_reduce_scatter_inputs"
        )
        same = tuple(id(given.get(name)) for name in names.split())
        values = tuple(
            given.get(name)
            for name in ("device", "gradient_divide_factor", "force_sum_reduction_for_comms", "all_reduce_grads")
        )
        return (_kind_of(given["reduce_scatter_comm"]), dtype, given.get("orig_dtype"), *same, *values)

    def placeholder(self) -> tuple[Any, ...]:
        """What FSDP2 is told while gradients are held: an event that has nothing to wait for, and no buffer.

        On 2.11 it waits for the events without looking whether there are any, so they must be real.
        """
        told = {
            "reduce_scatter_input": None,
            "reduce_scatter_event": self.event,
            "post_reduce_stream": self.arguments["reduce_scatter_stream"],
            "post_reduce_event": self.event,
            "all_reduce_input": None,
            "all_reduce_event": None,
            "partial_reduce_output": self.partial,
        }
        return tuple(told[name] for name in version().returns)

    def make(self, params: list[Any], grads: list[torch.Tensor]) -> dict[str, Any]:
        """Reduce these gradients now; what FSDP2's function returns, by name. `grads` is emptied."""
        facts = version()
        given = self.arguments | {
            "fsdp_params": params,
            "unsharded_grads": grads,
            "partial_reduce_output": self.partial,
        }
        if given["reduce_dtype"] is None and "orig_dtype" not in facts.arguments:
            given["reduce_dtype"] = grads[0].dtype  # 2.15 wants a name for what None meant before
        answer = original()(**{name: given[name] for name in facts.arguments})
        return dict(zip(facts.returns, answer, strict=True))


def _kind_of(comm: Any) -> Any:
    """What two reduce-scatters must share for one to stand in for the other."""
    if type(comm).__module__ == f"{HOME}._fsdp_collectives":
        return type(comm)  # their only state is the process group, which is part of a call's kind anyway
    if type(comm).__module__ == "retrograd.fsdp.ordered":
        return (type(comm), comm.wire_dtype, comm.check_finite)
    return getattr(comm, "bucket_key", id(comm))  # anyone's: it may know its module


def take_over(groups: Sequence[Any], owner: Callable[[Call], tuple[Any, ...]]) -> None:
    """From now on `owner` is called where FSDP2 would reduce gradients of these groups.

    Raises:
        UsageError: their gradients are in buckets already.
    """
    params = [param for group in groups for param in group.fsdp_params]
    if any(hasattr(param, _OWNER) for param in params):
        raise UsageError("the model has buckets already; remove() the first handle to make others")
    theirs = original()
    if "ours" not in replaced:
        signature = inspect.signature(theirs)

        def foreach_reduce(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            mine = given.arguments["fsdp_params"]
            taker = getattr(mine[0], _OWNER, None) if mine else None
            if taker is None:
                return theirs(*args, **kwargs)
            given.apply_defaults()
            return taker(Call(dict(given.arguments)))

        replaced.update(ours=foreach_reduce, users=0)
        module("_fsdp_param_group").foreach_reduce = foreach_reduce
    replaced["users"] += 1
    for param in params:
        setattr(param, _OWNER, owner)


def give_back(groups: Sequence[Any]) -> None:
    """FSDP2 reduces these groups itself again."""
    for group in groups:
        for param in group.fsdp_params:
            param.__dict__.pop(_OWNER, None)
    replaced["users"] -= 1
    if not replaced["users"]:
        module("_fsdp_param_group").foreach_reduce = original()
        replaced.clear()
