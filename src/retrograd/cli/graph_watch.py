"""`retrograd graph watch`: run a program and say which graphs its steps compile, and if there are too many."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from retrograd.errors import UsageError

if TYPE_CHECKING:
    from retrograd.graph.watching.schema import WatchReport

_WITH_VALUE = ("-X", "-W")


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="[-- python SCRIPT ...]")
@click.option("--from", "recorded", is_flag=True, help="PROGRAM are recorded graphs instead, in the order of steps.")
@click.option("--expect", type=click.IntRange(min=0), metavar="N", help="More graphs than N fail.")
@click.option(
    "--warmup",
    type=click.IntRange(min=0),
    metavar="N",
    help="New graphs after N steps fail  [default: 2 without --expect].",
)
@click.option("--backend", type=click.Choice(["auto", "compile", "xla", "jax"]), default="auto", show_default=True)
@click.option("--on-extra", type=click.Choice(["explain", "raise", "warn"]), default="explain", show_default=True)
@click.option("--save", type=click.Path(path_type=Path), metavar="DIR", help="Keep the graphs and the report.")
@click.option("--lock", type=click.Path(path_type=Path), metavar="FILE", help="Write this lock file, or hold to it.")
@click.option("--gc-before-cut", is_flag=True, help="torch_xla: collect garbage before each cut.")
@click.option(
    "--threshold",
    type=click.IntRange(min=0),
    default=0,
    metavar="NODES",
    help="torch_xla: smaller live tensors are not looked at.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Also write the report, JSON.")
@click.pass_context
def command(
    ctx: click.Context, program: tuple[str, ...], recorded: bool, as_json: bool, output: Path | None, **options: object
) -> None:
    """Run a Python program and watch the graphs that its steps compile, without a change of its source.

    Steps are calls of an optimizer of torch, or cuts of torch_xla. With torchrun, put it inside:
    torchrun -m retrograd.graph.watching.run '{"expect": 2}' train.py

    Exit code: the program's own if it failed; else 0, 1 if a graph is one too many, 3 if no framework was imported; 2
    wrong usage.
    """
    if recorded:
        reports, code = [_replay(program, options)], 0
    else:
        reports, code = _run(program, options)
    shown = [r for r in reports if r.graphs] or reports[:1]
    if output is not None:
        _write(output, shown)
    if as_json:
        click.echo(json.dumps([json.loads(r.to_json()) for r in shown], indent=1))
    else:
        click.echo(
            "\n\n".join(r.text() for r in shown) or "retrograd: the program imported no framework that is watched"
        )
    # 3, cannot decide: nothing was watched.
    ctx.exit(code or max((r.exit_code for r in shown), default=3))


def _replay(paths: Sequence[str], options: dict[str, object]) -> WatchReport:
    from retrograd.graph.watching import files, lock
    from retrograd.graph.watching.offline import replay
    from retrograd.graph.watching.session import Session

    for name, usual in (("backend", "auto"), ("gc_before_cut", False), ("threshold", 0)):
        if options[name] != usual:
            raise UsageError(
                f"`--{name.replace('_', '-')}` is for a program, but --from reads recorded graphs; leave it out"
            )
    warmup, expect = options["warmup"], options["expect"]
    session = Session(expect, warmup, str(options["on_extra"]), say=lambda text: None)  # type: ignore[arg-type]
    report = replay(paths, session)
    if options["save"] is not None:
        files.save(session, options["save"])  # type: ignore[arg-type]
    if options["lock"] is not None:
        lock.hold(session, options["lock"])  # type: ignore[arg-type]
    return report


def _run(program: Sequence[str], options: dict[str, object]) -> tuple[list[WatchReport], int]:
    from retrograd.graph.watching.schema import WatchReport

    python, flags, rest = split(program)
    with tempfile.TemporaryDirectory(prefix="retrograd-graph-") as folder:
        report = Path(folder) / "report.json"
        said = {k: str(v) if isinstance(v, Path) else v for k, v in options.items()} | {"report": str(report)}
        command = [python, *flags, "-m", "retrograd.graph.watching.run", json.dumps(said), *rest]
        try:
            code = subprocess.run(command, check=False).returncode
        except OSError as error:
            raise UsageError(f"{python!r} cannot be started: {error.strerror or error}") from None
        if not report.exists():
            click.echo("retrograd: the program ended without a report", err=True)
            return [], code or 2
        texts = json.loads(report.read_text(encoding="utf-8"))
    # A shell says 128 + n of a process that signal n killed.
    return [WatchReport.from_json(text) for text in texts], code if code >= 0 else 128 - code


def split(program: Sequence[str]) -> tuple[str, list[str], list[str]]:
    """Interpreter, its own flags, and what it runs.

    Raises:
        UsageError: it is no call of Python.
    """
    if not program:
        raise UsageError("there is no program; expected `retrograd graph watch [options] -- python train.py ...`")
    first = program[0]
    if first.endswith(".py"):
        return sys.executable, [], list(program)
    if not Path(first).name.startswith("python"):
        raise UsageError(
            f"the program is {first!r}, expected `python ...` or a script; a launcher starts the watcher itself: "
            f"{first} ... -m retrograd.graph.watching.run '{{}}' train.py"
        )
    at = 1
    while at < len(program) and program[at].startswith("-") and program[at] not in ("-m", "-c"):
        at += 2 if program[at] in _WITH_VALUE else 1
    if at >= len(program):
        raise UsageError("python is given nothing to run; expected a script, -m MODULE or -c CODE")
    return first, list(program[1:at]), list(program[at:])


def _write(path: Path, reports: Sequence[WatchReport]) -> None:
    text = (
        reports[0].to_json() if len(reports) == 1 else json.dumps([json.loads(r.to_json()) for r in reports], indent=1)
    )
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"`-o` is {str(path)!r}, which cannot be written: {error.strerror or error}") from None
