"""Options that several commands have."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from retrograd.errors import UsageError

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def words(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    """The words of "a, b", as the callback of an option."""
    return tuple(word.strip() for word in (value or "").split(",") if word.strip())


def seconds(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """The seconds of "90s", "5m", "1h" or "90", as the callback of an option."""
    if value is None:
        return None
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", value)
    if matched is None:
        raise UsageError(f"`--{param.name}` is {value!r}, expected seconds, or a time such as 90s, 5m or 1h")
    return float(matched[1]) * _UNITS[matched[2]]


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


def outputs_option(forms: str) -> Decorator:
    """The option for files to write, with the forms that they may have."""
    return click.option("-o", "--output", "outputs", multiple=True, metavar="FILE", help=f"Also write {forms}.")


EVERYTHING = click.option("--all", "everything", is_flag=True, help="Leave nothing out.")
FORMAT = choice("--format", "form", of=["text", "github"], help="Text, or annotations of GitHub Actions.")
