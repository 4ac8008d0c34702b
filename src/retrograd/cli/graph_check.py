"""`retrograd graph check`: are the graphs of files those of a lock file, and if not, why."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--lock", "path", type=click.Path(path_type=Path), default=Path("graphs.lock"), show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(ctx: click.Context, files: tuple[str, ...], path: Path, as_json: bool) -> None:
    """Compare the graphs in dumps with a lock file, by file name; what changed is explained.

    Exit code: 0 as locked, 1 a graph changed, appeared or is missing; 2 wrong usage.
    """
    from retrograd.graph.watching import lock

    found = lock.check(lock.of_files(files), lock.read(path), str(path))
    click.echo(found.to_json() if as_json else found.text())
    ctx.exit(found.exit_code)
