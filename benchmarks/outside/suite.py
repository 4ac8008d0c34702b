"""Specs of ops that other libraries have, and what `verify` says of each, beside what was adjudicated before.

    make outside                                                # sets up .venv-outside and runs all, resumable
    python benchmarks/outside/suite.py --only kornia -j 2       # in an environment that has the libraries
    python benchmarks/outside/suite.py --list

Each file of `libraries/` holds the specs of one library, in the language of `retrograd.op`; requirements.txt has the
versions. Specs run in worker processes: one that crashes or hangs is recorded, and the others go on. Results are
kept in SQLite; a run that is stopped goes on where it was. Exit code 1 where anything differs from
baseline.toml: what is not proved and is not in it, or is in it and no longer so.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import cpu_wheels  # noqa: E402
import opdb  # noqa: E402

import retrograd as rg  # noqa: E402
from retrograd.core.tasks import Begin, End, Outcome, Work  # noqa: E402

LIBRARIES = sorted(path.stem for path in (HERE / "libraries").glob("[a-z]*.py"))
BASELINE = HERE / "baseline.toml"
FIELDS = ("variant", "dtype", "level", "seed", "verdict", "stage", "kind", "sentence", "told", "cpu")


def specs(libraries: Sequence[str]) -> dict[str, Any]:
    """Every spec of these libraries by name; a library that cannot be imported ends the run with its error."""
    cpu_wheels.prepare()
    warnings.simplefilter("ignore")
    for name in libraries:
        importlib.import_module(f"libraries.{name}")
    return importlib.import_module("describe").SPECS


def prepare(infos: dict[str, Any], level: str, seed: int, device: str = "cpu") -> Work:
    """Work on specs, in a worker; a spec is a variant with one sample."""
    opdb.settle()

    def work(task: tuple[opdb.Variant, float], done: Mapping[str, Outcome]) -> Iterator[Begin | End]:
        (wanted, deadline) = task
        if "0" not in done and time.time() < deadline:
            yield Begin("0")
            spec = replace(infos[wanted.variant], dtypes=(wanted.dtype,))
            yield End("0", opdb.verdict_of(spec, level, seed, device))

    return work


def versions() -> str:
    """What it ran with: each pinned library, and the machine."""
    pins = [line.split("==")[0] for line in (HERE / "requirements.txt").read_text().splitlines() if "==" in line]
    words = [f"{name} {version(name)}" for name in pins]
    words += [f"Python {platform.python_version()}", f"retrograd {rg.__version__}", opdb.machine()]
    return ", ".join(words)


def report(records: Sequence[dict[str, Any]], entries: Sequence[dict[str, Any]], args: argparse.Namespace) -> str:
    """Markdown: verdicts by library, what is not proved and what was adjudicated of it."""
    counts = Counter((r["variant"].split(".")[0], r["verdict"]) for r in records)
    verdicts = [v for v in opdb.VERDICTS if any(key[1] == v for key in counts)]
    lines = ["# Ops of other libraries", "", "`make outside` repeats it; `benchmarks/outside/` has the specs.", "",
             f"Level {args.level}, seed {args.seed}, {args.dtypes}; {versions()}.", "",
             "| library | specs | " + " | ".join(verdicts) + " |", "|---" * (len(verdicts) + 2) + "|"]  # fmt: skip
    for library in sorted({key[0] for key in counts}):
        row = [counts[library, v] for v in verdicts]
        lines.append(f"| {library} | {sum(row)} | " + " | ".join(map(str, row)) + " |")
    total = [sum(counts[key] for key in counts if key[1] == v) for v in verdicts]
    lines.append(f"| all | {sum(total)} | " + " | ".join(map(str, total)) + " |")
    lines += ["", "| op | dtype | verdict | stage | what verify says | adjudicated |", "|---" * 6 + "|"]
    for record in records:
        if record["verdict"] not in opdb.PASSING:
            known = "; ".join(f"{e['class']}: {e['reason']}" for e in opdb.entries_of(entries, record))
            known = f"**new** {known}" if opdb.uncovered(entries, record) else known
            told = "<br>".join(f"{t[0]}: {opdb.sentence({'sentence': t[2]})}" for t in record.get("told", [])[:4])
            cells = (record["variant"], record["dtype"], record["verdict"], record.get("stage", ""))
            lines.append("| " + " | ".join((*cells, told or opdb.sentence(record), known)) + " |")
    return "\n".join(lines) + "\n"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--level", default="quick", choices=("quick", "full"))
    add("--seed", type=int, default=0)
    add("--dtypes", default="float32", help="of float32, float64, bfloat16, float16")
    add("--libraries", default=",".join(LIBRARIES), help="files of libraries/, all unless named")
    add("--only", default="", metavar="REGEX", help="specs whose names it matches somewhere")
    add("--list", action="store_true", help="names of the specs, and nothing else")
    add("-j", "--jobs", type=int, default=1)
    add("--timeout", type=float, default=120.0, help="seconds of CPU time a spec may take")
    add("--minutes", type=float, default=0.0, help="stop taking specs after so long")
    add("--results", type=Path, default=ROOT / "build" / "outside.sqlite", help="is continued")
    add("--baseline", type=Path, default=BASELINE)
    add("--report", type=Path, help="markdown, and JSON beside it")
    args = parser.parse_args(argv)
    args.samples = 1
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    infos = {name: spec for name, spec in specs(args.libraries.split(",")).items() if re.search(args.only, name)}
    if args.list:
        print("\n".join(infos))
        return 0
    results = opdb.open_results(args)
    tasks = [opdb.Variant(name, dtype, 1) for name in infos for dtype in args.dtypes.split(",")]
    opdb.run(tasks, results, args, partial(prepare, infos, args.level, args.seed))
    records = opdb.records_of(tasks, results)
    entries = opdb.read_baseline(args.baseline)
    if args.report:
        args.report.write_text(_without_paths(report(records, entries, args)), encoding="utf-8")
        kept = [{k: r[k] for k in FIELDS if k in r} for r in records]
        rows = {"versions": versions(), "records": kept}
        args.report.with_suffix(".json").write_text(_without_paths(json.dumps(rows, indent=1)) + "\n", encoding="utf-8")
    return opdb.conclude(records, entries, tasks, repro)


def _without_paths(text: str) -> str:
    """The text with files named from the package on, wherever that is installed."""
    return re.sub(r"/[^\s()\"]*/(?:site-packages|src)/", "", text)


def repro(record: dict[str, Any]) -> str:
    """The command that verifies a spec again."""
    name = record["variant"].replace(".", "\\.")
    return f"    python benchmarks/outside/suite.py --only '^{name}$' --dtypes {record['dtype']} --results :memory:"


if __name__ == "__main__":
    sys.exit(main())
