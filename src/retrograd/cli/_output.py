"""Output of commands: a record in the form asked for on stdout, progress on stderr."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from functools import partial, wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from retrograd import config
from retrograd.cli._options import AS_JSON, Decorator, options, outputs_option

if TYPE_CHECKING:
    from rich.console import Console

    from retrograd.report import AnyRecord

Progress = Callable[[str, str], None]
_UNFOLDED = 10_000  # columns, so that each row of a table is a line for grep
INTERRUPTED = 130  # exit code at Ctrl-C, as of a shell


class Terminated(KeyboardInterrupt):
    """SIGTERM, by which `timeout` and CI end a command, or SIGHUP, of a terminal that goes."""


@contextlib.contextmanager
def sigterm_interrupts() -> Generator[None]:
    """Take SIGTERM and SIGHUP like Ctrl-C: processes that a command started, in sessions of their own, end with it."""
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]  # Windows lacks one
    in_main = threading.current_thread() is threading.main_thread()
    ours = [number for number in numbers if in_main and signal.getsignal(number) is signal.SIG_DFL]  # nohup ignores one

    def terminated(*_: object) -> None:
        raise Terminated

    for number in ours:
        signal.signal(number, terminated)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def whole_output() -> Generator[None]:
    """Let a reader of stdout go before all is written (`| head`): no error, and the exit code stays the command's."""
    try:
        yield
    except BrokenPipeError:
        _to_nowhere()
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            _to_nowhere()


def _to_nowhere() -> None:
    """Point stdout to where nobody reads; Python flushes it once more when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show(record: AnyRecord, outputs: Sequence[str] = (), form: str = "text", everything: bool = False) -> None:
    """Write a record to files, then print it as "text", "json" or "github" (annotations)."""
    from retrograd import report

    # Written first: a reader may close the pipe before it has read everything.
    report.write(record, *outputs)
    with whole_output():
        if form == "json":
            click.echo(record.to_json())
        elif form == "github":
            click.echo(report.to_github(record), nl=False)
        else:
            report.show(record, console(), everything)


def console() -> Console:
    """The terminal; in a file or a pipe no line is folded, unless COLUMNS says how wide it is."""
    from rich.console import Console

    class Terminal(Console):
        def on_broken_pipe(self) -> None:
            raise  # rich calls it where it catches the error, and would end with exit code 1

    redirected = not sys.stdout.isatty() and not config.variables(["COLUMNS"])
    return Terminal(width=_UNFOLDED if redirected else None)


def answers(
    record: str, *more: Decorator, everything: bool = False, early: bool = False, judged: bool = False
) -> Decorator:
    """A command that returns a record: options for its form and for files, and the exit code that the record has.

    Args:
        record: "module:Class" of the record, to refuse names of files before minutes of work.
        more: further options, as `FORMAT` and `EVERYTHING`, which are for printing.
        everything: whether all is printed where the command has no such option.
        early: whether the command takes a function `tell`, which shows a record that it has before its end.
        judged: whether the record has SARIF and a badge.
    """

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def answer(
            as_json: bool, outputs: tuple[str, ...], form: str = "text", everything: bool = everything, **own: Any
        ) -> None:
            if outputs:
                from retrograd.report import check_paths

                module, _, name = record.partition(":")
                check_paths(*outputs, of=getattr(import_module(module), name))
            show_record = partial(show, outputs=outputs, form="json" if as_json else form, everything=everything)
            if early:
                own["tell"] = show_record
            result = command(**own)
            show_record(result)
            click.get_current_context().exit(getattr(result, "exit_code", 0))

        forms = ".html, .json, .txt, .sarif or .svg (a badge)" if judged else ".html, .json or .txt"
        return options([*more, outputs_option(forms), AS_JSON])(answer)

    return add


@contextlib.contextmanager
def live(quiet: bool) -> Generator[Progress | None]:
    """Live progress for a person, one plain line a stage for a log, nothing if quiet; always on stderr."""
    if quiet:
        yield None
    elif sys.stderr.isatty() and not config.in_ci():
        from rich.console import Console
        from rich.text import Text

        # Text, because a case such as `x[0]` must not be read as markup.
        with Console(stderr=True).status(Text("starting")) as status:

            def update(stage: str, text: str) -> None:
                line = Text(f"{stage}: {text}")
                if text.startswith("found: "):  # stays, above the line that changes
                    status.console.print(line, soft_wrap=True)
                else:
                    status.update(line)

            yield update
    else:

        def echo(stage: str, text: str) -> None:
            # A log needs the outcome only; a start is for who watches.
            if text != "running" and not text.startswith("compiling "):
                click.echo(f"{stage}: {text}", err=True)

        yield echo
