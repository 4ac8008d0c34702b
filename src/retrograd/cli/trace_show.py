"""`retrograd trace show`: the operators of a trace as a table."""

from __future__ import annotations

from pathlib import Path

import click

from retrograd.cli._trace import output_options, say


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="Only this step.")
@click.option("--phase", type=click.Choice(["forward", "backward", "other"]), help="Only this phase.")
@click.option("--op", metavar="PATTERN", help="Only operators with this in their name; * and ? are wild.")
@click.option("--module", metavar="PATTERN", help="Only modules with this in their path.")
@click.option("--bad", is_flag=True, help="Only results with NaN or Inf.")
@click.option("--most", type=click.IntRange(min=1), default=200, show_default=True, metavar="N", help="List at most N.")
@click.option("--partial", is_flag=True, help="Take what there is of a file that was cut off.")
@click.option("--tensorboard", type=click.Path(path_type=Path), metavar="DIR", help="Append to events in this folder.")
@output_options
def command(
    file: Path,
    most: int,
    partial: bool,
    tensorboard: Path | None,
    as_json: bool,
    outputs: tuple[str, ...],
    **filters: object,
) -> None:
    """List operators: number, step, phase, name, module, line and the range of the result.

    With --tensorboard, rms, largest magnitude and shares of NaN, Inf, subnormal numbers and zeros of each result that
    fits become scalars over the steps; its values and their exponents histograms, if it was recorded at --level full.
    """
    from retrograd.report import check_paths
    from retrograd.trace import load
    from retrograd.trace.filters import Listing, listing

    check_paths(*outputs, of=Listing)
    trace = load(file, partial=partial)
    if tensorboard is not None:
        from retrograd.report.trace_tensorboard import to_tensorboard

        to_tensorboard(listing(trace, **filters), tensorboard)  # type: ignore[arg-type]
        if trace.level != "full":
            click.echo(f"retrograd: no histograms: {file} was recorded at level {trace.level}, not full", err=True)
    say(listing(trace, most=most, **filters), as_json, outputs)  # type: ignore[arg-type]
