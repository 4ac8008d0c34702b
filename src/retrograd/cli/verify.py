"""`retrograd verify` checks one op, `retrograd repro` shows a finding of a saved report again.

Results go to stdout, progress to stderr, the verdict is the exit code.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from retrograd.cli._options import PATH, choice, examples, outputs_option, seconds, words
from retrograd.cli._output import INTERRUPTED, Progress, live, show, sigterm_interrupts
from retrograd.core.loading import require_file, require_torch
from retrograd.core.system_errors import as_usage_error
from retrograd.errors import RetrogradError, UsageError

if TYPE_CHECKING:
    from retrograd.check.isolation import ProcessLimits
    from retrograd.check.schema import Finding, Report


_STAGES = "List the stages."
_EXAMPLES = """\b
Examples:
  retrograd verify rms_norm --level quick
  retrograd verify my_op.py:spec --budget 30s
  retrograd verify my_op.py:spec -o report.html -o report.json
  retrograd verify my_op.py:spec --only oracle --dtype bfloat16 --case 'M=5 N=7'
  retrograd repro report.json#1
"""


def _list_stages(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    from retrograd.check.stages import load

    stages = load()
    width = max((len(s.id) for s in stages), default=0)
    for stage in stages:
        click.echo(f"{stage.id:<{width}}  {stage.title}")
    ctx.exit()


def _as_json(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.default_map = {"form": "json"}


@click.command(epilog=_EXAMPLES)
@click.argument("target")
@choice("--level", of=["quick", "full"], default="full", help="How much.")
@click.option("--only", callback=words, metavar="A,B", help="Run these stages only.")
@click.option("--skip", callback=words, metavar="A,B", help="Leave these stages out.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of all inputs.")
@click.option("--dtype", "dtypes", callback=words, metavar="A,B", help="Dtypes, instead of those of the spec.")
@click.option("--device", default="auto", show_default=True, metavar="auto|cpu|cuda[:N]", help="Where to run.")
@click.option("--case", metavar="TEXT", help="Check one case only, as a report prints it: 'M=5 N=7 eps=0.01'.")
@outputs_option(".html, .json, .txt, .xml (JUnit), .sarif or .svg (a badge)")
@choice("--format", "form", of=["text", "json", "github"])
@click.option("--json", is_flag=True, is_eager=True, expose_value=False, callback=_as_json, help="As --format json.")
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
@click.option(
    "--budget", callback=seconds, metavar="30s", help="Begin no case after this time; ordinary cases come first."
)
@choice("--configs", of=["some", "all"], default="some", help="Configurations of autotuned kernels to compare.")
@click.option("--timeout", type=float, default=300.0, show_default=True, help="Seconds that a case may take.")
@click.option(
    "--memory", type=float, metavar="GB", help="What the op's process may hold  [default: most of what is free]."
)
@click.option("-j", "--jobs", type=int, default=1, show_default=True, help="Processes that share the dtypes.")
@click.option("--in-process", is_flag=True, help="Run in this process, for a debugger: a crash ends it.")
@click.option("--memcheck", is_flag=True, help="On a GPU: also run the ordinary case under compute-sanitizer (slow).")
@click.option(
    "--sanitize",
    type=click.Choice(["gsan", "consan", "fpsan"]),
    help="On a GPU: also run the ordinary case under a sanitizer of Triton 3.9.",
)
@click.option("--baseline", type=PATH, help="Accepted findings  [default: retrograd-baseline.toml, if it is here].")
@click.option("--write-baseline", is_flag=True, help="Accept what is found: write it to the baseline.")
@click.option("--child", callback=lambda ctx, param, value: json.loads(value) if value else None, hidden=True)
@click.option("--list-stages", is_flag=True, is_eager=True, expose_value=False, callback=_list_stages, help=_STAGES)
@click.pass_context
def verify(
    ctx: click.Context,
    target: str,
    dtypes: tuple[str, ...],
    device: str,
    outputs: tuple[str, ...],
    form: str,
    quiet: bool,
    timeout: float,
    memory: float | None,
    jobs: int,
    in_process: bool,
    memcheck: bool,
    sanitize: str | None,
    baseline: Path | None,
    write_baseline: bool,
    child: dict[str, Any] | None,
    **options: Any,
) -> None:
    """Check the backward pass of TARGET.

    TARGET is a shipped name (rms_norm), package.module:name or path/file.py:name. It runs in a process of its own: an
    op that crashes, hangs, leaks or prints without end is a finding, and the other stages go on.

    Exit code: 0 proved, 1 finding, 2 wrong usage, 3 cannot decide, 130 interrupted, with the report so far.
    """
    from retrograd.check import acceptance
    from retrograd.check.isolation import process_limits
    from retrograd.check.spec import dtype_name
    from retrograd.report import check_paths

    # All that can be wrong with the arguments is told before torch is imported and minutes are spent.
    check_paths(*outputs)
    bounds = process_limits(timeout, memory, options["budget"])
    _check_place(target, device, in_process, memcheck, sanitize)
    options |= {"dtypes": tuple(dtype_name(d, "--dtype") for d in dtypes) or None, "name": target}
    if child is not None:
        _tell(child, target, device, options | {"baseline": baseline})
        return
    destination = baseline or Path(acceptance.FILE)
    if (destination.exists() or not write_baseline) and (accepted := acceptance.baseline_path(baseline)):
        options["baseline"] = accepted
    stopping = threading.Event()
    with live(quiet) as progress:
        if in_process:
            report = _verify(target, device, options | {"progress": progress})
        else:
            report = _isolated(target, device, options, bounds, progress, jobs, (memcheck, sanitize), stopping)
    if write_baseline and not stopping.is_set():
        report = _baselined(report, destination)
    show(report, outputs, form)
    ctx.exit(INTERRUPTED if stopping.is_set() else report.exit_code)


@click.command(epilog=examples("retrograd repro report.json#1", "retrograd repro report.json#2 --no-run -o again.py"))
@click.argument("finding", metavar="REPORT.json[#K]")
@click.option("-o", "--output", type=PATH, help="Write the script instead of running it.")
@click.option("--run/--no-run", default=True, show_default=True, help="Run the script after printing it.")
@click.pass_context
def repro(ctx: click.Context, finding: str, output: Path | None, run: bool) -> None:
    """Print a script of a few lines that shows finding K of a saved report again, and run it.

    K counts from 1, as the report does; left out, it is 1.

    Exit code: that of the script: 1 if the finding is there again, 0 if not; 2 wrong usage.
    """
    name, _, number = finding.partition("#")
    report, chosen = _finding(name, number or "1")
    text = script(report, chosen)
    if output is not None:
        with as_usage_error(f"cannot write {str(output)!r}"):
            output.write_text(text, encoding="utf-8")
        return
    click.echo(text)
    if run:
        # From the folder of the call, since a target such as op.py:spec is looked for there.
        ctx.exit(subprocess.run([sys.executable, "-c", text], check=False).returncode)


def _verify(
    target: str, device: str, options: dict[str, Any], kernels: str | None = None, compiling: Any = lambda name: None
) -> Report:
    """The report; `kernels` and `compiling` are arguments of `compiled_once`."""
    # An op that prints must not get between a reader and the JSON on stdout.
    with contextlib.redirect_stdout(sys.stderr):
        place = _device(device)
        if place != "cpu":
            from retrograd.compat.triton_compile import hash_ahead

            hash_ahead()
        from retrograd.catalog import resolve
        from retrograd.check.compile_ahead import compiled_once
        from retrograd.check.runner import verify

        if (end := options.pop("end", None)) is not None:  # of the budget; what was imported meanwhile has used it
            options["budget"] = max(end - time.monotonic(), 1e-3)
        with compiled_once(kernels, compiling):
            return verify(resolve(target), device=place, **options)


def _isolated(
    target: str,
    device: str,
    options: dict[str, Any],
    bounds: ProcessLimits,
    progress: Progress | None,
    jobs: int,
    tools: tuple[bool, str | None],
    stopping: threading.Event,
) -> Report:
    from retrograd.check.isolation import VerifyCommand, verify_isolated

    always = (target, "--level", options["level"], "--seed", str(options["seed"]), "--device", device)
    lists = (("--only", options["only"]), ("--dtype", options["dtypes"] or ()))
    chosen = [word for name, values in lists if values for word in (name, ",".join(values))]
    chosen += ["--case", options["case"]] if options["case"] is not None else []
    chosen += ["--configs", options["configs"]] if options["configs"] != "some" else []
    chosen += ["--baseline", str(options["baseline"])] if options.get("baseline") else []
    request = VerifyCommand(always, tuple(chosen), tuple(options["skip"]))
    with sigterm_interrupts():
        report = verify_isolated(request, bounds, progress, jobs, stopping)
    memcheck, sanitize = tools if not stopping.is_set() else (False, None)
    if memcheck:
        from retrograd.check.memcheck import with_memcheck

        report = with_memcheck(report, request, bounds.timeout)
    if sanitize:
        from retrograd.check.sanitizers import with_sanitizer

        report = with_sanitizer(report, request, sanitize, bounds.timeout)
    return report


def _baselined(report: Report, path: Path) -> Report:
    """The report with what it found accepted in a baseline file, which is written."""
    from retrograd.check import acceptance

    count = acceptance.write_baseline(path, [report])
    click.echo(f"retrograd: {path} accepts {count} finding{'s' * (count != 1)} of {report.target}", err=True)
    return acceptance.after_writing(report, path)


def _tell(job: dict[str, Any], target: str, device: str, options: dict[str, Any]) -> None:
    """Be the child of `retrograd.check.isolation`: write down what begins and ends."""
    from retrograd.core.subprocesses import Messages

    if "ahead" in job:
        _compile_ahead(job["ahead"], target, device, options)
        return
    messages = Messages(job["events"])
    failed: dict[str, list[str]] = {dtype: list(ids) for dtype, ids in job["failed"].items()}

    def watch(event: str, about: Any) -> None:
        if event == "start":
            messages.send(event, about.id, about.title)
        elif event == "case":
            messages.send(event, about.dtype, about.text())
        elif event == "finding":
            from retrograd.check.finding_summary import progress_line

            messages.send(event, about.stage, progress_line(about), about)
        elif event == "stage":
            for finding in [f for f in (*about.findings, *about.accepted) if not f.partial]:
                failed.setdefault(finding.case.dtype, []).append(finding.stage)
            messages.send(event, about.to_json(), failed)
        elif event == "begin":
            messages.send(event, about.to_json())

    try:
        child = {"watch": watch, "failed": job["failed"], "share": tuple(job["share"]), "end": job["end"]}
        report = _verify(target, device, options | child, job.get("kernels"), partial(messages.send, "compiling"))
    except RetrogradError as error:
        messages.send("error", str(error), error.exit_code)
    else:
        from retrograd.check.runner import GPU_LOST

        messages.send("lost" if any(stage.reason.startswith(GPU_LOST) for stage in report.stages) else "end")


def _compile_ahead(folder: str, target: str, device: str, options: dict[str, Any]) -> None:
    """Be the other child of `retrograd.check.isolation`, which compiles; where there is no GPU it has nothing to do."""
    place = _device(device)
    if place != "cpu":
        from retrograd.catalog import resolve
        from retrograd.check.compile_ahead import compile_ahead

        kept = {name: options[name] for name in ("only", "skip", "level", "seed", "dtypes", "case")}
        compile_ahead(resolve(target), place, Path(folder), **kept)


def _check_place(target: str, device: str, in_process: bool, memcheck: bool, sanitize: str | None) -> None:
    require_file(target)
    if in_process and (memcheck or sanitize):
        option = "--memcheck" if memcheck else "--sanitize"
        raise UsageError(f"`{option}` starts a process of its own; leave out `--in-process`")
    if sanitize:
        from retrograd.check.sanitizers import check_mode

        check_mode(sanitize)
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise UsageError(f"`--device` is {device!r}, expected auto, cpu, cuda or cuda:N")


def _device(device: str) -> str:
    """The device to use.

    Raises:
        UsageError: no such device.
        MissingExtraError: torch is not installed.
    """
    require_torch("retrograd verify")
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.startswith("cuda") and int(device.partition(":")[2] or 0) >= count:
        raise UsageError(f"`--device` is {device!r}, but torch sees {count} CUDA device(s); use --device cpu")
    return device if device != "auto" else "cuda" if count else "cpu"


def _finding(name: str, number: str) -> tuple[Report, Finding]:
    from retrograd.check.schema import Report
    from retrograd.report import load

    report = load(name)
    if not isinstance(report, Report):
        raise UsageError(f"{name!r} is a report of `retrograd flake`, which says itself how to repeat it")
    count = len(report.findings)
    if not count:
        raise UsageError(f"{name!r} has no finding to repeat: its verdict is {report.verdict!r}")
    if not number.isdecimal() or not 1 <= int(number) <= count:
        raise UsageError(f"the part after # is {number!r}, expected a number from 1 to {count} of {name!r}")
    return report, report.findings[int(number) - 1]


def script(report: Report, finding: Finding) -> str:
    """Python that verifies the finding's stage at its case; it exits with 1 if the finding is there again."""
    about = " ".join(finding.what.split()).replace("\\", "\\\\").replace('"""', "'''")
    device = "cpu" if report.device.startswith("cpu") else report.device.split()[0]
    configs = ", configs='all'" if "configs" in finding.repro else ""
    lines = [
        f'"""{report.target}, {finding.stage}: {about}"""',
        "",
        "from retrograd import verify",
        "from retrograd.catalog import resolve",
        "",
        "report = verify(",
        f"    resolve({report.target!r}), only=[{finding.stage!r}], case={finding.case.text()!r},",
        f"    dtypes=[{finding.case.dtype!r}], level={report.level!r}, seed={report.seed}, device={device!r}{configs},",
        ")",
        "for finding in report.findings:",
        "    print(finding.tensor, finding.what, finding.looks_like, sep='\\n')",
        "raise SystemExit(report.exit_code)",
    ]
    return "\n".join(lines) + "\n"
