"""`retrograd verify`: check one op; results on stdout, progress on stderr, the verdict as the exit code."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from typing import TYPE_CHECKING, Any

import click

from retrograd import config
from retrograd.cli._progress import Progress, live
from retrograd.errors import MissingExtraError, RetrogradError, UsageError

if TYPE_CHECKING:
    from retrograd.check.isolation import Limits
    from retrograd.core.schema import Report


def _split(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in (value or "").split(",") if word.strip())


def _job(ctx: click.Context, param: click.Parameter, value: str | None) -> dict[str, Any] | None:
    return json.loads(value) if value else None


def _list_stages(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    from retrograd.check.stages import load

    stages = load()
    width = max((len(s.id) for s in stages), default=0)
    for stage in stages:
        click.echo(f"{stage.id:<{width}}  {stage.title}")
    ctx.exit()


@click.command()
@click.argument("target")
@click.option("--level", type=click.Choice(["quick", "full"]), default="full", show_default=True, help="How much.")
@click.option("--only", callback=_split, metavar="A,B", help="Run these stages only.")
@click.option("--skip", callback=_split, metavar="A,B", help="Leave these stages out.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of all inputs.")
@click.option("--dtype", "dtypes", callback=_split, metavar="A,B", help="Dtypes, instead of those of the spec.")
@click.option("--device", default="auto", show_default=True, metavar="auto|cpu|cuda[:N]", help="Where to run.")
@click.option("--case", metavar="TEXT", help="Check one case only, as a report prints it: 'M=5 N=7 eps=0.01'.")
@click.option(
    "-o", "--output", "outputs", multiple=True, metavar="FILE", help="Also write .html, .json, .txt or .xml (JUnit)."
)
@click.option("--format", "shape", type=click.Choice(["text", "json", "github"]), default="text", show_default=True)
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
@click.option("--timeout", type=float, default=300.0, show_default=True, help="Seconds that a case may take.")
@click.option(
    "--memory", type=float, metavar="GB", help="What the op's process may hold  [default: most of what is free]."
)
@click.option(
    "-j", "--jobs", type=int, default=1, show_default=True, help="Processes that the dtypes are dealt out to."
)
@click.option("--in-process", is_flag=True, help="Run in this process, for a debugger: a crash ends it.")
@click.option("--memcheck", is_flag=True, help="On a GPU: also run the ordinary case under compute-sanitizer (slow).")
@click.option("--child", callback=_job, hidden=True)
@click.option(
    "--list-stages",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_stages,
    help="List the stages.",
)
@click.pass_context
def command(
    ctx: click.Context,
    target: str,
    level: str,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    seed: int,
    dtypes: tuple[str, ...],
    device: str,
    case: str | None,
    outputs: tuple[str, ...],
    shape: str,
    quiet: bool,
    timeout: float,
    memory: float | None,
    jobs: int,
    in_process: bool,
    memcheck: bool,
    child: dict[str, Any] | None,
) -> None:
    """Check the backward pass of TARGET.

    TARGET is a shipped name (rms_norm), package.module:name or path/file.py:name. It runs in a process of its own: an
    op that crashes, hangs, leaks or prints without end is a finding, and the other stages go on.

    Exit code: 0 proved, 1 finding, 2 wrong usage, 3 cannot decide.
    """
    from retrograd.check.isolation import limits
    from retrograd.check.spec import dtype_name
    from retrograd.report import check_paths, write

    # All that can be wrong with the arguments is told before torch is imported and minutes are spent.
    check_paths(*outputs)
    names = tuple(dtype_name(d, "--dtype") for d in dtypes)
    bounds = limits(timeout, memory)
    _check_place(device, memcheck and in_process)
    options: dict[str, Any] = dict(
        level=level, seed=seed, only=only, skip=skip, dtypes=names or None, case=case, name=target
    )
    if child is not None:
        _tell(child, target, device, options)
        return
    with live(quiet) as progress:
        if in_process:
            report = _verify(target, device, options | {"progress": progress})
        else:
            report = _isolated(target, device, options, bounds, progress, jobs=jobs, memcheck=memcheck)
    _print(report, shape)
    write(report, *outputs)
    ctx.exit(report.exit_code)


def _verify(target: str, device: str, options: dict[str, Any]) -> Report:
    # An op that prints must not get between a reader and the JSON on stdout.
    with contextlib.redirect_stdout(sys.stderr):
        place = _device(device)
        from retrograd.catalog import resolve
        from retrograd.check.runner import verify

        return verify(resolve(target), device=place, **options)


def _isolated(
    target: str,
    device: str,
    options: dict[str, Any],
    bounds: Limits,
    progress: Progress | None,
    *,
    jobs: int,
    memcheck: bool,
) -> Report:
    from retrograd.check.isolation import Request, verify_isolated

    always = (target, "--level", options["level"], "--seed", str(options["seed"]), "--device", device)
    given = (("--only", options["only"]), ("--dtype", options["dtypes"] or ()))
    chosen = [word for name, values in given if values for word in (name, ",".join(values))]
    chosen += ["--case", options["case"]] if options["case"] is not None else []
    request = Request(always, tuple(chosen), tuple(options["skip"]))
    report = verify_isolated(request, bounds, progress, jobs)
    if memcheck:
        from retrograd.check.memcheck import with_memcheck

        report = with_memcheck(report, request, bounds.timeout)
    return report


def _tell(job: dict[str, Any], target: str, device: str, options: dict[str, Any]) -> None:
    """Be the child of `retrograd.check.isolation`: write down what begins and ends."""
    from retrograd.core.subprocesses import Lines

    lines = Lines(job["events"])
    found: dict[str, list[str]] = {dtype: list(ids) for dtype, ids in job["failed"].items()}

    def watch(what: str, about: Any) -> None:
        if what == "start":
            lines.say(what, about.id, about.title)
        elif what == "case":
            lines.say(what, about.dtype, about.text())
        elif what == "finding":
            from retrograd.check.finding_summary import found as line

            lines.say(what, about.stage, line(about))
        elif what == "stage":
            for finding in [f for f in about.findings if not f.partial]:
                found.setdefault(finding.case.dtype, []).append(finding.stage)
            lines.say(what, about.to_json(), found)
        else:
            lines.say(what, about.to_json())

    try:
        given = {"watch": watch, "failed": job["failed"], "share": tuple(job["share"])}
        report = _verify(target, device, options | given)
    except RetrogradError as error:
        lines.say("error", str(error), error.exit_code)
    else:
        from retrograd.check.runner import GPU_LOST

        lines.say("lost" if any(stage.reason.startswith(GPU_LOST) for stage in report.stages) else "end")


def _check_place(device: str, both: bool) -> None:
    if both:
        raise UsageError("`--memcheck` starts a process of its own; leave out `--in-process`")
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise UsageError(f"`--device` is {device!r}, expected auto, cpu, cuda or cuda:N")


def _device(device: str) -> str:
    """The device to use; asks for Triton's interpreter if that is the CPU.

    Raises:
        UsageError: no such device.
        MissingExtraError: torch is not installed.
    """
    if device == "cpu":
        _interpreter()
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtraError("torch", "torch", "retrograd verify") from None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto" and not count:
        _interpreter()
    if device.startswith("cuda") and int(device.partition(":")[2] or 0) >= count:
        raise UsageError(f"`--device` is {device!r}, but torch sees {count} CUDA device(s); use --device cpu")
    return device if device != "auto" else "cuda" if count else "cpu"


def _interpreter() -> None:
    if not config.request_interpreter():
        click.echo(
            "retrograd: triton was imported before TRITON_INTERPRET=1 could be set, so Triton kernels "
            "will not run on the CPU; set the variable yourself",
            err=True,
        )


def _print(report: Report, shape: str) -> None:
    if shape == "json":
        click.echo(report.to_json())
        return
    if shape == "github":
        from retrograd.report.github import to_github

        click.echo(to_github(report), nl=False)
        return
    from rich.console import Console

    from retrograd.report.text import render

    render(report, Console())
