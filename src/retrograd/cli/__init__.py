"""The command line. Commands are imported when they are asked for, and import torch only to run."""

from __future__ import annotations

from typing import ClassVar

import click

from retrograd.cli._lazy import Lazy
from retrograd.errors import RetrogradError


class _Commands(Lazy):
    modules: ClassVar = {
        name: f"{__name__}.{name}"
        for name in ("verify", "repro", "flake", "trace", "graph", "fsdp", "codegen", "report", "bench", "env")
    }

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except RetrogradError as error:
            click.echo(f"retrograd: {error}", err=True)
            ctx.exit(error.exit_code)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Prove the backward pass of a PyTorch op, or find what is wrong with it."""
