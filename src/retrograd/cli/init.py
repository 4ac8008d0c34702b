"""`retrograd init`: a first spec for an op, written by looking at it."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from retrograd.cli._options import PATH
from retrograd.core.loading import require_file
from retrograd.core.system_errors import as_usage_error
from retrograd.errors import UsageError

_EXAMPLES = """\b
Examples:
  retrograd init mylib.py                   writes mylib_spec.py
  retrograd init mylib.py:rms_norm -o -     prints it
  retrograd init mypackage.kernels:rms_norm -o specs/rms_norm.py
"""


@click.command(epilog=_EXAMPLES)
@click.argument("target", metavar="FILE.py[:NAME]")
@click.option("-o", "--output", type=PATH, help="Where to write, - to print  [default: beside it, as FILE_spec.py].")
def init(target: str, output: Path | None) -> None:
    """Write a spec for an op, ready for `retrograd verify`.

    FILE.py[:NAME] (or package.module:NAME) is an autograd function, a function that calls one or launches Triton
    kernels, or a module. Its signature says what it takes; shapes are those of its docstring or its comments, as
    "x: [B, T, D]", else the plainest with which it runs; the reference is a function beside it that is called
    `reference`, `rms_norm_ref` or alike. Read what is written: it is a guess that runs.

    Exit code: 0 written, 2 wrong usage, 3 it ran with no shapes that were tried.
    """
    require_file(target)
    from retrograd.catalog.input_trials import signature
    from retrograd.catalog.proposal import propose

    proposal, folder = propose(target)
    if str(output) == "-":
        click.echo(proposal.text(), nl=False)
        return
    path = output or folder / f"{proposal.module.rpartition('.')[2]}_spec.py"
    if path.exists():
        raise UsageError(f"{str(path)!r} is there already; choose another with -o, or print with -o -")
    with as_usage_error(f"cannot write {str(path)!r}"):
        path.write_text(proposal.text(), encoding="utf-8")
    beside = f"reference {proposal.reference}" if proposal.reference else "no reference beside it: add one to the file"
    click.echo(f"wrote {path}: {proposal.op.name}, {signature(proposal.fit.inputs)}; {beside}")
    click.echo(f"next:  retrograd verify {shlex.quote(str(path))}")
