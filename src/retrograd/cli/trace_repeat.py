"""`retrograd trace repeat`: run a program twice and name the first operator that gave other bits the second time."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from retrograd.cli._trace import output_options
from retrograd.errors import UndecidedError

_STDERR = 2  # the answer alone goes to stdout


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="[-- SCRIPT.py ARGS ...]")
@click.option("--steps", type=click.IntRange(min=1), default=2, show_default=True, metavar="N", help="Of each run.")
@click.option(
    "--level",
    type=click.Choice(["fast", "full"]),
    default="full",
    show_default=True,
    help="Each value once; every view too.",
)
@click.option(
    "--keep",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Keep both traces, first.trace and second.trace.",
)
@output_options
@click.pass_context
def command(
    ctx: click.Context,
    program: tuple[str, ...],
    steps: int,
    level: str,
    keep: Path | None,
    as_json: bool,
    outputs: tuple[str, ...],
) -> None:
    """Run a Python program twice, recorded, in a process each, and compare the runs bit for bit.

    PROGRAM is a script, -m MODULE or -c CODE. What differs although the seeds are the same is not deterministic; a
    program that sets no seed differs at its first random operator. What the program prints goes to stderr.

    Exit code: 0 same, 1 different, 2 wrong usage, 3 the program failed.
    """
    from retrograd.cli.trace_diff import say
    from retrograd.report import check_paths
    from retrograd.trace.diffing.api import diff
    from retrograd.trace.diffing.schema import TraceDiff

    check_paths(*outputs, of=TraceDiff)
    with tempfile.TemporaryDirectory(prefix="retrograd-trace-") as temporary:
        folder = keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / "first.trace", folder / "second.trace"]
        for file in files:
            _record(program, file, steps, level)
        found = diff(*files, "bitwise")
    say(found, as_json, outputs)
    ctx.exit(found.exit_code)


def _record(program: Sequence[str], file: Path, steps: int, level: str) -> None:
    options = ["-o", str(file), "--steps", str(steps), "--level", level]
    command = [sys.executable, "-m", "retrograd", "trace", "record", *options, "--", *program]
    code = subprocess.run(command, check=False, stdout=_STDERR).returncode
    if code == 2:  # the recorder has said what is wrong
        click.get_current_context().exit(2)
    if code:
        raise UndecidedError(f"the program ended with exit code {code}; two runs can be compared if both end well")
