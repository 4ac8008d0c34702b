"""The command line. Commands are imported when they are asked for, and import torch only to run."""

from __future__ import annotations

import importlib

import click

from retrograd.errors import RetrogradError

_COMMANDS = ("verify", "repro", "flake", "report", "bench", "env")


class _Lazy(click.Group):
    """A group that finds its commands in the modules of this package."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"retrograd.cli.{cmd_name}").command
        return command

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except RetrogradError as error:
            click.echo(f"retrograd: {error}", err=True)
            ctx.exit(error.exit_code)


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Prove the backward pass of a PyTorch op, or find what is wrong with it."""
