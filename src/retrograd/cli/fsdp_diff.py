"""`retrograd fsdp diff`: where two logs of collectives part."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("one", type=click.Path(path_type=Path))
@click.argument("other", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(ctx: click.Context, one: Path, other: Path, as_json: bool) -> None:
    """Name the first collective in which two logs differ, with its step and module.

    Logs are those of `log.save(path)` or `retrograd fsdp check --logs DIR`: of two ranks of a run, of which the groups
    that both belong to are compared, or of one rank in two runs.

    Exit code: 0 same order, 1 different, 2 wrong usage or a file that is no log.
    """
    from retrograd.fsdp.log_diff import diff
    from retrograd.fsdp.schema import Log

    logs = Log.load(one), Log.load(other)
    names = None if logs[0].rank != logs[1].rank else (str(one), str(other))
    found = diff(*logs, names)
    click.echo(found.to_json() if as_json else found.words())
    ctx.exit(found.exit_code)
