"""Sizes in shapes and numbers in texts: what two differ in, and which change of a size explains one of a number."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod

NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
# A quotient of two sizes goes into the graph as a float32, with 24 bits.
_ROUNDING = 2.0**-22
_SHAPE = re.compile(r"\[([\d,]*)\]")


def changed_products(before: str, after: str) -> Iterator[tuple[float, float]]:
    """How many numbers two shapes have in dimensions that stand beside each other."""
    left, right = _dimensions(before), _dimensions(after)
    for i in range(len(left)) if len(left) == len(right) else ():
        yield from ((prod(left[i:j]), prod(right[i:j])) for j in range(i + 1, len(left) + 1))


def changed_dimensions(before: str, after: str) -> list[tuple[float, float]]:
    """The sizes in which two shapes of as many dimensions differ."""
    left, right = _dimensions(before), _dimensions(after)
    return [(x, y) for x, y in zip(left, right, strict=True) if x != y] if len(left) == len(right) else []


def changed_sizes(before: str, after: str) -> Iterator[tuple[float, float]]:
    """The sizes in which two shapes differ, and how many numbers they have."""
    shapes = [_SHAPE.findall(text.partition(" ")[0]) for text in (before, after)]
    if shapes[0] == shapes[1] or not all(shapes):
        return
    yield from changed_dimensions(before, after)
    left, right = prod(_dimensions(before)), prod(_dimensions(after))
    if left != right:
        yield left, right


def _dimensions(text: str) -> list[float]:
    """The sizes of the first shape of a text; none where it has no shape, or one with symbols."""
    return [float(n) for n in next(iter(_SHAPE.findall(text.partition(" ")[0])), "").split(",") if n]


def differing(before: str, after: str) -> list[tuple[float, float]]:
    """The numbers in which two texts differ; one that nothing explains if they differ in more."""
    if NUMBER.sub("#", before) != NUMBER.sub("#", after):
        return [(0.0, 1.0)]
    pairs = zip(NUMBER.findall(before), NUMBER.findall(after), strict=True)
    return [(float(x), float(y)) for x, y in pairs if x != y]


def explained(pair: tuple[float, float], changes: set[tuple[float, float]]) -> bool:
    """Whether a number changed as sizes did: by their ratio, or by as much."""
    x, y = pair
    return any(
        close(x * new, y * old)
        or close(x * old, y * new)
        # One more or less than a size, or what a size leaves of another: 12 - 10 -> 12 - 8.
        or (x.is_integer() and y.is_integer() and abs(y - x) == abs(new - old))
        for old, new in changes
    )


def close(x: float, y: float) -> bool:
    """Whether two products of sizes are one number, as a float32 has it."""
    return abs(x - y) <= _ROUNDING * max(abs(x), abs(y)) and x != 0
