"""The programs run without a GPU, in a process of its own: the tests' asks for Triton's interpreter before Triton is imported.

python tests/ttir/run_programs.py SEED:MULTIPROCESSORS[,...] [NAME ...]    # a line of JSON a run: faults, differences, error
"""

from __future__ import annotations

import json
import sys
from typing import Any

import programs

from retrograd import cpu_triton


def main() -> None:
    runs, *wanted = sys.argv[1:]
    programs.load()
    for seed, multiprocessors in (map(int, run.split(":")) for run in runs.split(",")):
        for kind, registered in (("racy", programs.RACY), ("healthy", programs.HEALTHY)):
            for program in registered.values():
                if not wanted or program.name in wanted:
                    sys.stdout.write(
                        json.dumps({"seed": seed, "kind": kind, **_row(program, seed, multiprocessors)}) + "\n"
                    )


def _row(program: Any, seed: int, multiprocessors: int) -> dict[str, Any]:
    row: dict[str, Any] = {"name": program.name, "differences": [], "error": ""}
    with cpu_triton(seed, multiprocessors) as run:
        try:
            checks = program.run("cuda") or []
            row["differences"] = [difference for check in checks if (difference := check.difference())]
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"
    row["faults"] = [[fault.kind, fault.argument, fault.text()] for fault in run.faults]
    row["in_turns"] = any(launch.in_turns for launch in run.launches)
    row["undecided"] = [launch.undecided for launch in run.launches if launch.undecided]
    return row


if __name__ == "__main__":
    main()
