"""Sizes that are measured, by name or spelled out, and the bytes that they must move. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from retrograd.errors import UsageError

_SPELLED = re.compile(r"B(\d+)-Q(\d+)-H(\d+)-C(\d+)-P(\d+)-(\d+x\d+(?:\+\d+x\d+)*)")
_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Shape:
    """B batch, levels (height, width), Q queries, H heads, C channels a head, P points a level.

    Attributes:
        pixels: each query is a pixel of a level and its points lie 2 pixels (standard deviation) around it, as in an
            encoder; else points are uniform over the levels.
    """

    batch: int
    levels: tuple[tuple[int, int], ...]
    queries: int
    heads: int = 8
    channels: int = 32
    points: int = 4
    pixels: bool = False

    @property
    def size(self) -> int:
        """S, pixels of all levels."""
        return sum(h * w for h, w in self.levels)

    def useful_bytes(self, direction: str, dtype: str, beside: str) -> int:
        """The least that "fwd" or "bwd" must move, each number once.

        Forward: value, locations, weights, out. Backward: the same with grad_out for out, and the gradients of the
        first three. Of value only pixels that are needed are read, at most four a sample; its gradient is written
        in full.

        Args:
            direction: "fwd" or "bwd".
            dtype: of value and out.
            beside: of locations and weights.
        """
        wide, narrow = _WIDTHS[dtype], _WIDTHS[beside]
        pixel = self.batch * self.heads * self.channels * wide
        read = pixel * sum(min(h * w, 4 * self.queries * self.points) for h, w in self.levels)
        places = 3 * self.batch * self.queries * self.heads * len(self.levels) * self.points * narrow
        out = pixel * self.queries
        return read + places + out + (pixel * self.size + places if direction == "bwd" else 0)


def _encoder(batch: int, levels: tuple[tuple[int, int], ...]) -> Shape:
    return Shape(batch, levels, sum(h * w for h, w in levels), pixels=True)


def _squares(*sides: int) -> tuple[tuple[int, int], ...]:
    return tuple((side, side) for side in sides)


# A feature pyramid of an image of 800 x 1333.
_DETR = ((100, 167), (50, 84), (25, 42), (13, 21))
SHAPES = {
    "enc800": _encoder(4, _DETR),
    "enc800b1": _encoder(1, _DETR),
    "bench10k": Shape(4, _squares(64, 32, 16, 8), 10000),
    "dec300": Shape(4, _DETR, 300),
    "dec900b16": Shape(16, _DETR, 900),
}
# On a CPU: one image each.
CPU_SHAPES = ("B1-Q5000-H8-C32-P4-64x64+32x32+16x16+8x8", "enc800b1")
# Measured when asked for by name.
MORE_SHAPES = {
    "rtdetr": Shape(16, _squares(80, 40, 20), 300),
    "rfdetr": Shape(4, _squares(40), 3900, heads=16, channels=16, points=2),
    "mask2former": _encoder(2, _squares(128, 64, 32)),
}


def shape_of(name: str) -> Shape:
    """A shape by its name, or spelled out as B4-Q300-H8-C32-P4-64x64+32x32 (levels height x width).

    Raises:
        UsageError: it is neither.
    """
    known = {**SHAPES, **MORE_SHAPES}
    if name in known:
        return known[name]
    found = _SPELLED.fullmatch(name)
    if not found:
        raise UsageError(
            f"`--shapes` has {name!r}, expected some of {', '.join(known)}, "
            "or sizes such as B4-Q300-H8-C32-P4-64x64+32x32"
        )
    batch, queries, heads, channels, points = map(int, found.groups()[:5])
    levels = tuple((int(h), int(w)) for h, w in (level.split("x") for level in found[6].split("+")))
    if not all((batch, queries, heads, channels, points, *(side for level in levels for side in level))):
        raise UsageError(f"`--shapes` has {name!r}, expected sizes above 0")
    return Shape(batch, levels, queries, heads, channels, points)
