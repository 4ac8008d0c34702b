"""Every private name of PyTorch that buckets rest on, in one place, and a test that they still mean what they meant.

FSDP2 offers no public hook between "the gradients of a group are ready" and "reduce them": a custom reduce-scatter is
called too late, what follows it divides, casts and hands out. So one global name of
`torch.distributed.fsdp._fully_shard._fsdp_param_group` is replaced: `foreach_reduce`, which copies gradients in,
reduces, casts and hands out, for any list of parameters. Calls for models without buckets pass through.

Read in 2.11.0, 2.12.1, 2.13.0 and 2.15.0; what differs between them stands in `VERSIONS`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from retrograd.errors import UsageError

_HOME = "torch.distributed.fsdp._fully_shard"
_OWNER = "_retrograd_reduce"  # on each FSDPParam that has buckets: who takes its gradients

_ARGUMENTS = (
    "fsdp_params unsharded_grads reduce_scatter_group reduce_scatter_stream reduce_scatter_comm orig_dtype "
    "reduce_dtype device gradient_divide_factor all_reduce_group all_reduce_stream all_reduce_grads "
    "partial_reduce_output all_reduce_hook force_sum_reduction_for_comms"
).split()
_RETURNS = (
    "reduce_scatter_input reduce_scatter_event post_reduce_stream post_reduce_event all_reduce_input all_reduce_event "
    "partial_reduce_output"
).split()


@dataclass(frozen=True)
class Version:
    """What one minor version of PyTorch calls things.

    Attributes:
        arguments: parameters of `foreach_reduce`, in order.
        returns: what its values mean, in order.
        groups: attribute of a state that holds its parameter group, or a list of them.
        resets: whether a failed backward can be cleared away (`reset_iter_state`).
        ran: whether our tests ran on it; otherwise its source was read.
    """

    arguments: tuple[str, ...]
    returns: tuple[str, ...]
    groups: str
    resets: bool
    ran: bool


_OLD = tuple(name for name in _RETURNS if name != "post_reduce_stream")
VERSIONS = {
    "2.11": Version(tuple(_ARGUMENTS), _OLD, "_fsdp_param_group", resets=False, ran=True),
    "2.12": Version(tuple(_ARGUMENTS), _OLD, "_fsdp_param_groups", resets=False, ran=False),
    "2.13": Version(tuple(_ARGUMENTS), tuple(_RETURNS), "_fsdp_param_groups", resets=True, ran=True),
    "2.15": Version(
        (*(name for name in _ARGUMENTS if name != "orig_dtype"), "prepare_reduce_scatter_inputs"),
        tuple(_RETURNS),
        "_fsdp_param_groups",
        resets=True,
        ran=False,
    ),
}

# Methods of a state that we shadow in the instance, and who looks them up there when it calls them.
_LOOKED_UP = {
    "_root_post_backward_final_callback": "_register_root_post_backward_final_callback",
    "_register_root_post_backward_final_callback": "_pre_backward",
    "_root_pre_forward": "_pre_forward",
}
BACKWARD_BEGINS = "_register_root_post_backward_final_callback"
BACKWARD_ENDS = "_root_post_backward_final_callback"
FORWARD_BEGINS = "_root_pre_forward"
RESET = "_reset_iter_state"
INPUTS_WATCHED = "_register_post_backward_hook"


def version() -> Version:
    """The names of the PyTorch that is installed.

    Raises:
        UsageError: it is none of the versions whose source was read.
    """
    minor = ".".join(torch.__version__.split(".")[:2])
    if minor not in VERSIONS:
        raise UsageError(
            f"bucket_gradients rests on private names of PyTorch and knows those of {', '.join(VERSIONS)}, not of "
            f"{torch.__version__}; use one of these, or retrograd.fsdp.shard_by_size, which needs no private name"
        )
    return VERSIONS[minor]


def _module(name: str) -> Any:
    return importlib.import_module(f"{_HOME}.{name}")


def self_test() -> None:
    """Look whether PyTorch is as the table says, and let it reduce two parameters of one process, without a collective.

    Raises:
        UsageError: something differs, as in a patched or development build; says what.
    """
    facts = version()
    home, states = _module("_fsdp_param_group"), _module("_fsdp_state").FSDPState
    found = tuple(inspect.signature(_original()).parameters)
    if found != facts.arguments:
        _refuse(f"foreach_reduce takes ({', '.join(found)}), expected ({', '.join(facts.arguments)})")
    if "foreach_reduce" not in inspect.unwrap(home.FSDPParamGroup.post_backward).__code__.co_names:
        _refuse("FSDPParamGroup.post_backward does not call foreach_reduce")
    for name, caller in _LOOKED_UP.items():
        if not callable(getattr(states, name, None)):
            _refuse(f"FSDPState has no {name}")
        if name not in inspect.unwrap(getattr(states, caller)).__code__.co_names:
            _refuse(f"FSDPState.{caller} does not use {name}")
    if not callable(getattr(home.FSDPParamGroup, INPUTS_WATCHED, None)):
        _refuse(f"FSDPParamGroup has no {INPUTS_WATCHED}")
    if callable(getattr(states, RESET, None)) is not facts.resets:
        _refuse(f"FSDPState.{RESET} is {'missing' if facts.resets else 'there'}")
    _reduce_alone(facts)


def _refuse(what: str) -> None:
    raise UsageError(
        f"FSDP2 of PyTorch {torch.__version__} is not what its release is: {what}; use an unpatched release, or "
        "retrograd.fsdp.shard_by_size, which needs no private name"
    )


def _reduce_alone(facts: Version) -> None:
    """Two parameters in one call, in a world of one process: are gradients divided, handed out and let go?"""
    params = [_alone(2), _alone(3)]
    grads = [torch.full((n,), float(n), dtype=torch.float32, device="cpu") for n in (2, 3)]
    streams = torch.cpu.Stream()
    given = dict.fromkeys(facts.arguments) | {
        "fsdp_params": params,
        "unsharded_grads": grads,
        "reduce_scatter_stream": streams,
        "reduce_scatter_comm": _module("_fsdp_collectives").DefaultReduceScatter(),
        "orig_dtype": torch.float32,
        "reduce_dtype": torch.float32,
        "device": torch.device("cpu"),
        "all_reduce_stream": streams,
        "all_reduce_grads": True,
        "force_sum_reduction_for_comms": False,
    }
    if "prepare_reduce_scatter_inputs" in given:
        given["prepare_reduce_scatter_inputs"] = _module("_fsdp_collectives")._default_reduce_scatter_input_fn
    given = {name: given[name] for name in facts.arguments}
    answer = _original()(**given)
    if not isinstance(answer, tuple) or len(answer) != len(facts.returns):
        _refuse(f"foreach_reduce does not return the {len(facts.returns)} values ({', '.join(facts.returns)})")
    if answer[0].numel() != 5 or grads:
        _refuse("foreach_reduce does not return its input first, or keeps the gradients")
    for param, n in zip(params, (2, 3), strict=True):
        if not torch.equal(param.sharded_param.grad, torch.full((n,), float(n), dtype=torch.float32, device="cpu")):
            _refuse("foreach_reduce does not hand each parameter its gradient")


def _alone(n: int) -> SimpleNamespace:
    """What foreach_reduce asks of a parameter, for one of n elements that is not sharded."""
    return SimpleNamespace(
        fsdp_placement=SimpleNamespace(dim=0),
        sharded_size=torch.Size([n]),
        contiguous_sharded_stride=(1,),
        offload_to_cpu=False,
        sharded_grad_dtype=torch.float32,
        grad_offload_event=None,
        sharded_param=SimpleNamespace(grad=None),
        to_sharded_dtensor=lambda tensor: tensor,
    )


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
        return given["all_reduce_group"] is not None and (
            not given["all_reduce_grads"] or self.partial is not None
        )

    @property
    def kind(self) -> tuple[Any, ...]:
        """Calls of equal kind can be one."""
        given = self.arguments
        comm = given["reduce_scatter_comm"]
        # PyTorch's own have no state but the process group, which is part of the kind; others may know their module.
        theirs = type(comm).__module__ == f"{_HOME}._fsdp_collectives"
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
        return (type(comm) if theirs else id(comm), dtype, given.get("orig_dtype"), *same, *values)

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
        answer = _original()(**{name: given[name] for name in facts.arguments})
        return dict(zip(facts.returns, answer, strict=True))


_replaced: dict[str, Any] = {}  # the original, and how many models use the replacement


def _original() -> Callable[..., Any]:
    found = _module("_fsdp_collectives").foreach_reduce
    here = _module("_fsdp_param_group").foreach_reduce
    if here is not found and here is not _replaced.get("ours"):
        _refuse(f"_fsdp_param_group.foreach_reduce was replaced by {getattr(here, '__module__', '?')}.{here.__name__}")
    return found


def take_over(groups: Sequence[Any], owner: Callable[[Call], tuple[Any, ...]]) -> None:
    """From now on `owner` is called where FSDP2 would reduce gradients of these groups.

    Raises:
        UsageError: their gradients are in buckets already.
    """
    params = [param for group in groups for param in group.fsdp_params]
    if any(hasattr(param, _OWNER) for param in params):
        raise UsageError("the model has buckets already; remove() the first handle to make others")
    original = _original()
    if "ours" not in _replaced:
        signature = inspect.signature(original)

        def foreach_reduce(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            mine = given.arguments["fsdp_params"]
            theirs = getattr(mine[0], _OWNER, None) if mine else None
            if theirs is None:
                return original(*args, **kwargs)
            given.apply_defaults()
            return theirs(Call(dict(given.arguments)))

        _replaced.update(ours=foreach_reduce, users=0)
        _module("_fsdp_param_group").foreach_reduce = foreach_reduce
    _replaced["users"] += 1
    for param in params:
        setattr(param, _OWNER, owner)


def give_back(groups: Sequence[Any]) -> None:
    """FSDP2 reduces these groups itself again."""
    for group in groups:
        for param in group.fsdp_params:
            param.__dict__.pop(_OWNER, None)
    _replaced["users"] -= 1
    if not _replaced["users"]:
        _module("_fsdp_param_group").foreach_reduce = _original()
        _replaced.clear()


def states_of(model: Any) -> list[Any]:
    """The states of `fully_shard` in a model, each once, in the order of its modules; the root's first.

    Raises:
        UsageError: the model is not sharded by `fully_shard`, or is not the root of what is.
    """
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(model, FSDPModule):
        raise UsageError(
            f"`model` is {type(model).__name__}, which fully_shard was not called on; give the root module after "
            "fully_shard(model)"
        )
    found: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            found.setdefault(id(state), state)
    states = list(found.values())
    if states[0]._is_root is False:
        raise UsageError("`model` is part of a larger sharded model; give the module on which forward is called")
    return states


def groups_of(states: Sequence[Any]) -> list[Any]:
    """The parameter groups of states, in order."""
    name, groups = version().groups, []
    for state in states:
        held = getattr(state, name)
        groups += held if isinstance(held, list) else [held] if held is not None else []
    return groups


def names_of(model: Any, groups: Sequence[Any]) -> list[str]:
    """A name for each group: its modules as the root calls them, without what wrappers add."""
    fqn = {id(module): name for name, module in model.named_modules()}
    names: list[str] = []
    for group in groups:
        name = "+".join(_bare(fqn[id(module)]) for module in group.modules if id(module) in fqn)
        names.append(f"{name}#{names.count(name)}" if name in names else name)
    return names


def _bare(name: str) -> str:
    for wrapper in ("_orig_mod", "_checkpoint_wrapped_module"):
        name = name.replace(f"{wrapper}.", "").replace(f".{wrapper}", "")
    return name or "(root)"


def parameter_names(model: Any, groups: Sequence[Any]) -> dict[int, str]:
    """Names of parameters by the id of their FSDPParam."""
    named = {id(param): _bare(name) for name, param in model.named_parameters()}
    return {
        id(param): named.get(id(param.sharded_param)) or named.get(id(getattr(param, "_unsharded_param", None))) or "?"
        for group in groups
        for param in group.fsdp_params
    }


def shadow(thing: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a method in one instance; `make` gets the method as it was."""
    thing.__dict__[name] = make(getattr(thing, name))


