"""`retrograd fsdp check`: run a job and say whether its ranks and steps issue the same collectives."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="-- torchrun ... SCRIPT ...")
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="End the program after N steps of an optimizer.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="S",
    help="End a job in which a rank issues nothing for S seconds, with the collective that is due.",
)
@click.option("--strict", is_flag=True, help="Compare ranks before each collective, not only before each update.")
@click.option("--nonfinite", is_flag=True, help="Name the rank that gives NaN or Inf to a reduction.")
@click.option("--logs", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Keep the logs.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(ctx: click.Context, program: tuple[str, ...], logs: Path | None, as_json: bool, **options: object) -> None:
    """Run a training job, without a change of its source, and compare the collectives of its ranks and steps.

    A step ends with an optimizer's step(). A job whose ranks differ is stopped before the optimizer uses the gradients.

    Exit code: 0 same order; 1 ranks or steps differ, gradients were not reduced, a rank hangs or failed; 2 wrong usage,
    or the program failed and nothing was found.
    """
    from retrograd.fsdp.check_command import check

    found = check(program, dict(options), logs)
    click.echo(found.to_json() if as_json else found.text())
    ctx.exit(found.exit_code)
