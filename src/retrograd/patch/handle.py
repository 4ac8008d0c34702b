"""Handle of a patch: which modules changed their class, and how they get it back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any, Self

import torch

from retrograd.core.wording import some


@dataclass(frozen=True)
class Swap:
    """A module and its class before and after."""

    name: str
    module: torch.nn.Module
    before: type
    after: type


class Handle:
    """What was replaced. `undo()` puts it back; as a context manager it does so at the end of the block.

    Attributes:
        names: qualified names of the replaced modules.
        left: qualified name of each module that looks like one and was left, with the reason.
    """

    def __init__(
        self, kind: str, swaps: list[Swap], left: dict[str, str], options: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Replace the classes, set the options on each module and remember both; `kind` is what they are, in words."""
        self._kind, self._swaps, self._options = kind, swaps, options
        for swap in swaps:
            swap.module.__class__ = swap.after
            swap.module.__dict__.update(options)
        self.names = tuple(swap.name for swap in swaps)
        self.left = left

    def undo(self) -> None:
        """Give every module the class it had. A second call does nothing.

        Raises:
            RuntimeError: something else has changed a module's class since; nothing is undone.
        """
        for swap in self._swaps:
            if type(swap.module) is not swap.after:
                raise RuntimeError(
                    f"`{swap.name}` is a {type(swap.module).__name__} by now, expected {swap.after.__name__} as the "
                    "patch left it; undo what was done to it after the patch first"
                )
        while self._swaps:
            swap = self._swaps.pop()
            swap.module.__class__ = swap.before
            for name in self._options:
                swap.module.__dict__.pop(name, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __repr__(self) -> str:
        names: dict[str, list[str]] = {}
        for name, reason in self.left.items():
            names.setdefault(reason, []).append(name)
        left = "".join(f"; left {some(of, 2)}: {reason}" for reason, of in names.items())
        return f"<{len(self._swaps)} {self._kind} replaced{left}>"


def own_forward(name: str, module: torch.nn.Module) -> str:
    """Why a module that has `forward` as an attribute of its own is no matter of a change of class."""
    return (
        f"`{name}` has a forward of its own beside that of {type(module).__name__}, which a change of class would not "
        "touch; remove it first (accelerate and kernels hang hooks there)"
    )
