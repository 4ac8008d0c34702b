"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def words(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    """The words of "a, b", as the callback of an option."""
    return tuple(word.strip() for word in (value or "").split(",") if word.strip())


def examples(*lines: str) -> str:
    """The end of a help page."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def options(choices: Sequence[Decorator]) -> Decorator:
    """A decorator that adds options in this order."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(choices):
            command = option(command)
        return command

    return add


def program(metavar: str) -> Decorator:
    """The words of another program, whose options are none of ours."""
    return click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar=metavar)


def choice(*names: str, of: Sequence[str], help: str | None = None, default: str = "") -> Decorator:
    """An option with one of some words; the first, if no default is named."""
    return click.option(*names, type=click.Choice(of), default=default or of[0], show_default=True, help=help)


PATH = click.Path(path_type=Path)
FOLDER = click.Path(path_type=Path, file_okay=False)
# Settings of a command that takes `program`.
PASSES_OPTIONS_ON: dict[str, Any] = {"ignore_unknown_options": True, "allow_interspersed_args": False}

AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
OUTPUTS = click.option(
    "-o", "--output", "outputs", multiple=True, metavar="FILE", help="Also write .html, .json or .txt."
)
EVERYTHING = click.option("--all", "everything", is_flag=True, help="Leave nothing out.")
FORMAT = choice("--format", "form", of=["text", "github"], help="Text, or annotations of GitHub Actions.")
