"""Table of what versions of PyTorch call the private names of FSDP2."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

import torch

from retrograd.errors import UnsupportedVersionError

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
    """What one minor version of PyTorch calls things."""

    arguments: tuple[str, ...]  # parameters of `foreach_reduce` that are given by position, in order
    returns: tuple[str, ...]  # what its values mean, in order
    resets: bool  # whether a failed backward can be cleared away (`reset_iter_state`)
    keywords: tuple[str, ...] = ()  # parameters that are given by name alone
    ran: bool = True  # whether our tests ran on it; otherwise its source was read

    def signature(self) -> str:
        """The parameters as a `def` writes them."""
        return ", ".join((*self.arguments, *(("*", *self.keywords) if self.keywords else ())))

    def call(self, function: Callable[..., Any], arguments: dict[str, Any]) -> tuple[Any, ...]:
        """Call FSDP2's function, or what stands in for it, as FSDP2 does: by position where it takes positions."""
        keywords = {name: arguments[name] for name in self.keywords}
        return function(*[arguments[name] for name in self.arguments], **keywords)


_OLD = tuple(name for name in _RETURNS if name != "post_reduce_stream")
VERSIONS = {
    "2.11": Version(_ARGUMENTS, _OLD, resets=False),
    "2.12": Version(_ARGUMENTS, _OLD, resets=False, ran=False),
    "2.13": Version(_ARGUMENTS, _RETURNS, resets=True),
    "2.14": Version(_ARGUMENTS, _RETURNS, resets=True, ran=False),
    "2.15": Version(
        tuple(name for name in _ARGUMENTS if name != "orig_dtype"),
        _RETURNS,
        resets=True,
        keywords=("prepare_reduce_scatter_inputs",),
    ),
}

BACKWARD_BEGINS = "_register_root_post_backward_final_callback"
BACKWARD_ENDS = "_root_post_backward_final_callback"
FORWARD_BEGINS = "_root_pre_forward"
RESET = "_reset_iter_state"
INPUTS_WATCHED = "_register_post_backward_hook"


def version() -> Version:
    """The names of the PyTorch that is installed.

    Raises:
        UnsupportedVersionError: it is none of the versions whose source was read.
    """
    return _of(torch.__version__)


@cache
def _of(name: str) -> Version:
    minor = ".".join(name.split(".")[:2])
    if minor not in VERSIONS:
        raise UnsupportedVersionError(
            f"bucket_gradients rests on private names of FSDP2 and knows those of {', '.join(VERSIONS)}, not of {name}"
        )
    return VERSIONS[minor]


def module(name: str) -> Any:
    return importlib.import_module(f"{HOME}.{name}")


def refuse(difference: str) -> NoReturn:
    """This PyTorch is not what we know; say what differs."""
    raise UnsupportedVersionError(f"FSDP2 of PyTorch {torch.__version__} is not what its release is: {difference}")
