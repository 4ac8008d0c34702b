"""Whether deformable attention is right, before its time is worth anything: its truth in float64."""

from __future__ import annotations

import torch

from retrograd.bench.deviation import Pieces, computed, deviations
from retrograd.bench.harness import Provider, Tensors
from retrograd.bench.msda.providers import LEAVES, RESULTS
from retrograd.bench.msda.shapes import Shape
from retrograd.ops.msda import ms_deform_attn_reference

# In units of 2^-24: sums of products, and for each pixel of the largest side what placing a point otherwise may cost.
# grid_sample at 2 p - 1 is off by 4e-7 in levels of up to 167 pixels, where this allows 6e-6.
_SUMS, _PLACE = 8, 0.25
_CHUNK_ELEMENTS = 2**24
# 16-bit atomics lose up to this in the sums of hundreds of terms; beyond it a term is missing or wrong.
_COARSE = 0.1


def truth(shape: Shape, inputs: Tensors, grads: Tensors) -> dict[str, torch.Tensor]:
    """Result and gradients in float64, points in the cells where float32 finds them; a few queries at a time."""
    value = inputs["value"].detach().double().requires_grad_()
    kept: dict[str, list[torch.Tensor]] = {name: [] for name in ("out", "grad_locations", "grad_weights")}
    total = torch.zeros_like(value)
    a_query = shape.batch * shape.heads * len(shape.levels) * shape.points * shape.channels
    step = max(_CHUNK_ELEMENTS // a_query, 1)
    for start in range(0, shape.queries, step):
        rows = slice(start, start + step)
        locations, weights = (inputs[name][:, rows].detach().double().requires_grad_() for name in LEAVES[1:])
        out = ms_deform_attn_reference(value, list(shape.levels), locations, weights, coordinates_in=torch.float32)
        found = torch.autograd.grad(out, (value, locations, weights), grads["out"][:, rows].double())
        total += found[0]
        for name, tensor in zip(kept, (out.detach(), *found[1:]), strict=True):
            kept[name].append(tensor)
    return {"grad_value": total} | {name: torch.cat(parts, dim=1) for name, parts in kept.items()}


def judged(provider: Provider, shape: Shape, inputs: Tensors, grads: Tensors, want: Tensors) -> tuple[str, str]:
    """(what is wrong, what is merely coarse), each "" if nothing.

    An error may be twice that of rounding the truth, plus what float32 costs: its sums, and the few roundings of a
    coordinate in which libraries differ. 16-bit results beyond that, yet within a tenth, are coarse: added in 16 bits.
    """
    got = computed(provider, LEAVES, RESULTS, inputs, grads)
    largest = max(side for level in shape.levels for side in level)
    pieces: Pieces = ((name, slice(None), tensor) for name, tensor in want.items())
    wrong, coarse = [], []
    for found in deviations(got, pieces, (_SUMS + _PLACE * largest) * 2.0**-24):
        if not found.excess <= 1:
            lenient = got[found.name].dtype.itemsize == 2 and found.relative <= _COARSE
            (coarse if lenient else wrong).append(str(found))
    return ", ".join(wrong), ", ".join(coarse)
