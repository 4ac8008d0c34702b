"""Histograms of exponents as small pictures in a table: inline SVG, one unit of width a power of two."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from retrograd.trace.nan_reasons import NORMAL
from retrograd.trace.schema import Exponents, Stats

_HEIGHT = 20
_LEAST = 16  # powers of two that are shown at least, so that a bar does not fill the picture


def axis(shown: Iterable[Stats | None]) -> tuple[int, int] | None:
    """The least and greatest exponent of all that is shown, which share one axis; None where nothing was counted."""
    counted = [s.exponents for s in shown if s is not None and s.exponents]
    if not counted:
        return None
    low, high = min(e.least for e in counted), max(e.greatest for e in counted)
    return low, max(high, low + _LEAST - 1)


def picture(stats: Stats | None, over: tuple[int, int], said: str) -> str:
    """The histogram of a tensor as SVG; "" where nothing was counted.

    Heights are roots of shares, so that a thousandth is seen too. Subnormal numbers, and those of the last power of two
    before overflow, are of class "edge".
    """
    found = None if stats is None else stats.exponents
    if not found or stats is None:
        return ""
    low, high = over
    counts = totals(found)
    most = max(counts)
    normal = NORMAL.get(stats.dtype, (-(1 << 30), 1 << 30))
    inside: list[str] = []
    edge: list[str] = []
    for exponent, number in enumerate(counts, found.least):
        if number:
            bar = f"M{exponent - low} {_HEIGHT}v-{max(1.0, _HEIGHT * (number / most) ** 0.5):.3g}h1V{_HEIGHT}z"
            (inside if normal[0] <= exponent < normal[1] else edge).append(bar)
    paths = "".join(
        f'<path{kind} d="{"".join(bars)}"/>' for kind, bars in (("", inside), (' class="edge"', edge)) if bars
    )
    one = f'<path class="one" d="M{-low} 0V{_HEIGHT}"/>' if low < 0 <= high else ""
    return (
        f'<svg role="img" aria-label="{said}" viewBox="0 0 {high - low + 1} {_HEIGHT}" preserveAspectRatio="none">'
        f"{one}{paths}</svg>"
    )


def totals(found: Exponents) -> Sequence[int]:
    """Counts of both signs together."""
    return [a + b for a, b in zip_longest(found.positive, found.negative, fillvalue=0)]
