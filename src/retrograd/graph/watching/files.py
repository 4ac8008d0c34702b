"""A watched run as a folder: graph-000-forward.fx.txt.gz, ..., and report.json."""

from __future__ import annotations

import gzip
from pathlib import Path

from retrograd.core.system_errors import as_usage_error
from retrograd.graph.watching.session import WatchSession

ENDINGS = {"hlo": "hlo.txt", "fx": "fx.txt", "stablehlo": "mlir"}


def save(session: WatchSession, folder: str | Path) -> None:
    """Write the text of each graph and the report.

    Raises:
        UsageError: the folder cannot be written.
    """
    path = Path(folder)
    with as_usage_error(f"`save` is {str(folder)!r}, which cannot be written"):
        path.mkdir(parents=True, exist_ok=True)
        for entry in session.entries:
            graph = entry.watched
            if entry.text:
                name = f"graph-{graph.number:03d}-{graph.role}.{ENDINGS.get(graph.format, 'txt')}.gz"
                # No time in the header: the same graph is the same file.
                (path / name).write_bytes(gzip.compress(entry.text.encode("utf-8", "surrogatepass"), mtime=0))
        (path / "report.json").write_text(session.report().to_json() + "\n", encoding="utf-8")
