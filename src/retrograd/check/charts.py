"""Charts of a `Profile` as Vega-Lite: where a tensor is wrong, and by how many units in the last place."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from retrograd.check.schema import Profile

# Decades of err / attainable error. Blue is within what a correct op may do, orange to red is not: the
# hue changes at 1 and nowhere else, so that the eye finds the border without reading the legend.
_BANDS = (
    (0.01, "up to 0.01", "#dbe9f6"),
    (0.1, "0.01 to 0.1", "#a6c8e4"),
    (1.0, "0.1 to 1", "#6a9fcb"),
    (10.0, "1 to 10: WRONG", "#f7b267"),
    (100.0, "10 to 100: WRONG", "#e8743b"),
    (math.inf, "over 100: WRONG", "#b3202c"),
)
_ODD = ("NaN or inf: WRONG", "#7b2d8b")


def band(ratio: float) -> str:
    """The legend entry of one ratio; exactly 1 is still attainable."""
    if not math.isfinite(ratio):
        return _ODD[0]
    return next(label for limit, label, _ in _BANDS if ratio <= limit)


def heat_map(profile: Profile) -> dict[str, Any]:
    """Where the error is: err / attainable error over rows x last dimension, by decade."""
    rows, columns = max(math.prod(profile.shape[:-1]), 1), max(*profile.shape[-1:], 1, 1)
    labels = [label for _, label, _ in _BANDS] + [_ODD[0]]
    colours = [colour for _, _, colour in _BANDS] + [_ODD[1]]
    cells = _runs(profile.ratio, rows, columns)

    def axis(low: str, size: int, title: str, backwards: bool = False) -> dict[str, Any]:
        scale = {"domain": [0, size], "nice": False, "zero": False, "reverse": backwards}
        ticks = {"tickCount": min(size, 6), "tickMinStep": 1, "format": "d"}
        return {"field": low, "type": "quantitative", "scale": scale, "title": title, "axis": ticks}

    colour = {
        "field": "band",
        "type": "ordinal",
        "scale": {"domain": labels, "range": colours},
        "legend": {"title": ["error over", "attainable error"], "symbolType": "square"},
    }
    return {
        "width": 360,
        "height": 220,
        "data": {"values": cells},
        "mark": {"type": "rect", "strokeWidth": 0},
        "encoding": {
            "x": axis("x0", columns, "last dimension"),
            "x2": {"field": "x1"},
            "y": axis("y0", rows, "row", backwards=True),
            "y2": {"field": "y1"},
            "color": colour,
        },
    }


def ulp_histogram(profile: Profile) -> dict[str, Any]:
    """How many elements are how many units in the last place away from the correctly rounded result."""
    labels = _bins(profile.ulp_edges, len(profile.ulp_counts))
    values = [
        {"bin": label, "count": count, "text": f"{count:,}" if count else ""}
        for label, count in zip(labels, profile.ulp_counts, strict=False)
    ]
    axis = {"labelAngle": -35 if len(labels) > 6 else 0}
    bin_x = {"field": "bin", "type": "ordinal", "sort": None, "title": "distance in ulp", "axis": axis}
    # One wrong element among millions must remain visible, hence no linear scale.
    count_y = {
        "field": "count",
        "type": "quantitative",
        "title": "elements (log)",
        "scale": {"type": "symlog"},
        "axis": {"labels": False, "ticks": False},
    }
    label_layer = {
        "mark": {"type": "text", "dy": -7, "color": "currentColor", "fontSize": 10},
        "encoding": {"text": {"field": "text", "type": "nominal"}},
    }
    return {
        "width": 360,
        "height": 160,
        "data": {"values": values},
        "encoding": {"x": bin_x, "y": count_y},
        "layer": [{"mark": {"type": "bar", "color": "#6a9fcb"}}, label_layer],
    }


def kink(low: float, high: float, got: float) -> dict[str, Any]:
    """The interval of the one-sided derivatives as a bar, and what the op gave as a point."""
    values = [{"what": "right", "from": low, "to": high}, {"what": "got", "from": got, "to": got}]
    x = {"field": "from", "type": "quantitative", "title": "value", "scale": {"zero": False}}
    y = {"field": "what", "type": "nominal", "sort": None, "title": None}
    colour = {
        "field": "what",
        "type": "nominal",
        "scale": {"domain": ["right", "got"], "range": ["#6a9fcb", "#b3202c"]},
        "legend": None,
    }
    place = {"x": x, "y": y, "color": colour}
    bar = {"mark": {"type": "bar", "height": 8}, "encoding": {**place, "x2": {"field": "to"}}}
    ends = {"mark": {"type": "point", "filled": True, "size": 60}, "encoding": place}
    return {"width": 360, "height": 60, "data": {"values": values}, "layer": [bar, ends]}


def _runs(ratio: tuple[tuple[float, ...], ...], rows: int, columns: int) -> list[dict[str, Any]]:
    """Grid cells as rectangles in elements; neighbours of one band in a row become one."""
    out: list[dict[str, Any]] = []
    for i, line in enumerate(ratio):
        top, bottom = i * rows / len(ratio), (i + 1) * rows / len(ratio)
        step = columns / max(len(line), 1)
        open_run: dict[str, Any] = {}
        for j, value in enumerate(line):
            label = band(value)
            if open_run.get("band") == label:
                open_run["x1"] = (j + 1) * step
                continue
            open_run = {"x0": j * step, "x1": (j + 1) * step, "y0": top, "y1": bottom, "band": label}
            out.append(open_run)
    return out


def _bins(edges: tuple[float, ...], count: int) -> list[str]:
    """A label for each bin; the last is open above."""
    low = [f"{edge:g}" for edge in edges[:count]]
    closed = [f"{a} to {b}" for a, b in pairwise(low)]
    return closed + [f"{edge} or more" for edge in low[-1:]]
