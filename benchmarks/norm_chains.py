"""What it is worth to launch the norms while the kernel ahead of them ends (programmatic dependent launch).

    python benchmarks/norm_chains.py --out benchmarks/results/norm-chains-nvidia-h200.md

Each norm alone, between two elementwise kernels and between two matrix products, with dependent launches and without,
by turns of either order: replayed from a CUDA graph, and queued on a stream behind a kernel that keeps the GPU busy
meanwhile, as an eager training step is whose host is ahead of its GPU. All graphs are measured before anything is
queued: a graph that was captured right after a queue of launches took 1.3 us a chain longer, dependent or not. Inputs
go round sets larger than the L2 cache. Needs Hopper or later.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import triton

from retrograd.bench.timing import CudaTimer
from retrograd.ops.norm.arguments import BackwardTensors, NormTensors, WantedGrads, WantedOutput
from retrograd.ops.norm.plan import Kind, plan_backward, plan_forward
from retrograd.ops.norm.spec import NormSpec
from retrograd.ops.norm.triton import launch as norms
from retrograd.runtime.triton import launch as device

DTYPE = torch.bfloat16
SHAPES = [(512, 4096), (4096, 1024)]
OPS = {"rms_norm": (False, False), "add_rms_norm": (False, True), "layer_norm": (True, False)}
COLUMNS = 1024  # of the matrix products' other factor
TURNS = 6
_BUSY_CYCLES = 40_000_000  # 20 ms, longer than the host takes to queue the calls
_FACTOR = 1.0  # x stays what it is

Norm = Callable[[int], tuple[torch.Tensor | None, ...]]


def norm_of(op: str, way: str, x: list[torch.Tensor], pdl: bool) -> Norm:
    """A call of one kernel on input set i, the backward's sums for weight and bias included."""
    centered, adds = OPS[op]
    m, n = x[0].shape
    spec, weight = NormSpec(centered, 1e-5), torch.randn(n, device="cuda", dtype=DTYPE)
    bias = torch.randn_like(weight) if centered else None
    others = [torch.randn_like(t) for t in x]
    gpu = replace(device.gpu_of(weight), pdl=pdl)

    def forward(i: int) -> tuple[torch.Tensor | None, ...]:
        norms.gpu_of = lambda _: gpu
        residual = others[i] if adds else None
        tensors = NormTensors(x=x[i], weight=weight, bias=bias, residual=residual)
        return norms.norm_fwd(tensors, spec, WantedOutput(out_dtype=DTYPE, s_dtype=DTYPE), plan=fwd)

    def backward(i: int) -> tuple[torch.Tensor | None, ...]:
        norms.gpu_of = lambda _: gpu
        _, _, mean, rstd = kept[i]
        saved = BackwardTensors(
            grad_out=x[i], s=others[i], weight=weight, mean=mean, rstd=rstd, grad_s=grads[i] if adds else None
        )
        wanted = WantedGrads(x=DTYPE, weight=DTYPE, bias=DTYPE if centered else None, residual=DTYPE if adds else None)
        return norms.norm_bwd(saved, spec, wanted, plan=bwd)

    fwd = plan_forward(m, n, DTYPE.itemsize, gpu, centered=centered, streams=1 + adds)
    bwd = plan_backward(m, n, 1, DTYPE.itemsize, gpu, centered=centered, streams=2 + adds)
    assert fwd.kind is bwd.kind is Kind.TILE, "a shape whose kernels this benchmark does not hand a plan"
    if way == "forward":
        return forward
    grads = [torch.randn_like(t) for t in x] if adds else []
    kept = [
        norms.norm_fwd(
            NormTensors(x=t, weight=weight, bias=bias), spec, WantedOutput(out_dtype=DTYPE, s_dtype=DTYPE), plan=fwd
        )
        for t in others
    ]
    return backward


def chains(norm: Norm, x: list[torch.Tensor]) -> dict[str, Norm]:
    """The norm alone, between elementwise kernels, between matrix products."""
    factor = torch.randn(x[0].shape[1], COLUMNS, device="cuda", dtype=DTYPE)

    def elementwise(i: int) -> tuple[torch.Tensor | None, ...]:
        torch.mul(x[i], _FACTOR, out=x[i])
        out = norm(i)
        return *out, torch.mul(out[0], _FACTOR)

    def products(i: int) -> tuple[torch.Tensor | None, ...]:
        before, out = x[i] @ factor, norm(i)
        return *out, before, out[0] @ factor

    return {"alone": norm, "elementwise": elementwise, "matrix products": products}


def graph_ms(timer: CudaTimer, call: Norm, sets: int, calls: int) -> float:
    """Milliseconds a call, replayed."""
    with timer.scope():
        return timer.time(call, sets, calls).ms


def queued_ms(call: Norm, sets: int, calls: int) -> float:
    """Milliseconds a call, launched one by one and waiting on the stream before the first of them begins."""
    times = []
    while len(times) < TURNS:
        torch.cuda.synchronize()
        torch.cuda._sleep(_BUSY_CYCLES)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for i in range(calls):
            call(i % sets)
        end.record()
        if begin.query():
            raise RuntimeError("the host took longer than the GPU was kept busy; raise _BUSY_CYCLES")
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / calls)
    return statistics.median(times)


def rows() -> Iterator[str]:
    """A line of the table for each op, way, shape and chain."""
    timer = CudaTimer()
    for op in OPS:
        for way in ("forward", "backward"):
            for m, n in SHAPES:
                sets, calls = timer.plan(2 * m * n * DTYPE.itemsize)
                x = [torch.randn(m, n, device="cuda", dtype=DTYPE) for _ in range(sets)]
                by_pdl = {pdl: chains(norm_of(op, way, x, pdl), x) for pdl in (False, True)}
                for chain in by_pdl[False]:
                    cells = []
                    for measure in (partial(graph_ms, timer), queued_ms):
                        us: dict[bool, list[float]] = {False: [], True: []}
                        for turn in range(TURNS):
                            for pdl in (False, True) if turn % 2 else (True, False):
                                us[pdl].append(1e3 * measure(by_pdl[pdl][chain], sets, calls))
                        cells += [f"{statistics.median(us[pdl]):.2f}" for pdl in (False, True)]
                    yield f"| {op} | {way} | {m}x{n} | {chain} | " + " | ".join(cells) + " |"


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the table here too")
    args = parser.parse_args()
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, bfloat16;",
        "microseconds of the whole chain. Printed by `python benchmarks/norm_chains.py`.",
        "",
        "| op | way | shape | chain | graph | graph, dependent | stream | stream, dependent |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for line in rows():
        print(line, flush=True)
        lines.append(line)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
