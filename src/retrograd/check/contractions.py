"""Products of matrices that a formula writes by elements, (q[:, :, None] * k[:, None] * decay).sum(-1): which sums are.

An op multiplies these as matrices, in tf32 it may be, beside others that its formula has by name. So it does with the
rows of a formula that walks over steps, (state * k[:, t, :, None]).sum(-2), which are a matrix in all steps together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from retrograd.check.operators import about

SUMS = {"sum", "mean"}
_MULTIPLYING = {"mul", "div"}
# What these make of a product has the same factors, up to zeros; other views than these have not, or are rare.
_LINEAR = {"neg", "clone", "_to_copy", "masked_fill", "tril", "triu", "where", "mul", "div"}
_KEPT = "_retrograd_factors"  # of a tensor, which lives as long as it
_ROW = "_retrograd_row"  # of a tensor that is one step of another, or is computed from it
_JOINED = {"stack", "cat"}  # of what steps have made: no step any more

# Of a factor, in the shape of the product, along which dimensions it has numbers of its own.
_Factor = tuple[bool, ...]


class EinsumAsMatrices(TorchFunctionMode):
    """Has torch.einsum multiply matrices where all that it adds up has size 1, too, forward and backward.

    It would multiply element by element there, exactly, what an op's kernel multiplies in tf32 at any size: an
    attention with one key gives v with 11 bits.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(_with_a_term_of_zeros(*args) if func is torch.einsum else args), **(kwargs or {}))


def _with_a_term_of_zeros(equation: Any, *operands: Any) -> tuple[Any, ...]:
    """What einsum is called with; of two tensors that share nothing but dimensions of 1 to add up, one has 2."""
    tensors = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    names, arrow, kept = equation.replace(" ", "").partition("->") if isinstance(equation, str) else ("", "", "")
    indices = names.split(",")
    diagonal = any(len(set(index)) < len(index) for index in indices)
    if not arrow or len(tensors) != 2 or len(indices) != 2 or "." in names or diagonal:
        return equation, *operands
    summed = [name for name in indices[0] if name in indices[1] and name not in kept]
    places = [[index.index(name) for name in summed] for index in indices]
    if not summed or any(t.shape[d] != 1 for t, dims in zip(tensors, places, strict=True) for d in dims):
        return equation, *operands
    return equation, *(torch.cat([t, torch.zeros_like(t)], d[0]) for t, d in zip(tensors, places, strict=True))


def note(func: Any, args: Any, out: Any) -> None:
    """Keep with a result of an operator what it was multiplied from: of each factor, which dimensions it lacks.

    Flags alone: with tensors on "meta" for factors this took a fifth of a reference of a hundred thousand operators.
    """
    name = about(func).name
    if name == "unbind":
        for row in out:
            vars(row)[_ROW] = True
    if not isinstance(out, torch.Tensor) or not out.is_floating_point() or not args:
        return
    first = args[0]
    if name == "select" or (name not in _JOINED and any(map(_is_row, args[:2]))):
        vars(out)[_ROW] = True
    if name == "unsqueeze":  # a dimension of size 1 may be one that is lacked, or one of a single step
        at = args[1] % out.ndim
        _keep(out, [((*f[:at], False, *f[at:]), row) for f, row in _factors(first).items()])
    elif name in _LINEAR:
        tensors = [t for t in args[:3] if isinstance(t, torch.Tensor) and t.is_floating_point() and t.ndim]
        factors = _factors if name in _MULTIPLYING else _known
        _keep(out, [(_expanded(f, t.shape, out.shape), row) for t in tensors for f, row in factors(t).items()])
    elif name in _VIEWS:
        if known := _known(first):
            _keep(out, [(_VIEWS[name](f, first.shape, out.shape, *args[1:]), row) for f, row in known.items()])
    elif name.endswith("_"):
        vars(out).pop(_KEPT, None)


def contracts(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a sum is a product of matrices: over what two factors have, either lacking what the other has.

    A factor that is a row has another dimension, that of the steps.
    """
    known = _known(args[0]) if name in SUMS else {}
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    if len(known) < 2 or dims is None:
        return False
    rank = args[0].ndim
    summed = {d % rank for d in ([dims] if isinstance(dims, int) else dims)}
    has = [({d for d, own in enumerate(f) if own}, row) for f, row in known.items()]
    return any(
        a & b & summed and (row_a or a - b - summed) and (row_b or b - a - summed)
        for (a, row_a), (b, row_b) in combinations(has, 2)
    )


def _is_row(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and _ROW in vars(t)


def _known(t: Any) -> dict[_Factor, bool]:
    """Factors, each with whether it is a row."""
    return vars(t).get(_KEPT, {}) if isinstance(t, torch.Tensor) else {}


def _factors(t: torch.Tensor) -> dict[_Factor, bool]:
    """Those that are known of a tensor, or itself."""
    return _known(t) or {tuple(map(bool, t.stride())): _is_row(t)}


def _keep(out: torch.Tensor, factors: Sequence[tuple[_Factor, bool]]) -> None:
    """Keep the factors, if any lacks a dimension."""
    if not all(all(f) for f, _ in factors):
        rows = {f for f, row in factors if row}
        vars(out)[_KEPT] = {f: f in rows for f, _ in factors}


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