def unshadow(thing: Any, name: str) -> None:
    """Undo `shadow`; nothing if it was undone."""
    thing.__dict__.pop(name, None)


def forward_order(state: Any) -> list[Any]:
    """Groups in the order in which they ended their forwards since the last backward, with repetitions."""
    return list(state._comm_ctx.post_forward_order)


def failed(state: Any) -> bool:
    """Whether a backward began and never ended, asked where none runs."""
    return bool(state._state_ctx.post_backward_final_callback_queued)


def begun(state: Any) -> bool:
    """Whether the backward that runs has been seen by FSDP2 before."""
    return bool(state._state_ctx.post_backward_final_callback_queued)


def manual(state: Any) -> bool:
    """Whether the user ends backward by hand (2.15)."""
    return bool(getattr(state._state_ctx, "manual_backward_finalization", False))


def in_backward() -> bool:
    """Whether this thread runs a backward pass, as when a checkpointed forward is computed again."""
    return torch._C._current_graph_task_id() != -1


def compiled_autograd() -> bool:
    """Whether torch.compile takes over the backward pass as a whole."""
    import torch._dynamo.compiled_autograd as compiled

    return bool(
        torch._dynamo.config.compiled_autograd
        or compiled.compiled_autograd_enabled
        or getattr(compiled, "in_compiled_autograd_region", False)
    )


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


