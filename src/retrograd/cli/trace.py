"""`retrograd trace`: what every operator of a training step made. Each subcommand is a module of its own."""

from __future__ import annotations

from typing import ClassVar

import click

from retrograd.cli._lazy import Lazy


class _Commands(Lazy):
    modules: ClassVar = {
        "record": "retrograd.cli.trace_record",
        "show": "retrograd.cli.trace_show",
        "nan": "retrograd.cli.trace_nan",
        "diff": "retrograd.cli.trace_diff",
        "repeat": "retrograd.cli.trace_repeat",
        "bisect": "retrograd.cli.trace_bisect",
    }


@click.group(cls=_Commands)
def command() -> None:
    """Record every operator of training steps, and ask the records: who made the first NaN, where do two runs differ?

    FILE is what `record` wrote: any machine can read it, without torch.
    """
