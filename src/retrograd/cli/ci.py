"""`retrograd ci`: verify the op specs of files and folders, all or those that changed; one report of all."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from retrograd.cli._options import FORMAT, PATH, choice
from retrograd.cli._output import Terminated, sigterm_interrupts
from retrograd.cli._revisions import changed_files, with_imports
from retrograd.core.loading import require_torch
from retrograd.core.system_errors import as_usage_error
from retrograd.core.wording import count
from retrograd.errors import RetrogradError, UsageError

if TYPE_CHECKING:
    from retrograd.check.schema import Report

_WORST = (1, 2, 3, 0)  # exit codes: a finding, wrong usage, cannot decide, proved
_EXAMPLES = """\b
Examples:
  retrograd ci specs --since origin/main... --format github -o retrograd.sarif
  retrograd ci my_op.py my_other_op.py --level full -o badge.svg
"""


@click.command(epilog=_EXAMPLES)
@click.argument("paths", nargs=-1, required=True, type=PATH, metavar="PATH...")
@click.option("--since", metavar="REV", help="Only what changed since this revision of git.")
@choice("--level", of=["quick", "full"], help="How much.")
@click.option(
    "-o", "--output", "outputs", multiple=True, type=PATH, metavar="FILE", help="Also write .sarif, or .svg (a badge)."
)
@FORMAT
@click.pass_context
def ci(
    ctx: click.Context, paths: tuple[Path, ...], since: str | None, level: str, outputs: tuple[Path, ...], form: str
) -> None:
    """Verify every op spec of the files and folders PATH, one after the other.

    With --since only those specs whose file changed, or a file that it imports by a statement, at whatever remove; what
    is loaded by other means (C++ sources, data) is not seen. Findings that retrograd-baseline.toml accepts may stand.

    Exit code: that of the worst: 1 a finding, 2 a file cannot be used, 3 cannot decide, 0 all proved or nothing to do.
    """
    for path in outputs:
        if path.suffix not in (".sarif", ".svg"):
            raise UsageError(f"cannot write {str(path)!r}: the name must end in .sarif or .svg")
    files = [file for path in paths for file in _files(path)]
    if not files:
        raise UsageError(f"no Python file of {', '.join(map(str, paths))} names retrograd, so there is no spec in them")
    if since is not None:
        changed, roots = changed_files(since), (Path.cwd(), Path.cwd() / "src")
        files = [file for file in files if with_imports(file, roots) & changed]
    if files:
        require_torch("retrograd ci")
    reports, codes, lines = list["Report"](), [0], list[str]()
    for target in _targets(files):
        if isinstance(target, RetrogradError):
            click.echo(f"retrograd: {target}", err=True)
            codes.append(2)
            continue
        report, code = _verified(target, level, form)
        reports += [] if report is None else [report]  # one with a finding is false
        codes.append(code)
        lines.append(f"{'no report' if report is None else report.verdict:<10} {target}")
    if since is None and not lines and codes == [0]:
        raise UsageError(f"there is no op spec in {', '.join(map(str, files))}; make one with rg.op")
    _write(reports, outputs)
    if form == "text":
        click.echo("\n".join([*lines, f"{count(len(lines), 'op')}{f' changed since {since}' * bool(since)}"]))
    ctx.exit(min(codes, key=_WORST.index))


def _files(path: Path) -> Iterator[Path]:
    """Python files that may hold specs: they name the package; hidden folders are left out."""
    if not path.exists():
        raise UsageError(f"there is no {str(path)!r}")
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        if not hidden and b"retrograd" in file.read_bytes():
            yield file


def _targets(files: list[Path]) -> Iterator[str | RetrogradError]:
    from retrograd.catalog import spec_names

    for file in files:
        try:
            yield from (f"{file.as_posix()}:{name}" for name in spec_names(str(file)))
        except RetrogradError as error:
            yield error


def _verified(target: str, level: str, form: str) -> tuple[Report | None, int]:
    """The report of `retrograd verify`, None if it made none, and its exit code; it prints what it finds."""
    from retrograd import report

    with tempfile.TemporaryDirectory(prefix="retrograd-ci-") as folder:
        saved = Path(folder) / "report.json"
        command = [sys.executable, "-m", "retrograd", "verify", target, "--level", level, "--format", form]
        with sigterm_interrupts(), subprocess.Popen([*command, "-q", "-o", str(saved)]) as process:
            try:
                code = process.wait()
            except Terminated:  # at Ctrl-C the terminal tells it
                process.terminate()
                raise
        return (report.load(saved) if saved.exists() else None), code if code in _WORST else 2


def _write(reports: list[Report], outputs: tuple[Path, ...]) -> None:
    from retrograd.report import together

    for path in outputs:
        with as_usage_error(f"cannot write {str(path)!r}"):
            path.write_text(together(reports, path.suffix), encoding="utf-8")
