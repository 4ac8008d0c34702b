"""Groups of commands: help with whole sentences, and commands that are imported when they are asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import ClassVar

import click

_LONGEST_SENTENCE = 1000  # characters; click cuts after 45


class CommandGroup(click.Group):
    """A group whose help lists its commands as they were declared, each with its whole first sentence."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order in which the commands were declared; click would sort them."""
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands."""
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [(name, known.get_short_help_str(_LONGEST_SENTENCE)) for name, known in commands if known is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class LazyGroup(CommandGroup):
    """A group that finds its commands in a table of name -> module; in each module the command has its own name."""

    modules: ClassVar[Mapping[str, str]]

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.modules:
            return None
        command: click.Command = getattr(importlib.import_module(self.modules[cmd_name]), cmd_name)
        return command
