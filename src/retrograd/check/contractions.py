"""Products of matrices that a formula writes by elements, (q[:, :, None] * k[:, None] * decay).sum(-1): which sums are.

An op multiplies these as matrices, in tf32 it may be, beside others that its formula has by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import combinations
from typing import Any

import torch

from retrograd.check.operators import about

SUMS = {"sum", "mean"}
_MULTIPLYING = {"mul", "div"}
# What these make of a product has the same factors, up to zeros; other views than these have not, or are rare.
_LINEAR = {"neg", "clone", "_to_copy", "masked_fill", "tril", "triu", "where", "mul", "div"}
_KEPT = "_retrograd_factors"  # of a tensor, which lives as long as it

# Of a factor, in the shape of the product, along which dimensions it has numbers of its own.
_Factor = tuple[bool, ...]


def note(func: Any, args: Any, out: Any) -> None:
    """Keep with a result of an operator what it was multiplied from: of each factor, which dimensions it lacks.

    Flags alone: with tensors on "meta" for factors this took a fifth of a reference of a hundred thousand operators.
    """
    if not isinstance(out, torch.Tensor) or not out.is_floating_point() or not args:
        return
    name, first = about(func).name, args[0]
    if name == "unsqueeze":  # a dimension of size 1 may be one that is lacked, or one of a single step
        at = args[1] % out.ndim
        _keep(out, {(*f[:at], False, *f[at:]) for f in _factors(first)})
    elif name in _LINEAR:
        tensors = [t for t in args[:3] if isinstance(t, torch.Tensor) and t.is_floating_point() and t.ndim]
        factors = _factors if name in _MULTIPLYING else _known
        _keep(out, {_expanded(f, t.shape, out.shape) for t in tensors for f in factors(t)})
    elif name in _VIEWS:
        if known := _known(first):
            _keep(out, {_VIEWS[name](f, first.shape, out.shape, *args[1:]) for f in known})
    elif name.endswith("_"):
        vars(out).pop(_KEPT, None)


def contracts(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a sum is a product of matrices: over what two factors have, either lacking what the other has."""
    known = _known(args[0]) if name in SUMS else ()
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    if len(known) < 2 or dims is None:
        return False
    rank = args[0].ndim
    summed = {d % rank for d in ([dims] if isinstance(dims, int) else dims)}
    has = [{d for d, own in enumerate(f) if own} for f in known]
    return any(a & b & summed and a - b - summed and b - a - summed for a, b in combinations(has, 2))


def _known(t: Any) -> Collection[_Factor]:
    return vars(t).get(_KEPT, ()) if isinstance(t, torch.Tensor) else ()


def _factors(t: torch.Tensor) -> Collection[_Factor]:
    """Those that are known of a tensor, or itself."""
    return _known(t) or (tuple(map(bool, t.stride())),)


def _keep(out: torch.Tensor, factors: set[_Factor]) -> None:
    """Keep the factors, if any lacks a dimension."""
    if not all(map(all, factors)):
        vars(out)[_KEPT] = factors


def _expanded(factor: _Factor, shape: torch.Size, to: torch.Size, *_: Any) -> _Factor:
    """A factor in the shape of a product; dimensions that it gets it lacks, of one step too."""
    if shape == to:
        return factor
    new = len(to) - len(shape)
    own = (has and (size > 1 or size == wide) for has, size, wide in zip(factor, shape, to[new:], strict=True))
    return (*[False] * new, *own)


def _permuted(factor: _Factor, shape: torch.Size, to: torch.Size, dims: Sequence[int]) -> _Factor:
    return tuple(factor[d] for d in dims)


def _transposed(factor: _Factor, shape: torch.Size, to: torch.Size, a: int = 0, b: int = -1) -> _Factor:
    flags = list(factor)
    if flags:
        flags[a], flags[b] = flags[b], flags[a]
    return tuple(flags)


def _selected(factor: _Factor, shape: torch.Size, to: torch.Size, dim: int, *_: Any) -> _Factor:
    at = dim % len(shape)
    return factor[:at] + factor[at + 1 :]


def _squeezed(factor: _Factor, shape: torch.Size, to: torch.Size, dims: int | Sequence[int] | None = None) -> _Factor:
    rank = len(shape)
    asked = range(rank) if dims is None else {d % rank for d in ([dims] if isinstance(dims, int) else dims)}
    return tuple(has for d, (has, size) in enumerate(zip(factor, shape, strict=True)) if size != 1 or d not in asked)


def _alike(factor: _Factor, *_: Any) -> _Factor:
    return factor


_VIEWS: dict[str, Callable[..., _Factor]] = {
    "expand": _expanded, "permute": _permuted, "transpose": _transposed, "t": _transposed, "select": _selected,
    "squeeze": _squeezed, "slice": _alike, "alias": _alike, "detach": _alike,
}  # fmt: skip
