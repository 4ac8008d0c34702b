"""`retrograd flake`: does a test fail sometimes, how often, when and why; the verdict as the exit code."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import click

from retrograd.cli._options import PATH, examples, words
from retrograd.cli._output import INTERRUPTED, answers, console, live, show, sigterm_interrupts
from retrograd.errors import MissingExtraError, UsageError

if TYPE_CHECKING:
    from retrograd.flake.schema import FlakeReport


def _threads(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...]:
    numbers = words(ctx, param, value)
    for word in numbers:
        if not re.fullmatch(r"[1-9]\d*", word):
            raise UsageError(f"`--threads` has {word!r}, expected whole numbers such as 1,2")
    return tuple(map(int, numbers))


def _env(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    variables: dict[str, tuple[str, ...]] = {}
    for text in value:
        name, equals, choices = text.partition("=")
        if not equals or not name:
            raise UsageError(f"`--env` is {text!r}, expected NAME=a,b: a variable with the values to compare")
        variables[name] = tuple(choices.split(","))
    return variables


@click.command(
    epilog=examples(
        "retrograd flake tests/test_x.py::test_backward", "retrograd flake my_op.py:margin --seeds 300 --threads 1,2"
    )
)
@click.argument("targets", nargs=-1, metavar="NODEID...")
@click.option("--seeds", type=int, default=30, show_default=True, help="How many seeds.")
@click.option("--seed", "first", type=int, help="The first of them  [default: the next in the history, or 0].")
@click.option("--repeats", type=int, default=2, show_default=True, help="Fresh processes that run all seeds.")
@click.option("--threads", callback=_threads, metavar="1,2", help="Numbers of threads to compare.")
@click.option("--env", multiple=True, callback=_env, metavar="NAME=a,b", help="Variables with values to compare.")
@click.option("--order", "orders", type=int, default=0, metavar="N", help="Orders of the file's other tests before it.")
@click.option("--timeout", type=float, default=300.0, show_default=True, help="Seconds after which a run is cut off.")
@click.option("-j", "--jobs", type=int, default=1, show_default=True, help="Processes at a time.")
@click.option("--fresh", is_flag=True, help="Each run in a process of its own.")
@click.option("--pytest", "pytest_args", multiple=True, metavar="ARG", help="One more argument for pytest.")
@answers("retrograd.flake.schema:FlakeReport")
@click.option("--history", "show_history", is_flag=True, help="Print the rates of the history; run nothing.")
@click.option("--db", type=PATH, help="The history  [default: .retrograd/flake.sqlite3].")
@click.option("--no-history", is_flag=True, help="Neither read nor write the history.")
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
@click.pass_context
def flake(
    ctx: click.Context,
    targets: tuple[str, ...],
    first: int | None,
    show_history: bool,
    db: Path | None,
    no_history: bool,
    quiet: bool,
    **plan: object,
) -> FlakeReport:
    """Run tests again and again under control, and say whether, how often, when and why they fail.

    NODEID is a node id of pytest (tests/test_x.py::test_y; a file stands for its tests) or a callable
    (package.module:name, file.py:name) that raises, returns False or returns a margin err / tol.

    Exit code: 0 no failure seen, 1 flaky or broken, 2 wrong usage, 3 cannot decide, 130 interrupted, with the report so
    far.
    """
    from retrograd.flake import history

    path = db or history.DEFAULT
    if show_history:
        _print_history(path, targets, ctx.params["as_json"])
        ctx.exit(0)
    stopping = threading.Event()
    with sigterm_interrupts():
        report = _run(targets, first, None if no_history else path, quiet, {**plan, "stopping": stopping})
    # Kept first: a reader may close the pipe before it has read everything.
    if not no_history:
        _keep(path, report, chosen=db is not None)
    if stopping.is_set():
        show(report, ctx.params["outputs"], "json" if ctx.params["as_json"] else "text")
        ctx.exit(INTERRUPTED)
    return report


def _run(
    targets: tuple[str, ...], first: int | None, path: Path | None, quiet: bool, plan: dict[str, object]
) -> FlakeReport:
    from retrograd.flake import history
    from retrograd.flake.examination import run

    _need_pytest(targets)
    if first is None:
        # Seeds that were tried before would tell nothing new.
        first = max((history.next_seed(path, target) for target in targets), default=0) if path else 0
    with live(quiet) as tell:
        command_line = "retrograd " + " ".join(sys.argv[1:])
        return run(*targets, first=first, progress=tell, command=command_line, **plan)  # type: ignore[arg-type]


def _need_pytest(targets: tuple[str, ...]) -> None:
    from importlib.util import find_spec

    from retrograd.flake.plan import FlakeTarget

    if any(FlakeTarget(target).is_test for target in targets) and not find_spec("pytest"):
        raise MissingExtraError("pytest", "flake", "retrograd flake with a node id")


def _keep(path: Path, report: FlakeReport, chosen: bool) -> None:
    """Append to the history; where its place was not chosen, that it cannot be written is no reason to fail."""
    from retrograd.flake import history

    try:
        history.record(path, report, history.revision())
    except UsageError as error:
        if chosen:
            raise
        click.echo(f"retrograd: the runs were not kept: {error}", err=True)


def _print_history(path: Path, targets: tuple[str, ...], as_json: bool) -> None:
    from retrograd.flake import history

    periods = history.periods(path, targets)
    if as_json:
        import json
        from dataclasses import asdict

        click.echo(json.dumps([asdict(period) for period in periods], indent=1))
        return

    from retrograd.flake.messages import history as history_text
    from retrograd.report.text import show as show_parts

    show_parts(history_text(periods), console())
