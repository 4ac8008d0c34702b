"""`retrograd trace record`: run a Python program and record its training steps."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="[-- SCRIPT.py ARGS ...]")
@click.option(
    "--level",
    type=click.Choice(["names", "fast", "full"]),
    default="fast",
    show_default=True,
    help="No numbers; each value once; every view too.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("run.trace"),
    show_default=True,
    metavar="FILE",
    help="Where to write, .trace or .jsonl.gz.",
)
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="End the program after N steps.")
@click.option(
    "--compiled",
    type=click.Choice(["keep", "eager", "refuse"]),
    default="keep",
    show_default=True,
    help="What torch.compile has compiled: runs unseen; runs eagerly; is an error.",
)
@click.option(
    "--engine",
    type=click.Choice(["auto", "tape", "python"]),
    default="auto",
    show_default=True,
    help="What records: compiled code, built at its first use; Python; the first where it is built or there is a GPU.",
)
@click.option("--pdb", is_flag=True, help="Open the debugger at the first operator that makes a NaN or Inf.")
@click.option("--nan", is_flag=True, help="Say at the end where the first NaN or Inf comes from, as `trace nan` does.")
@click.pass_context
def command(
    ctx: click.Context,
    program: tuple[str, ...],
    level: str,
    output: Path,
    steps: int | None,
    compiled: str,
    engine: str,
    pdb: bool,
    nan: bool,
) -> None:
    """Run a Python program in this process and record every operator, without a change of its source.

    PROGRAM is a script, -m MODULE or -c CODE, with its arguments; a step ends with each call of an optimizer. With
    torchrun: torchrun ... -m retrograd trace record -o run.trace -- train.py; each rank writes its own file.

    Exit code: the program's own if it failed; with --nan 1 if there is a NaN or Inf; 2 wrong usage.
    """
    from retrograd.core.run_program import run

    options = dict(level=level, steps=steps, compiled=compiled, breakpoint_on="bad" if pdb else None, engine=engine)
    recorder, code = run(program, output, options)
    steps_told = f"{recorder.steps} whole step{'' if recorder.steps == 1 else 's'}"
    click.echo(f"retrograd: {len(recorder.trace.ops)} operators, {steps_told}, are in {recorder.path}", err=True)
    if nan:
        from retrograd.cli._trace import say
        from retrograd.trace.nan_provenance import provenance

        found = provenance(recorder.trace)
        say(found, False, ())
        code = code or found.exit_code
    ctx.exit(code)
