"""torch.compile beside a recorder: compiled regions stay compiled and unseen, which is said; or they run eagerly."""

from __future__ import annotations

import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from retrograd.errors import UsageError

CHOICES = ("keep", "eager", "refuse")


class Compiled:
    """Notices compiled regions.

    Args:
        choice: "keep", "eager" or "refuse", as `retrograd.trace.record` describes.
        model: looked through for compiled modules now.

    Raises:
        UsageError: the choice is another one, or there are compiled modules and they are refused.
    """

    def __init__(self, choice: str, model: Any) -> None:
        if choice not in CHOICES:
            raise UsageError(f"`compiled` is {choice!r}, expected one of {', '.join(map(repr, CHOICES))}")
        self.choice, self._said = choice, False
        if model is not None and _has_compiled(model):
            self._found("the model has compiled modules")

    @property
    def in_frames(self) -> bool:
        """Whether generated code was among the callers of an operator."""
        return self._said

    @in_frames.setter
    def in_frames(self, found: bool) -> None:
        if found and not self._said:
            self._found("code that torch.compile generated ran")

    @property
    def in_nodes(self) -> bool:
        """Whether a compiled backward ran."""
        return self._said

    @in_nodes.setter
    def in_nodes(self, found: bool) -> None:
        if found and not self._said:
            self._found("a compiled backward ran")

    def look(self, tensor: torch.Tensor) -> None:
        """Notice a value that comes out of a compiled region."""
        if not self._said and tensor.grad_fn is not None and tensor.grad_fn.name().startswith("CompiledFunction"):
            self._found("a compiled forward ran")

    def stance(self) -> AbstractContextManager[Any]:
        """The context in which compiled functions run as chosen."""
        return torch.compiler.set_stance("force_eager") if self.choice == "eager" else nullcontext()

    def meta(self) -> dict[str, str]:
        """What the trace says of it."""
        if self.choice == "eager":
            return {"compiled": "functions compiled by torch.compile ran eagerly"}
        return {"compiled": f"not seen: {self._why}"} if self._said else {}

    def _found(self, why: str) -> None:
        self._said, self._why = True, why
        if self.choice == "eager":
            return
        if self.choice == "refuse":
            raise UsageError(f"{why}, and compiled='refuse'; pass compiled='eager' to record it operator by operator")
        kept = hasattr(TorchDispatchMode, "ignore_compile_internals")
        what = (
            "regions that torch.compile has compiled run as they are, and a dispatch mode cannot see the operators "
            "that were fused in them"
            if kept
            else f"torch {torch.__version__} runs compiled functions eagerly while a recorder is active"
        )
        warnings.warn(
            f"retrograd.trace: {why}: {what}; compiled='eager' (--compiled eager) runs and records them eagerly, which "
            "may change last bits",
            stacklevel=4,
        )


def _has_compiled(model: torch.nn.Module) -> bool:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    kinds = (dynamo.OptimizedModule,) if dynamo is not None else ()
    return any(isinstance(m, kinds) or getattr(m, "_compiled_call_impl", None) is not None for m in model.modules())
