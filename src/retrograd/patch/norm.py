"""Norms of a model, replaced in place: a module keeps its identity, parameters and hooks and changes its class."""

# torch types attributes of modules as Tensor or Module.
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportReturnType=false

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Any, Self, Unpack

import torch

from retrograd.nn.norm import LayerNorm, NormOptions, RMSNorm, check_options
from retrograd.ops import rms_norm

_OURS: dict[type, type] = {torch.nn.RMSNorm: RMSNorm, torch.nn.LayerNorm: LayerNorm}


@dataclass(frozen=True)
class RmsLike:
    """How an RMSNorm that is not torch's own is to be read.

    Attributes:
        eps: name of the attribute that holds eps.
        weight_offset: added to the weight: 1.0 for Gemma.
        promotes: y has the promoted dtype of x and weight (Llama multiplies by the weight last), else that of x.
    """

    eps: str = "variance_epsilon"
    weight_offset: float = 0.0
    promotes: bool = True


@dataclass(frozen=True)
class _Swap:
    name: str
    module: torch.nn.Module
    before: type
    after: type


class Handle:
    """What was replaced. `undo()` puts it back; as a context manager it does so at the end of the block.

    Attributes:
        names: qualified names of the replaced modules.
    """

    def __init__(self, swaps: list[_Swap], options: NormOptions) -> None:
        self._swaps, self._options = swaps, options
        self.names = tuple(swap.name for swap in swaps)

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
        return f"<{len(self._swaps)} norms replaced>"


def norms(
    model: torch.nn.Module, also: Mapping[type | str, RmsLike] | None = None, **options: Unpack[NormOptions]
) -> Handle:
    """Replace the norms of a model by this project's, in place.

    Replaced are modules whose class is exactly torch.nn.RMSNorm or torch.nn.LayerNorm, not a subclass, and those in
    `also`. Parameters, hooks, training mode and the modules themselves stay the same objects, and the new classes
    are subclasses of the old, so optimisers, state_dict and isinstance see no difference.

    Args:
        model: any module, itself included.
        also: other RMSNorm classes with a `weight` and no bias, by class or by name, and how to read them:
            {"LlamaRMSNorm": RmsLike(), "GemmaRMSNorm": RmsLike(eps="eps", weight_offset=1.0, promotes=False)}.
        options: set on every replaced module, see `retrograd.nn.norm.NormOptions`.

    Returns:
        A handle that knows what was replaced and undoes it.

    Raises:
        TypeError: an option is unknown or belongs into `also`.
        ValueError: a module of a class in `also` lacks weight or eps, or a module has a forward of its own; nothing
            is replaced.

    Numerics: y is rounded once, where Llama's own code rounds before and after the multiplication by the weight.
    """
    check_options(options)
    if "weight_offset" in options:
        raise TypeError("`weight_offset` is a matter of each class, expected in RmsLike(weight_offset=...) of `also`")
    swaps = []
    for name, module in model.named_modules():
        target = _target(name, module, also or {})
        if target is not None:
            swaps.append(_Swap(name, module, type(module), target))
    for swap in swaps:
        swap.module.__class__ = swap.after
        swap.module.__dict__.update(options)
    return Handle(swaps, options)


def _target(name: str, module: torch.nn.Module, also: Mapping[type | str, RmsLike]) -> type | None:
    """The class that replaces the module's, None to leave it."""
    kind = type(module)
    like = also.get(kind, also.get(kind.__name__))
    if kind not in _OURS and (like is None or issubclass(kind, _Like)):
        return None
    if "forward" in module.__dict__:
        raise ValueError(
            f"`{name}` has a forward of its own beside that of {kind.__name__}, which a change of class would not "
            "touch; remove it first (accelerate and kernels hang hooks there)"
        )
    if kind in _OURS:
        return _OURS[kind]
    for needed in ("weight", like.eps):
        if not hasattr(module, needed):
            raise ValueError(
                f"`{name}` is a {kind.__name__} without `{needed}`, expected a norm with `weight` and `{like.eps}`; "
                "say where its eps is with RmsLike(eps=...)"
            )
    return _like_class(kind, like)


_OPTIONS = tuple(sorted(NormOptions.__optional_keys__))


class _Like(torch.nn.Module):
    """First base of a class that is made for a norm in `also`; the norm's own class is the second."""

    retrograd_like = RmsLike()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """y, with the options that the patch set on this module."""
        like = self.retrograd_like
        # Not through __dict__, whose items torch.compile cannot follow before torch 2.13.
        options: dict[str, Any] = {name: getattr(self, name) for name in _OPTIONS if hasattr(self, name)}
        if like.promotes:
            options.setdefault("out_dtype", torch.promote_types(hidden_states.dtype, self.weight.dtype))
        eps = float(getattr(self, like.eps))
        return rms_norm(hidden_states, self.weight, eps=eps, weight_offset=like.weight_offset, **options)


@cache
def _like_class(kind: type, like: RmsLike) -> type:
    """A subclass of `kind` of the same name whose forward is ours; one per class, so that compiled code is shared."""
    return type(kind.__name__, (_Like, kind), {"retrograd_like": like, "__module__": kind.__module__})
