"""Compiled regions beside a recorder: they stay compiled and unseen, with a warning, or run eagerly."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from retrograd.compat.torch_dynamo import has_compiled_modules
from retrograd.errors import UsageError
from retrograd.trace.schema import NOT_SEEN

FORWARD_CODE_RAN = "code that torch.compile generated ran"
BACKWARD_RAN = "a compiled backward ran"
UPDATE_RAN = "an optimizer's step ran without operators, as torch.compile makes it"
CHOICES = ("keep", "eager", "refuse")
# Whether compiled regions stay compiled below a mode that asks for it; torch without this name runs them eagerly there.
STAY_COMPILED = hasattr(TorchDispatchMode, "ignore_compile_internals")


class CompiledRegions:
    """Notices regions that torch.compile has compiled.

    Args:
        choice: "keep", "eager" or "refuse", as `retrograd.trace.record` describes.
        model: looked through for compiled modules now.

    Raises:
        UsageError: the choice is another one, or there are compiled modules and they are refused.
    """

    def __init__(self, choice: str, model: Any) -> None:
        if choice not in CHOICES:
            raise UsageError(f"`compiled` is {choice!r}, expected one of {', '.join(map(repr, CHOICES))}")
        self.choice, self._why = choice, ""
        if model is not None and has_compiled_modules(model):
            self.notice("the model has compiled modules")

    def check_tensor(self, tensor: torch.Tensor) -> None:
        """Notice a value that comes out of a compiled region."""
        if self._why:
            return
        try:
            node = tensor.grad_fn
        except RuntimeError:  # a view made under no_grad whose base has changed since: its node cannot be asked for
            return
        if node is not None and node.name().startswith("CompiledFunction"):
            self.notice("a compiled forward ran")

    def updated(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Notice an optimizer that has made a step of which no operator was recorded; the parameters that it wrote."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if parameters:
            self.notice(UPDATE_RAN)
        return [getattr(p, "_local_tensor", p) for p in parameters]

    def stance(self) -> AbstractContextManager[Any]:
        """The context in which compiled functions run as chosen."""
        return torch.compiler.set_stance("force_eager") if self.choice == "eager" else nullcontext()

    def meta(self) -> dict[str, str]:
        """The entry for `Trace.meta`."""
        if self.choice == "eager":
            return {"compiled": "functions compiled by torch.compile ran eagerly"}
        return {"compiled": f"{NOT_SEEN}: {self._why}"} if self._why else {}

    def notice(self, why: str) -> None:
        """Warn or refuse, the first time, since a compiled region ran."""
        if self._why:
            return
        self._why = why
        if self.choice == "eager":
            return
        if self.choice == "refuse":
            raise UsageError(f"{why}, and compiled='refuse'; pass compiled='eager' to record it operator by operator")
        consequence = (
            "regions that torch.compile has compiled run as they are, and a dispatch mode cannot see the operators "
            "that were fused in them"
            if STAY_COMPILED
            else f"torch {torch.__version__} runs compiled functions eagerly while a recorder is active"
        )
        warnings.warn(
            f"retrograd.trace: {why}: {consequence}; compiled='eager' (--compiled eager) runs and records them "
            "eagerly, which may change last bits",
            stacklevel=4,
        )
