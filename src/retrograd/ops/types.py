"""Types that all ops share: which implementation runs."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Impl(Enum):
    """An implementation of an op."""

    TRITON = "triton"
    TORCH = "torch"


def resolve_impl(impl: str | Impl | None, device: torch.device) -> Impl:
    """The implementation to run on `device`; None picks triton on CUDA and torch elsewhere.

    Raises:
        ValueError: `impl` is neither None, an `Impl` nor the value of one. An explicit choice is returned
            as it is.
    """
    if impl is None:
        return Impl.TRITON if device.type == "cuda" else Impl.TORCH
    try:
        return Impl(impl)
    except ValueError:
        names = ", ".join(repr(member.value) for member in Impl)
        raise ValueError(f"`impl` is {impl!r}, expected one of {names}, or None to choose by device") from None
