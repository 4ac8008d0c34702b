"""Tensors that are something else than numbers in memory, and who else may look on.

Some tensors wait for a collective, some have no memory for kernels to read, some are negated when they are read; modes
see operators and no kernels.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from retrograd.compat.torch_dispatch import async_collective_class, implements_operators

Tensors = TypeVar("Tensors", bound=tuple[Any, ...])
PLAIN = (torch.Tensor, torch.nn.Parameter, type(None))


def finished(tensor: Any) -> Any:
    """What an asynchronous collective put into `tensor`, once it is over; other tensors as they are.

    Tensor parallelism hands such tensors out: their address is null until somebody waits.
    """
    if type(tensor) in PLAIN:
        return tensor
    kind = async_collective_class()
    # In a traced graph the operator waits.
    if kind is None or torch.compiler.is_compiling() or not isinstance(tensor, kind):
        return tensor
    return _Wait.apply(tensor)


def as_stored(tensors: Tensors) -> Tensors:
    """The tensors, or None, with their sign in memory: z.conj().imag is a view that torch negates when it reads it.

    Kernels read memory. Operators need none of this: torch's dispatcher does it for them.
    """
    if not torch.compiler.is_compiling():
        for tensor in tensors:
            if tensor is not None and tensor.is_neg():
                make = getattr(type(tensors), "_make", tuple)  # a named tuple stays one
                return make(None if t is None else t.resolve_neg() for t in tensors)  # pyright: ignore[reportReturnType]
    return tensors


def without_memory(*tensors: Any) -> bool:
    """Whether any of the tensors is of a class that implements operators itself, such as FakeTensor."""
    return any(type(t) not in PLAIN and implements_operators(type(t)) for t in tensors)


class _Wait(torch.autograd.Function):
    """The tensor inside an AsyncCollectiveTensor."""

    @staticmethod
    def forward(_ctx: Any, tensor: Any) -> torch.Tensor:
        return tensor.trigger_wait().detach()

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad
