"""A group of commands that are imported when they are asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import ClassVar

import click

_WHOLE = 1000  # characters: longer than any sentence


class Lazy(click.Group):
    """Finds its commands in a table of name -> module; in each module it is called `command`."""

    modules: ClassVar[Mapping[str, str]]

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.modules:
            return None
        command: click.Command = importlib.import_module(self.modules[cmd_name]).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The first sentence of each command, whole: click's own list cuts it after 45 characters."""
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [(name, found.get_short_help_str(_WHOLE)) for name, found in commands if found is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
