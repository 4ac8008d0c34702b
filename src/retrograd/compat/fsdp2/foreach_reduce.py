"""Calls of FSDP2's `foreach_reduce`: taken over, held back, made for several groups at once.

The arguments of a call are a dict by name, as `signature` of the version table has them; only `Version.call` knows
which of them go by position.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from retrograd.compat.fsdp2.names import HOME, Version, module, refuse, version
from retrograd.errors import UsageError

_OWNER = "_retrograd_reduce"  # on each FSDPParam that has buckets: who takes its gradients
# Arguments that calls have to share to be one: these by identity, those by value.
_SAME = (
    "reduce_scatter_group",
    "reduce_scatter_stream",
    "all_reduce_group",
    "all_reduce_stream",
    "all_reduce_hook",
    "prepare_reduce_scatter_inputs",
)
_EQUAL = ("device", "gradient_divide_factor", "force_sum_reduction_for_comms", "all_reduce_grads")


@dataclass
class _Replacement:
    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    users: int = 0  # models with buckets


_replacement: _Replacement | None = None


class ReduceCall:
    """One call of `foreach_reduce` that was held back, or that is made up for a group without gradients.

    Args:
        arguments: by name.
        stream: on which its gradients were made.
        event: after them on that stream; None where waiting for the whole stream is as good.
    """

    def __init__(self, arguments: dict[str, Any], stream: Any, event: Any = None) -> None:
        self.arguments = arguments
        self.params: list[Any] = list(arguments["fsdp_params"])
        self.grads: list[torch.Tensor] = list(arguments["unsharded_grads"])
        self.stream: Any = stream
        self.event: Any = event
        self.partial: Any = arguments["partial_reduce_output"]

    @classmethod
    def of(cls, group: Any) -> ReduceCall:
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
            },
            device_handle(group.device).current_stream(),
        )

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """The dtype on the wire; None for that of the gradients."""
        return self.arguments["reduce_dtype"]

    @property
    def alone(self) -> bool:
        """Sums that are not all-reduced yet belong to one group: they cannot be computed with another's."""
        arguments = self.arguments
        return arguments["all_reduce_group"] is not None and (
            not arguments["all_reduce_grads"] or self.partial is not None
        )

    @property
    def kind(self) -> tuple[Any, ...]:
        """Calls of equal kind can be one."""
        arguments = self.arguments
        dtype = self.reduce_dtype or (self.grads[0].dtype if self.grads else None)
        same = [id(arguments.get(name)) for name in _SAME]
        values = [arguments.get(name) for name in _EQUAL]
        return (_kind_of(arguments["reduce_scatter_comm"]), dtype, arguments.get("orig_dtype"), *same, *values)

    def placeholder(self, event: Any) -> tuple[Any, ...]:
        """What FSDP2 is told while gradients are held: an event that has nothing to wait for, and no buffer.

        On 2.11 it waits for the events without looking whether there are any, so they must be real.
        """
        told = {
            "reduce_scatter_event": event,
            "post_reduce_stream": self.arguments["reduce_scatter_stream"],
            "post_reduce_event": event,
            "partial_reduce_output": self.partial,
        }
        return tuple(map(told.get, version().returns))

    def make(self, params: list[Any], grads: list[torch.Tensor]) -> dict[str, Any]:
        """Reduce these gradients now; what FSDP2's function returns, by name. `grads` is emptied."""
        facts = version()
        arguments = self.arguments | {
            "fsdp_params": params,
            "unsharded_grads": grads,
            "partial_reduce_output": self.partial,
        }
        if arguments["reduce_dtype"] is None and "orig_dtype" not in facts.arguments:
            arguments["reduce_dtype"] = grads[0].dtype  # 2.15 wants a name for what None meant before
        return dict(zip(facts.returns, facts.call(original(), arguments), strict=True))


def _kind_of(comm: Any) -> Any:
    """What two reduce-scatters must share for one to stand in for the other."""
    if type(comm).__module__ == f"{HOME}._fsdp_collectives":
        return type(comm)  # their only state is the process group, which is part of a call's kind anyway
    if type(comm).__module__ == "retrograd.fsdp.ordered_reduce":
        return (type(comm), comm.wire_dtype, comm.check_finite)
    return getattr(comm, "bucket_key", id(comm))  # anyone's: it may know its module


# The module of streams and events: torch.cuda, or torch.cpu, where both do nothing.
device_handle: Callable[[torch.device], Any] = torch.get_device_module


def wire_dtype(arguments: dict[str, Any]) -> torch.dtype:
    """The dtype in which gradients of a call are sent."""
    return arguments["reduce_dtype"] or arguments["unsharded_grads"][0].dtype


def reduce_as_given(arguments: dict[str, Any]) -> tuple[tuple[Any, ...], Any, Any]:
    """Let FSDP2 reduce one group: what it is to be told, and the reduction's stream, if it is named, and last event.

    The answer goes back to FSDP2 as it is, which then keeps buffers and waits for them as ever.
    """
    facts = version()
    answer = facts.call(original(), arguments)
    by_name = dict(zip(facts.returns, answer, strict=True))
    # 2.11 and 2.12 name no stream, and wait for each group's event by themselves.
    return answer, by_name.get("post_reduce_stream"), by_name["post_reduce_event"]


def original() -> Callable[..., Any]:
    """FSDP2's own `foreach_reduce`.

    Raises:
        UnsupportedVersionError: something else has taken its place.
    """
    here = module("_fsdp_param_group").foreach_reduce
    if _replacement is not None and here is _replacement.ours:
        return _replacement.theirs
    if here is not module("_fsdp_collectives").foreach_reduce:
        refuse(f"_fsdp_param_group.foreach_reduce was replaced by {getattr(here, '__module__', '?')}.{here.__name__}")
    return here


def take_over(groups: Sequence[Any], owner: Callable[[dict[str, Any]], tuple[Any, ...]]) -> None:
    """From now on `owner` is called, with all arguments by name, where FSDP2 would reduce gradients of these groups.

    Raises:
        UsageError: their gradients are in buckets already.
    """
    global _replacement
    params = [param for group in groups for param in group.fsdp_params]
    if any(hasattr(param, _OWNER) for param in params):
        raise UsageError("the model has buckets already; remove() the first handle to make others")
    theirs = original()
    if _replacement is None:
        _replacement = _Replacement(_substitute(theirs, version()), theirs)
        module("_fsdp_param_group").foreach_reduce = _replacement.ours
    _replacement.users += 1
    for param in params:
        setattr(param, _OWNER, owner)


def _substitute(theirs: Callable[..., Any], facts: Version) -> Callable[..., Any]:
    signature = inspect.signature(theirs)

    def foreach_reduce(*args: Any, **kwargs: Any) -> Any:
        params = args[0] if args else kwargs["fsdp_params"]
        owner = getattr(params[0], _OWNER, None) if params else None
        if owner is None:
            return theirs(*args, **kwargs)
        if len(args) == len(facts.arguments) and len(kwargs) == len(facts.keywords):
            return owner(dict(zip(facts.arguments, args, strict=True)) | kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return owner(dict(bound.arguments))

    return foreach_reduce


def give_back(groups: Sequence[Any]) -> None:
    """FSDP2 reduces these groups itself again."""
    global _replacement
    for group in groups:
        for param in group.fsdp_params:
            param.__dict__.pop(_OWNER, None)
    if _replacement is None:
        return
    _replacement.users -= 1
    if not _replacement.users:
        module("_fsdp_param_group").foreach_reduce = _replacement.theirs
        _replacement = None
