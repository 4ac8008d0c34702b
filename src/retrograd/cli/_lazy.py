"""A group of commands that are imported when they are asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import ClassVar

import click


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
