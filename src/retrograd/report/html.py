"""HTML of a document: one page that needs no network, with charts as inline SVG and the record embedded; and fragments.

A fragment, for notebooks, has neither charts nor a script: it may be read where nothing runs.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from retrograd.core.document import Card, Chart, Document, Embedded
from retrograd.errors import MissingExtraError

_MOST = 5  # cards of a fragment; the page has all of them
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
        "legend": {"labelColor": "currentColor", "titleColor": "currentColor"},
    },
}


def require() -> None:
    """Raise MissingExtraError unless the package that draws the charts is there."""
    try:
        import vl_convert  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError:
        raise MissingExtraError("vl-convert-python", "html", "an HTML report") from None


def to_html(document: Document, record: str) -> str:
    """The page as text; `record` is the JSON that it embeds.

    Raises:
        MissingExtraError: the document has charts, and vl-convert-python is not installed.
    """
    from markupsafe import Markup

    scripts = [script for part in _embedded(document.page) if (script := _script(part.template))]
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


def to_notebook(document: Document) -> str:
    """The fragment; it needs no network and no other style."""
    left_out = [part for part in document.brief if isinstance(part, Card)][_MOST:]
    more = ""
    if left_out:
        more = f'{len(left_out)} more {document.more}; all of them are in retrograd.write(record, "record.html")'
    parts = [part for part in document.brief if not any(part is card for card in left_out)]
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
    environment.tests["kind"] = _is_kind
    return environment


def _markup_svg(chart: Chart) -> Any:
    from markupsafe import Markup

    return Markup(svg(chart))


def svg(chart: Chart) -> str:
    """A chart as inline SVG."""
    require()
    import vl_convert

    # HTML needs no namespaces, and a page without any address is easily seen to load nothing.
    return re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", vl_convert.vegalite_to_svg({**_CHART, **chart.spec}))


def _is_kind(part: object, name: str) -> bool:
    return type(part).__name__ == name


def _embedded(parts: Any) -> Iterator[Embedded]:
    for part in parts:
        if isinstance(part, Embedded):
            yield part
        elif is_dataclass(part):
            yield from _embedded(getattr(part, "parts", ()))


def _script(name: str) -> str:
    """The script beside a template, "" if it has none."""
    path = _TEMPLATES / name.replace(".html.j2", ".js")
    return path.read_text(encoding="utf-8") if path.exists() else ""
