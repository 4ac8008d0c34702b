"""Mutants that nobody chose: what `verify` notices of them, beside gradcheck and assert_close, by rarity.

    python benchmarks/mutation.py --seeds 10-14 --count 60 -j 2 --out benchmarks/results/mutation.md
    python benchmarks/mutation.py --only gelu,nll_loss --level full

Mutated are backward formulas of PyTorch's decompositions (`benchmarks/mutation_ops`), each by its source and operation
by operation. A mutant counts where a search of its own finds an input at which it computes something else
(`retrograd.mutation.search`); what raises at every ordinary input does not, and findings of the original give no
credit. One line of JSON a formula and seed is written as it ends; those that are there are not run again.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from detection import close, gradcheck
from mutation_ops.decompositions import FORMULAS

import retrograd as rg
from retrograd.mutation.schema import RARITIES, MutationReport

BESIDE = {
    "gradcheck (fast mode)": lambda spec, seed: gradcheck(spec, seed, fast=True),
    "assert_close": close,
}


def run(name: str, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    formula = FORMULAS[name]
    start = time.perf_counter()
    report = rg.mutate(
        formula.spec(name), functions=[formula.place], levels=["python", "operation"], count=args.count,
        level=args.level, seed=seed, jobs=args.jobs, beside=BESIDE,
    )  # fmt: skip
    print(f"{name} {seed}: {_words(report)} in {time.perf_counter() - start:.0f} s", flush=True)
    return {
        "name": name,
        "seed": seed,
        "level": args.level,
        "report": json.loads(report.to_json()),
    }


def _words(report: MutationReport) -> str:
    missed = report.survivors("verify")
    return f"{len(report.differing)} of {len(report.results)} differ, verify misses {len(missed)}" + "".join(
        f"\n  missed at {r.rarity}: {r.case}: {r.difference}\n{r.mutant.diff}" for r in missed
    )


def table(records: list[dict[str, Any]]) -> list[str]:
    """Lines of a table: what each judge notices, by rarity."""
    reports = [MutationReport.from_json(json.dumps(r["report"])) for r in records]
    judges = list(dict.fromkeys(j for r in reports for j in r.judges))
    counts: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    for result in (m for report in reports for m in report.differing):
        for judgement in result.judgements:
            for row in (result.rarity, "all"):
                counts[row][judgement.judge][0] += judgement.killed
                counts[row][judgement.judge][1] += 1
    lines = [f"| differ at | {' | '.join(judges)} |", "|---" * (1 + len(judges)) + "|"]
    for row in (*RARITIES, "all"):
        if row in counts:
            cells = (f"{counts[row][j][0]} of {counts[row][j][1]}" for j in judges)
            lines.append(f"| {row} | {' | '.join(cells)} |")
    every = [m for report in reports for m in report.results]
    apart = {fate: sum(m.fate == fate for m in every) for fate in dict.fromkeys(m.fate for m in every)}
    lines += ["", f"{len(every)} mutants: " + ", ".join(f"{n} {fate}" for fate, n in sorted(apart.items()))]
    missed = [(r["name"], m) for r, report in zip(records, reports, strict=True) for m in report.survivors("verify")]
    if missed:
        lines += ["", "Missed by verify:", ""]
    for name, m in missed:
        change = [line for line in m.mutant.diff.splitlines()[3:] if line[:1] in "+-"]
        lines += [f"* {name}, {m.mutant.operator}, at {m.rarity} ({m.case}): {m.difference}", "", "  ```diff"]
        lines += [f"  {line}" for line in change] + ["  ```", ""]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0", help="one, or A-B")
    parser.add_argument("--count", type=int, default=40, help="mutants of a formula and seed")
    parser.add_argument("--level", choices=("quick", "full"), default="quick")
    parser.add_argument("--only", default="", help="formulas, A,B")
    parser.add_argument("-j", "--jobs", type=int, default=1)
    parser.add_argument("--records", type=Path, default=Path("build/mutation.jsonl"), help="what is done already")
    parser.add_argument("--out", type=Path, default=Path("build/mutation.md"))
    args = parser.parse_args()
    first, _, last = args.seeds.partition("-")
    lines = args.records
    lines.parent.mkdir(parents=True, exist_ok=True)
    records = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    done = {(r["name"], r["seed"], r["level"]) for r in records}
    for seed in range(int(first), int(last or first) + 1):
        for name in args.only.split(",") if args.only else FORMULAS:
            if (name, seed, args.level) not in done:
                records.append(run(name, args, seed))
                with lines.open("a") as file:
                    file.write(json.dumps(records[-1]) + "\n")
    head = [
        "# Mutants of PyTorch's backward decompositions", "",
        f"`python benchmarks/mutation.py` makes it. {len({r['name'] for r in records})} formulas, seeds "
        f"{', '.join(map(str, sorted({r['seed'] for r in records})))}, level {args.level}; torch {torch.__version__}, "
        f"Python {platform.python_version()}, {platform.machine()}.", "",
    ]  # fmt: skip
    args.out.write_text("\n".join(head + table(records)).rstrip() + "\n")
    print("\n".join(table(records)[:16]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
