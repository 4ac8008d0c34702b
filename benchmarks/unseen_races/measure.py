"""Racy and healthy kernels in the manner of those in the wild, at ten seeds each without a GPU.

    python benchmarks/unseen_races/measure.py first                     # every kernel at ten seeds, a table
    python benchmarks/unseen_races/measure.py first --only NAME,NAME --seeds 0,5
    retrograd run-kernel benchmarks/unseen_races/measure.py NAME        # one of them as a program

The files of a set (`first_*.py`, `second_*.py`) were written and committed before any of their kernels had been run;
each kernel says in its decorator which argument is raced for, and how, or why nothing is. Seed s is a GPU of
40 + 9 s multiprocessors. A racy kernel is found at a seed if a finding (no note) names one of its arguments; a healthy
one passes if there is no finding, no undecided launch, and the results are exactly what torch gives, or within the
bound that the kernel states.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests" / "ttir"))
import programs  # noqa: E402

SEEDS = range(10)
# Whose red or atom in inline assembly each thread of a program makes, which their author had not thought of: a barrier
# counts threads, and a thread waits for a lock that another one of its program has. Right is a refusal that says so.
REFUSED = ("barrier_in_assembly", "barrier_in_assembly_with_relaxed_arrivals", "lock_in_assembly")


def load(chosen: str) -> None:
    """Fill the registries of `programs` from the files of a set, "" for all."""
    for path in sorted(HERE.glob(f"{chosen or '*'}_*.py")):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec
        assert spec.loader
        sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def run(chosen: str, seed: int, names: list[str]) -> None:
    """A line of JSON for each kernel at one seed."""
    from retrograd import cpu_triton

    load(chosen)
    for kind, registered in (("racy", programs.RACY), ("healthy", programs.HEALTHY)):
        for name, program in registered.items():
            if names and name not in names:
                continue
            row: dict[str, Any] = {"name": name, "kind": kind, "seed": seed, "error": "", "differences": []}
            start = time.perf_counter()
            with cpu_triton(seed, 40 + 9 * seed) as session:
                try:
                    checks = program.run("cuda") or []
                    row["differences"] = [text for check in checks if (text := check.difference())]
                except Exception as error:
                    row["error"] = f"{type(error).__name__}: {error}".partition("\n")[0]
            row["seconds"] = time.perf_counter() - start
            row["findings"] = [[f.kind, f.argument, f.text()] for f in session.faults if not f.is_mild]
            row["notes"] = [f.text() for f in session.faults if f.is_mild]
            row["undecided"] = [launch.undecided for launch in session.launches if launch.undecided]
            if name in REFUSED:
                row["kind"], row["right"] = "refused", "each thread of a program" in row["error"]
            elif kind == "racy":
                arguments = programs.RACY[name].arguments
                row["right"] = any(f[0] in ("race", "autotune") and f[1] in arguments for f in row["findings"])
            else:
                row["right"] = not (row["findings"] or row["undecided"] or row["error"] or row["differences"])
            print(json.dumps(row), flush=True)


def rows_of(chosen: str, seeds: list[int], names: list[str]) -> list[dict[str, Any]]:
    """Rows of all seeds, each seed in a process of its own."""
    rows = []
    for seed in seeds:
        command = [sys.executable, str(Path(__file__)), chosen, "--child", str(seed), "--only", ",".join(names)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows += [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return rows


def table(rows: list[dict[str, Any]], seeds: list[int]) -> str:
    """How many seeds were right of each kernel, and what was said where they were not."""
    lines = []
    for kind, word in (("racy", "found"), ("healthy", "right"), ("refused", "told")):
        of_kind = [row for row in rows if row["kind"] == kind]
        names = list(dict.fromkeys(row["name"] for row in of_kind))
        everywhere = [n for n in names if all(row["right"] for row in of_kind if row["name"] == n)]
        right = sum(row["right"] for row in of_kind)
        lines += [
            f"{len(everywhere)} of {len(names)} {kind} {word} at all of {len(seeds)} seeds; {right} of {len(of_kind)} runs",
            "",
        ]
        for name in names:
            mine = [row for row in of_kind if row["name"] == name]
            wrong = [row for row in mine if not row["right"]]
            told = [
                row["error"]
                or (row["findings"] or [["", "", ""]])[0][2]
                or " ".join(row["differences"] + row["undecided"])
                for row in wrong
            ]
            said = "; ".join(dict.fromkeys(told))[:300]
            lines.append(f"| {name} | {len(mine) - len(wrong)} of {len(mine)} | {said.replace('|', '/')} |")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("set", help="first, second, or the name of a kernel to run once")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", type=int)
    args = parser.parse_args()
    names = [name for name in args.only.split(",") if name]
    if args.child is not None:
        run(args.set, args.child, names)
        return 0
    if not list(HERE.glob(f"{args.set}_*.py")):
        load("")
        checks = (programs.RACY | programs.HEALTHY)[args.set].run("cuda") or []
        print(*[check.difference() or "as torch has it" for check in checks], sep="\n")
        return 0
    seeds = [int(seed) for seed in args.seeds.split(",")]
    start = time.perf_counter()
    rows = rows_of(args.set, seeds, names)
    text = table(rows, seeds)
    print(text, f"{time.perf_counter() - start:.0f} s", sep="\n")
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
