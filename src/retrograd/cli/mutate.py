"""`retrograd mutate`: changes an op's functions one at a time, and says which mistakes tests would let pass."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from retrograd import config
from retrograd.cli._options import EVERYTHING, FORMAT, choice, seconds
from retrograd.cli._output import answers, live, sigterm_interrupts
from retrograd.cli._revisions import git
from retrograd.core.loading import require_file, require_torch
from retrograd.errors import UsageError

if TYPE_CHECKING:
    from retrograd.mutation.schema import MutationReport

_EXAMPLES = """\b
Examples:
  retrograd mutate my_op.py:spec --tests "pytest tests/test_my_op.py" -j 2
  retrograd mutate my_op.py:spec --since main --fail-under 90 --format github
  retrograd mutate my_op.py:spec --tests "pytest tests" -n 2000 --results mutants.sqlite --cluster tcp://host:8786
  retrograd mutate my_op.py:spec --function MyOp.backward -n 30 -o report.html
"""


def _range(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, int] | None:
    if value is None:
        return None
    matched = re.fullmatch(r"(\d+)(?:-(\d+))?", value)
    if matched is None:
        raise UsageError(f"`--only-lines` is {value!r}, expected lines such as 12 or 10-40")
    return int(matched[1]), int(matched[2] or matched[1])


@click.command(epilog=_EXAMPLES)
@click.argument("target")
@click.option("--tests", metavar="COMMAND", help="Judge these tests too: 'pytest tests/test_op.py', or any command.")
@click.option("-n", "--count", type=click.IntRange(min=1), default=100, show_default=True, help="Mutants at most.")
@click.option("--function", "functions", multiple=True, metavar="NAME", help="Mutate this one  [default: all it runs].")
@click.option("--since", metavar="REV", help="Only lines that changed since this revision of git.")
@click.option("--only-lines", "only", callback=_range, metavar="A-B", help="Only these lines.")
@click.option("--budget", callback=seconds, metavar="5m", help="Begin no mutant after this time.")
@click.option(
    "--fail-under",
    "least",
    type=click.FloatRange(0, 100),
    default=0.0,
    metavar="PERCENT",
    help="Exit with 1 below this share.",
)
@choice("--level", of=["quick", "full"], help="Of verify.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the choice and of all inputs.")
@click.option("--timeout", type=float, default=120.0, show_default=True, help="CPU seconds that a mutant may take.")
@click.option("-j", "--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Processes at a time.")
@click.option(
    "--search", type=click.IntRange(min=1), default=1, show_default=True, help="Rounds of 130 inputs for each mutant."
)
@click.option("--results", metavar="FILE", help="Keep results in this SQLite file, and go on where it was.")
@click.option("--cluster", default="", metavar="ADDRESS", help="Take the workers of a Dask scheduler.")
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
@answers("retrograd.mutation.schema:MutationReport", FORMAT, EVERYTHING, judged=True)
def mutate(
    target: str,
    since: str | None,
    only: tuple[int, int] | None,
    least: float,
    quiet: bool,
    **options: object,
) -> MutationReport:
    """Change the functions that TARGET runs, one at a time, and say which mistakes would pass.

    TARGET is an op spec, as for `retrograd verify`. Judges are verify and, with --tests, a command of your own. Your
    files are not touched: each mutant lives in a process of its own. Survivors come with the smallest input that shows
    them and a test to paste.

    Exit code: 0, 1 below --fail-under, 2 wrong usage.
    """
    require_file(target)
    config.hide_gpus()  # before torch is imported
    require_torch("retrograd mutate")
    from retrograd.catalog import resolve
    from retrograd.mutation import runner
    from retrograd.mutation.messages import progress_line

    spec = resolve(target)
    lines = _chosen(_changed(since) if since else None, only)
    with live(quiet) as show, sigterm_interrupts():

        def progress(done: int, of: int, result: runner.MutantResult) -> None:
            if show:
                show(f"{done} of {of}", progress_line(result))

        return runner.mutate(
            spec, lines=lines, least=least / 100, name=target, progress=progress, load=partial(resolve, target),
            **options,  # type: ignore[arg-type]
        )  # fmt: skip


def _chosen(
    changed: dict[Path, set[int]] | None, only: tuple[int, int] | None
) -> Callable[[str, int], bool] | None:  # fmt: skip
    if changed is None and only is None:
        return None

    def chosen(file: str, line: int) -> bool:
        inside = only is None or only[0] <= line <= only[1]
        return inside and (changed is None or line in changed.get(Path(file).resolve(), ()))

    return chosen


def _changed(revision: str) -> dict[Path, set[int]]:
    """Lines that differ from a revision, by file; files that git does not know are not among them."""
    root = Path(git(revision, "rev-parse", "--show-toplevel").strip())
    changed: dict[Path, set[int]] = {}
    file = Path()
    for line in git(revision, "diff", "--unified=0", "--no-color", revision, "--", "*.py").splitlines():
        if line.startswith("+++ "):
            file = (root / line[4:].removeprefix("b/")).resolve()
        elif matched := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, number = int(matched[1]), int(matched[2] or 1)
            changed.setdefault(file, set()).update(range(first, first + number))
    return changed
