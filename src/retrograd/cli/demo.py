"""`retrograd demo`: a broken op, its passing test, and what `verify` says of it."""

from __future__ import annotations

import inspect
import tempfile
from pathlib import Path

import click

from retrograd.cli._options import PATH
from retrograd.cli._output import console, live
from retrograd.core.loading import require_torch

_EXAMPLES = """\b
Examples:
  retrograd demo
  retrograd demo --open            the report as a page, in a browser
  retrograd demo -o report.html    likewise, into a file
"""


@click.command(epilog=_EXAMPLES)
@click.option("-o", "--output", type=PATH, help="Write the report: .html, .json, .txt or .xml.")
@click.option("--open", "shown", is_flag=True, help="Open it as a page in a browser.")
def demo(output: Path | None, shown: bool) -> None:
    """See a wrong gradient found and explained, in ten seconds.

    The op is an RMSNorm whose backward was written by hand and forgets the weight. An ordinary test passes, since
    weights are ones there; `verify` says what is wrong and like what.

    Exit code: 0 it was found, 1 it was not.
    """
    from retrograd import report as reports

    if output:
        reports.check_paths(output)
    require_torch("retrograd demo")
    from retrograd.catalog import demo as broken
    from retrograd.check.runner import verify

    lines = inspect.getsource(broken.RmsNorm.backward).rstrip()
    click.echo(f"A backward written by hand ({broken.__file__}):\n\n{lines}\n")
    broken.ordinary_test()
    click.echo("The test that many suites have (weights of ones, one shape, rtol=1e-2): passes\n")
    with live(False) as progress:
        report = verify(broken.spec, level="quick", name="retrograd.catalog.demo:spec", progress=progress)
    reports.show(report, console())
    if shown and output is None:
        output = Path(tempfile.mkdtemp()) / "retrograd-demo.html"
    if output:
        reports.write(report, output)
        click.echo(f"\npage: {output.resolve()}")
    if shown:
        click.launch(str(output))
    click.echo("\nYours:  retrograd init mylib.py && retrograd verify mylib_spec.py")
    click.get_current_context().exit(0 if report.verdict == "finding" else 1)
