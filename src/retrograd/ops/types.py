"""Types that all ops share: which implementation runs."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Impl(Enum):
    """An implementation of an op."""

    TRITON = "triton"
    CUDA = "cuda"
    NATIVE = "native"
    TORCH = "torch"


# Every op has these; CUDA C++ of its own has only who says so.
_COMMON = (Impl.TRITON, Impl.NATIVE, Impl.TORCH)


def resolve_impl(
    impl: str | Impl | None,
    device: torch.device,
    *,
    native: Callable[[], bool] = lambda: False,
    among: tuple[Impl, ...] = _COMMON,
) -> Impl:
    """The implementation to run on `device`; None picks triton on CUDA, native on CPU where it applies, else torch.

    Args:
        impl: None, an `Impl` or the value of one. An explicit choice is returned as it is.
        device: where the tensors are.
        native: whether native code applies to this call; asked only where it would be picked.
        among: implementations that the op has.

    Raises:
        ValueError: `impl` is something else.
    """
    if impl is None:
        if device.type == "cuda":
            return Impl.TRITON
        return Impl.NATIVE if device.type == "cpu" and native() else Impl.TORCH
    for member in among:
        if impl in (member, member.value):
            return member
    names = ", ".join(repr(member.value) for member in among)
    name = impl.value if isinstance(impl, Impl) else impl
    raise ValueError(f"`impl` is {name!r}, expected one of {names}, or None to choose by device")
