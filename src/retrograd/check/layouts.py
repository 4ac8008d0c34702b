"""Memory layouts: the same values at other strides and offsets. What lies between the values is NaN."""

from __future__ import annotations

import torch

from retrograd.check.schema import Case

# These change the values too (one slice repeated), so they need a truth of their own.
REPEATING = ("expanded", "scalar")


def applicable(ndim: int) -> tuple[str, ...]:
    """The layouts that differ from "contiguous" for a tensor of this rank."""
    flat = ("offset", "sliced", "expanded") if ndim else ()
    return ("transposed", "rows", *flat, "scalar") if ndim > 1 else flat


def repeat_values(t: torch.Tensor, layout: str) -> torch.Tensor:
    """The values a repeating layout stands for, as a contiguous tensor; `t` itself for the other layouts."""
    if layout not in REPEATING or not t.numel() or not t.ndim:
        return t
    dims = range(t.ndim) if layout == "scalar" else range(1)
    for dim in dims:
        t = t.narrow(dim, 0, 1).expand_as(t)
    return t.contiguous()


def _gapped(t: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    gap = float("nan") if t.is_floating_point() or t.is_complex() else 0
    return torch.full(shape, gap, dtype=t.dtype, device=t.device)


def lay_out(t: torch.Tensor, layout: str) -> torch.Tensor:
    """A tensor equal to `t` with the named layout; `t` must already repeat for a repeating one.

    Contiguous where a tensor of its rank has no such layout, as one of several outputs may have.
    """
    if layout not in applicable(t.ndim) or not t.numel():
        return t.contiguous()
    if layout in REPEATING:
        for dim in range(t.ndim) if layout == "scalar" else range(1):
            t = t.narrow(dim, 0, 1).expand_as(t)
        return t
    if layout == "transposed":
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "offset":  # one element off the allocator's alignment
        out = _gapped(t, (t.numel() + 1,))[1:].view(t.shape)
    elif layout == "sliced":
        out = _gapped(t, (*t.shape[:-1], 2 * t.shape[-1]))[..., ::2]
    else:  # "rows": part of a wider matrix
        out = _gapped(t, (*t.shape[:-1], t.shape[-1] + 3))[..., : t.shape[-1]]
    return out.copy_(t)


def without_strides(case: Case) -> Case:
    """The case without the layouts that leave its values as they are: what a truth depends on."""
    return case.but(layouts=tuple((k, v) for k, v in case.layouts if v in REPEATING)) if case.layouts else case
