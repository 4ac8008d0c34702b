"""`retrograd graph unique`: how many graphs files really hold."""

from __future__ import annotations

import click

from retrograd.cli import _graph


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@_graph.output_options
def command(files: tuple[str, ...], as_json: bool, form: str, everything: bool, outputs: tuple[str, ...]) -> None:
    """Count the graphs that files really hold.

    They are counted as texts, up to names, up to dead code and packaging, and up to the order of parameters; the table
    says which file has which.

    Exit code: 0, however many there are; 2 wrong usage.
    """
    from retrograd import graph
    from retrograd.graph.schema import Unique
    from retrograd.report import check_paths

    check_paths(*outputs, of=Unique)
    _graph.say(graph.unique(_graph.every(files)), as_json, form, everything, outputs)
