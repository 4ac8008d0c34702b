"""Notebook and terminal display of records: a leaf without imports, since `import retrograd` loads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar


class Shown:
    """A record that Jupyter displays as HTML and everything else as text."""

    __slots__ = ()
    # Set by the package, which knows the renderers: records stand below whoever draws them.
    renderer: ClassVar[Callable[[Any], str] | None] = None
    printer: ClassVar[Callable[[Any], str] | None] = None
    viewer: ClassVar[Callable[[Any], None] | None] = None

    def text(self) -> str:
        """The record for a terminal without colours."""
        return repr(self) if Shown.printer is None else Shown.printer(self)

    def show(self) -> None:
        """Show it with its pictures: below the cell of a notebook, elsewhere as a page in a browser.

        Where there is no browser, the text and the path of the page are printed.
        """
        if Shown.viewer is not None:
            Shown.viewer(self)

    def _repr_html_(self) -> str | None:
        """The record, compact, as HTML for a page of somebody else's; None, so that text is shown, without jinja2."""
        try:
            return None if Shown.renderer is None else Shown.renderer(self)
        except ImportError:
            return None
