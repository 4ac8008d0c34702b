"""Runs the tests that need no torch under the other Python there is: 3.12 beside 3.11, 3.11 beside 3.12.

    python tools/other_python.py [--quick] [pytest's options]

The base dependencies and pytest are pure Python, or fall back to it, so they are borrowed from this environment and
nothing is installed. Exit code: pytest's; 0 with a line that says so if there is no other Python.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BORROWED = (
    "_pytest", "click", "iniconfig", "jinja2", "markdown_it", "markupsafe", "mdurl", "packaging", "pluggy", "py",
    "pygments", "pytest", "rich", "typing_extensions", "vl_convert",
)  # fmt: skip
# What imports no torch: graphs, records, reports, plans. Under `--quick` the files that take a second or two.
QUICK = (
    "tests/test_record.py", "tests/bench/test_bench_rows.py", "tests/cli/test_cli_graph.py",
    "tests/fsdp/test_buckets.py", "tests/graph/test_keys.py",
    "tests/graph/test_read_files.py", "tests/graph/test_read_hlo.py",
    "tests/graph/test_watch_lock.py", "tests/graph/test_watch_session.py", "tests/report/test_report_ci.py",
    "tests/report/test_report_notebook.py", "tests/report/test_report_text.py", "tests/report/test_report_write.py",
)  # fmt: skip
MORE = (
    "tests/bench/test_bench_plot.py", "tests/graph/test_diff.py", "tests/graph/test_follow.py",
    "tests/graph/test_graph_report.py", "tests/graph/test_read_damaged.py", "tests/graph/test_watch_docs.py",
    "tests/graph/test_watch_offline.py", "tests/report/test_report_browser.py", "tests/report/test_report_html.py",
)  # fmt: skip


def other() -> tuple[str, str]:
    """Version that is wanted, and an interpreter of it that runs, or ""."""
    version = "3.12" if sys.version_info < (3, 12) else "3.11"
    for candidate in _candidates(version):
        said = subprocess.run(
            [candidate, "-c", "import sys; print(*sys.version_info[:2], sep='.')"], capture_output=True
        )
        if said.stdout.decode().strip() == version:
            return version, candidate
    return version, ""


def _candidates(version: str) -> Iterator[str]:
    if on_path := shutil.which(f"python{version}"):
        yield on_path  # may be a shim of pyenv that refuses to run
    if pyenv := shutil.which("pyenv"):
        root = subprocess.run([pyenv, "root"], capture_output=True, text=True).stdout.strip()
        yield from map(str, sorted(Path(root).glob(f"versions/{version}*/bin/python{version}")))


def run(python: str, arguments: list[str]) -> int:
    """pytest under `python`, with this tree and what is borrowed on its path."""
    with tempfile.TemporaryDirectory() as folder:
        for name in BORROWED:
            spec = find_spec(name)
            if spec is None or spec.origin is None:
                continue  # vl_convert without the extra `html`: its tests say what they miss
            found = Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)
            (Path(folder) / found.name).symlink_to(found)
        path = os.pathsep.join([folder, str(ROOT / "src"), str(ROOT / "tests")])
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        environment.pop("PYTEST_ADDOPTS", None)
        # tests/conftest.py sets torch up, which is not there.
        command = [python, "-m", "pytest", "-p", "no:cacheprovider", "--noconftest", *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment).returncode


def main(arguments: list[str]) -> int:
    """Find the other Python, run what it can."""
    version, python = other()
    if not python:
        print(f"there is no Python {version} here that runs; nothing was tested with it")
        return 0
    print(f"Python {version}: {python}", flush=True)
    quick = "--quick" in arguments
    rest = [a for a in arguments if a != "--quick"]
    return run(python, [*rest, "-q", "--no-header", *QUICK, *(() if quick else MORE)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
