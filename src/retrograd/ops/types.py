"""Types that all ops share: which implementations there are, and which of them runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from types import ModuleType

import torch

from retrograd.errors import MissingExtraError
from retrograd.runtime.rehearsal import rehearsed


class Impl(Enum):
    """An implementation of an op."""

    TRITON = "triton"
    CUDA = "cuda"
    NATIVE = "native"
    TORCH = "torch"


def inner_dtype(tensor: torch.Tensor) -> torch.dtype:
    """What an op of `tensor` computes in: its coordinates, sums and statistics."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


_MODULES = {Impl.TRITON: "triton", Impl.CUDA: "cuda", Impl.NATIVE: "cpu", Impl.TORCH: "torch_impl"}


@dataclass(frozen=True)
class Family:
    """An op with its implementations, which are imported when they are first asked for."""

    package: str  # where they are
    tensor: str  # the argument whose dtype and device count
    impls: tuple[Impl, ...]  # those that the op has
    doubles: tuple[Impl, ...]  # those that compute in float64

    def module(self, impl: Impl) -> ModuleType:
        """The package or module of an implementation; MissingExtraError if it needs Triton, which is not installed."""
        try:
            return import_module(f"{self.package}.{_MODULES[impl]}")
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != "triton":
                raise
            raise MissingExtraError("triton", "triton", f"impl={impl.value!r}") from None

    def choose(self, impl: str | Impl | None, dtype: torch.dtype, device: torch.device) -> Impl:
        """The implementation to run on `device`; None picks triton on CUDA, native on CPU where it can run, else torch;
        where a GPU's launches are rehearsed on the CPU, what CUDA would run.

        Raises:
            TypeError: the chosen implementation does not compute in the dtype.
            ValueError: impl is unknown, or does not run on the device.
            RuntimeError: impl="native" cannot be built here.
        """
        double = dtype == torch.float64
        if impl is None:
            if (device.type == "cuda" or rehearsed()) and not double:
                return Impl.TRITON
            native = device.type == "cpu" and (not double or Impl.NATIVE in self.doubles)
            return Impl.NATIVE if native and self._why_no_native() is None else Impl.TORCH
        chosen = next((member for member in self.impls if impl in (member, member.value)), None)
        if chosen is None:
            names = ", ".join(repr(member.value) for member in self.impls)
            name = impl.value if isinstance(impl, Impl) else impl
            raise ValueError(f"`impl` is {name!r}, expected one of {names}, or None to choose by device")
        if double and chosen not in self.doubles:
            raise TypeError(
                f"`{self.tensor}` has dtype torch.float64, expected float32, float16 or bfloat16 for "
                f"impl={chosen.value!r} (its kernels compute in float32); use impl='torch'"
            )
        needed = {Impl.CUDA: "cuda", Impl.NATIVE: "cpu"}.get(chosen, device.type)
        if device.type != needed:
            other = "native" if needed == "cuda" else "triton"
            raise ValueError(
                f"`{self.tensor}` is on {device}, expected {needed} for impl={chosen.value!r}; use impl={other!r} or "
                "'torch'"
            )
        if chosen is Impl.NATIVE and (reason := self._why_no_native()) is not None:
            raise RuntimeError(f"impl='native' cannot run here: {reason}; use impl='torch'")
        return chosen

    def _why_no_native(self) -> str | None:
        """Why native code cannot run; open while torch.compile traces: the operator asks when it runs."""
        if torch.compiler.is_compiling():
            return None
        why_not: Callable[[], str | None] = self.module(Impl.NATIVE).why_not
        return why_not()
