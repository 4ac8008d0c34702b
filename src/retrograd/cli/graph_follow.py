"""`retrograd graph follow`: where one value of a graph goes."""

from __future__ import annotations

import click

from retrograd.cli import _graph


@click.command()
@click.argument("file")
@click.argument("value")
@_graph.output_options
def command(file: str, value: str, as_json: bool, form: str, everything: bool, outputs: tuple[str, ...]) -> None:
    """Follow one value to all that depends on it.

    The way goes through tuples, barriers, called computations and collectives, to the outputs.

    VALUE is the name of an instruction (add.7, body/add.7 in a called computation), a parameter (p24) or an output
    ("output 3": what makes it); NAME[1] is element 1 of a tuple.

    Exit code: 0, whether something depends on it or not; 2 wrong usage.
    """
    from retrograd.graph import follow
    from retrograd.graph.schema import Follow
    from retrograd.report import check_paths

    check_paths(*outputs, of=Follow)
    graph = _graph.one(file)
    # A record holds the nearest steps, unless all are asked for: a page of 40,000 lines helps nobody.
    found = follow(graph, value, limit=None) if everything else follow(graph, value)
    _graph.say(found, as_json, form, everything, outputs)
