"""Command line: one file a command or group, imported when it is asked for; torch is imported to run only."""

from __future__ import annotations

import importlib

import click

import retrograd
from retrograd.cli._groups import CommandGroup
from retrograd.cli._output import INTERRUPTED, whole_output
from retrograd.errors import RetrogradError

_ELSEWHERE = {"repro": "verify"}  # a command in the file of another
_COMMANDS = (
    "demo", "init", "verify", "ci", "repro", "mutate", "flake", "trace", "graph", "fsdp", "codegen", "run-kernel",
    "report", "bench", "env",
)  # fmt: skip


class _Commands(CommandGroup):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        module = importlib.import_module(f"{__name__}.{_ELSEWHERE.get(name, name)}")
        command: click.Command = getattr(module, name)
        return command

    def invoke(self, ctx: click.Context) -> object:
        try:
            with whole_output():
                return super().invoke(ctx)
        except RetrogradError as error:
            click.echo(f"retrograd: {error}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("retrograd: interrupted", err=True)
            ctx.exit(INTERRUPTED)


_EXAMPLES = """\b
Examples:
  retrograd demo                                  a wrong gradient found and explained, in ten seconds
  retrograd init mylib.py                         a first spec for an op of yours
  retrograd verify mylib_spec.py -o report.html   prove it, or say what is wrong
  retrograd flake tests/test_x.py::test_backward  how often a test fails, and why
  retrograd trace record -o run.trace --nan -- train.py && retrograd trace nan run.trace
  retrograd env                                   for a bug report
"""


def _say_version(context: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked and not context.resilient_parsing:
        click.echo(f"retrograd {retrograd.__version__}")
        context.exit()


@click.group(cls=_Commands, epilog=_EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_say_version,
    help="Show the version and exit.",
)  # fmt: skip
def main() -> None:
    """Prove the backward pass of a PyTorch op, or find what is wrong with it."""
