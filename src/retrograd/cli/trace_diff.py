"""`retrograd trace diff`: the first operator at which two runs differ, and why; the verdict as the exit code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from retrograd.cli._trace import output_options

if TYPE_CHECKING:
    from retrograd.report import Compared


@click.command()
@click.argument("a")
@click.argument("b")
@click.option(
    "--bitwise/--attainable",
    "bitwise",
    default=None,
    help="Each bit counts, or what rounding does not explain  [default: bits, if devices and dtypes are the same].",
)
@click.option("--all", "everything", is_flag=True, help="Leave nothing out.")
@output_options
@click.pass_context
def command(
    ctx: click.Context, a: str, b: str, bitwise: bool | None, everything: bool, as_json: bool, outputs: tuple[str, ...]
) -> None:
    """Name the first operator at which two recorded runs differ by themselves, and say why where that is plain.

    A and B are files of `retrograd trace record`. Operators that only one of the runs has do not end the comparison.
    What differs because of its inputs is counted. With -o diff.html a page shows the operators around it on both sides.

    Exit code: 0 same, 1 different, 2 wrong usage.
    """
    from retrograd.report import check_paths
    from retrograd.trace.diffing.api import diff
    from retrograd.trace.diffing.schema import TraceDiff

    check_paths(*outputs, of=TraceDiff)
    found = diff(a, b, None if bitwise is None else "bitwise" if bitwise else "attainable")
    say(found, as_json, outputs, everything)
    ctx.exit(found.exit_code)


def say(record: Compared, as_json: bool, outputs: Sequence[str], everything: bool = False) -> None:
    """Print a record and write it to the files asked for."""
    from retrograd.report import write

    # Written first: a reader may close the pipe before it has read everything.
    write(record, *outputs)
    if as_json:
        click.echo(record.to_json())
        return
    from rich.console import Console

    from retrograd.report.trace_diff import render

    render(record, Console(), everything)
