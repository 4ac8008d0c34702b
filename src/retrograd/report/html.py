"""HTML of a document: one page that needs no network, with charts as inline SVG and the record embedded; and fragments.

A fragment, for notebooks, has no script: it may be read where nothing runs. Without vl-convert-python grids are drawn
without axes, and other charts are tables of their numbers.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import cache
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import Any, TypeVar

from retrograd.core.document import Card, Chart, Document, Embedded, Table

_Part = TypeVar("_Part")
_MOST = 5  # cards of a fragment; the page has all of them
_MOST_NUMBERS = 60  # rows of a chart that is shown as a table
_TEMPLATES = Path(__file__).parent / "templates"
# Text is drawn in "currentColor", so that an inline picture follows the light or dark scheme of its page.
_CHART = {
    "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
    "config": {
        "aria": False,
        "font": "system-ui, sans-serif",
        "background": None,
        "view": {"stroke": "currentColor", "strokeOpacity": 0.3},
        "axis": {"labelColor": "currentColor", "titleColor": "currentColor", "grid": False},
        "legend": {"labelColor": "currentColor", "titleColor": "currentColor", "orient": "bottom", "columns": 3},
    },
}


def to_html(document: Document, record: str) -> str:
    """The page as text; `record` is the JSON that it embeds."""
    from markupsafe import Markup

    scripts = [script for part in _parts_of(document.page, Embedded) if (script := _script(part.template))]
    hashes = ["'sha256-" + b64encode(sha256(script.encode()).digest()).decode() + "'" for script in scripts]
    return (
        _templates()
        .get_template("page.html.j2")
        .render(
            document=document,
            # No text can end the script element or open a comment in it.
            record=Markup(record.replace("<", "\\u003c")),
            scripts=[Markup(script) for script in scripts],
            # The policy of the page runs these scripts and no other, whatever a name in a dump may look like.
            policy=Markup(f"; script-src {' '.join(hashes)}" if hashes else ""),
        )
    )


def to_notebook(document: Document, charts: bool = False) -> str:
    """The fragment; it needs no network and no other style. With `charts` the page's come below it."""
    left_out = [part for part in document.brief if isinstance(part, Card)][_MOST:]
    more = ""
    if left_out:
        more = f'{len(left_out)} more {document.more}; all of them are in retrograd.write(record, "record.html")'
    parts: list[Any] = [part for part in document.brief if not any(part is card for card in left_out)]
    if charts:
        # A section whose parts stand there already, such as findings with pictures of kinks, is not shown twice.
        below = [p for p in document.page if any(_parts_of([p], Chart)) and p not in document.brief]
        parts += [p for p in below if any(each not in document.brief for each in getattr(p, "parts", (p,)))]
    fragment: str = _templates().get_template("notebook.html.j2").render(parts=parts, more=more)
    return fragment


@cache
def _templates() -> Any:
    """The templates of this folder, which escape everything."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment: Any = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["svg"] = _markup_svg
    environment.globals["numbers"] = numbers
    environment.tests["kind"] = _is_kind
    return environment


def _markup_svg(chart: Chart) -> Any:
    from markupsafe import Markup

    return Markup(svg(chart))


def svg(chart: Chart) -> str:
    """A chart as inline SVG; "" if it cannot be drawn without vl-convert-python, and that is not installed."""
    try:
        import vl_convert
    except ImportError:
        return _grid(chart)
    drawn = vl_convert.vegalite_to_svg({**_CHART, **chart.spec})
    # HTML needs no namespaces, and a page without any address is easily seen to load nothing. The picture has one name,
    # its marks have none.
    plain = re.sub(r'\s+(xmlns(:\w+)?|role|aria-\w+)="[^"]*"', "", drawn)
    return plain.replace("<svg", f"<svg {_named(chart)}", 1)


def _named(chart: Chart) -> str:
    return f'role="img" aria-label="{escape(chart.label)}"'


def _grid(chart: Chart) -> str:
    """Rectangles of a grid, stretched to a picture, with a title each that says what its colour means."""
    cells = chart.spec["data"]["values"]
    if not cells or "x1" not in cells[0]:
        return ""
    scale = chart.spec["encoding"]["color"]["scale"]
    colours = dict(zip(scale["domain"], scale["range"], strict=True))
    width, height = max(c["x1"] for c in cells), max(c["y1"] for c in cells)
    drawn = "".join(
        f'<rect x="{c["x0"]:g}" y="{c["y0"]:g}" width="{c["x1"] - c["x0"]:g}" height="{c["y1"] - c["y0"]:g}" '
        f'fill="{colours[c["band"]]}"><title>{escape(c["band"])}</title></rect>'
        for c in cells
    )
    size = f'width="360" height="220" viewBox="0 0 {width:g} {height:g}" preserveAspectRatio="none"'
    return f"<svg {_named(chart)} {size}>{drawn}</svg>"


def numbers(chart: Chart) -> Table:
    """The data of a chart as a table, numbers with four digits."""
    values = chart.spec["data"]["values"][:_MOST_NUMBERS]
    head = tuple(dict.fromkeys(key for value in values for key in value))
    rows = tuple(tuple(_short(value.get(key, "")) for key in head) for value in values)
    return Table(head, rows)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _is_kind(part: object, name: str) -> bool:
    return type(part).__name__ == name


def _parts_of(parts: Any, kind: type[_Part]) -> Iterator[_Part]:
    """Parts of a kind, at any depth."""
    for part in parts:
        if isinstance(part, kind):
            yield part
        elif is_dataclass(part):
            yield from _parts_of(getattr(part, "parts", ()), kind)


def _script(name: str) -> str:
    """The script beside a template, "" if it has none."""
    path = _TEMPLATES / name.replace(".html.j2", ".js")
    return path.read_text(encoding="utf-8") if path.exists() else ""
