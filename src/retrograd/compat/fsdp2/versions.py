"""What versions of PyTorch call things, and a test that they still mean what they meant."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from retrograd.errors import UsageError

replaced: dict[str, Any] = {}  # the original, and how many models use the replacement
HOME = "torch.distributed.fsdp._fully_shard"

_ARGUMENTS = (
    "fsdp_params",
    "unsharded_grads",
    "reduce_scatter_group",
    "reduce_scatter_stream",
    "reduce_scatter_comm",
    "orig_dtype",
    "reduce_dtype",
    "device",
    "gradient_divide_factor",
    "all_reduce_group",
    "all_reduce_stream",
    "all_reduce_grads",
    "partial_reduce_output",
    "all_reduce_hook",
    "force_sum_reduction_for_comms",
)
_RETURNS = (
    "reduce_scatter_input",
    "reduce_scatter_event",
    "post_reduce_stream",
    "post_reduce_event",
    "all_reduce_input",
    "all_reduce_event",
    "partial_reduce_output",
)


@dataclass(frozen=True)
class Version:
    """What one minor version of PyTorch calls things.

    Attributes:
        arguments: parameters of `foreach_reduce`, in order.
        returns: what its values mean, in order.
        resets: whether a failed backward can be cleared away (`reset_iter_state`).
        ran: whether our tests ran on it; otherwise its source was read.
    """

    arguments: tuple[str, ...]
    returns: tuple[str, ...]
    resets: bool
    ran: bool

    @cached_property
    def reduce_dtype_at(self) -> int:
        """The place of this argument."""
        return self.arguments.index("reduce_dtype")

    @cached_property
    def event_at(self) -> int:
        """The place of the last event among what is returned."""
        return self.returns.index("post_reduce_event")

    @cached_property
    def stream_at(self) -> int | None:
        """The place of its stream; None where it is not returned."""
        return self.returns.index("post_reduce_stream") if "post_reduce_stream" in self.returns else None


_OLD = tuple(name for name in _RETURNS if name != "post_reduce_stream")
VERSIONS = {
    "2.11": Version(_ARGUMENTS, _OLD, resets=False, ran=True),
    "2.12": Version(_ARGUMENTS, _OLD, resets=False, ran=False),
    "2.13": Version(_ARGUMENTS, _RETURNS, resets=True, ran=True),
    "2.15": Version(
        (*(name for name in _ARGUMENTS if name != "orig_dtype"), "prepare_reduce_scatter_inputs"),
        _RETURNS,
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
    return _of(torch.__version__)


@cache
def _of(name: str) -> Version:
    minor = ".".join(name.split(".")[:2])
    if minor not in VERSIONS:
        raise UsageError(
            f"bucket_gradients rests on private names of PyTorch and knows those of {', '.join(VERSIONS)}, not of "
            f"{name}; use one of these, or retrograd.fsdp.shard_by_size, which needs no private name"
        )
    return VERSIONS[minor]


def module(name: str) -> Any:
    """A module of FSDP2."""
    return importlib.import_module(f"{HOME}.{name}")


def self_test() -> None:
    """Look whether PyTorch is as the table says, and let it reduce two parameters of one process, without a collective.

    Raises:
        UsageError: something differs, as in a patched or development build; says what.
    """
    facts = version()
    home, states = module("_fsdp_param_group"), module("_fsdp_state").FSDPState
    found = tuple(inspect.signature(original()).parameters)
    if found != facts.arguments:
        refuse(f"foreach_reduce takes ({', '.join(found)}), expected ({', '.join(facts.arguments)})")
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
    _reduce_alone(facts)


def refuse(what: str) -> NoReturn:
    """This PyTorch is not what we know; say what differs."""
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
        "reduce_scatter_comm": module("_fsdp_collectives").DefaultReduceScatter(),
        "orig_dtype": torch.float32,
        "reduce_dtype": torch.float32,
        "device": torch.device("cpu"),
        "all_reduce_stream": streams,
        "all_reduce_grads": True,
        "force_sum_reduction_for_comms": False,
    }
    if "prepare_reduce_scatter_inputs" in given:
        given["prepare_reduce_scatter_inputs"] = module("_fsdp_collectives")._default_reduce_scatter_input_fn
    given = {name: given[name] for name in facts.arguments}
    answer = original()(**given)
    if not isinstance(answer, tuple) or len(answer) != len(facts.returns):
        refuse(f"foreach_reduce does not return the {len(facts.returns)} values ({', '.join(facts.returns)})")
    if answer[0].numel() != 5 or grads:
        refuse("foreach_reduce does not return its input first, or keeps the gradients")
    for param, n in zip(params, (2, 3), strict=True):
        if not torch.equal(param.sharded_param.grad, torch.full((n,), float(n), dtype=torch.float32, device="cpu")):
            refuse("foreach_reduce does not hand each parameter its gradient")


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


def original() -> Callable[..., Any]:
    """FSDP2's own `foreach_reduce`.

    Raises:
        UsageError: something else has taken its place.
    """
    found = module("_fsdp_collectives").foreach_reduce
    here = module("_fsdp_param_group").foreach_reduce
    if here is not found and here is not replaced.get("ours"):
        refuse(f"_fsdp_param_group.foreach_reduce was replaced by {getattr(here, '__module__', '?')}.{here.__name__}")
    return found
