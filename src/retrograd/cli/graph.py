"""`retrograd graph`: questions about computation graphs. Each subcommand is a module, imported when it is asked for."""

from __future__ import annotations

from typing import ClassVar

import click

from retrograd.cli._lazy import Lazy


class _Commands(Lazy):
    modules: ClassVar = {
        name: f"retrograd.cli.graph_{name}" for name in ("unique", "diff", "follow", "ls", "watch", "lock", "check")
    }


@click.group(cls=_Commands)
def command() -> None:
    """Read, count, compare and explain the computation graphs of training steps.

    FILE is a dump: HLO of torch_xla or JAX, StableHLO, an FX graph, a save-file of torch_xla; plain or gzip; FILE#3 is
    graph 3 of a file with several (from 0), - is stdin.
    """
