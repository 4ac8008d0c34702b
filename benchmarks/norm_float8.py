"""Norms in float8 on a GPU, timed in a CUDA graph by turns: with a scale a row and a tensor, beside the norm in
bfloat16 and beside torch.compile and eager torch, which normalise, find the scale and round.

    python benchmarks/norm_float8.py [--shapes 32768x4096,...] [--op rms,ln] [--plans]

Inputs are in bfloat16 and do not fit into L2. `of copy`: useful bytes (3 an element) beside a device copy. Each
result is held against the float64 value rounded once. `--plans`: other tiles of the kernel with a scale a row.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from norm_tune import COLD_BYTES, DTYPE, Replay, events_ms

from retrograd import ops
from retrograd.ops.norm.arguments import Float8Results, NormTensors, WantedOutput
from retrograd.ops.norm.plan import ForwardPlan, Kind, plan_forward_float8
from retrograd.ops.norm.quantization import quantize
from retrograd.ops.norm.spec import NormSpec
from retrograd.ops.norm.triton.float8 import norm_fwd_float8
from retrograd.runtime.triton.gpu import ceil_div
from retrograd.runtime.triton.launch import gpu_of

SHAPES = "131072x256,32768x1024,32768x4096,32768x5120,16384x8192,16384x16384,512x4096,1000x5120,7x8192"
EPS = 1e-6
COPY_BYTES = 1024**3
Inputs = dict[str, Any]


def norm_of(op: str, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    """The norm by torch, in float32."""
    x, w = x.float(), w.float()
    if op == "ln":
        return torch.nn.functional.layer_norm(x, x.shape[-1:], w, None if b is None else b.float(), EPS)
    return torch.nn.functional.rms_norm(x, x.shape[-1:], w, EPS)


def by_torch(op: str, t: Inputs, scale: torch.Tensor | None = None) -> tuple[torch.Tensor | None, ...]:
    return quantize(norm_of(op, t["x"], t["w"], t["b"]), scale)


def ours(op: str, t: Inputs, scale: torch.Tensor | None = None) -> ops.norm.Float8Norm:
    function = ops.layer_norm_float8_fwd if op == "ln" else ops.rms_norm_float8_fwd
    return function(t["x"], t["w"], t["b"], scale=scale, eps=EPS)


def in_bfloat16(op: str, t: Inputs) -> torch.Tensor:
    return (ops.layer_norm if op == "ln" else ops.rms_norm)(t["x"], t["w"], t["b"], eps=EPS)


def planned(op: str, plan: ForwardPlan, t: Inputs) -> Float8Results | None:
    wanted = WantedOutput(torch.float8_e4m3fn, t["x"].dtype)
    spec = NormSpec(op == "ln", EPS, 0.0, True, None)
    return norm_fwd_float8(NormTensors(t["x"], t["w"], t["b"]), None, spec, wanted, plan)


def plans(m: int, n: int, x: torch.Tensor) -> list[ForwardPlan]:
    """That which is taken, and others."""
    first = plan_forward_float8(m, n, 2, gpu_of(x))
    if first.kind is not Kind.TILE:
        return []
    kinds = [first]
    for rows in {1, first.block_m // 2, first.block_m, first.block_m * 2} - {0}:
        for warps in {first.num_warps // 2, first.num_warps, first.num_warps * 2} - {0, 64}:
            for stores in {first.stores, ".cs", ""}:
                plan = replace(first, block_m=rows, num_warps=warps, programs=ceil_div(m, rows), stores=stores)
                kinds += [plan] * (plan not in kinds and rows * n // (32 * warps) in range(4, 129))
    return kinds


def accuracy(op: str, run: Callable[[Inputs], Any], t: Inputs) -> float:
    """Error beside that of the float64 value rounded once."""
    y, scale = run(t)[:2]
    x, w = t["x"].double(), t["w"].double()
    c = x - x.mean(1, keepdim=True) if op == "ln" else x
    want = c * (c.square().mean(1, keepdim=True) + EPS).rsqrt() * w + (0 if t["b"] is None else t["b"].double())
    scaled = (want / scale.double().reshape(-1, 1)).clamp(-448, 448)
    return float((y.double() - scaled).norm() / (scaled.to(torch.float8_e4m3fn).double() - scaled).norm())


def copy_gb_per_s() -> float:
    """Of a device copy."""
    a, b = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * COPY_BYTES / events_ms(lambda: b.copy_(a)) / 1e6


def main() -> None:
    """Print a table, a row a shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--op", default="rms,ln")
    parser.add_argument("--plans", action="store_true")
    args = parser.parse_args()
    copy = copy_gb_per_s()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; copy {copy:.0f} GB/s; us of a call\n")
    print("| | a scale a row | of copy | a scale a tensor | bfloat16 | compile, row | tensor | torch, row | accuracy |")
    print("|---|---|---|---|---|---|---|---|---|")
    torch._dynamo.config.cache_size_limit = 256
    for op in args.op.split(","):
        for shape in args.shapes.split(","):
            m, n = map(int, shape.split("x"))
            make = partial(torch.randn, device="cuda", dtype=DTYPE)
            count = max(2, min(16, ceil_div(COLD_BYTES, 3 * m * n)))
            sets = [dict(x=make(m, n), w=make(n), b=make(n) if op == "ln" else None) for _ in range(count)]
            scale = torch.tensor([0.02], device="cuda")
            compiled = torch.compile(partial(by_torch, op), dynamic=False)
            runs: list[Any] = [
                partial(ours, op), partial(ours, op, scale=scale), partial(in_bfloat16, op), compiled,
                partial(compiled, scale=scale), partial(by_torch, op),
            ]  # fmt: skip
            few = {k: v[:64] if k == "x" else v for k, v in sets[0].items()}
            floors = [f"{accuracy(op, run, few):.3f}" for run in (runs[0], runs[1], runs[3])]
            us = by_turns(runs, sets)
            share = 3 * m * n / us[0] / 1e3 / copy
            shown = " | ".join(f"{time:.2f}" for time in us[1:])
            print(f"| {op} {shape} | {us[0]:.2f} | {share:.0%} | {shown} | {' '.join(floors)} |", flush=True)
            if args.plans:
                kinds = plans(m, n, sets[0]["x"])
                timed = zip(by_turns([partial(planned, op, plan) for plan in kinds], sets), kinds, strict=True)
                for i, (time, plan) in sorted(enumerate(timed), key=lambda row: row[1][0])[:4]:
                    print(f"  {'*' if i == 0 else ' '} {time:.2f} {plan}", flush=True)
            del sets
            torch.cuda.empty_cache()


def by_turns(runs: list[Callable[[Inputs], Any]], sets: list[Inputs]) -> list[float]:
    """us of a call of each, medians of 9 turns."""
    with torch.no_grad():
        replays = [Replay(run, sets) for run in runs]
        for _ in range(9):
            for replay in replays:
                replay.take()
    return [1e3 * statistics.median(replay.times) for replay in replays]


if __name__ == "__main__":
    main()
