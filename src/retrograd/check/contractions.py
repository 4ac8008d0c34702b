"""Products of matrices that a formula writes by elements, (q[:, :, None] * k[:, None] * decay).sum(-1): which sums are.

An op multiplies these as matrices, in tf32 it may be, beside others that its formula has by name.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import torch

from retrograd.check.operators import about

SUMS = {"sum", "mean"}
_MULTIPLYING = {"mul", "div"}
# What these make of a product has the same factors, up to zeros; other views than these have not, or are rare.
_LINEAR = {"neg", "clone", "_to_copy", "masked_fill", "tril", "triu", "where", "mul", "div"}
_VIEWS = {"expand", "permute", "transpose", "t", "slice", "select", "squeeze", "alias", "detach"}
_KEPT = "_retrograd_factors"  # of a tensor, which lives as long as it


def note(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
    """Keep with a result of an operator what it was multiplied from: of each factor, which dimensions it lacks.

    A factor is a tensor without memory, in the shape of the product: where its stride is 0 it is the same number.
    """
    if not isinstance(out, torch.Tensor) or not out.is_floating_point() or not args:
        return
    name, first = about(func).name, args[0]
    if name == "unsqueeze":  # a dimension of size 1 may be one that is lacked, or one of a single step
        _keep(out, [_lacking(func(f, args[1]), args[1]) for f in _factors(first)])
    elif name in _LINEAR:
        tensors = [t for t in args[:3] if isinstance(t, torch.Tensor) and t.is_floating_point() and t.ndim]
        _keep(out, [f for t in tensors for f in (_factors(t) if name in _MULTIPLYING else _known(t))])
    elif name in _VIEWS:
        _keep(out, [func(f, *args[1:], **kwargs) for f in _known(first)])
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
    has = [{d for d, stride in enumerate(f.stride()) if stride} for f in known]
    return any(a & b & summed and a - b - summed and b - a - summed for a, b in combinations(has, 2))


def _known(t: Any) -> tuple[torch.Tensor, ...]:
    return vars(t).get(_KEPT, ()) if isinstance(t, torch.Tensor) else ()


def _factors(t: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Those that are known of a tensor, or itself."""
    return _known(t) or (torch.empty_strided(t.shape, t.stride(), device="meta"),)


def _lacking(factor: torch.Tensor, dim: int) -> torch.Tensor:
    strides = list(factor.stride())
    strides[dim] = 0
    return factor.as_strided(factor.shape, strides)


def _keep(out: torch.Tensor, factors: list[torch.Tensor]) -> None:
    """Keep the different ones, if any lacks a dimension."""
    wide = {tuple(map(bool, f.stride())): f for f in (_spread(f, out.shape) for f in factors)}
    if any(0 in f.stride() for f in wide.values()):
        vars(out)[_KEPT] = tuple(wide.values())


def _spread(factor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A factor in the shape of a product; dimensions that it gets it lacks, of one step too."""
    wide, before = factor.expand(shape), len(shape) - factor.ndim
    return wide.as_strided(shape, (*[0] * before, *wide.stride()[before:])) if before else wide
