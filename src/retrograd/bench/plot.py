"""Chart of bandwidth, in Vega-Lite, written as an offline page or a picture: lines over the width of norms, bars for
the rest. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from retrograd.bench.registry import GROUPS
from retrograd.bench.rows import DIRECTIONS, Row
from retrograd.errors import MissingExtraError, UsageError

_COLOURS = {
    "retrograd": "#c8442f",
    "retrograd-atomic": "#e9a08f",
    "torch": "#6a6a6a",
    "compile": "#2f6fb3",
    "liger": "#3f8f5a",
    "quack": "#8a5fb0",
}
_COPY = "device copy"
_WORDS = dict(zip(DIRECTIONS, ("forward", "backward"), strict=True))
_COLUMNS = {"field": "direction", "type": "nominal", "sort": [*_WORDS.values()], "title": None}


def check_path(path: Path) -> None:
    """Complain now about what `write` would refuse after minutes of measuring."""
    if path.suffix.lower() not in (".html", ".png"):
        raise UsageError(f"cannot write {str(path)!r}: a plot's name must end in .html or .png")
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {str(path)!r}: there is no folder {str(path.parent)!r}")
    if path.suffix.lower() == ".png":
        _png()


def png(rows: Sequence[Row]) -> bytes:
    """A picture of `rows`; UsageError if there is nothing to draw, MissingExtraError without vl-convert-python."""
    return _png()({**chart(rows), "background": "white"}, scale=2)


def _png() -> Callable[..., bytes]:
    try:
        import vl_convert
    except ImportError:
        raise MissingExtraError("vl-convert-python", "html", "a plot as a picture") from None
    return vl_convert.vegalite_to_png


def chart(rows: Sequence[Row]) -> dict[str, Any]:
    """The Vega-Lite description: for norms GB/s against N, a panel an op and direction, the copy as a dashed line; for
    other ops a bar a provider. UsageError if no row has a time, of norms at a width that is a power of two.
    """
    points = _points([row for row in rows if row.group == "norm"])
    bars = _bar_points([row for row in rows if row.group != "norm"])
    if not points and not bars:
        raise UsageError("there is nothing to draw: no row has a time (of norms: at a width that is a power of two)")
    parts = [_lines(points)] * bool(points) + [_bars(bars)] * bool(bars)
    body = parts[0] if len(parts) == 1 else {"vconcat": parts, "resolve": {"scale": {"color": "independent"}}}
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        **body,
        "config": {
            "aria": False,
            "font": "system-ui, sans-serif",
            "background": None,
            "view": {"stroke": "currentColor", "strokeOpacity": 0.3},
            "axis": {"labelColor": "currentColor", "titleColor": "currentColor", "gridOpacity": 0.3},
            "legend": {"labelColor": "currentColor", "titleColor": "currentColor"},
            "header": {"labelColor": "currentColor", "titleColor": "currentColor", "labelFontSize": 13},
        },
    }


def _lines(points: list[dict[str, Any]]) -> dict[str, Any]:
    """A line a provider over the width."""
    names = [name for name in _COLOURS if any(p["provider"] == name for p in points)]
    names += sorted({p["provider"] for p in points} - set(names) - {_COPY})
    names += [_COPY] * any(p["provider"] == _COPY for p in points)
    colours = [_COLOURS.get(name, "#b08a2e" if name != _COPY else "#999999") for name in names]
    present = [op for op in GROUPS["norm"] if any(p["op"] == op for p in points)]
    ticks = sorted({p["n"] for p in points})
    scale = {"type": "log", "base": 2}
    x: dict[str, Any] = {"field": "n", "type": "quantitative", "title": "N (columns)", "scale": scale}
    x["axis"] = {"values": ticks, "format": "d", "labelAngle": -40, "grid": False}
    y = {"field": "gb_per_s", "type": "quantitative", "title": "useful GB/s", "scale": {"zero": True}}
    dash = {"condition": {"test": f"datum.provider === '{_COPY}'", "value": [5, 4]}, "value": [1, 0]}
    colour = {"field": "provider", "type": "nominal", "scale": {"domain": names, "range": colours}, "title": None}
    return {
        "data": {"values": points},
        "facet": {"row": {"field": "op", "type": "nominal", "sort": present, "title": None}, "column": _COLUMNS},
        "spec": {
            "width": 380,
            "height": 220,
            "mark": {"type": "line", "point": {"size": 30}, "strokeWidth": 2},
            "encoding": {"x": x, "y": y, "color": colour, "strokeDash": dash},
        },
    }


def _bars(points: list[dict[str, Any]]) -> dict[str, Any]:
    """A bar a provider, a row of panels an op, shape and dtype."""
    cases = list(dict.fromkeys(p["case"] for p in points))
    providers = list(dict.fromkeys(p["provider"] for p in points))
    y = {"field": "provider", "type": "nominal", "sort": providers, "title": None}
    x = {"field": "gb_per_s", "type": "quantitative", "title": "useful GB/s"}
    panels: dict[str, Any] = {"field": "case", "type": "nominal", "sort": cases, "title": None}
    panels["header"] = {"labelOrient": "top", "labelAnchor": "start"}
    # The first provider of an op is the one that the others are held against.
    first = {"condition": {"test": "datum.first", "value": _COLOURS["retrograd"]}, "value": "#6a6a6a"}
    return {
        "data": {"values": points},
        "facet": {"row": panels, "column": _COLUMNS},
        "spec": {"width": 300, "height": {"step": 18}, "mark": "bar", "encoding": {"x": x, "y": y, "color": first}},
        "resolve": {"scale": {"y": "independent"}},
    }


def _speeds(rows: Sequence[Row]) -> Iterator[tuple[Row, str, float]]:
    """Each row with a direction in words and its bandwidth."""
    for row, (direction, words) in itertools.product(rows, _WORDS.items()):
        if speed := row.gb_per_s(direction):
            yield row, words, speed


def _bar_points(rows: Sequence[Row]) -> list[dict[str, Any]]:
    points: list[dict[str, Any]] = []
    firsts = {row.case: row.provider for row in reversed(rows)}
    for row, words, speed in _speeds(rows):
        at = {"case": " ".join(row.case), "direction": words, "provider": row.provider}
        points.append({**at, "gb_per_s": float(f"{speed:.3g}"), "first": firsts[row.case] == row.provider})
    return points


def _points(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One point a row and direction; of several shapes with one width the one with the most rows is drawn."""
    tallest = {(row.op, row.n): row.m for row in sorted(rows, key=attrgetter("m")) if row.n & (row.n - 1) == 0}
    points: list[dict[str, Any]] = []
    for row, words, speed in _speeds([row for row in rows if tallest.get((row.op, row.n)) == row.m]):
        at = {"op": row.op, "direction": words, "n": row.n}
        points.append({**at, "provider": row.provider, "gb_per_s": float(f"{speed:.4g}")})
        roof = {**at, "provider": _COPY, "gb_per_s": round(row.copy_gb_per_s or 0.0, 1)}
        if row.copy_gb_per_s and roof not in points:
            points.append(roof)
    return points
