"""Useful bandwidth of RMSNorm, forward and backward, beside torch and other libraries (bfloat16, one GPU).

Useful bytes: forward 2 M N itemsize (x, y), backward 3 M N itemsize (x, grad_out, grad_x). Inputs rotate through
enough sets that each call finds the L2 cache cold; the time is the median over calls between CUDA events. The
backward is timed through autograd, so host time counts where a kernel is short. Each provider is first checked
against float64; a wrong one is reported and not timed.

    python benchmarks/norm.py [--shapes 4096x2000,512x4096] [--providers retrograd,torch] [--max-seconds 300]
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import triton

from retrograd.ops import rms_norm
from retrograd.ops.norm.reference import rms_norm_reference

SHAPES = [
    *[(32768, n) for n in (256, 1024, 2048, 4096, 8192)],
    *[(16384, 16384), (8192, 32768), (4096, 65536), (2048, 131072), (4096, 2000), (512, 4096)],
]
EPS = 1e-6
DTYPE = torch.bfloat16
# Beyond any L2 (50 MB on H100/H200, 126 MB on B200).
COLD_BYTES = 512 * 1024**2
CHECK_ROWS = 256

Norm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def providers() -> dict[str, Norm]:
    """Norm functions by name; libraries that cannot be imported are left out."""
    compiled = torch.compile(lambda x, w: rms_norm_reference(x, w, eps=EPS)[0], dynamic=False)
    found: dict[str, Norm] = {
        "retrograd": lambda x, w: rms_norm(x, w, eps=EPS),
        "retrograd-atomic": lambda x, w: rms_norm(x, w, eps=EPS, deterministic=False),
        "torch": lambda x, w: F.rms_norm(x, (x.shape[-1],), w, EPS),
        "compile": compiled,
    }
    try:
        function = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
        found["liger"] = lambda x, w: function.apply(x, w, EPS, 0.0, "llama", False)
    except (ImportError, AttributeError):
        pass
    try:
        rmsnorm = importlib.import_module("quack").rmsnorm
        found["quack"] = lambda x, w: rmsnorm(x, w, eps=EPS)
    except (ImportError, AttributeError):
        pass
    return found


def median_ms(call: Callable[[int], object], calls: int) -> float:
    """Median time of `call(i)`, each call between its own pair of events, after three untimed ones."""
    for i in range(3):
        call(i)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
    for i, (start, stop) in enumerate(events):
        start.record()
        call(i)
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in events)


def copy_gb_per_s() -> float:
    """Bandwidth of a device copy of 1 GiB, bytes read plus bytes written."""
    source = torch.empty(1024**3, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / median_ms(lambda _: target.copy_(source), 20) / 1e6


def wrong_results(norm: Norm, n: int) -> str:
    """Names of results whose relative L2 error exceeds twice that of rounding the truth to bfloat16; "" if none."""
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(CHECK_ROWS, n, device="cuda", generator=generator).to(DTYPE)
    noise = torch.randn(CHECK_ROWS, n, device="cuda", generator=generator)
    weight = (1 + 0.2 * torch.randn(n, device="cuda", generator=generator)).to(DTYPE)
    grad = (x + 0.5 * noise).to(DTYPE)
    results = []
    for function, dtype in ((norm, DTYPE), (lambda a, b: rms_norm_reference(a, b, eps=EPS)[0], torch.float64)):
        leaves = [t.detach().clone().to(dtype).requires_grad_() for t in (x, weight)]
        y = function(*leaves)
        # Some libraries reuse the buffer of grad_out.
        results.append([y.detach().clone(), *torch.autograd.grad(y, leaves, grad.to(dtype).clone())])
    bad = []
    for name, got, want in zip(("y", "grad_x", "grad_weight"), *results, strict=True):
        floor = (want.to(DTYPE).double() - want).norm()
        if not (got.double() - want).norm() <= 2 * floor:
            bad.append(name)
    return ", ".join(bad)


def measure(norm: Norm, m: int, n: int) -> dict[str, float]:
    """Forward and backward median times of one provider at one shape, in milliseconds."""
    sets = max(2, min(16, -(-COLD_BYTES // (2 * m * n * DTYPE.itemsize))))
    xs = [torch.randn(m, n, device="cuda", dtype=DTYPE).requires_grad_() for _ in range(sets)]
    weight = torch.ones(n, device="cuda", dtype=DTYPE, requires_grad=True)
    calls = max(20, 2 * sets)
    with torch.no_grad():
        forward = median_ms(lambda i: norm(xs[i % sets], weight), calls)
    graphs = [(norm(x, weight), torch.randn(m, n, device="cuda", dtype=DTYPE)) for x in xs]

    def backward(i: int) -> object:
        y, grad = graphs[i % sets]
        return torch.autograd.grad(y, (xs[i % sets], weight), grad, retain_graph=True)

    return {"forward_ms": forward, "backward_ms": median_ms(backward, calls)}


def parse_args() -> argparse.Namespace:
    """Command line; filters are comma-separated."""
    parser = argparse.ArgumentParser(description="Bandwidth of RMSNorm, forward and backward.")
    parser.add_argument("--shapes", help="MxN,... (default: all)")
    parser.add_argument("--providers", help="names, comma-separated (default: all that can be imported)")
    parser.add_argument("--max-seconds", type=float, default=float("inf"), help="no torch.compile after this long")
    parser.add_argument("--out", type=Path, help="JSON lines (default: benchmarks/results/norm-<gpu>.jsonl)")
    return parser.parse_args()


def main() -> None:
    """Measure, print a markdown table, write JSON lines."""
    args = parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/norm.py needs a CUDA device")
    began = time.monotonic()
    shapes = SHAPES
    if args.shapes:
        shapes = [tuple(int(size) for size in shape.split("x")) for shape in args.shapes.split(",")]
    found = providers()
    names = args.providers.split(",") if args.providers else list(found)
    for name in set(names) - set(found):
        raise SystemExit(f"provider {name!r} is unknown or cannot be imported; there are {', '.join(found)}")

    gpu = torch.cuda.get_device_name().replace(" ", "-")
    out = args.out or Path(__file__).parent / "results" / f"norm-{gpu}.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    roof = copy_gb_per_s()
    versions = {"torch": torch.__version__, "triton": triton.__version__, "gpu": gpu}
    print(f"{gpu}, torch {torch.__version__}, triton {triton.__version__}; copy {roof:.0f} GB/s\n")
    print("| shape | provider | forward GB/s | of copy | backward GB/s | of copy |")
    print("|---|---|---|---|---|---|")
    with out.open("w") as lines:
        for m, n in shapes:
            for name in names:
                record = {**versions, "copy_gb_per_s": roof, "m": m, "n": n, "dtype": "bfloat16", "provider": name}
                if name == "compile" and time.monotonic() - began > args.max_seconds:
                    record["skipped"] = "over --max-seconds"
                else:
                    record |= run_one(found[name], m, n)
                lines.write(json.dumps(record) + "\n")
                lines.flush()
                print(table_row(record, roof), flush=True)
                torch.cuda.empty_cache()


def run_one(norm: Norm, m: int, n: int) -> dict[str, object]:
    """Check and measure; a provider that raises or is wrong says so in its record instead of ending the run."""
    torch.compiler.reset()
    try:
        bad = wrong_results(norm, n)
        if bad:
            return {"skipped": f"wrong: {bad}"}
        times = measure(norm, m, n)
    except Exception as error:
        return {"skipped": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]}
    size = m * n * DTYPE.itemsize / 1e6
    return {
        **times,
        "forward_gb_per_s": 2 * size / times["forward_ms"],
        "backward_gb_per_s": 3 * size / times["backward_ms"],
    }


def table_row(record: dict[str, object], roof: float) -> str:
    """One row of the markdown table."""
    head = f"| {record['m']}x{record['n']} | {record['provider']} |"
    if "skipped" in record:
        return f"{head} {record['skipped']} | | | |"
    forward, backward = float(record["forward_gb_per_s"]), float(record["backward_gb_per_s"])
    return f"{head} {forward:.0f} | {forward / roof:.0%} | {backward:.0f} | {backward / roof:.0%} |"


if __name__ == "__main__":
    main()
