"""How a record shows itself in a notebook. A leaf: the renderer is loaded by name, when a notebook asks for it."""

from __future__ import annotations

from importlib import import_module


class Shown:
    """A record that Jupyter displays as HTML and everything else as text."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        """The record, compact, as HTML for a page of somebody else's; None, so that text is shown, without jinja2."""
        try:
            html: str = import_module("retrograd.report.notebook").render(self)
        except ImportError:
            return None
        return html
