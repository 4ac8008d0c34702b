"""Forward + backward of the norms on the CPU: native code beside torch (median of interleaved runs).

All gradients are computed (x, weight, residual; bias for LayerNorm). retrograd's two implementations are called without
autograd, torch through it. Providers take turns within a repeat, so that a busy machine slows all of them.

The two variables keep freed memory in the process. Without them each large result is mapped afresh, and on a virtual
machine those page faults (0.4 GiB/s measured) drown every kernel.

    MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000 \\
    python benchmarks/norm_cpu.py [--shape 4096x4096] [--threads 2] [--repeats 9] [--write]
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from retrograd.ops.norm import eager, native
from retrograd.ops.norm.spec import NormSpec

EPS = 1e-6
OPS = ("rms_norm", "layer_norm", "add + rms_norm")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PROVIDERS = ("native", "eager", "written out", "F.*")
RESULTS = Path(__file__).parent / "results" / "norm-cpu.md"

Inputs = dict[str, torch.Tensor]
Run = Callable[[], tuple[float, float]]


def make_inputs(m: int, n: int, dtype: torch.dtype) -> Inputs:
    """Normal data; the weight is around one."""
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn((m, n), generator=generator) for name in ("x", "residual", "grad")}
    made["weight"] = 1 + 0.2 * torch.randn(n, generator=generator)
    made["bias"] = 0.3 * torch.randn(n, generator=generator)
    return {name: tensor.to(dtype) for name, tensor in made.items()}


def ours(module: object, op: str, data: Inputs) -> Run:
    """Both low-level functions of an implementation of the family."""
    spec = NormSpec(centered=op == "layer_norm", eps=EPS)
    dtype = data["x"].dtype
    bias = data["bias"] if spec.centered else None
    residual = data["residual"] if op.startswith("add") else None
    grad_s = data["grad"] if residual is not None else None
    wanted = {"x_dtype": dtype, "weight_dtype": dtype, "bias_dtype": dtype if spec.centered else None}
    wanted["residual_dtype"] = dtype if residual is not None else None

    def run() -> tuple[float, float]:
        began = time.perf_counter()
        y, s, mean, rstd = module.norm_fwd(  # type: ignore[attr-defined]
            data["x"], data["weight"], bias, residual, spec, out_dtype=dtype, s_dtype=dtype
        )
        middle = time.perf_counter()
        s = data["x"] if s is None else s
        grads = module.norm_bwd(data["grad"], s, data["weight"], mean, rstd, grad_s, spec, **wanted)  # type: ignore[attr-defined]
        ended = time.perf_counter()
        del y, grads
        return middle - began, ended - middle

    return run


def torchs(op: str, data: Inputs, written_out: bool) -> Run:
    """torch's function, or the formula as models write it, through autograd."""
    names = ["x", "weight"] + (["bias"] if op == "layer_norm" else []) + (["residual"] if op.startswith("add") else [])
    leaves = {name: data[name].clone().requires_grad_() for name in names}
    grad, shape = data["grad"], data["weight"].shape

    def norm(s: torch.Tensor) -> torch.Tensor:
        weight = leaves["weight"]
        if op != "layer_norm":
            return (
                s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + EPS) * weight
                if written_out
                else (F.rms_norm(s, shape, weight, EPS))
            )
        if not written_out:
            return F.layer_norm(s, shape, weight, leaves["bias"], EPS)
        d = s - s.mean(-1, keepdim=True)
        return d * torch.rsqrt(d.pow(2).mean(-1, keepdim=True) + EPS) * weight + leaves["bias"]

    def run() -> tuple[float, float]:
        began = time.perf_counter()
        s = leaves["x"] + leaves["residual"] if op.startswith("add") else leaves["x"]
        y = norm(s)
        middle = time.perf_counter()
        outputs, grads = ([y, s], [grad, grad]) if op.startswith("add") else ([y], [grad])
        torch.autograd.grad(outputs, list(leaves.values()), grads)
        return middle - began, time.perf_counter() - middle

    return run


def measure(
    op: str, dtype: torch.dtype, shape: tuple[int, int], repeats: int, names: list[str]
) -> dict[str, tuple[float, float]]:
    """Median (forward, backward) milliseconds of each provider."""
    data = make_inputs(*shape, dtype)
    runs = {
        "native": ours(native, op, data),
        "eager": ours(eager, op, data),
        "written out": torchs(op, data, True),
        "F.*": torchs(op, data, False),
    }
    runs = {name: run for name, run in runs.items() if name in names}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            took = run()
            if repeat:  # the first one warms up
                times[name].append(took)
    return {name: tuple(1e3 * statistics.median(t) for t in zip(*took, strict=True)) for name, took in times.items()}


def table(shape: tuple[int, int], repeats: int, names: list[str]) -> list[str]:
    """Rows of a markdown table: forward + backward milliseconds, and how many times longer than native."""
    lines = ["| op | dtype | " + " | ".join(f"{name} ms" for name in names) + " |", "|---" * (2 + len(names)) + "|"]
    for op in OPS:
        for dtype in DTYPES:
            took = measure(op, dtype, shape, repeats, names)
            cells = []
            for name in names:
                forward, backward = took[name]
                total, base = forward + backward, sum(took["native"])
                ratio = "" if name == "native" else f", x{total / base:.1f}"
                cells.append(f"{total:.1f} ({forward:.1f} + {backward:.1f}{ratio})")
            lines.append(f"| {op} | {str(dtype).removeprefix('torch.')} | " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
    return lines


def cpu_model() -> str:
    """As the kernel names it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    """Measure, print the table, write it with what it was measured on."""
    parser = argparse.ArgumentParser(description="Norms on the CPU, forward + backward.")
    parser.add_argument("--shape", default="4096x4096", help="MxN")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--providers", default=",".join(PROVIDERS), help="of these; native always runs")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.parent.name}/{RESULTS.name}")
    args = parser.parse_args()
    if (reason := native.why_not()) is not None:
        raise SystemExit(reason)
    torch.set_num_threads(args.threads)
    m, n = (int(size) for size in args.shape.split("x"))
    command = (
        "MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000 python benchmarks/norm_cpu.py "
        f"--shape {args.shape} --threads {args.threads} --repeats {args.repeats} --providers '{args.providers}'"
    )
    lines = [
        "# Norms on the CPU, forward + backward",
        "",
        f"{cpu_model()} ({torch.backends.cpu.get_cpu_capability()}), {args.threads} threads; torch "
        f"{torch.__version__}, Python {platform.python_version()}; [{m}, {n}], median of {args.repeats} interleaved "
        "runs, total ms (forward + backward, times native).",
        "",
        "`native` and `eager` are retrograd's own functions without autograd; `written out` is "
        "`x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w` in the dtype of x, `F.*` torch's function, both "
        "through autograd.",
        "",
        f"    {command}",
        "",
    ]
    print("\n".join(lines))
    names = [name for name in PROVIDERS if name in {"native", *args.providers.split(",")}]
    lines += table((m, n), args.repeats, names)
    if args.write:
        RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
