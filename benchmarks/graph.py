"""Time and memory of reading and comparing two modules, by size, beside tools that do a part of the job.

    python benchmarks/graph.py                            # 2,000 and 45,000 instructions, then growth to 500,000
    python benchmarks/graph.py --sizes 2000 --repeat 5
    python benchmarks/graph.py -o benchmarks/results/graph.md

Two pairs a size, in the style of torch_xla (`graph_modules.py`): `stray` has one more live tensor, `constant` another
constant in the forward pass of the first step, so that nearly every value differs. Each measurement is a process
of its own; seconds are CPU time, the least of the repeats; MB is the peak of the process with both texts.

Beside it, where installed: GNU diff of the texts (finds changed lines, no reason); jaxlib's HLO parser and its
canonical text (parses, compares nothing); networkx's Weisfeiler-Lehman hash of the parsed graph (says equal or not,
blind to the order of operands).
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from graph_modules import module

from retrograd.graph.readers.files import MAX_BYTES, text_of

DATA = Path(__file__).parents[1] / "tests" / "graph" / "data" / "xla"
SIZES = (2000, 45_000, 100_000, 200_000, 500_000)
WITH_PEERS = 50_000  # networkx takes minutes and gigabytes beyond


def main() -> None:
    args = _arguments()
    if args.measure:
        _measure(args.measure, [Path(p) for p in args.files])
        return
    lines = [
        f"Python {platform.python_version()}, {platform.machine()}, least CPU seconds of {args.repeat} runs; "
        "`python benchmarks/graph.py`",
        "",
        "| instructions | pair | parse both | compare | total s | us an instruction | MB | first cause |",
        "|---|---|---|---|---|---|---|---|",
    ]
    peers = ["", "| instructions | pair | tool | s | MB | says |", "|---|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        for size in args.sizes:
            for pair, (a, b) in _pairs(Path(folder), size).items():
                ours = _best("retrograd", a, b, args.repeat)
                total = ours["parse"] + ours["compare"]
                both = ours["instructions"]
                lines.append(
                    f"| {both // 2:,} | {pair} | {ours['parse']:.2f} | {ours['compare']:.2f} | {total:.2f} "
                    f"| {1e6 * total / both:.1f} | {ours['mb']} | {ours['says']} |"
                )
                print(lines[-1], flush=True)
                for tool in _peers() if size <= WITH_PEERS else ():
                    theirs = _best(tool, a, b, 1)
                    seconds = f"{theirs['compare']:.2f}"
                    peers.append(f"| {both // 2:,} | {pair} | {tool} | {seconds} | {theirs['mb']} | {theirs['says']} |")
                    print(peers[-1], flush=True)
    text = "\n".join(lines + (peers if len(peers) > 3 else [])) + "\n"
    if args.output:
        args.output.write_text(text)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("files", nargs="*", help=argparse.SUPPRESS)
    return parser.parse_args()


def _pairs(folder: Path, size: int) -> dict[str, tuple[Path, Path]]:
    base = module(text_of(DATA / "base_step1.hlo.txt.gz", MAX_BYTES), size)
    head, _, root = base.rpartition("  ROOT %root = (")
    shapes, _, names = root.partition(") tuple(")
    scalar = re.findall(r"f32\[\] (%[\w.\-]+)", names)[-1]
    more = f"  %stray = f32[] add(f32[] {scalar}, f32[] {scalar})\n"
    stray = f"{head}{more}  ROOT %root = (f32[], {shapes}) tuple(f32[] %stray, {names}"
    # The first constant that a line of the model made, not FSDP or the token chain.
    found = next(re.finditer(r"constant\((?!0\))([\d.e\-]+)\), metadata=.*fsdp_run", base[base.index("ENTRY") :]))
    start = base.index("ENTRY") + found.start(1)
    constant = base[:start] + "7.25" + base[start + len(found[1]) :]
    paths = {}
    # Names are numbered anew at each trace, so those of the second file are others.
    for name, text in (
        ("base", base),
        ("stray", stray.replace(".r", ".t")),
        ("constant", constant.replace(".r", ".t")),
    ):
        paths[name] = folder / f"{name}-{size}.hlo.txt"
        paths[name].write_text(text)
    return {"stray": (paths["base"], paths["stray"]), "constant": (paths["base"], paths["constant"])}


def _peers() -> list[str]:
    found = ["diff"] if shutil.which("diff") else []
    return found + [name for name in ("jaxlib", "networkx") if find_spec(name)]


def _best(tool: str, a: Path, b: Path, repeat: int) -> dict:
    command = [sys.executable, __file__, "--measure", tool, str(a), str(b)]
    runs = [
        json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(repeat)
    ]
    return min(runs, key=lambda r: r["parse"] + r["compare"])


def _measure(tool: str, files: list[Path]) -> None:
    start = time.process_time()
    found = {"retrograd": _retrograd, "diff": _diff, "jaxlib": _jaxlib, "networkx": _networkx}[tool](files)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    found.setdefault("parse", 0.0)
    found.setdefault("compare", time.process_time() - start + children.ru_utime + children.ru_stime)
    found["mb"] = max(peak_mb(), children.ru_maxrss // 1024)
    print(json.dumps(found))


def peak_mb() -> int:
    """The peak of this process; what `getrusage` says begins with that of the process that started it."""
    status = Path("/proc/self/status")
    peak = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return (int(peak[1]) if peak else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) // 1024


def _timed(f: Callable, *args: object) -> tuple:
    start = time.process_time()
    return f(*args), time.process_time() - start


def _retrograd(files: list[Path]) -> dict:
    from retrograd import graph
    from retrograd.graph.diffing import compare as imported  # noqa: F401 : imports are not what is measured

    (a, b), parse = _timed(lambda: [graph.read(f)[0] for f in files])
    said, compare = _timed(graph.diff, a, b)
    return dict(parse=parse, compare=compare, instructions=len(a) + len(b), says=said.causes[0].kind)


def _diff(files: list[Path]) -> dict:
    out = subprocess.run(["diff", *map(str, files)], capture_output=True, text=True, check=False).stdout
    return dict(says=f"{sum(line[:1] in '<>' for line in out.splitlines()):,} changed lines")


def _jaxlib(files: list[Path]) -> dict:
    from jaxlib import xla_client

    hlo = xla_client._xla if not hasattr(xla_client, "hlo") else xla_client.hlo
    modules, parse = _timed(lambda: [hlo.hlo_module_from_text(f.read_text()) for f in files])
    same, compare = _timed(lambda: len({m.to_string(hlo.HloPrintOptions.canonical()) for m in modules}) == 1)
    return dict(compare=parse + compare, says="canonical texts are equal" if same else "canonical texts differ")


def _networkx(files: list[Path]) -> dict:
    import networkx

    from retrograd import graph

    start = 0.0
    hashes = set()
    for f in files:
        (one,) = graph.read(f)
        made, seconds = _timed(_digraph, networkx, one)
        _, more = _timed(lambda made=made: hashes.add(networkx.weisfeiler_lehman_graph_hash(made, node_attr="label")))
        start += seconds + more
    return dict(compare=start, says="hashes are equal" if len(hashes) == 1 else "hashes differ")


def _digraph(networkx, one):
    made = networkx.DiGraph()
    for k, ins in enumerate(one.main.instructions):
        made.add_node(k, label=f"{ins.opcode} {ins.shape} {ins.attrs}")
        made.add_edges_from((o, k) for o in ins.operands)
    return made


if __name__ == "__main__":
    main()
