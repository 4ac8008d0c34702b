"""What the commands of `retrograd graph` share: reading graphs, and saying the answer in the form asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from retrograd.errors import UsageError

if TYPE_CHECKING:
    from retrograd.graph.ir import Graph
    from retrograd.report.graph import GraphRecord

_GZIP = b"\x1f\x8b"


def output_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--json, --format, --all and -o, as every command that answers with a record has them."""
    for option in (
        click.option("--all", "everything", is_flag=True, help="Leave nothing out."),
        click.option(
            "-o", "--output", "outputs", multiple=True, metavar="FILE", help="Also write .html, .json or .txt."
        ),
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        click.option(
            "--format",
            "form",
            type=click.Choice(["text", "github"]),
            default="text",
            show_default=True,
            help="Text, or annotations of GitHub Actions.",
        ),
    ):
        command = option(command)
    return command


def load(spec: str) -> list[Graph]:
    """The graphs of FILE, of FILE#3 the one, of - those on stdin."""
    from retrograd.graph import sources
    from retrograd.graph.readers import parse

    path, number = sources.split(spec)
    if path != "-":
        return sources.load(spec)
    graphs = parse(_stdin(), "stdin")
    return graphs if number is None else [sources.numbered(graphs, number, path)]


def one(spec: str) -> Graph:
    """The graph of a file that holds one, or of FILE#3."""
    from retrograd.graph import sources

    return sources.single(load(spec), spec)


def every(specs: Sequence[str]) -> list[Graph]:
    """The graphs of all files, in the order given."""
    if list(specs).count("-") > 1:
        raise UsageError("`FILE` is - twice, but there is only one stdin")
    return [graph for spec in specs for graph in load(spec)]


def say(record: GraphRecord, as_json: bool, form: str, everything: bool, outputs: Sequence[str]) -> None:
    """Print a record and write it to the files asked for."""
    from retrograd.report import write

    # Written first: a reader may close the pipe before it has read everything.
    write(record, *outputs)
    if as_json:
        click.echo(record.to_json())
        return
    from rich.console import Console

    from retrograd.report import graph

    if form == "github":
        click.echo(graph.to_github(record), nl=False)
    else:
        graph.render(record, Console(), everything)


def _stdin() -> str:
    data = sys.stdin.buffer.read()
    if data.startswith(_GZIP):
        import gzip
        import zlib

        try:
            data = gzip.decompress(data)
        except (EOFError, OSError, zlib.error) as error:
            raise UsageError(f"stdin: the gzip data is damaged or cut off ({error})") from None
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin: byte {error.start} is not UTF-8 text; expected a dump, plain or gzip") from None
