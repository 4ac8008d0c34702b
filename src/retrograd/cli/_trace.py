"""What the commands of `retrograd trace` share: how an answer is said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from retrograd.report import TraceRecord


def output_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--json and -o, as every command that answers with a record has them."""
    for option in (
        click.option(
            "-o", "--output", "outputs", multiple=True, metavar="FILE", help="Also write .html, .json or .txt."
        ),
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
    ):
        command = option(command)
    return command


def say(record: TraceRecord, as_json: bool, outputs: Sequence[str]) -> None:
    """Print a record and write it to the files asked for."""
    from retrograd.report import write

    # Written first: a reader may close the pipe before it has read everything.
    write(record, *outputs)
    if as_json:
        click.echo(record.to_json())
        return
    from rich.console import Console

    from retrograd.report.trace import render

    render(record, Console())
