"""Runs the notebooks of docs/notebooks and keeps what they show: `python tools/site/notebook.py`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent.parent.parent / "docs" / "notebooks"


def execute(path: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of a new kernel; CellExecutionError if a cell raises."""
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(FOLDER)}}
    with TemporaryDirectory() as sockets:  # in a private folder: no port that others on the machine could talk to
        manager = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"{sockets}/kernel")
        client = NotebookClient(notebook, km=manager, timeout=300, startup_timeout=300, resources=resources)
        client.execute(env=_plain())
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when it ran: a difference in every commit
        for output in cell.get("outputs", ()):
            if "text/html" in output.get("data", {}):
                output["data"].pop("text/plain", None)  # the record's repr, half a megabyte for a comparison of graphs
    return notebook


def _plain() -> dict[str, str]:
    """The environment without what changes how kernels run, as tests set it."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "RETROGRAD_"))}


def main() -> None:
    """Execute every notebook in place."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        sys.stdout.write(f"{path.name}\n")
        nbformat.write(execute(path), path)


if __name__ == "__main__":
    main()
