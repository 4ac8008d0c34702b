"""`retrograd fsdp`: the collectives of sharded training, over steps and ranks."""

from __future__ import annotations

from pathlib import Path

import click

from retrograd.cli._groups import CommandGroup
from retrograd.cli._options import AS_JSON, FOLDER, PASSES_OPTIONS_ON, PATH, program


@click.group(cls=CommandGroup)
def fsdp() -> None:
    """Record and compare the collectives of sharded training (FSDP2, DDP): same order at each step, on each rank."""


@fsdp.command(context_settings=PASSES_OPTIONS_ON)
@program("-- torchrun ... SCRIPT ...")
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="End the program after N steps of an optimizer.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="S",
    help="End a job in which a rank issues nothing for S seconds, with the collective that is due.",
)
@click.option("--strict", is_flag=True, help="Compare ranks before each collective, not only before each update.")
@click.option("--nonfinite", is_flag=True, help="Name the rank that gives NaN or Inf to a reduction.")
@click.option("--logs", type=FOLDER, metavar="DIR", help="Keep the logs.")
@AS_JSON
@click.pass_context
def check(ctx: click.Context, program: tuple[str, ...], logs: Path | None, as_json: bool, **options: object) -> None:
    """Run a training job, without a change of its source, and compare the collectives of its ranks and steps.

    A step ends with an optimizer's step(). A job whose ranks differ is stopped before the optimizer uses the gradients.

    Exit code: 0 same order; 1 ranks or steps differ, gradients were not reduced, a rank hangs or failed; 2 wrong usage,
    or the program failed and nothing was found.
    """
    from retrograd.fsdp import check_command

    result = check_command.check(program, dict(options), logs)
    click.echo(result.to_json() if as_json else result.text())
    ctx.exit(result.exit_code)


@fsdp.command()
@click.argument("first", metavar="ONE", type=PATH)
@click.argument("second", metavar="OTHER", type=PATH)
@AS_JSON
@click.pass_context
def diff(ctx: click.Context, first: Path, second: Path, as_json: bool) -> None:
    """Name the first collective in which two logs differ, with its step and module.

    Logs are those of `log.save(path)` or `retrograd fsdp check --logs DIR`: of two ranks of a run, of which the groups
    that both belong to are compared, or of one rank in two runs.

    Exit code: 0 same order, 1 different, 2 wrong usage or a file that is no log.
    """
    from retrograd.fsdp import log_diff
    from retrograd.fsdp.schema import Log

    logs = Log.load(first), Log.load(second)
    names = None if logs[0].rank != logs[1].rank else (str(first), str(second))
    result = log_diff.diff(*logs, names)
    click.echo(result.to_json() if as_json else result.words())
    ctx.exit(result.exit_code)
