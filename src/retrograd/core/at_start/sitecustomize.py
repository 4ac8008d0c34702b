"""Imported by Python at the start of processes that we ask to begin with something; before it the user's own one is."""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path


def _own() -> Path | None:
    """The sitecustomize that Python would have found without us."""
    here = Path(__file__).resolve().parent
    for entry in sys.path:
        folder = Path(entry or ".").resolve()
        if folder != here and (folder / "sitecustomize.py").is_file():
            return folder / "sitecustomize.py"
    return None


if (_shadowed := _own()) is not None:
    runpy.run_path(str(_shadowed), run_name="sitecustomize")

from retrograd import config  # noqa: E402 (the user's may change sys.path)

if (_asked := config.at_start()) is not None:
    importlib.import_module(_asked[0]).begin(_asked[1])
