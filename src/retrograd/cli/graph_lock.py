"""`retrograd graph lock`: keep the graphs of files as they are now, for `retrograd graph check`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("graphs.lock"), show_default=True)
@click.option("--no-text", is_flag=True, help="Keep keys alone: smaller, but a change cannot be explained.")
def command(files: tuple[str, ...], output: Path, no_text: bool) -> None:
    """Write a lock file of the graphs in dumps: their keys by file name, their sizes and their texts.

    Exit code: 0 written, 2 wrong usage or a file that is no graph.
    """
    from retrograd.graph.watching import lock

    graphs = lock.of_files(files, keep=not no_text)
    lock.write(output, graphs)
    click.echo(f"{output}: {len(graphs)} graph{'s' if len(graphs) != 1 else ''}")
