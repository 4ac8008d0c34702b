"""`retrograd report`: read a saved record and render it again."""

from __future__ import annotations

from pathlib import Path

import click

from retrograd.cli._options import PATH, examples
from retrograd.cli._output import show

_OUTPUTS = "Write .html, .json, .txt or .xml (JUnit) instead of printing."


@click.command(epilog=examples("retrograd report r.json -o r.html", "retrograd report r.json --format github"))
@click.argument("file", type=PATH)
@click.option("-o", "--output", "outputs", multiple=True, metavar="FILE", help=_OUTPUTS)
@click.option("--tensorboard", type=PATH, metavar="DIR", help="Append to events in this folder.")
@click.option("--step", type=int, default=0, show_default=True, help="Step of these events.")
def report(file: Path, outputs: tuple[str, ...], tensorboard: Path | None, step: int) -> None:
    """Render the JSON record FILE again: as text on stdout, or as the files given with -o.

    The exit code tells whether the file could be rendered, not its verdict.
    """
    from retrograd.report import check_paths, load, to_tensorboard, write

    report = load(file)
    check_paths(*outputs, of=type(report))
    if tensorboard is not None:
        to_tensorboard(report, tensorboard, step)
    if outputs or tensorboard is not None:
        write(report, *outputs)
    else:
        show(report, everything=True)
