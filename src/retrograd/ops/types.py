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
    NATIVE = "native"
    TORCH = "torch"


def resolve_impl(impl: str | Impl | None, device: torch.device, *, native: Callable[[], bool] = lambda: False) -> Impl:
    """The implementation to run on `device`; None picks triton on CUDA, native on CPU where it applies, else torch.

    Args:
        impl: None, an `Impl` or the value of one. An explicit choice is returned as it is.
        device: where the tensors are.
        native: whether native code applies to this call; asked only where it would be picked.

    Raises:
        ValueError: `impl` is something else.
    """
    if impl is None:
        if device.type == "cuda":
            return Impl.TRITON
        return Impl.NATIVE if device.type == "cpu" and native() else Impl.TORCH
    try:
        return Impl(impl)
    except ValueError:
        names = ", ".join(repr(member.value) for member in Impl)
        raise ValueError(f"`impl` is {impl!r}, expected one of {names}, or None to choose by device") from None
