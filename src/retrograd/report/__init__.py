"""Renderers: a record becomes a `Document` (`retrograd.core.document`), and one module a format shows it.

Rooms, renderers and the packages that they need are imported when they are used: a report can be read and compared
without rich, jinja2 or vl_convert. A new record is one row of `_RECORDS` and a function `document` beside its schema.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, cast

from retrograd.core.document import Document
from retrograd.core.system_errors import as_usage_error
from retrograd.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["check_paths", "load", "read", "write"]


# Schema -> the record's class; `messages` in the same package has its `document`, and `events` if it has numbers.
_RECORDS = {
    "retrograd.report/1": "retrograd.check.schema:Report",
    "retrograd.flake/1": "retrograd.flake.schema:FlakeReport",
    "retrograd.mutation/1": "retrograd.mutation.schema:MutationReport",
    "retrograd.codegen/1": "retrograd.codegen.schema:Codegen",
    "retrograd.graph.diff/1": "retrograd.graph.schema:Diff",
    "retrograd.graph.pairs/1": "retrograd.graph.schema:Pairs",
    "retrograd.graph.unique/1": "retrograd.graph.schema:Unique",
    "retrograd.graph.follow/1": "retrograd.graph.schema:Follow",
    "retrograd.graph.watch/1": "retrograd.graph.watching.schema:WatchReport",
    "retrograd.graph.lock.check/1": "retrograd.graph.watching.schema:Check",
    "retrograd.graph.compilations/1": "retrograd.graph.compilations.schema:Compilations",
    "retrograd.provenance/1": "retrograd.trace.nan_provenance:Provenance",
    "retrograd.trace-listing/1": "retrograd.trace.filters:Listing",
    "retrograd.trace.diff/1": "retrograd.trace.diffing.schema:TraceDiff",
    "retrograd.trace.bisect/1": "retrograd.trace.bisecting.schema:Bisection",
    "retrograd.trace.repeat/1": "retrograd.trace.repeating.schema:RepeatedSteps",
    "retrograd.kernel-run/1": "retrograd.ttir.schema:KernelRun",
    "retrograd.fsdp/1": "retrograd.fsdp.outcome.schema:RankComparison",
    "retrograd.bench/1": "retrograd.bench.rows:BenchResults",
}
_VERIFY, _FLAKE = "retrograd.report/1", "retrograd.flake/1"
_JUDGED = {
    _VERIFY: "verify",
    "retrograd.codegen/1": "codegen",
    "retrograd.graph.diff/1": "graph diff",
    "retrograd.graph.lock.check/1": "graph check",
    "retrograd.mutation/1": "mutate",
    "retrograd.kernel-run/1": "run-kernel",
}
_SUFFIXES = (".html", ".json", ".txt", ".xml", ".sarif", ".svg")
# Suffixes that not every record has, and the commands whose records have them.
_LIMITED = {
    ".xml": ("JUnit XML", {_VERIFY: "verify"}),
    ".sarif": ("SARIF", _JUDGED),
    ".svg": ("a badge", _JUDGED),
}


class AnyRecord(Protocol):
    """A record of a command: plain data with a schema of its own."""

    @property
    def schema(self) -> str: ...
    def to_json(self) -> str: ...


def document(record: Any, everything: bool = True) -> Document:
    """What is shown of a record; `everything` leaves nothing out of its text."""
    shown: Document = _messages(record).document(record, everything)
    return shown


def read(text: str) -> Any:
    """The record that JSON holds, whichever it is; UsageError if it is none."""
    data: Any = None
    with contextlib.suppress(json.JSONDecodeError, RecursionError):
        data = json.loads(text)
    schema = str(cast(dict[str, Any], data).get("schema")) if isinstance(data, dict) else ""
    # What is no record at all is told by the reader of the most common one.
    module, _, name = _RECORDS.get(schema, _RECORDS[_VERIFY]).partition(":")
    return getattr(import_module(module), name).from_json(text)


def load(path: str | os.PathLike[str]) -> Any:
    """The record in a .json file; UsageError if the file cannot be read or holds none."""
    name = os.fspath(path)
    with as_usage_error(f"cannot read {name!r}"):
        raw = Path(path).read_bytes()
    try:
        return read(raw.decode())
    except UnicodeDecodeError:
        raise UsageError(f"cannot read {name!r}: it is not UTF-8 text; expected a .json record") from None
    except UsageError as error:
        raise UsageError(f"{name!r}: {error}") from None


def check_paths(*paths: str | os.PathLike[str], of: Any = None) -> None:
    """Complain now about a path that `write` would refuse after minutes of work.

    Args:
        paths: names of files.
        of: the record, or its class; that of `verify` if left out.

    Raises:
        UsageError: the suffix is unknown or not one for such a record, or the folder does not exist.
    """
    schema = _VERIFY if of is None else _schema(of)
    for path in map(Path, paths):
        suffix = path.suffix.lower()
        if suffix not in _SUFFIXES:
            raise UsageError(f"cannot write {str(path)!r}: the name must end in one of {', '.join(_SUFFIXES)}")
        form, commands = _LIMITED.get(suffix, ("", {schema: ""}))
        if schema not in commands:
            named = ", ".join(f"`{command}`" for command in commands.values())
            raise UsageError(f"cannot write {str(path)!r}: only {named} has {form}; use .json, .html or .txt")
        if not path.parent.is_dir():
            raise UsageError(f"cannot write {str(path)!r}: there is no folder {str(path.parent)!r}")


def write(record: AnyRecord, *paths: str | os.PathLike[str]) -> None:
    """Write the record to every path, as HTML, JSON, text, JUnit XML, SARIF or a badge by its suffix.

    Raises:
        UsageError: the suffix is not .html, .json, .txt, .xml, .sarif or .svg, or the file cannot be written.
    """
    check_paths(*paths, of=record)
    for path in map(Path, paths):
        content = _content(record, path.suffix.lower())
        with as_usage_error(f"cannot write {str(path)!r}"):
            path.write_text(content, encoding="utf-8")


def together(records: Iterable[AnyRecord], suffix: str) -> str:
    """What several records have in common: ".sarif" the remarks of all, ".svg" a badge with the worst verdict."""
    documents = [document(record) for record in records]
    if suffix == ".sarif":
        from retrograd.report.sarif import to_sarif

        return to_sarif(documents)
    from retrograd.report.badge import to_badge

    return to_badge(documents)


def show(record: AnyRecord, console: Console, everything: bool = False) -> None:
    """Print a record; `everything` leaves nothing out."""
    from retrograd.report import text

    text.show(document(record, everything).text, console)


def to_text(record: AnyRecord, everything: bool = True) -> str:
    """The record as plain text without colour."""
    from retrograd.report import text

    return text.to_text(document(record, everything))


def to_github(record: AnyRecord) -> str:
    """The record as annotations of GitHub Actions."""
    from retrograd.report import github

    return github.to_github(document(record))


def to_notebook(record: Any, charts: bool = False) -> str:
    """The record as a fragment of HTML, with all charts of its page if asked for; ImportError without jinja2."""
    from retrograd.report import html

    return html.to_notebook(document(record), charts)


def to_tensorboard(record: AnyRecord, folder: str | os.PathLike[str], step: int = 0) -> None:
    """Append the numbers of a record to the events of TensorBoard in a folder, at `step` or from it on.

    Raises:
        MissingExtraError: tensorboard is not installed.
        UsageError: the folder cannot be written, `step` is negative, or the record has no such numbers.
    """
    if step < 0:
        raise UsageError(f"`step` is {step}, expected 0 or more")
    events = getattr(_messages(record), "events", None)
    if events is None:
        raise UsageError("`--tensorboard` takes a report of `retrograd verify` or a listing of `retrograd trace show`")
    from retrograd.report import tensorboard

    tensorboard.write_events(events(record, step), folder)


def _schema(record: Any) -> str:
    # The field's default is known of the class, too. A Flake, which has none, is shown alone as it is in its report.
    return next((str(f.default) for f in fields(record) if f.name == "schema"), _FLAKE)


def _messages(record: Any) -> ModuleType:
    module = _RECORDS[_schema(record)].partition(":")[0]
    return import_module(f"{module.rpartition('.')[0]}.messages")


def _content(record: AnyRecord, suffix: str) -> str:
    if suffix == ".json":
        return record.to_json() + "\n"
    if suffix == ".html":
        from retrograd.report.html import to_html

        return to_html(document(record), record.to_json())
    if suffix == ".xml":
        from retrograd.report.junit import to_junit

        suite = document(record).suite
        assert suite is not None  # as `check_paths` has seen to
        return to_junit(suite)
    if suffix in (".sarif", ".svg"):
        return together([record], suffix)
    return to_text(record)
