"""Times of an op by several methods in one process: replayed graphs, events around eager calls, triton's do_bench.

Every provider is made, compiled and held against float64 first; then each is timed by all methods. Scripts that are
given the same folder as `--with` prepare at once and measure one after the other, so that nothing is compiled or
checked while somebody measures.

    python benchmarks/methods.py rms_norm --shapes 512x4096,7x8192 --out results [--providers A,B] [--with FOLDER 3]
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from retrograd.bench import registry, runner
from retrograd.bench.accuracy import judge
from retrograd.bench.benchmark import UnavailableError
from retrograd.bench.rows import OVER, Row, to_line
from retrograd.bench.selection import Selection
from retrograd.bench.table import markdown
from retrograd.bench.timing import CudaTimer, first_line

METHODS = ("graph", "eager", "do_bench")


def prepared(jobs: list[Row]) -> Iterator[tuple[Row, runner.Work | None]]:
    """Each job with its work, or with the reason why there is none; what is not installed is left out."""
    missing: set[tuple[str, str]] = set()
    problem, case = None, None
    for job in jobs:
        if (job.op, job.provider) in missing:
            continue
        provider = registry.find(job.op, job.provider)
        try:
            if provider is None:
                raise UnavailableError(f"{job.provider} has no {job.op}")
            implementation = registry.make(job.op, provider, job.shape, job.dtype)
            if case != job.case:
                benchmark = registry.BENCHMARKS[job.op]
                problem, case = benchmark.problem(job.shape, job.dtype, job.beside, "cuda"), job.case
            assert problem is not None
            if provider.compiled:
                implementation = replace(implementation, call=torch.compile(implementation.call, dynamic=False))
            wrong, coarse = judge(implementation, problem, *next(problem.data()))
            fwd, bwd = problem.bytes_moved
            row = replace(job, fwd_bytes=fwd, bwd_bytes=bwd, note=f"coarse: {coarse}" if coarse else "")
            yield (replace(row, skipped=f"wrong: {wrong}"), None) if wrong else (row, (implementation, problem))
        except UnavailableError as error:
            missing.add((job.op, job.provider))
            print(f"left out: {error}", flush=True)
        except Exception as error:
            yield replace(job, skipped=first_line(error)), None
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def alone(folder: Path | None, parties: int, seconds: float) -> Iterator[None]:
    """Inside, nobody else of `parties` prepares or measures; after so many seconds those that are late do not count."""
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"ready-{os.getpid()}").touch()
    until = time.monotonic() + seconds
    while len(list(folder.glob("ready-*"))) < parties and time.monotonic() < until:
        time.sleep(0.05)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="+")
    for name in ("shapes", "providers", "dtypes"):
        parser.add_argument(f"--{name}", type=lambda text: tuple(text.split(",")), default=())
    parser.add_argument("--methods", type=lambda text: tuple(text.split(",")), default=METHODS[:2])
    parser.add_argument(
        "--second", type=lambda text: tuple(text.split(",")), default=(), help="shapes for do_bench too"
    )
    parser.add_argument("--prepare", action="store_true", help="fill the caches of compiled kernels, measure nothing")
    parser.add_argument("--with", dest="others", nargs=2, metavar=("FOLDER", "SCRIPTS"))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no measurement after this long")
    parser.add_argument("--out", type=Path, required=True, help="folder of a JSON lines file an op and method")
    args = parser.parse_args()
    began = time.monotonic()
    torch._dynamo.config.cache_size_limit = 256  # one function for all shapes
    selection = Selection(tuple(args.ops), shapes=args.shapes, providers=args.providers, dtypes=args.dtypes)
    benchmarks = [registry.BENCHMARKS[op] for op in args.ops]
    order = selection.providers_of(benchmarks)
    jobs = sorted(selection.jobs(benchmarks), key=lambda row: (row.case, order.index(row.provider)))
    timers = {method: CudaTimer(method) for method in (*args.methods, *["do_bench"] * bool(args.second))}
    args.out.mkdir(parents=True, exist_ok=True)
    works = list(prepared(jobs))
    print(f"{' '.join(args.ops)}: {len(works)} prepared in {time.monotonic() - began:.0f} s", flush=True)
    if args.prepare:
        return 0
    folder, parties = args.others or (None, "1")
    rows: dict[str, list[Row]] = {method: [] for method in timers}
    with alone(folder and Path(folder), int(parties), 120):
        began_alone = time.monotonic()
        copy = next(iter(timers.values())).copy_gb_per_s()
        facts = runner.machine(next(iter(timers.values())), benchmarks[0].packages)
        for (row, work), (method, timer) in ((pair, item) for pair in works for item in timers.items()):
            if method == "do_bench" and row.shape not in args.second:
                continue
            row = replace(row, copy_gb_per_s=copy, machine=facts)
            if work is not None and time.monotonic() - began > args.seconds:
                row = replace(row, skipped=OVER)
            elif work is not None:
                try:
                    with timer.scope():
                        row = runner.timed(row, *work, timer)
                except Exception as error:
                    row = replace(row, skipped=first_line(error))
                if method == args.methods[-1]:
                    gc.collect()
                    torch.cuda.empty_cache()
            rows[method].append(row)
            with (args.out / f"{row.op}-{method}.jsonl").open("a") as lines:
                print(to_line(row), file=lines)
        print(f"{' '.join(args.ops)}: measured in {time.monotonic() - began_alone:.0f} s", flush=True)
    for method, kept in rows.items():
        print(f"\n## {method}\n\n{markdown(kept)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
