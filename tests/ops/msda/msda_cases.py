"""Inputs for tests of deformable attention, their truth in float64 and the error that each element may have."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from retrograd.ops import ms_deform_attn
from retrograd.ops.msda import ms_deform_attn_reference

# Wide, tall, one column, one pixel: no two sizes equal, so that a swap of height and width shows.
LEVELS = [(7, 9), (5, 4), (3, 1), (1, 1)]
INPUTS = ("value", "sampling_locations", "attention_weights")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# For tests that compare bits of grad_value, which is added up in no fixed order on a GPU unless told.
SAME_BITS: dict[str, Any] = dict(deterministic=True) if DEVICE == "cuda" else {}
Case = dict[str, Any]


def make_inputs(
    levels: Sequence[tuple[int, int]] = LEVELS,
    dtype: torch.dtype = torch.float32,
    device: str = DEVICE,
    *,
    batch: int = 2,
    queries: int = 11,
    heads: int = 3,
    points: int = 3,
    channels: int = 8,
    beside: torch.dtype | None = None,
    align_corners: bool = False,
    seed: int = 7,
) -> Case:
    """Inputs whose points lie inside and up to two pixels outside of their levels, 0.1 pixels from every integer.

    Args:
        beside: dtype of locations and weights where it is not that of value. Rounding to 16 bits moves a point of
            these small levels by less than 0.1 pixels.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(*size: int) -> torch.Tensor:
        return torch.rand(size, generator=generator, dtype=torch.float64)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    shape = (batch, queries, heads, len(levels), points)
    size = torch.tensor(levels, dtype=torch.float64).view(-1, 2).flip(1)[:, None]  # [L, 1, 2] (width, height)
    x = (uniform(*shape, 2) * (size + 4)).floor() - 2 + 0.1 + 0.8 * uniform(*shape, 2)
    p = x / (size - 1).clamp_min(1) if align_corners else (x + 0.5) / size.clamp_min(1)
    pixels = sum(h * w for h, w in levels)
    kept = {
        "value": normal(batch, pixels, heads, channels).to(dtype),
        "sampling_locations": p.to(beside or dtype),
        "attention_weights": normal(*shape).to(beside or dtype),
        "grad_out": normal(batch, queries, heads, channels).to(dtype),
    }
    return {name: tensor.to(device) for name, tensor in kept.items()} | {"spatial_shapes": list(levels)}


def arguments(case: Case) -> tuple[Any, ...]:
    """The positional arguments of the op."""
    return case["value"], case["spatial_shapes"], case["sampling_locations"], case["attention_weights"]


def run(case: Case, *, frozen: Sequence[str] = (), **options: Any) -> dict[str, torch.Tensor]:
    """Output and gradients by name; arguments named in `frozen` require no gradient."""
    case = case | {name: case[name].detach().requires_grad_(name not in frozen) for name in INPUTS}
    out = ms_deform_attn(*arguments(case), **options)
    wanted = [case[name] for name in INPUTS if name not in frozen]
    grads = iter(torch.autograd.grad(out, wanted, case["grad_out"]))
    return {"out": out.detach()} | {name: next(grads) for name in INPUTS if name not in frozen}


def defined(case: Case, **options: Any) -> dict[str, torch.Tensor]:
    """The same by the reference, in the dtypes of the case."""
    leaves = case | {name: case[name].detach().requires_grad_() for name in INPUTS}
    out = ms_deform_attn_reference(*arguments(leaves), **options)
    grads = torch.autograd.grad(out, [leaves[name] for name in INPUTS], case["grad_out"])
    return {"out": out.detach(), **dict(zip(INPUTS, grads, strict=True))}


def truth(case: Case, **options: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """For each result its float64 value and the sum of magnitudes that float32 rounding errors scale with."""
    exact = case | {name: case[name].double() for name in (*INPUTS, "grad_out")}
    low = torch.float64 if case["value"].dtype == torch.float64 else torch.float32
    value = defined(exact, coordinates_in=low, **options)
    names = ("value", "attention_weights", "grad_out")
    size = exact | {name: exact[name].abs() for name in names}
    sizes = defined(size, coordinates_in=low, **options)
    # A slope is a difference of corners. Corners of one cell differ in the parity of column or row, so the pixels of
    # one parity alone give the part of one corner.
    slope = torch.zeros_like(sizes["sampling_locations"])
    pixels = _parity(case["spatial_shapes"]).to(slope.device)  # [S]
    for parity in range(4):
        part = size | {"value": size["value"] * (pixels == parity)[:, None, None]}
        slope += defined(part, coordinates_in=low, **options)["sampling_locations"].abs()
    return {name: (value[name], sizes[name]) for name in value} | {
        "sampling_locations": (value["sampling_locations"], slope)
    }


def _parity(levels: Sequence[tuple[int, int]]) -> torch.Tensor:
    """[S] 0 to 3."""
    grids = [torch.zeros(0), *(2 * (torch.arange(h) % 2)[:, None] + (torch.arange(w) % 2) for h, w in levels)]
    return torch.cat([grid.flatten() for grid in grids])


def assert_within_budget(
    got: Mapping[str, torch.Tensor],
    want: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    case: Case,
    further: Mapping[str, int] | None = None,
) -> None:
    """Hold each element to |error| <= u |value| + c 2^-24 size.

    u is the rounding unit of the result's dtype, spent once on storing. Inside, float32 operations cost 2^-24 each: c
    counts about 16 elementwise steps, the levels of a sum over C channels, and the terms of the longest sum: K for an
    output, every sample that may hit one pixel for grad_value. The last terms are half the distance between subnormals
    of the result, and what a step loses near 0: a subnormal, on a GPU a normal number, as additions there flush.
    """
    _, queries, heads, channels = case["grad_out"].shape
    terms = case["attention_weights"][0, 0, 0].numel() if queries and heads else 0
    for name, tensor in got.items():
        value, size = want[name]
        longest = {"out": terms, "value": queries * terms}.get(name, 0)
        steps = 16 + math.ceil(math.log2(max(channels, 1))) + longest + (further or {}).get(name, 0)
        info = torch.finfo(tensor.dtype)
        inner = torch.finfo(torch.float64 if tensor.dtype == torch.float64 else torch.float32)
        near_zero = inner.smallest_normal * (1.0 if tensor.is_cuda else inner.eps)
        budget = info.eps / 2 * value.abs() + info.smallest_normal * info.eps
        budget = budget + steps * (inner.eps / 2 * size + near_zero)
        assert tensor.shape == value.shape, name
        # `not <=` rather than `>`: a NaN has to fail.
        bad = ~((tensor.double() - value).abs() <= budget)
        assert not bad.any(), f"{name}: {int(bad.sum())} elements over budget, first {bad.nonzero()[0].tolist()}"
