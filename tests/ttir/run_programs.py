"""The programs run without a GPU, in a process of its own: the tests' asks for Triton's interpreter before Triton is imported.

python tests/ttir/run_programs.py SEED MULTIPROCESSORS [NAME ...]    # a line of JSON a program: faults, differences, error
"""

from __future__ import annotations

import json
import sys
from typing import Any

import programs

from retrograd import cpu_triton


def main() -> None:
    seed, multiprocessors, *wanted = sys.argv[1:]
    programs.load()
    for kind, registered in (("racy", programs.RACY), ("healthy", programs.HEALTHY)):
        for program in registered.values():
            if wanted and program.name not in wanted:
                continue
            row: dict[str, Any] = {"name": program.name, "kind": kind, "differences": [], "error": ""}
            with cpu_triton(int(seed), int(multiprocessors)) as run:
                try:
                    checks = program.run("cuda") or []
                    row["differences"] = [difference for check in checks if (difference := check.difference())]
                except Exception as error:
                    row["error"] = f"{type(error).__name__}: {error}"
            row["faults"] = [[fault.kind, fault.argument, fault.text()] for fault in run.faults]
            row["undecided"] = [launch.undecided for launch in run.launches if launch.undecided]
            sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
