"""`retrograd codegen`: what the compiler made of Triton kernels; results on stdout, limits as the exit code."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from retrograd import config
from retrograd.cli._options import FORMAT, examples, options, words
from retrograd.cli._output import answers, live
from retrograd.core.loading import require_torch
from retrograd.errors import RetrogradError, UsageError

if TYPE_CHECKING:
    from retrograd.codegen.limits import Limits
    from retrograd.codegen.schema import Codegen


_LIMITS = (
    click.option("--max-registers", type=int, metavar="N", help="Limit: registers of a thread."),
    click.option("--max-shared", type=int, metavar="BYTES", help="Limit: shared memory of a program."),
    click.option("--min-load-bytes", type=int, metavar="N", help="Limit: narrowest load from global memory."),
    click.option("--narrow", callback=words, metavar="A,B", help="Pointers of which loads may be narrow."),
    click.option("--min-occupancy", type=float, metavar="PCT", help="Limit: estimated occupancy."),
    click.option("--no-spills", is_flag=True, help="Limit: no spilled registers."),
    click.option("--no-float-atomics", is_flag=True, help="Limit: no atomic addition of floating numbers."),
    click.option("--no-cas-loops", is_flag=True, help="Limit: no additions by compare-and-swap."),
    click.option("--no-f64", is_flag=True, help="Limit: no float64 arithmetic."),
    click.option("--no-tf32", is_flag=True, help="Limit: no matrix products in TF32."),
    click.option("--no-hazards", is_flag=True, help="Limit: none of the hazards that are told."),
    click.option("--no-worse", is_flag=True, help="Limit: with --against, nothing worse."),
)


@click.command(
    epilog=examples(
        "retrograd codegen kernels.py:launch",
        "retrograd codegen kernels.py:launch --no-spills --min-load-bytes 16",
        "retrograd codegen kernels.py:launch --against codegen.json --no-worse",
    )
)
@click.argument("target")
@click.option("--arch", "architectures", callback=words, metavar="A,B", help="sm_80, sm_90, sm_100, gfx942, gfx950.")
@click.option("--signature", metavar="TEXT", help="Arguments of a kernel: 'x_ptr=*bf16, N=i32:16, BLOCK=1024'.")
@click.option("--case", metavar="TEXT", help="Sizes and parameters of an op: 'M=4096 N=8192'.")
@click.option("--dtype", metavar="NAME", help="Dtype of an op  [default: the first of its spec].")
@click.option("--kernels", "only", callback=words, metavar="A,B", help="Only kernels with these words in their name.")
@click.option("--against", metavar="TARGET", help="Compare with this one: a target or a saved .json.")
@click.option("--run", "run_it", is_flag=True, help="Run on the GPU of this machine, read the code that ran.")
@click.option("--profile", is_flag=True, help="As --run, and say how long each kernel takes.")
@options(_LIMITS)
@answers("retrograd.codegen.schema:Codegen", FORMAT, judged=True)
@click.option("--all", "everything", is_flag=True, help="Every access to memory with its line.")
@click.option("-j", "--jobs", type=int, help="Processes that compile  [default: one a core].")
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
def codegen(target: str, against: str | None, **options: Any) -> Codegen:
    """Say what the compiler made of the Triton kernels that TARGET launches, on each GPU, without having one.

    TARGET is a shipped op (rms_norm), file.py:name of a function that launches kernels (recorded, not executed), of an
    op spec, or of a kernel itself with --signature; or a saved .json.

    Exit code: 0 limits kept, 1 a limit is not kept or a kernel does not compile, 2 wrong usage, 3 nothing is launched.
    """
    from retrograd.codegen.compare import changes
    from retrograd.codegen.limits import Limits, violations

    limits = Limits(**{name: options.pop(name) for name in Limits.__dataclass_fields__})
    _check(limits, against, options)
    record = _of(target, options)
    if against is not None:
        other = _of(against, options)
        different, notes = changes(record, other)
        record = replace(record, against=other.target, changes=different, notes=(*record.notes, *notes))
    broken = violations(record.kernels, record.changes, limits)
    return replace(record, limits=limits.asked(), violations=broken)


def _check(limits: Limits, against: str | None, options: dict[str, Any]) -> None:
    """What can be wrong with the options, before minutes are spent."""
    from retrograd.runtime.gpu_targets import targets

    if unknown := [name for name in options["architectures"] if name not in targets()]:
        raise UsageError(f"`--arch` has {unknown[0]!r}, expected some of {', '.join(targets())}")
    if limits.no_worse and against is None:
        raise UsageError("`--no-worse` needs something to compare with; add --against TARGET or --against FILE.json")
    if limits.narrow and limits.min_load_bytes is None:
        raise UsageError("`--narrow` excepts loads from a limit that is not set; add --min-load-bytes N")
    if options["jobs"] is not None and options["jobs"] < 1:
        raise UsageError(f"`--jobs` is {options['jobs']}, expected 1 or more")
    if (options["run_it"] or options["profile"]) and options["architectures"]:
        raise UsageError("`--arch` chooses what to cross-compile for; a run has the architecture of its GPU")


def _of(target: str, options: dict[str, Any]) -> Codegen:
    """The record of a target, or the one in a file."""
    if target.endswith(".json"):
        return _saved(target, options["architectures"], options["only"])
    if config.interpreting():
        raise RetrogradError(
            "TRITON_INTERPRET=1 is set, so kernels of this process are interpreted and there is nothing to compile; "
            "run: env -u TRITON_INTERPRET retrograd codegen ..."
        )
    with live(options["quiet"]) as progress, contextlib.redirect_stdout(sys.stderr):
        if options["run_it"] or options["profile"]:
            return _ran(target, options)
        return _compiled(target, options, progress)


def _saved(path: str, architectures: tuple[str, ...], only: tuple[str, ...]) -> Codegen:
    from retrograd.codegen.schema import Codegen
    from retrograd.report import load

    record = load(path)
    if not isinstance(record, Codegen):
        raise UsageError(f"{path!r} is another kind of record, expected one of `retrograd codegen -o FILE.json`")
    if missing := [name for name in architectures if name not in record.architectures]:
        raise UsageError(f"`--arch` has {missing[0]}, but {path!r} has {', '.join(record.architectures)}")
    chosen = architectures or record.architectures
    kernels = [k for k in record.kernels if k.target in chosen and (not only or any(w in k.name for w in only))]
    return replace(record, target=path, architectures=chosen, kernels=tuple(kernels), against="", changes=(), notes=())


def _compiled(target: str, options: dict[str, Any], progress: Any) -> Codegen:
    from retrograd.codegen.compile import require_triton

    require_triton()
    require_torch("retrograd codegen")
    from retrograd.catalog.launches import LaunchArguments, launches
    from retrograd.codegen.listing import cross_compiled
    from retrograd.env.facts import cpu_count
    from retrograd.runtime.gpu_targets import targets

    architectures = options["architectures"] or tuple(targets())
    chosen = LaunchArguments(options["signature"], options["case"], options["dtype"])
    workload = launches(target, chosen, architectures[0])
    jobs = options["jobs"] or cpu_count()
    return cross_compiled(target, workload, architectures, only=options["only"], workers=jobs, progress=progress)


def _ran(target: str, options: dict[str, Any]) -> Codegen:
    from retrograd.codegen.loaded_kernels import need_gpu, of_run, profiled

    need_gpu("--profile" if options["profile"] else "--run")
    from retrograd.catalog.launches import LaunchArguments, runs

    workload = runs(target, LaunchArguments(options["signature"], options["case"], options["dtype"]))
    record = of_run(target, workload, only=options["only"])
    if not options["profile"]:
        return record
    from retrograd.bench.timing import CudaTimer

    return profiled(record, workload, CudaTimer().copy_gb_per_s())
