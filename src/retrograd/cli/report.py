"""`retrograd report`: read a saved record and render it again."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    "outputs",
    multiple=True,
    metavar="FILE",
    help="Write .html, .json or .txt instead of printing.",
)
def command(file: Path, outputs: tuple[str, ...]) -> None:
    """Render the JSON record FILE again: as text on stdout, or as the files given with -o.

    The exit code tells whether the file could be rendered, not its verdict.
    """
    from retrograd.errors import UsageError
    from retrograd.report import check_paths, read, write

    check_paths(*outputs)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {str(file)!r}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"cannot read {str(file)!r}: it is not UTF-8 text; expected a .json record") from None
    report = read(text)
    if outputs:
        write(report, *outputs)
        return
    from rich.console import Console

    from retrograd.flake.record import FlakeReport
    from retrograd.report import flake
    from retrograd.report import text as plain

    if isinstance(report, FlakeReport):
        flake.render(report, Console())
    else:
        plain.render(report, Console())
