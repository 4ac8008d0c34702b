"""Renderers of reports, and of what `retrograd graph`, `trace` and `codegen` say, chosen by the suffix of the file.

The renderers are imported when they are used: a report can be read and compared without rich, jinja2
or vl_convert.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from retrograd.check.schema import Report
from retrograd.codegen.schema import SCHEMA as CODEGEN_SCHEMA
from retrograd.codegen.schema import Codegen
from retrograd.errors import UsageError
from retrograd.flake.schema import SCHEMA as FLAKE_SCHEMA
from retrograd.flake.schema import FlakeReport
from retrograd.graph.schema import DIFF_SCHEMA, FOLLOW_SCHEMA, UNIQUE_SCHEMA, Diff, Follow, Unique
from retrograd.trace.bisecting.schema import BISECT_SCHEMA, Bisection
from retrograd.trace.diffing.schema import DIFF_SCHEMA as TRACE_DIFF_SCHEMA
from retrograd.trace.diffing.schema import TraceDiff
from retrograd.trace.filters import SCHEMA as LISTING_SCHEMA
from retrograd.trace.filters import Listing
from retrograd.trace.nan_provenance import SCHEMA as PROVENANCE_SCHEMA
from retrograd.trace.nan_provenance import Provenance

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["check_paths", "load", "read", "show", "to_github", "write"]


GraphRecord = Diff | Unique | Follow
TraceRecord = Provenance | Listing
Compared = TraceDiff | Bisection
AnyRecord = Report | FlakeReport | GraphRecord | TraceRecord | Compared | Codegen

# Which record JSON is, by its schema; whatever else it says, a verification's report reads it or complains.
_SCHEMAS: dict[str, type[FlakeReport | GraphRecord | TraceRecord | Compared | Codegen]] = {
    CODEGEN_SCHEMA: Codegen,
    FLAKE_SCHEMA: FlakeReport,
    DIFF_SCHEMA: Diff,
    UNIQUE_SCHEMA: Unique,
    FOLLOW_SCHEMA: Follow,
    PROVENANCE_SCHEMA: Provenance,
    LISTING_SCHEMA: Listing,
    TRACE_DIFF_SCHEMA: TraceDiff,
    BISECT_SCHEMA: Bisection,
}


def _html(report: AnyRecord) -> str:
    from retrograd.report.html import render, render_flake

    if isinstance(report, Codegen):
        from retrograd.report.codegen import to_html

        return to_html(report)
    if isinstance(report, GraphRecord):
        from retrograd.report.graph_html import render as render_graph

        return render_graph(report)
    if isinstance(report, TraceRecord):
        from retrograd.report.trace_html import render as render_trace

        return render_trace(report)
    if isinstance(report, Compared):
        from retrograd.report.trace_diff import to_html

        return to_html(report)
    return render_flake(report) if isinstance(report, FlakeReport) else render(report)


def _text(report: AnyRecord) -> str:
    from retrograd.report import codegen, flake, graph, text, trace, trace_diff

    if isinstance(report, Codegen):
        return codegen.to_text(report)
    if isinstance(report, GraphRecord):
        return graph.to_text(report)
    if isinstance(report, TraceRecord):
        return trace.to_text(report)
    if isinstance(report, Compared):
        return trace_diff.to_text(report)
    return flake.to_text(report) if isinstance(report, FlakeReport) else text.to_text(report)


def _json(report: AnyRecord) -> str:
    return report.to_json() + "\n"


def _xml(report: AnyRecord) -> str:
    from retrograd.report.junit import to_junit

    assert isinstance(report, Report)  # as `check_paths` has seen to
    return to_junit(report)


_FORMATS: dict[str, Callable[[AnyRecord], str]] = {".html": _html, ".json": _json, ".txt": _text, ".xml": _xml}


def read(text: str) -> AnyRecord:
    """The report that JSON holds, whichever it is; UsageError if it is none."""
    # The schema stands in the text, at its end or begin; a look at it decides whose error message fits.
    kind = next((kind for schema, kind in _SCHEMAS.items() if f'"schema": "{schema}"' in text), Report)
    return kind.from_json(text)


def load(path: str | os.PathLike[str]) -> AnyRecord:
    """The report in a .json file; UsageError if the file cannot be read or holds none."""
    name = os.fspath(path)
    try:
        return read(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {name!r}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"cannot read {name!r}: it is not UTF-8 text; expected a .json record") from None


def check_paths(*paths: str | os.PathLike[str], of: type[AnyRecord] = Report) -> None:
    """Complain now about a path that `write` would refuse after minutes of checking; `of` is what will be written.

    Raises:
        UsageError: the suffix is unknown or not one for such a report, or the folder does not exist.
        MissingExtraError: an .html file is asked for and vl-convert-python is not installed.
    """
    for path in map(Path, paths):
        if path.suffix.lower() not in _FORMATS:
            raise UsageError(f"cannot write {str(path)!r}: the name must end in one of {', '.join(_FORMATS)}")
        if path.suffix.lower() == ".xml" and of is not Report:
            raise UsageError(f"cannot write {str(path)!r}: only `verify` has JUnit XML; use .json, .html or .txt")
        if not path.parent.is_dir():
            raise UsageError(f"cannot write {str(path)!r}: there is no folder {str(path.parent)!r}")
        # Only pictures of numbers need the package that draws them; graphs are drawn by their page.
        if path.suffix.lower() == ".html" and not issubclass(of, GraphRecord | TraceRecord | Compared | Codegen):
            from retrograd.report.html import require

            require()


def write(report: AnyRecord, *paths: str | os.PathLike[str]) -> None:
    """Write the report to every path, as HTML, JSON, text or JUnit XML by its suffix.

    Raises:
        UsageError: the suffix is not .html, .json, .txt or .xml, or the file cannot be written.
        MissingExtraError: an .html file is asked for and vl-convert-python is not installed.
    """
    check_paths(*paths, of=type(report))
    for path in map(Path, paths):
        content = _FORMATS[path.suffix.lower()](report)
        try:
            path.write_text(content, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {str(path)!r}: {error.strerror or error}") from None


def show(record: AnyRecord, console: Console, everything: bool = False) -> None:
    """Print a record; `everything` leaves nothing out."""
    from retrograd.report import codegen, flake, graph, text, trace, trace_diff

    if isinstance(record, Codegen):
        codegen.render(record, console, everything)
    elif isinstance(record, GraphRecord):
        graph.render(record, console, everything)
    elif isinstance(record, TraceRecord):
        trace.render(record, console)
    elif isinstance(record, Compared):
        trace_diff.render(record, console, everything)
    elif isinstance(record, FlakeReport):
        flake.render(record, console)
    else:
        text.render(record, console)


def to_github(record: AnyRecord) -> str:
    """The record as annotations of GitHub Actions."""
    from retrograd.report import codegen, github, graph

    if isinstance(record, Codegen):
        return codegen.to_github(record)
    return graph.to_github(record) if isinstance(record, GraphRecord) else github.to_github(record)
