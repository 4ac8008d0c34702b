"""How long `verify` takes: healthy and shipped ops from the first stage to the last, broken ones to the first finding.

    python benchmarks/verify_speed.py --level quick --out benchmarks/results/verify-quick.md
    python benchmarks/verify_speed.py --level full --sets shipped --names rms_norm,layer_norm

One thread, after the imports. CPU seconds are what an idle core takes; the wall clock of a busy machine says little.
The budget is that of the documentation: level quick within a second, full within ten, a first finding within one. A
finding counts when it is told, which is before it is shrunk and explained.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from retrograd import catalog, cpu_triton
from retrograd.check.runner import verify
from retrograd.check.spec import OpSpec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from corpus import SETS, files, load

BUDGET = {"quick": 1.0, "full": 10.0}
FIRST = 1.0  # a finding, at any level
NORMS = [f"{norm}{variant}{impl}" for norm in ("rms_norm", "layer_norm") for variant in ("", "_residual")
         for impl in ("", "_cpu", "_torch")]  # fmt: skip


class Watch:
    """CPU seconds since it was made, when the first finding was told."""

    def __init__(self) -> None:
        self.start, self.found = time.process_time(), 0.0

    def __call__(self, stage: str, said: str) -> None:
        if said.startswith("found: ") and not self.found:
            self.found = time.process_time() - self.start


def ops(kind: str) -> Iterator[tuple[str, OpSpec]]:
    """Ops of a set by name, made anew."""
    if kind == "shipped":
        yield from ((name, catalog.resolve(name)) for name in (*NORMS, "ms_deform_attn"))
        return
    for path in files(kind, kernels=False):
        yield from load(path).items()


def measure(name: str, spec: OpSpec, level: str, seed: int) -> tuple[float, float, str, str]:
    """CPU seconds of all, to the first finding (0 if none), the verdict, the three longest stages."""
    watch, start = Watch(), time.process_time()
    report = verify(spec, level=level, seed=seed, progress=watch)
    total = time.process_time() - start
    longest = sorted(report.stages, key=lambda s: -s.seconds)[:3]
    return total, watch.found, report.verdict, ", ".join(f"{s.id} {s.seconds:.2f}" for s in longest)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", default="quick", choices=list(BUDGET))
    parser.add_argument("--sets", default="shipped,healthy", help=f"some of shipped,{','.join(SETS)}")
    parser.add_argument("--names", default="", help="only these ops, comma separated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="markdown")
    args = parser.parse_args()
    torch.set_num_threads(1)
    # The first verification of a process, the first of a custom operator and the first torch.compile import parts of
    # torch (1.3, 0.4 and 1 s), which is no op's cost.
    torch.compile(torch.sin, backend="aot_eager")(torch.ones(1, requires_grad=True)).backward()
    verify(next(iter(load(files("healthy")[0]).values())), level="quick", seed=0)
    verify(catalog.resolve("rms_norm_cpu"), level="quick", only=["compiler"])
    # Neither is the import of Triton, of what executes its kernels and of the kernels themselves.
    for family in ("norm", "msda"):
        importlib.import_module(f"retrograd.ops.{family}.triton")
    with cpu_triton():
        pass
    wanted = [n for n in args.names.split(",") if n]
    setting = f"torch {torch.__version__}, one thread, level {args.level}, seed {args.seed}"
    head = "| op | set | verdict | seconds | to the first finding | longest stages |"
    lines = [f"{setting}; CPU seconds, stages by the wall clock", "", head, "|---" * 6 + "|"]
    healthy: list[float] = []
    first: list[float] = []
    for kind in args.sets.split(","):
        for name, spec in ops(kind):
            if wanted and name not in wanted:
                continue
            total, found, verdict, longest = measure(name, spec, args.level, args.seed)
            (first if found else healthy).append(found or total)
            shown = f"{found:.2f}" if found else ""
            lines.append(f"| {name} | {kind} | {verdict} | {total:.2f} | {shown} | {longest} |")
            print(lines[-1], flush=True)
    for what, seconds, most in (("proved", healthy, BUDGET[args.level]), ("first finding", first, FIRST)):
        if seconds:
            late = sum(s > most for s in seconds)
            middle = sorted(seconds)[len(seconds) // 2]
            said = (
                f"{what}: {len(seconds)} ops, median {middle:.2f}, longest {max(seconds):.2f}; {late} beyond {most:g}"
            )
            lines[2:2] = [said, ""]
            print(said)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
