"""`retrograd graph ls`: which graphs files hold."""

from __future__ import annotations

import json

import click

from retrograd.cli import _graph


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(files: tuple[str, ...], as_json: bool) -> None:
    """List the graphs of files.

    With their sizes and two keys: ours, which equal computations share, and the one that was recorded beside it.
    """
    from dataclasses import asdict

    from retrograd.graph.canonical import forms
    from retrograd.graph.diffing.compare import side
    from retrograd.graph.keys import strict_key

    graphs = _graph.every(files)
    folded = [forms(graph) for graph in graphs]
    sides = [side(graph, of, strict_key(graph, of)) for graph, of in zip(graphs, folded, strict=True)]
    recorded = [graph.key for graph in graphs]
    if as_json:
        rows = [{**asdict(one), "recorded": key} for one, key in zip(sides, recorded, strict=True)]
        click.echo(json.dumps(rows, indent=1))
        return
    from rich.console import Console

    from retrograd.report.graph import listing

    listing(sides, Console(), recorded)
