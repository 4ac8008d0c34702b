"""Groups of commands whose help has whole sentences."""

from __future__ import annotations

import click

from retrograd.core.loading import near

_LONGEST_SENTENCE = 1000  # characters; click cuts after 45


class CommandGroup(click.Group):
    """A group whose help lists its commands as they were declared, each with its whole first sentence."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order in which the commands were declared; click would sort them."""
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command of a name; of one that there is not, the error says which is spelt alike."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            names = self.list_commands(ctx)
            close = near(args[0], names) or f"; expected one of {', '.join(names)}"
            raise click.UsageError(error.message.rstrip(".") + close, ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands."""
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [(name, known.get_short_help_str(_LONGEST_SENTENCE)) for name, known in commands if known is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
