"""Load: a command that runs while other processes want the same cores, as on a busy CI machine.

    python tools/under_load.py [--processes 20] -- retrograd flake tests/fsdp/test_record_check.py

A test that passes alone and fails here waits for a time where it should wait for an event. Exit code: the command's.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import subprocess
import sys
from collections.abc import Iterator


def _spin() -> None:
    while True:
        sum(range(10_000))


@contextlib.contextmanager
def load(processes: int) -> Iterator[None]:
    """So many processes that compute without pause, ended at the end."""
    context = multiprocessing.get_context("spawn")
    spinning = [context.Process(target=_spin, daemon=True) for _ in range(processes)]
    try:
        for process in spinning:
            process.start()
        yield
    finally:
        for process in spinning:
            process.kill()


def main() -> int:
    """Run the command under load."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=20, help="how many compute beside it (default: 20)")
    parser.add_argument("command", nargs="+", help="what runs, after --")
    options = parser.parse_args()
    if options.processes < 1:
        parser.error(f"--processes is {options.processes}, expected 1 or more")
    with load(options.processes):
        return subprocess.run(options.command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
