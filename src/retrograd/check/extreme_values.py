"""Extreme values: what an input of a case may hold instead of ordinary numbers. The same for any dtype and shape."""

from __future__ import annotations

from collections.abc import Callable

import torch

# As far from zero as activations get in training; float16 still reaches it.
_MEAN = 1e4
CELLS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
KINK = "kink"  # elements at points without a derivative: needs the reference, so the workbench makes it
NAMES = ("nan", "mean", "-mean", "1e4", "zero", "1e-6", "inf", "-inf", "constant", "100", "1e-3", "max/4")
LARGE = ("mean", "-mean", "1e4", "100", "max/4")
UNTRACKED = frozenset({*CELLS, KINK})  # of these nobody asks which numbers adding up meets
# Every element of whole numbers or of a mask: nothing is selected, all is ignored, all go to one place. Of other
# numbers with a range every element in this share of it: what is special about an end may be a small part of the whole.
ENDS = ("lowest", "highest")
_END = 1 / 16
# One element of other numbers with a range exactly at its end, where what is divided by or taken the logarithm of is 0.
EXACT_ENDS = {"low": 0.0, "high": 1.0}
EVERY_END = (*ENDS, *EXACT_ENDS)


def cell(shape: torch.Size) -> tuple[int, ...]:
    """The index of the one cell that is not finite, or at an end: the middle one."""
    return tuple(n // 2 for n in shape)


def _in_row(t: torch.Tensor, value: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The middle row replaced; of a vector the middle element."""
    out = t.clone()
    row = cell(t.shape)[:-1] if t.ndim > 1 else cell(t.shape)
    out[row] = value(out[row])
    return out


def at_end(shares: torch.Tensor, extreme: str | None) -> torch.Tensor:
    """Numbers between 0 and 1, all moved to one end of that range, or one put there, if `extreme` says so."""
    if extreme in EXACT_ENDS and shares.numel():
        shares[cell(shares.shape)] = EXACT_ENDS[extreme]
    if extreme not in ENDS:
        return shares
    return shares * _END if extreme == "lowest" else 1 - shares * _END


def alter(t: torch.Tensor, name: str) -> torch.Tensor:
    """`t` with the named extreme; `t` itself if it has no element or is not floating."""
    if not t.numel() or not t.is_floating_point():
        return t
    if name in CELLS:
        out = t.clone()
        out[cell(t.shape)] = CELLS[name]
        return out
    if name == "zero":
        return _in_row(t, torch.zeros_like)
    if name == "constant":
        return _in_row(t, lambda row: row.flatten()[0].expand_as(row))
    wide = t.double()
    if name in ("mean", "-mean"):
        return (wide + (_MEAN if name == "mean" else -_MEAN)).to(t.dtype)
    if name == "max/4":
        return (wide * (torch.finfo(t.dtype).max / 4 / wide.abs().max().clamp_min(1e-300))).to(t.dtype)
    return (wide * float(name)).to(t.dtype)