def leftovers(group: Any) -> Iterator[Any]:
    """Parameters whose unreduced gradients are still there: they would be added to the next step's."""
    for param in group.fsdp_params:
        leaf = getattr(param, "_unsharded_param", None)
        held = getattr(param, "unsharded_accumulated_grad", None) if leaf is not None else None
        if held is not None or (leaf is not None and leaf.grad is not None):
            yield param


def look_again(groups: Sequence[Any]) -> None:
    """Let FSDP2, which ends a backward now, see gradients that came after it was done with their group.

    A block that is used twice under reentrant checkpointing gets no second post-backward (2.13): gradients of its
    earlier use are not reduced in this step, and added to the next step's. FSDP2 looks at every group again when
    backward ends, unless the group's state says that this was done.
    """
    common = _module("_fsdp_common").TrainingState
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
    """Drop gradients that were not reduced."""
    for group in groups:
        for param in leftovers(group):
            param._unsharded_param.grad = None
            if getattr(param, "unsharded_accumulated_grad", None) is not None:
                param.unsharded_accumulated_grad = None


def buffers_in_flight(state: Any) -> int:
    """How many inputs of reduce-scatters may be alive at once: the user's choice (2.13), or 1."""
    return getattr(state._comm_ctx, "reduce_scatter_max_input_buffers", 1)


def wait_for_offload(group: Any) -> None:
    """Gradients that go to the CPU are there when backward has ended."""
    for param in group.fsdp_params:
        if getattr(param, "grad_offload_event", None) is not None:
            param.grad_offload_event.synchronize()
            param.grad_offload_event = None


def custom_comms(groups: Sequence[Any]) -> str:
    """Which groups have a reduce-scatter that is not PyTorch's own, in words; empty when none has."""
    found = {
        f"{type(group._reduce_scatter_comm).__name__} of {group._module_fqn or 'a module'}"
        for group in groups
        if type(group._reduce_scatter_comm).__module__ != f"{_HOME}._fsdp_collectives"
    }
    return ", ".join(sorted(found))
