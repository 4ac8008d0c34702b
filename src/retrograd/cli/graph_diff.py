"""`retrograd graph diff`: why two graphs differ, the causes first; the verdict as the exit code."""

from __future__ import annotations

import click

from retrograd.cli import _graph


@click.command()
@click.argument("a")
@click.argument("b")
@_graph.output_options
@click.pass_context
def command(
    ctx: click.Context, a: str, b: str, as_json: bool, form: str, everything: bool, outputs: tuple[str, ...]
) -> None:
    """Say in words why two graphs differ.

    The causes come first, with source line and advice; what differs only because of them is counted. With
    -o diff.html a page shows the changed neighbourhood of both sides as a picture to walk along.

    Exit code: 0 same computation, 1 different, 2 wrong usage.
    """
    from retrograd import graph
    from retrograd.graph.schema import Diff
    from retrograd.report import check_paths

    check_paths(*outputs, of=Diff)
    if a == b == "-":
        _graph.every([a, b])
    found = graph.diff(_graph.one(a), _graph.one(b))
    _graph.say(found, as_json, form, everything, outputs)
    ctx.exit(found.exit_code)
