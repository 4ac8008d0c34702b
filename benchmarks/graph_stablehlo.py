"""Time and memory of reading and comparing StableHLO beside HLO, by instruction, and of large modules of HLO.

    python benchmarks/graph_stablehlo.py
    python benchmarks/graph_stablehlo.py --sizes 64000 300000 -o benchmarks/results/graph-stablehlo.md

The pair of a size is a recorded training step (`tests/graph/data/trust/tf.*`) again and again, as functions that the
entry calls, against the same with another constant in the first. Each measurement is a process of its own; seconds are
CPU time of it and of the process that parses MLIR, the least of the repeats, in which the formats alternate; MB is the
peak of the process.
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from graph import _pairs, peak_mb

TRUST = Path(__file__).parents[1] / "tests" / "graph" / "data" / "trust"


def stablehlo(instructions: int) -> str:
    """A module of about so many instructions."""
    text = gzip.decompress((TRUST / "tf.shlo.mlir.gz").read_bytes()).decode()
    header, _, body = text.partition("\n")
    body = body.rstrip().removesuffix("}")
    copies = max(1, round(instructions / body.count(" = ")))
    signature = re.search(r"func\.func public @main\((.*)\) -> \((.*)\) \{", body)
    assert signature
    strip = re.compile(r" \{[^{}]*\}")
    arguments, results = (strip.sub("", part) for part in signature.groups())
    names = re.findall(r"%\w+", arguments)
    types = ", ".join(part.partition(": ")[2] for part in re.split(r", (?=%)", arguments))
    count = results.count("tensor<")
    functions = [
        re.sub(r"@([\w.]+)", rf"@\1_{k}", body.replace("func.func public", "func.func private")) for k in range(copies)
    ]
    calls = [
        f"    %r{k}:{count} = call @main_{k}({', '.join(names)}) : ({types}) -> ({results})" for k in range(copies)
    ]
    returned = ", ".join(f"%r{k}#{j}" for k in range(copies) for j in range(count))
    kinds = ", ".join([results] * copies)
    entry = f"  func.func public @main({arguments}) -> ({kinds}) {{\n" + "\n".join(calls)
    return "\n".join([header, entry, f"    return {returned} : {kinds}\n  }}", *functions, "}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[64_000, 300_000])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--measure", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(_measured(*args.measure)))
        return
    lines = [
        f"Python {platform.python_version()}, {platform.machine()}, least CPU seconds of {args.repeat} runs; "
        "`python benchmarks/graph_stablehlo.py`",
        "",
        "| format | instructions | read both | compare | total s | us an instruction | MB |",
        "|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for size in args.sizes:
            pairs = {"HLO": _pairs(Path(folder), size)["constant"]}
            if size == min(args.sizes):
                pairs["StableHLO"] = _stablehlo_pair(Path(folder), size)
            alternated = [{kind: _run(*pair) for kind, pair in pairs.items()} for _ in range(args.repeat)]
            for kind in pairs:
                runs = [of[kind] for of in alternated]
                best = min(runs, key=lambda run: run["read"] + run["compare"])
                total = best["read"] + best["compare"]
                lines.append(
                    f"| {kind} | {best['instructions'] // 2:,} | {best['read']:.2f} | {best['compare']:.2f} "
                    f"| {total:.2f} | {1e6 * total / best['instructions']:.1f} | {best['mb']} |"
                )
                print(lines[-1], flush=True)
    if args.output:
        args.output.write_text("\n".join(lines) + "\n")


def _stablehlo_pair(folder: Path, size: int) -> tuple[Path, Path]:
    base = stablehlo(size)
    constant = re.search(r"dense<(\d\.\d+e[-+]\d+)> : tensor<f32>", base)
    assert constant
    paths = folder / "a.mlir", folder / "b.mlir"
    paths[0].write_text(base)
    paths[1].write_text(base[: constant.start(1)] + "7.250000e+00" + base[constant.end(1) :])
    return paths


def _run(a: Path, b: Path) -> dict:
    command = [sys.executable, __file__, "--measure", str(a), str(b)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _measured(a: Path, b: Path) -> dict:
    from retrograd import graph
    from retrograd.graph.diffing import compare  # noqa: F401 : imports are not what is measured

    def cpu() -> float:
        usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(u.ru_utime + u.ru_stime for u in usage)

    started = cpu()
    graphs = [graph.read(path)[0] for path in (a, b)]
    read = cpu() - started
    diff = graph.diff(*graphs)
    assert len(diff.causes) == 1, diff.causes
    mb = peak_mb()
    return {
        "read": read,
        "compare": cpu() - started - read,
        "mb": mb,
        "instructions": sum(map(len, graphs)),
        "at": time.time(),
    }


if __name__ == "__main__":
    main()
