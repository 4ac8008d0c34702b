"""Self-test of FSDP2's private names: two parameters are reduced as production reduces them, without a collective."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import torch

from retrograd.compat.fsdp2.foreach_reduce import ReduceCall, give_back, original, reduce_as_given, take_over
from retrograd.compat.fsdp2.names import INPUTS_WATCHED, RESET, VERSIONS, Version, module, refuse, version
from retrograd.compat.registry import in_fresh_thread, part
from retrograd.errors import UnsupportedVersionError

# Methods of a state that we shadow in the instance, and who looks them up there when it calls them.
_LOOKED_UP = {
    "_root_post_backward_final_callback": "_register_root_post_backward_final_callback",
    "_register_root_post_backward_final_callback": "_pre_backward",
    "_root_pre_forward": "_pre_forward",
}


@part(
    "torch.fsdp2.buckets",
    "reduces gradients of several FSDP2 groups together",
    "use an unpatched release, or retrograd.fsdp.shard_by_size, which needs no private name",
    names=(
        "_fsdp_param_group.foreach_reduce", "_fsdp_collectives.DefaultReduceScatter", *_LOOKED_UP, RESET,
        f"FSDPParamGroup.{INPUTS_WATCHED}",
    ),
    ran=tuple(name for name, facts in VERSIONS.items() if facts.ran),
    refuses=True,
)  # fmt: skip
@in_fresh_thread
def BUCKETS() -> str:
    """Look whether FSDP2 is as the table says, and let it reduce; what differs, as in a patched build."""
    try:
        _compare_with_table()
    except UnsupportedVersionError as error:
        return str(error)
    return ""


def _compare_with_table() -> None:
    facts = version()
    home, states = module("_fsdp_param_group"), module("_fsdp_state").FSDPState
    parameters = inspect.signature(original()).parameters.values()
    by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    by_place = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    signature = ", ".join((*by_place, *(("*", *by_name) if by_name else ())))
    if signature != facts.signature():
        refuse(f"foreach_reduce takes ({signature}), expected ({facts.signature()})")
    if "foreach_reduce" not in inspect.unwrap(home.FSDPParamGroup.post_backward).__code__.co_names:
        refuse("FSDPParamGroup.post_backward does not call foreach_reduce")
    for name, caller in _LOOKED_UP.items():
        if not callable(getattr(states, name, None)):
            refuse(f"FSDPState has no {name}")
        if name not in inspect.unwrap(getattr(states, caller)).__code__.co_names:
            refuse(f"FSDPState.{caller} does not use {name}")
    if not callable(getattr(home.FSDPParamGroup, INPUTS_WATCHED, None)):
        refuse(f"FSDPParamGroup has no {INPUTS_WATCHED}")
    if callable(getattr(states, RESET, None)) is not facts.resets:
        refuse(f"FSDPState.{RESET} is {'missing' if facts.resets else 'there'}")
    _reduce(facts, lambda arguments: reduce_as_given(arguments)[0])
    _reduce(facts, _reduce_held)


def _reduce_held(arguments: dict[str, Any]) -> tuple[Any, ...]:
    """As a bucket does: the call is kept, and made with the parameters and gradients of all its groups."""
    call = ReduceCall(arguments, torch.cpu.Stream())
    result = call.make(call.params, arguments["unsharded_grads"])
    return tuple(result.values())


def _reduce(facts: Version, owner: Any) -> None:
    """Two parameters in one call, in a world of one process: are gradients divided, handed out and let go?"""
    params = [_parameter(2), _parameter(3)]
    grads = [torch.full((n,), float(n), dtype=torch.float32, device="cpu") for n in (2, 3)]
    groups = [SimpleNamespace(fsdp_params=params)]
    take_over(groups, owner)
    try:
        # Called as FSDPParamGroup.post_backward calls it: by this name, with its mixture of places and names.
        answer = facts.call(module("_fsdp_param_group").foreach_reduce, _arguments(facts, params, grads))
    finally:
        give_back(groups)
    if not isinstance(answer, tuple) or len(answer) != len(facts.returns):
        refuse(f"foreach_reduce does not return the {len(facts.returns)} values ({', '.join(facts.returns)})")
    if answer[0].numel() != 5 or grads:
        refuse("foreach_reduce does not return its input first, or keeps the gradients")
    for param, n in zip(params, (2, 3), strict=True):
        if not torch.equal(param.sharded_param.grad, torch.full((n,), float(n), dtype=torch.float32, device="cpu")):
            refuse("foreach_reduce does not hand each parameter its gradient")


def _arguments(facts: Version, params: list[Any], grads: list[torch.Tensor]) -> dict[str, Any]:
    stream, collectives = torch.cpu.Stream(), module("_fsdp_collectives")
    arguments = dict.fromkeys((*facts.arguments, *facts.keywords)) | {
        "fsdp_params": params,
        "unsharded_grads": grads,
        "reduce_scatter_stream": stream,
        "reduce_scatter_comm": collectives.DefaultReduceScatter(),
        "reduce_dtype": torch.float32,
        "device": torch.device("cpu"),
        "all_reduce_stream": stream,
        "all_reduce_grads": True,
        "force_sum_reduction_for_comms": False,
    }
    if "orig_dtype" in arguments:
        arguments["orig_dtype"] = torch.float32
    if "prepare_reduce_scatter_inputs" in arguments:
        arguments["prepare_reduce_scatter_inputs"] = collectives._default_reduce_scatter_input_fn
    return arguments


def _parameter(n: int) -> SimpleNamespace:
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
