"""`retrograd fsdp`: questions about sharded training. Each subcommand is a module, imported when it is asked for."""

from __future__ import annotations

from typing import ClassVar

import click

from retrograd.cli._lazy import Lazy


class _Commands(Lazy):
    modules: ClassVar = {name: f"retrograd.cli.fsdp_{name}" for name in ("check", "diff")}


@click.group(cls=_Commands)
def command() -> None:
    """Record and compare the collectives of sharded training (FSDP2, DDP): same order at each step, on each rank."""
