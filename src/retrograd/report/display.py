"""Display of a record where a person looks: in a notebook (Jupyter, VS Code, Colab), else in a browser."""

from __future__ import annotations

import sys
import tempfile
import webbrowser
from pathlib import Path
from typing import Any

from retrograd import report


def display(record: Any) -> None:
    """Show a record with all its charts."""
    kernel = _notebook()
    if kernel is not None:
        kernel.display(kernel.HTML(report.to_notebook(record, charts=True)))
        return
    path = Path(tempfile.mkdtemp(prefix="retrograd-")) / "report.html"
    report.write(record, path)
    if not webbrowser.open(path.as_uri()):
        sys.stdout.write(f"{report.to_text(record)}page: {path}\n")


def _notebook() -> Any:
    """IPython's module of display, if this process answers cells; None in a terminal."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if not hasattr(shell, "kernel"):
        return None
    from IPython import display as shown  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

    return shown  # pyright: ignore[reportUnknownVariableType]
