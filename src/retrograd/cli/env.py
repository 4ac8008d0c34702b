"""`retrograd env`: what a bug report needs to know."""

from __future__ import annotations

import json

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
    """Print versions, devices and the variables that matter."""
    from retrograd import env

    facts = env.collect()
    click.echo(json.dumps(facts, indent=1) if as_json else env.as_text(facts))
