"""Norms of a model, replaced in place: a module keeps its identity, parameters and hooks and changes its class."""

# torch types attributes of modules as Tensor or Module.
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportReturnType=false

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache
from typing import Any, Unpack

import torch

from retrograd.nn.norm import LayerNorm, NormOptions, RMSNorm, check_options
from retrograd.patch import recognition
from retrograd.patch.handle import Handle, Swap, own_forward
from retrograd.patch.recognition import LayerLike, NormLike, RmsLike

_OURS: dict[type, type] = {torch.nn.RMSNorm: RMSNorm, torch.nn.LayerNorm: LayerNorm}


def norms(
    model: torch.nn.Module,
    also: Mapping[type | str, RmsLike | LayerLike] | None = None,
    *,
    recognise: bool = True,
    **options: Unpack[NormOptions],
) -> Handle:
    """Replace the norms of a model by this project's, in place.

    Replaced are torch.nn.RMSNorm and torch.nn.LayerNorm, and modules of other classes that look like a norm (no
    children, "norm" in the name of the class) and compute one: random rows of several scales through the module and
    through ours, in float32 and bfloat16, forward and backward, have to agree within rounding. What looks like a norm
    and was left is in `left` of the handle, with the reason. Parameters, hooks, training mode and the modules
    themselves stay the same objects, and the new classes are subclasses of the old, so optimisers, state_dict and
    isinstance see no difference.

    Args:
        model: any module, itself included.
        also: classes, by class or by name, that are to be replaced whatever they are called, and how to read them:
            {"Scale": RmsLike(eps="eps", weight_offset=1.0, promotes=False)}. They are run beside ours like the others.
        recognise: Look for norms of other libraries. False replaces torch's own and those in `also`.
        options: set on every replaced module, see `retrograd.nn.norm.NormOptions`.

    Returns:
        A handle that knows what was replaced and what was left, and undoes it.

    Raises:
        TypeError: an option is unknown or belongs into `also`.
        ValueError: no module is of a class that `also` names, one that is lacks eps or computes something else than
            `also` says, or has a forward of its own, as may a norm of torch; nothing is replaced.

    Numerics: y is rounded once, where Llama's own code rounds before and after the multiplication by the weight.
    """
    check_options(options)
    if "weight_offset" in options:
        raise TypeError("`weight_offset` is a matter of each class, expected in RmsLike(weight_offset=...) of `also`")
    also = also or {}
    _check_names(model, also)
    swaps: list[Swap] = []
    left: dict[str, str] = {}
    known: dict[Any, NormLike | str] = {}
    for name, module in model.named_modules():
        target = _target(name, module, also, known if recognise else None)
        if isinstance(target, str):
            left[name] = target
        elif target is not None:
            swaps.append(Swap(name, module, type(module), target))
    return Handle("norms", swaps, left, options)


def _check_names(model: torch.nn.Module, also: Mapping[type | str, NormLike]) -> None:
    """Raise ValueError for a name in `also` that no module's class has."""
    kinds = {type(module).__name__ for module in model.modules()}
    for name in also:
        if isinstance(name, str) and name not in kinds:
            near = difflib.get_close_matches(name, kinds, n=1) or sorted(k for k in kinds if "norm" in k.lower())
            raise ValueError(
                f"`also` names {name!r}, and no module of the model is of such a class; "
                f"expected one of its classes, such as {', '.join(near) or ', '.join(sorted(kinds))}"
            )


def _target(
    name: str, module: torch.nn.Module, also: Mapping[type | str, NormLike], known: dict[Any, NormLike | str] | None
) -> type | str | None:
    """The class that replaces the module's, why it is left, or None where it is no matter of ours.

    `known` has what modules of the same attributes are; None if norms of other libraries are not looked for.
    """
    kind = type(module)
    stated = also.get(kind, also.get(kind.__name__))
    if issubclass(kind, (_Like, *_OURS.values())):
        return None
    if kind in _OURS or stated is not None:
        if "forward" in module.__dict__:
            raise ValueError(own_forward(name, module))
        if stated is None:
            return _OURS[kind]
        _check_stated(name, module, stated)
        return _like_class(kind, stated)
    if known is None or not recognition.looks_like_norm(module):
        return None
    if "forward" in module.__dict__:
        return own_forward(name, module)
    key = recognition.same_by_attributes(module)
    like = recognition.recognise(module) if key is None or key not in known else known[key]
    if key is not None:
        known[key] = like
    return like if isinstance(like, str) else _like_class(kind, like)


def _check_stated(name: str, module: torch.nn.Module, like: NormLike) -> None:
    """Raise ValueError where the module is not what `also` says."""
    kind = type(module).__name__
    for needed in ("weight", like.eps):
        if not hasattr(module, needed):
            raise ValueError(
                f"`{name}` is a {kind} without `{needed}`, expected a norm with `weight` and `{like.eps}`; "
                f"say where its eps is with {type(like).__name__}(eps=...)"
            )
    reasons = list(recognition.explained(module, like))
    if reasons:
        raise ValueError(f"`{name}`, a {kind}, is not what `also` says, {like}: {'; '.join(reasons)}")


_OPTIONS = tuple(sorted(NormOptions.__optional_keys__ - {"weight_offset"}))


class _Like(torch.nn.Module):
    """First base of a class that is made for a norm of another library; the norm's own class is the second."""

    retrograd_like: NormLike = RmsLike()

    def forward(self, *args: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        """y of the one argument, whatever it is called, with the options that the patch set on this module."""
        (x,) = (*args, *named.values())
        # Not through __dict__, whose items torch.compile cannot follow before torch 2.13.
        options: dict[str, Any] = {name: getattr(self, name) for name in _OPTIONS if hasattr(self, name)}
        return recognition.compute(x, self, self.retrograd_like, **options)


@cache
def _like_class(kind: type, like: NormLike) -> type:
    """A subclass of `kind` of the same name whose forward is ours; one per class, so that compiled code is shared."""
    return type(kind.__name__, (_Like, kind), {"retrograd_like": like, "__module__": kind.__module__})
