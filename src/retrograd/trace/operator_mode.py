"""Dispatch mode that hands each operator to a function, those inside of tensors that wrap others too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from retrograd.compat.torch_dispatch import resolved
from retrograd.trace.observer import is_wrapper_subclass


class OperatorMode(TorchDispatchMode):
    """Hands operators to `run`, which calls them with their arguments and returns what they do."""

    supports_higher_order_operators = True

    def __init__(self, run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._run = run

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled regions stay compiled: to look on changes no result."""
        return True

    @resolved
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Wrapper subclasses (DTensor) dispatch first, so that the operators inside them are seen.
        if types and any(is_wrapper_subclass(t) for t in types):
            return NotImplemented
        return self._run(func, args, kwargs or {})
