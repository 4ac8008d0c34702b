"""`retrograd repro`: a script that shows one finding of a saved report again, and its run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from retrograd.errors import UsageError

if TYPE_CHECKING:
    from retrograd.core.schema import Finding, Report


@click.command()
@click.argument("finding", metavar="REPORT.json[#K]")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the script instead of running it.")
@click.option("--run/--no-run", default=True, show_default=True, help="Run the script after printing it.")
@click.pass_context
def command(ctx: click.Context, finding: str, output: Path | None, run: bool) -> None:
    """Print a script of a few lines that shows finding K of a saved report again, and run it.

    K counts from 1, as the report does; left out, it is 1.

    Exit code: that of the script: 1 if the finding is there again, 0 if not; 2 wrong usage.
    """
    name, _, number = finding.partition("#")
    report, found = _finding(name, number or "1")
    text = script(report, found)
    if output is not None:
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {str(output)!r}: {error.strerror or error}") from None
        return
    click.echo(text)
    if run:
        # From the folder of the call, since a target such as op.py:spec is looked for there.
        ctx.exit(subprocess.run([sys.executable, "-c", text], check=False).returncode)


def _finding(name: str, number: str) -> tuple[Report, Finding]:
    from retrograd.core.schema import Report
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
    # Triton reads the variable when it is imported.
    interpreter = ["import os", "", 'os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels on CPU tensors', ""]
    device = "cpu" if report.device.startswith("cpu") else report.device.split()[0]
    lines = [
        f'"""{report.target}, {finding.stage}: {about}"""',
        "",
        *(interpreter if device == "cpu" else []),
        "from retrograd import verify",
        "from retrograd.catalog import resolve",
        "",
        "report = verify(",
        f"    resolve({report.target!r}), only=[{finding.stage!r}], case={finding.case.text()!r},",
        f"    dtypes=[{finding.case.dtype!r}], level={report.level!r}, seed={report.seed}, device={device!r},",
        ")",
        "for finding in report.findings:",
        "    print(finding.tensor, finding.what, finding.looks_like, sep='\\n')",
        "raise SystemExit(report.exit_code)",
    ]
    return "\n".join(lines) + "\n"
