"""Whole numbers among floats: counts, rows and columns to read from, which no rounding changes."""

from __future__ import annotations

from typing import Any

import torch

from retrograd.check.operators import WHOLE, WHOLE_SUMS


def stays_whole(name: str, out: Any, args: tuple[Any, ...], unit: float) -> bool:
    """Whether these are sums or products of whole numbers that floats of this unit roundoff hold, in any order."""
    if name in WHOLE_SUMS:
        args = tuple(a for a in args if isinstance(a, torch.Tensor))  # others are dimensions
        terms = max(a.numel() for a in args)
    elif name in WHOLE:
        terms = 1
    else:
        return False
    return _whole(out, 1 / unit) and all(_whole(a, 1 / (unit * max(terms, 1))) for a in args)


def _whole(value: Any, largest: float) -> bool:
    """Whether a number, or each of a tensor, is whole and not too large."""
    if not isinstance(value, torch.Tensor):
        return isinstance(value, (int, float)) and value % 1 == 0
    if not value.numel() or not value.is_floating_point() or value.is_meta:
        return not value.is_complex()
    # A few numbers say enough of most tensors, and this runs at each addition: an index takes five times as long.
    strided = value.layout is torch.strided
    if (first := (value.as_strided((), ()) if strided else value[(0,) * value.ndim]).item()) and first % 1:
        return False
    few = value.flatten()[:: value.numel() // 16 + 1].tolist()
    if any(number % 1 for number in few):
        return False
    return bool(((value == value.trunc()) & (value.abs() <= largest)).all())
