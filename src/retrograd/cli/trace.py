"""`retrograd trace`: recording every operator of training steps, and asking the records."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from retrograd import config
from retrograd.cli._groups import CommandGroup
from retrograd.cli._options import EVERYTHING, FOLDER, PASSES_OPTIONS_ON, PATH, choice, examples, program
from retrograd.cli._output import answers, show
from retrograd.errors import UndecidedError, UsageError

if TYPE_CHECKING:
    from retrograd.trace.bisecting.schema import Bisection
    from retrograd.trace.diffing.schema import TraceDiff
    from retrograd.trace.filters import Listing
    from retrograd.trace.nan_provenance import Provenance
    from retrograd.trace.repeating.schema import RepeatedSteps

_STDERR = 2  # the answer alone goes to stdout
_FORMS = "'path/file.py:name' or 'package.module:name'"

_FILE = click.argument("file", type=PATH)
_WHERE = "Where to write, .trace or .jsonl.gz."
_COMPILED = "What torch.compile has compiled: runs unseen; runs eagerly; is an error."
_ENGINE = (
    "What records: compiled code, built at its first use; Python; the first where it is built, and built for later."
)
_PARTIAL = click.option("--partial", is_flag=True, help="Take what there is of a file that was cut off.")


@click.group(
    cls=CommandGroup,
    epilog=examples(
        "retrograd trace record -o run.trace --nan -- train.py",
        "retrograd trace nan run.trace",
        "retrograd trace diff a.trace b.trace -o diff.html",
    ),
)
def trace() -> None:
    """Record every operator of training steps, and ask the records: who made the first NaN, where do two runs differ?

    FILE is what `record` wrote: any machine can read it, without torch.
    """


@trace.command(
    context_settings=PASSES_OPTIONS_ON,
    epilog=examples(
        "retrograd trace record -o run.trace --nan --steps 3 -- train.py", "retrograd trace record --pdb -- train.py"
    ),
)
@program("[-- SCRIPT.py ARGS ...]")
@choice("--level", of=["names", "fast", "full"], default="fast", help="No numbers; each value once; every view too.")
@click.option("-o", "--output", type=PATH, default=Path("run.trace"), show_default=True, metavar="FILE", help=_WHERE)
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="End the program after N steps.")
@choice("--compiled", of=["keep", "eager", "refuse"], help=_COMPILED)
@choice("--engine", of=["auto", "tape", "python"], help=_ENGINE)
@click.option("--pdb", is_flag=True, help="Open the debugger at the first operator that makes a NaN or Inf.")
@click.option("--nan", is_flag=True, help="Say at the end where the first NaN or Inf comes from, as `trace nan` does.")
@click.pass_context
def record(ctx: click.Context, program: tuple[str, ...], output: Path, pdb: bool, nan: bool, **options: object) -> None:
    """Run a Python program in this process and record every operator, without a change of its source.

    PROGRAM is a script, -m MODULE or -c CODE, with its arguments; a step ends with each call of an optimizer. With
    torchrun: torchrun ... -m retrograd trace record -o run.trace -- train.py; each rank writes its own file.

    Exit code: the program's own if it failed; with --nan 1 if there is a NaN or Inf, 0 under torchrun, which would
    end the other ranks; 2 wrong usage.
    """
    from retrograd.trace.record_program import record_program

    recorder, code = record_program(program, output, {**options, "breakpoint_on": "bad" if pdb else None})
    steps = f"{recorder.steps} whole step{'' if recorder.steps == 1 else 's'}"
    click.echo(f"retrograd: {len(recorder.trace.ops)} operators, {steps}, are in {recorder.path}", err=True)
    if nan:
        from retrograd.trace.nan_provenance import provenance

        origin = provenance(recorder.trace)
        show(origin)
        # A launcher ends the other ranks where one fails, before their files are whole.
        code = code or (0 if config.rank() is not None else origin.exit_code)
    ctx.exit(code)


@trace.command("show", epilog=examples("retrograd trace show run.trace"))
@_FILE
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="Only this step.")
@click.option("--phase", type=click.Choice(["forward", "backward", "other"]), help="Only this phase.")
@click.option("--op", metavar="PATTERN", help="Only operators with this in their name; * and ? are wild.")
@click.option("--module", metavar="PATTERN", help="Only modules with this in their path.")
@click.option("--bad", is_flag=True, help="Only results with NaN or Inf.")
@click.option("--most", type=click.IntRange(min=1), default=200, show_default=True, metavar="N", help="List at most N.")
@_PARTIAL
@click.option("--tensorboard", type=PATH, metavar="DIR", help="Append to events in this folder.")
@answers("retrograd.trace.filters:Listing")
def show_operators(file: Path, most: int, partial: bool, tensorboard: Path | None, **filters: Any) -> Listing:
    """List operators: number, step, phase, name, module, line and the range of the result.

    With --tensorboard, rms, largest magnitude and shares of NaN, Inf, subnormal numbers and zeros of each result that
    fits become scalars over the steps; its values and their exponents histograms, if it was recorded at --level full.
    """
    from retrograd.trace import load
    from retrograd.trace.filters import listing

    loaded = load(file, partial=partial)
    if tensorboard is not None:
        from retrograd.report import to_tensorboard

        to_tensorboard(listing(loaded, **filters), tensorboard)
        if loaded.level != "full":
            click.echo(f"retrograd: no histograms: {file} was recorded at level {loaded.level}, not full", err=True)
    return listing(loaded, most=most, **filters)


@trace.command(epilog=examples("retrograd trace nan run.trace -o nan.html", "retrograd trace nan run.rank*.trace"))
@click.argument("files", metavar="FILE ...", type=PATH, nargs=-1, required=True)
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="Only what is bad in this step.")
@click.option("--from", "begin", type=click.IntRange(min=0), default=0, metavar="N", help="From this step on.")
@click.option("--all", "births", is_flag=True, help="List every operator that made one, each line once.")
@_PARTIAL
@answers("retrograd.trace.nan_provenance:Provenance")
def nan(files: tuple[Path, ...], partial: bool, **options: Any) -> Provenance:
    """Name the operator that made the first NaN or Inf, with its line, module, inputs and why.

    With the files of all ranks, run.rank*.trace, it is followed through collectives to the rank that made it. The
    overflow of gradients that GradScaler looks for is a note, what is bad beside it is told.

    Exit code: 0 there is none, 1 found, 2 wrong usage, 3 the trace has no statistics.
    """
    from retrograd.trace import load
    from retrograd.trace.rank_provenance import rank_provenance

    return rank_provenance([load(file, partial=partial) for file in files], **options)


@trace.command(epilog=examples("retrograd trace diff a.trace b.trace -o diff.html"))
@click.argument("a")
@click.argument("b", nargs=-1, required=True, metavar="B...")
@click.option(
    "--bitwise/--attainable",
    "bitwise",
    default=None,
    help="Each bit counts, or what rounding does not explain  [default: bits, if devices and dtypes are the same].",
)
@answers("retrograd.trace.diffing.schema:TraceDiff", EVERYTHING)
def diff(a: str, b: tuple[str, ...], bitwise: bool | None) -> TraceDiff:
    """Name the first operator at which two recorded runs differ by themselves, and say why where that is plain.

    A and B are files of `retrograd trace record`. Operators that only one of the runs has do not end the comparison.
    What differs because of its inputs is counted. With -o diff.html a page shows the operators around it on both sides.

    Two logs of DebugMode.save_logs (torch 2.15) are compared by calls and by what they hold of each tensor.

    Several files B are those of all ranks of a run under tensor, sequence or data parallelism, or of a pipeline: their
    shards and microbatches are put together and compared with A, the same program on one device.

    Exit code: 0 same, 1 different, 2 wrong usage.
    """
    from retrograd.trace.diffing.compare import diff

    return diff(a, b[0] if len(b) == 1 else b, None if bitwise is None else "bitwise" if bitwise else "attainable")


@trace.command(
    context_settings=PASSES_OPTIONS_ON,
    epilog=examples(
        "retrograd trace repeat -- train.py",
        "retrograd trace repeat --every 100 -- train.py",
        "torchrun --nproc-per-node 8 -m retrograd trace repeat --every 100 --ranks -- train.py",
    ),
)
@program("[-- SCRIPT.py ARGS ...]")
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="Of each run  [default: 2; with --every all].")
@click.option("--level", type=click.Choice(["fast", "full"]), help="Each value once; every view too  [default: full].")
@click.option("--keep", type=FOLDER, metavar="DIR", help="Keep both traces, first.trace and second.trace.")
@click.option("--every", type=click.IntRange(min=1), metavar="N", help="Run once; repeat operators in each Nth step.")
@click.option("--ranks", is_flag=True, help="With --every: all ranks end together, and copies on them are compared.")
@answers("retrograd.trace.diffing.schema:TraceDiff")
def repeat(
    program: tuple[str, ...], steps: int | None, level: str | None, keep: Path | None, every: int | None, ranks: bool
) -> TraceDiff | RepeatedSteps:
    """Run a Python program twice, recorded, in a process each, and compare the runs bit for bit.

    PROGRAM is a script, -m MODULE or -c CODE. What differs although the seeds are the same is not deterministic; a
    program that sets no seed differs at its first random operator. What the program prints goes to stderr.

    With --every it runs once, and in each Nth step every operator is executed twice from the same inputs: silent
    corruption ends it before the optimizer steps. With torchrun and --ranks rank 0 answers for all.

    Exit code: 0 same, 1 different, 2 wrong usage, 3 the program failed; with --every its own if it failed.
    """
    if every is not None:
        if level or keep:
            raise UsageError(f"{'--level' if level else '--keep'} is of two runs; with --every the program runs once")
        return _repeat_steps(program, every, ranks, steps)
    if ranks:
        raise UsageError("--ranks needs --every N: the operators of each Nth step are then repeated on all ranks")
    from retrograd.trace.diffing.compare import diff

    with tempfile.TemporaryDirectory(prefix="retrograd-trace-") as temporary:
        folder = keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / "first.trace", folder / "second.trace"]
        for file in files:
            options = ["-o", str(file), "--steps", str(steps or 2), "--level", level or "full"]
            command = [sys.executable, "-m", "retrograd", "trace", "record", *options, "--", *program]
            code = subprocess.run(command, check=False, stdout=_STDERR).returncode
            if code == 2:  # the recorder has said what is wrong
                click.get_current_context().exit(2)
            if code:
                raise UndecidedError(
                    f"the program ended with exit code {code}; two runs can be compared if both end well"
                )
        return diff(files[0], files[1], "bitwise")


def _repeat_steps(program: tuple[str, ...], every: int, ranks: bool, steps: int | None) -> RepeatedSteps:
    """One run, of which the operators of sampled steps are repeated."""
    from retrograd.trace.record_program import repeat_program

    with contextlib.redirect_stdout(sys.stderr):
        outcome, code = repeat_program(program, {"every": every, "ranks": ranks, "steps": steps})
    if code or (len(outcome.ranks) > 1 and outcome.rank != 0):
        click.get_current_context().exit(code or outcome.exit_code)
    return outcome


@trace.command(epilog=examples("retrograd trace bisect steps.py:step --tolerance 1e-3"))
@click.argument("target")
@click.option("--tolerance", type=float, metavar="R", help="Relative error allowed  [default: a tenth of what it is].")
@choice("--precision", of=["float64", "float32"])
@choice("--by", of=["operator", "module"])
@answers("retrograd.trace.bisecting.schema:Bisection", everything=True)
def bisect(target: str, **options: Any) -> Bisection:
    """Find the fewest operators that must be computed in higher precision for a step to agree with its reference.

    TARGET names a function without arguments, file.py:name or package.module:name, that returns (step, model) or (step,
    model, reference). step runs forward and backward and returns tensors, or None for the gradients of model;
    reference is what it should return, or a function for that; without one it is the step with every operator in higher
    precision.

    Exit code: 0 no mismatch, 1 operators found, 2 wrong usage, 3 cannot decide.
    """
    from retrograd.trace import bisect_precision

    return bisect_precision(*_step(target), target=target.rpartition("/")[2], **options)


def _step(target: str) -> tuple[Any, Any, Any]:
    """Step, model and reference of a target.

    Raises:
        UsageError: there is no such module, file or name, or it gives something else.
        SpecError: the module or the function raises.
    """
    from retrograd.core.loading import guard, is_path, load, near

    place, _, name = target.rpartition(":")
    if not place or not name:
        raise UsageError(f"target {target!r} names no function; expected {_FORMS}")
    module = load(place, target, _FORMS)
    if not callable(getattr(module, name, None)):
        public = [k for k, v in vars(module).items() if callable(v) and not k.startswith("_")]
        raise UsageError(f"{place!r} has no function {name!r}{near(name, public)}")
    result: Any = guard(getattr(module, name), target, Path(place).resolve() if is_path(place) else None)
    if type(result) is not tuple or len(cast(tuple[Any, ...], result)) not in (2, 3):
        kind = type(cast(object, result)).__name__
        raise UsageError(f"{name!r} in {place!r} returned {kind}, expected (step, model) or (step, model, reference)")
    step, model, *reference = cast(tuple[Any, ...], result)
    return step, model, reference[0] if reference else None
