"""Progress of a command that takes minutes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

import click

from retrograd import config

Progress = Callable[[str, str], None]


@contextlib.contextmanager
def live(quiet: bool) -> Iterator[Progress | None]:
    """Live progress for a person, one plain line a stage for a log, nothing if quiet; always on stderr."""
    if quiet:
        yield None
    elif sys.stderr.isatty() and not config.in_ci():
        from rich.console import Console
        from rich.text import Text

        # Text, because a case such as `x[0]` must not be read as markup.
        with Console(stderr=True).status(Text("starting")) as status:

            def show(stage: str, text: str) -> None:
                line = Text(f"{stage}: {text}")
                if text.startswith("found: "):  # stays, above the line that changes
                    status.console.print(line, soft_wrap=True)
                else:
                    status.update(line)

            yield show
    else:

        def tell(stage: str, text: str) -> None:
            # A log needs the outcome only; a start is for who watches.
            if text != "running":
                click.echo(f"{stage}: {text}", err=True)

        yield tell
