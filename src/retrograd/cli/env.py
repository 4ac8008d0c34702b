"""`retrograd env`: what a bug report needs to know, and what may surprise who compares numbers."""

from __future__ import annotations

import json

import click

from retrograd.cli._options import examples


@click.command(epilog=examples("retrograd env", "retrograd env --json"))
@click.option("--json", "as_json", is_flag=True, help="Print JSON (retrograd.env/1).")
@click.option("--torch/--no-torch", "with_torch", default=True, help="Read torch's flags, which imports it (seconds).")
@click.option("--self-test", is_flag=True, help="Test every part that rests on private names (half a minute).")
def env(as_json: bool, with_torch: bool, self_test: bool) -> None:
    """Print versions, devices, compilers, torch's flags, variables, settings, caches and compatibility.

    A line with a `!` changes numbers, whether they are the same twice, or times. Flags are those of a new process; in
    a program of yours, print retrograd.env.survey().
    """
    from retrograd import env
    from retrograd.env.text import as_text

    facts = env.survey(with_torch, self_test)
    click.echo(json.dumps(facts, indent=1) if as_json else as_text(facts))
