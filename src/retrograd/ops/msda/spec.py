"""Deformable attention that is computed, without its tensors: what every implementation is told. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MsdaSpec:
    """out[b, q, h] = sum over k of weights[b, q, h, k] * bilinear(the level of point k, locations[b, q, h, k]).

    Attributes:
        points: how many of the K points belong to each level, in the order of the levels; their sum is K.
        border: points outside are moved to the nearest pixel centre; False: outside there are zeros.
        align_corners: 0 and 1 are the centres of the outermost pixels; False: the outer edges of them.
        deterministic: grad_value is a sum in a fixed order, not atomic additions.
    """

    points: tuple[int, ...]
    border: bool = False
    align_corners: bool = False
    deterministic: bool = False
