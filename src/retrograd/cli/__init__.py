"""Command line: one file a command or group, imported when it is asked for; torch is imported to run only."""

from __future__ import annotations

from typing import ClassVar

import click

from retrograd.cli._groups import LazyGroup
from retrograd.errors import RetrogradError

_ELSEWHERE = {"repro": "verify"}  # a command in the file of another
_COMMANDS = ("verify", "repro", "flake", "trace", "graph", "fsdp", "codegen", "report", "bench", "env")


class _Commands(LazyGroup):
    modules: ClassVar = {name: f"{__name__}.{_ELSEWHERE.get(name, name)}" for name in _COMMANDS}

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except RetrogradError as error:
            click.echo(f"retrograd: {error}", err=True)
            ctx.exit(error.exit_code)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Prove the backward pass of a PyTorch op, or find what is wrong with it."""
