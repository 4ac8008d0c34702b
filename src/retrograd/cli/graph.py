"""`retrograd graph`: reading, counting, comparing, locking and watching the computation graphs of training steps."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from retrograd.cli._groups import CommandGroup
from retrograd.cli._options import AS_JSON, EVERYTHING, FORMAT, PASSES_OPTIONS_ON, PATH, choice, examples, program
from retrograd.cli._output import answers, console
from retrograd.core.run_program import with_interpreter
from retrograd.core.system_errors import as_usage_error
from retrograd.errors import UsageError

if TYPE_CHECKING:
    from retrograd.graph.compilations.schema import Compilations
    from retrograd.graph.schema import Diff, Follow, Pairs, Unique
    from retrograd.graph.watching.schema import Check, WatchReport

_FLAGS_WITH_VALUE = ("-X", "-W")  # of Python

_WARMUP = "New graphs after N steps fail  [default: 2 without --expect]."
_THRESHOLD = "torch_xla: smaller live tensors are not looked at."
_NUMBER = click.IntRange(min=0)
_FILES = click.argument("files", nargs=-1, required=True, metavar="FILE...")


@click.group(
    cls=CommandGroup,
    epilog=examples("retrograd graph diff step1.hlo step2.hlo", "retrograd graph watch --expect 2 -- train.py"),
)
def graph() -> None:
    """Read, count, compare and explain the computation graphs of training steps.

    FILE is a dump: HLO of torch_xla or JAX, StableHLO, an FX graph, a save-file of torch_xla; plain or gzip; FILE#3 is
    graph 3 of a file with several (from 0), - is stdin.
    """


@graph.command(epilog=examples("retrograd graph unique step*.hlo"))
@_FILES
@answers("retrograd.graph.schema:Unique", FORMAT, EVERYTHING)
def unique(files: tuple[str, ...]) -> Unique:
    """Count the graphs that files really hold.

    They are counted as texts, up to names, up to dead code and packaging, and up to the order of parameters; the table
    says which file has which.

    Exit code: 0, however many there are; 2 wrong usage.
    """
    from retrograd import graph

    _refuse_two_stdins(files)
    return graph.unique(files)


@graph.command(epilog=examples("retrograd graph diff step1.hlo step2.hlo -o diff.html"))
@click.argument("a")
@click.argument("b")
@answers("retrograd.graph.schema:Diff", FORMAT, EVERYTHING, judged=True)
def diff(a: str, b: str) -> Diff | Pairs:
    """Say in words why two graphs differ.

    The causes come first, with source line and advice; what differs only because of them is counted. With
    -o diff.html a page shows the changed neighbourhood of both sides as a picture to walk along. Two folders, logs or
    files with several graphs are compared graph by graph. Of two stages of one program (HLO before and after
    optimisation, an eager trace and its graph) a table says what was fused, removed and moved.

    Exit code: 0 the same, 1 different (in what is computed or in how it is compiled), 2 wrong usage, 3 cannot tell: a
    text leaves out what is computed.
    """
    from retrograd.graph.pairing import diff_of

    _refuse_two_stdins((a, b))
    return diff_of(a, b)


@graph.command(epilog=examples("retrograd graph follow step2.hlo p30"))
@click.argument("file")
@click.argument("value")
@answers("retrograd.graph.schema:Follow", FORMAT, EVERYTHING)
def follow(file: str, value: str) -> Follow:
    """Follow one value to all that depends on it.

    The way goes through tuples, barriers, called computations and collectives, to the outputs.

    VALUE is the name of an instruction (add.7, body/add.7 in a called computation), a parameter (p24) or an output
    ("output 3": what makes it); NAME[1] is element 1 of a tuple.

    Exit code: 0, whether something depends on it or not; 2 wrong usage.
    """
    from retrograd import graph

    # A record holds the nearest steps, unless all are asked for: a page of 40,000 lines helps nobody.
    limit = {"limit": None} if click.get_current_context().params["everything"] else {}
    return graph.follow(file, value, **limit)


@graph.command(epilog=examples("retrograd graph ls save.hlo"))
@_FILES
@AS_JSON
def ls(files: tuple[str, ...], as_json: bool) -> None:
    """List the graphs of files.

    With their sizes and two keys: ours, which equal computations share, and the one that was recorded beside it.
    """
    from dataclasses import asdict

    from retrograd.graph.canonical import forms
    from retrograd.graph.diffing.compare import side
    from retrograd.graph.keys import strict_key
    from retrograd.graph.sources import load

    _refuse_two_stdins(files)
    graphs = [graph for file in files for graph in load(file)]
    folded = [forms(graph) for graph in graphs]
    sides = [side(graph, of, strict_key(graph, of)) for graph, of in zip(graphs, folded, strict=True)]
    recorded = [graph.key for graph in graphs]
    if as_json:
        rows = [{**asdict(each), "recorded": key} for each, key in zip(sides, recorded, strict=True)]
        click.echo(json.dumps(rows, indent=1))
        return

    from retrograd.graph.messages import listing
    from retrograd.report.text import show as show_parts

    show_parts([listing(sides, recorded)], console())


@graph.command(epilog=examples("retrograd graph compilations traces/"))
@click.argument("logs", nargs=-1, required=True, metavar="LOG...")
@answers("retrograd.graph.compilations.schema:Compilations", FORMAT, EVERYTHING)
def compilations(logs: tuple[str, ...]) -> Compilations:
    """List what torch.compile compiled in a run that TORCH_TRACE recorded, and where its ranks part.

    LOG is a log, or the folder with one a rank. Of each compilation: line, guards, graphs, what torch's caches
    answered, seconds, which guard failed, where the graph broke, recordings of CUDA graphs. Ranks part in the tensors
    that go in, in compile ids, collectives or graphs.

    Exit code: 0, 1 where ranks part, 2 wrong usage.
    """
    from retrograd.graph.compilations.listing import compilations

    return compilations(logs)


@graph.command(
    context_settings=PASSES_OPTIONS_ON, epilog=examples("retrograd graph watch --expect 2 -- train.py --lr 1e-3")
)
@program("[-- python SCRIPT ...]")
@click.option("--from", "recorded", is_flag=True, help="PROGRAM are recorded graphs instead, in the order of steps.")
@click.option("--expect", type=_NUMBER, metavar="N", help="More graphs than N fail.")
@click.option("--warmup", type=_NUMBER, metavar="N", help=_WARMUP)
@choice("--backend", of=["auto", "compile", "xla", "jax"])
@choice("--on-extra", of=["explain", "raise", "warn"])
@click.option("--save", type=PATH, metavar="DIR", help="Keep the graphs and the report.")
@click.option("--lock", type=PATH, metavar="FILE", help="Write this lock file, or hold to it.")
@click.option("--gc-before-cut", is_flag=True, help="torch_xla: collect garbage before each cut.")
@click.option("--threshold", type=_NUMBER, default=0, metavar="NODES", help=_THRESHOLD)
@AS_JSON
@click.option("-o", "--output", type=PATH, metavar="FILE", help="Also write the report, JSON.")
@click.pass_context
def watch(
    ctx: click.Context, program: tuple[str, ...], recorded: bool, as_json: bool, output: Path | None, **options: object
) -> None:
    """Run a Python program and watch the graphs that its steps compile, without a change of its source.

    Steps are calls of the first optimizer of torch, or cuts of torch_xla, unless the program calls
    retrograd.graph.step(). `python` is the interpreter that retrograd runs under. With torchrun, put it inside:
    torchrun -m retrograd.graph.watching.run '{"expect": 2}' train.py

    Exit code: the program's own if it failed; else 0, 1 if a graph is one too many, 3 if no framework was imported; 2
    wrong usage.
    """
    if recorded:
        reports, code = [_replay(program, options)], 0
    else:
        reports, code = _run(program, options)
    shown = [r for r in reports if r.graphs] or reports[:1]
    records = [json.loads(r.to_json()) for r in shown]
    if output is not None:
        with as_usage_error(f"`-o` is {str(output)!r}, which cannot be written"):
            text = json.dumps(records[0] if len(records) == 1 else records, indent=1)
            output.write_text(text + "\n", encoding="utf-8")
    if as_json:
        click.echo(json.dumps(records, indent=1))
    else:
        click.echo(
            "\n\n".join(r.text() for r in shown) or "retrograd: the program imported no framework that is watched"
        )
    # 3, cannot decide: nothing was watched.
    ctx.exit(code or max((r.exit_code for r in shown), default=3))


@graph.command(epilog=examples("retrograd graph lock step*.hlo -o graphs.lock"))
@_FILES
@click.option("-o", "--output", type=PATH, default=Path("graphs.lock"), show_default=True)
@click.option("--no-text", is_flag=True, help="Keep keys alone: smaller, but a change cannot be explained.")
def lock(files: tuple[str, ...], output: Path, no_text: bool) -> None:
    """Write a lock file of the graphs in dumps: their keys by file name, their sizes and their texts.

    Exit code: 0 written, 2 wrong usage or a file that is no graph, 3 a text leaves out what is computed.
    """
    from retrograd.graph.watching import lock

    graphs = lock.of_files(files, keep=not no_text)
    lock.write(output, graphs)
    click.echo(f"{output}: {len(graphs)} graph{'s' if len(graphs) != 1 else ''}")


@graph.command(epilog=examples("retrograd graph check step*.hlo --lock graphs.lock"))
@_FILES
@click.option("--lock", "path", type=PATH, default=Path("graphs.lock"), show_default=True)
@answers("retrograd.graph.watching.schema:Check", FORMAT, everything=True, judged=True)
def check(files: tuple[str, ...], path: Path) -> Check:
    """Compare the graphs in dumps with a lock file, by file name; what changed is explained.

    Exit code: 0 as locked, 1 a graph changed, appeared or is missing; 2 wrong usage; 3 a text leaves out what is
    computed.
    """
    from retrograd.graph.watching import lock

    return lock.check(lock.of_files(files), lock.read(path), str(path))


def _refuse_two_stdins(files: Sequence[str]) -> None:
    if list(files).count("-") > 1:
        raise UsageError("`FILE` is - twice, but there is only one stdin")


def _replay(paths: Sequence[str], options: dict[str, object]) -> WatchReport:
    from retrograd.graph.watching import files, lock
    from retrograd.graph.watching.offline import replay
    from retrograd.graph.watching.session import WatchSession

    for name, usual in (("backend", "auto"), ("gc_before_cut", False), ("threshold", 0)):
        if options[name] != usual:
            raise UsageError(
                f"`--{name.replace('_', '-')}` is for a program, but --from reads recorded graphs; leave it out"
            )
    warmup, expect = options["warmup"], options["expect"]
    session = WatchSession(expect, warmup, str(options["on_extra"]), say=lambda text: None)  # type: ignore[arg-type]
    report = replay(paths, session)
    if options["save"] is not None:
        files.save(session, options["save"])  # type: ignore[arg-type]
    if options["lock"] is not None:
        lock.hold(options["lock"], session)  # type: ignore[arg-type]
    return report


def _run(program: Sequence[str], options: dict[str, object]) -> tuple[list[WatchReport], int]:
    from retrograd.graph.watching.schema import WatchReport

    python, flags, rest = split(program)
    with tempfile.TemporaryDirectory(prefix="retrograd-graph-") as folder:
        report = Path(folder) / "report.json"
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in options.items()} | {"report": str(report)}
        command = [python, *flags, "-m", "retrograd.graph.watching.run", json.dumps(settings), *rest]
        with as_usage_error(f"{python!r} cannot be started"):
            code = subprocess.run(command, check=False).returncode
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
    first, *_ = program = with_interpreter(program)
    if not Path(first).name.startswith("python"):
        raise UsageError(
            f"the program is {first!r}, expected `python ...` or a script; a launcher starts the watcher itself: "
            f"{first} ... -m retrograd.graph.watching.run '{{}}' train.py"
        )
    at = 1
    while at < len(program) and program[at].startswith("-") and program[at] not in ("-m", "-c"):
        at += 2 if program[at] in _FLAGS_WITH_VALUE else 1
    if at >= len(program):
        raise UsageError("python is given nothing to run; expected a script, -m MODULE or -c CODE")
    return first, program[1:at], program[at:]
