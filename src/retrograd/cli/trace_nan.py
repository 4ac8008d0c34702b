"""`retrograd trace nan`: where the first NaN or Inf of a trace comes from; the answer as the exit code."""

from __future__ import annotations

from pathlib import Path

import click

from retrograd.cli._trace import output_options, say


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--partial", is_flag=True, help="Take what there is of a file that was cut off.")
@output_options
@click.pass_context
def command(ctx: click.Context, file: Path, partial: bool, as_json: bool, outputs: tuple[str, ...]) -> None:
    """Name the operator that made the first NaN or Inf, with its line, module, inputs and why.

    Exit code: 0 there is none, 1 found, 2 wrong usage, 3 the trace has no statistics.
    """
    from retrograd.report import check_paths
    from retrograd.trace import load
    from retrograd.trace.nan_provenance import Provenance, provenance

    check_paths(*outputs, of=Provenance)
    found = provenance(load(file, partial=partial))
    say(found, as_json, outputs)
    ctx.exit(found.exit_code)
