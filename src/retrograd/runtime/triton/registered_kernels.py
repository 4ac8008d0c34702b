"""Kernels that libraries have registered for CUDA in Python, run where nothing else hears of operators."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from retrograd.compat.torch_dispatch import HigherOrderOperator, implements_operators, resolved, until_dynamo_is_loaded
from retrograd.compat.torch_library import any_cuda_kernel, cuda_kernel


class _Registered(TorchDispatchMode):
    """Operators run the kernels that somebody has registered for CUDA in Python."""

    supports_higher_order_operators = True

    @until_dynamo_is_loaded
    @resolved
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        theirs = not isinstance(func, HigherOrderOperator) and not any(implements_operators(kind) for kind in types)
        if not theirs or (kernel := cuda_kernel(func)) is None:
            return func(*args, **kwargs)
        with self:  # it may call another one
            return kernel(*args, **kwargs)


def registered_kernels() -> AbstractContextManager[object]:
    """A context in which they run; it costs nothing where there are none."""
    return _Registered() if any_cuda_kernel() else nullcontext()
