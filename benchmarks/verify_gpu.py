"""Where the seconds of `retrograd verify` on a GPU go: process start, imports, stages, kernels that were compiled.

    python benchmarks/verify_gpu.py rms_norm,ms_deform_attn [--level quick] [--device cuda] [--cache FOLDER]
    python benchmarks/verify_gpu.py rms_norm --inside [--profile PATH]     # in this process, stage by stage

Each op is verified from empty caches of kernels and again with what that has left, by the command itself, so that the
process's start counts. Before, an op without kernels is verified: where packages have no bytecode, its process keeps
it. `--inside` says of each stage its seconds and what was compiled in it: kernels by Triton (and how long), launchers
and other modules by a C compiler, kernels by NVRTC, and processes that were started.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_BEGIN = time.perf_counter()


class Spent:
    """Seconds and calls by kind of work, since the last time that they were taken."""

    def __init__(self) -> None:
        self.work: dict[str, list[float]] = defaultdict(list)

    def around(self, owner: Any, name: str, kind: str) -> None:
        """Count the calls of a function, whatever it does."""
        stock = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return stock(*args, **kwargs)
            finally:
                self.work[kind].append(time.perf_counter() - start)

        setattr(owner, name, timed)

    def compiled(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        """Listener of Triton's compiler; seconds are what it says itself."""
        self.work["kernels from the cache" if cache_hit else "kernels compiled"].append(times.total / 1e6)

    def text(self) -> str:
        """What was done, and forgotten."""
        parts = [f"{len(spent)} {kind} {sum(spent):.2f} s" for kind, spent in self.work.items() if spent]
        self.work.clear()
        return ", ".join(parts)


def inside(op: str, level: str, device: str, profile: Path | None) -> None:
    """Verify in this process, and print a line a stage."""
    spent, started = Spent(), time.perf_counter()
    print(f"python to here {started - _BEGIN:.2f} s")
    with step("import torch"):
        import torch
    with step("import triton"):
        import triton
        from triton import knobs
        from triton.runtime import build
    knobs.compilation.listener = spent.compiled
    spent.around(build, "_build", "modules by a C compiler")
    spent.around(subprocess, "Popen", "processes")
    with step("import retrograd.check"):
        from retrograd import catalog
        from retrograd.check.runner import verify
        from retrograd.runtime.cuda import nvrtc
    spent.around(nvrtc, "_compile", "kernels by NVRTC")
    with step("resolve"):
        spec = catalog.resolve(op)
    if device.startswith("cuda"):
        with step("CUDA context"):
            torch.zeros(1, device=device).add_(1).item()
    print(f"torch {torch.__version__}, Triton {triton.__version__}, {os.cpu_count()} cores")
    last = [time.perf_counter()]

    def watch(event: str, about: Any) -> None:
        if event == "stage":
            (stage,) = about.stages
            now = time.perf_counter()
            print(f"{now - last[0]:7.2f} s {stage.id:<13}{stage.cases:4} cases {stage.runs:5} runs  {spent.text()}")
            last[0] = now

    profiler = cProfile.Profile() if profile else None
    if profiler:
        profiler.enable()
    report = verify(spec, level=level, device=device, watch=watch)
    if profiler and profile:
        profiler.disable()
        profiler.dump_stats(profile)
        for order in ("cumulative", "tottime"):
            pstats.Stats(profiler).sort_stats(order).print_stats(60)
    print(f"{report.verdict}, {report.seconds:.2f} s of stages, {time.perf_counter() - _BEGIN:.2f} s in all")


@contextmanager
def step(name: str) -> Iterator[None]:
    """Print how long something took."""
    start = time.perf_counter()
    yield
    print(f"{time.perf_counter() - start:7.2f} s {name}", flush=True)


def command(op: str, level: str, device: str, cache: Path, options: list[str]) -> tuple[float, str]:
    """Seconds of the command, and the verdict."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache / "triton"), "XDG_CACHE_HOME": str(cache)}
    words = [sys.executable, "-m", "retrograd", "verify", op, "--level", level, "--device", device, "--json", "-q"]
    start = time.perf_counter()
    done = subprocess.run([*words, *options], env=environment, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if not done.stdout.startswith("{"):
        return seconds, done.stderr[-300:]
    report = json.loads(done.stdout)
    longest = sorted(report["stages"], key=lambda stage: -stage["seconds"])[:4]
    stages = ", ".join(f"{stage['id']} {stage['seconds']:.1f}" for stage in longest)
    return seconds, f"{report['verdict']} | {report['seconds']:.1f} | {stages}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", help="targets of verify, comma separated")
    parser.add_argument("--level", default="quick", help="quick, full or both with a comma")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--inside", action="store_true")
    parser.add_argument("--profile", type=Path, help="with --inside: also profile, into this file")
    parser.add_argument("--cache", type=Path, help="folder of caches; a new one for each op by default")
    args, options = parser.parse_known_args()
    if args.inside:
        inside(args.ops, args.level, args.device, args.profile)
        return 0
    print("| op | level | cache | seconds | verdict | of the report | longest stages |", "|---" * 7 + "|", sep="\n")
    for op in args.ops.split(","):
        with tempfile.TemporaryDirectory() as folder:
            seconds, told = command("rms_norm_torch", "quick", args.device, args.cache or Path(folder), options)
            print(f"| rms_norm_torch | quick | | {seconds:.1f} | {told} |", flush=True)
            for level in args.level.split(","):
                for cache in ("cold", "warm"):
                    seconds, told = command(op, level, args.device, args.cache or Path(folder), options)
                    print(f"| {op} | {level} | {cache} | {seconds:.1f} | {told} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
