"""Deformable attention on the CPU, forward and backward: native code, torch operations and grid_sample side by side.

All gradients are computed. retrograd's two implementations are called without autograd; grid_sample is what models do
without kernels, as in transformers: one grid_sample a level, then a weighted sum, through autograd. Results are held
against each other before anything is timed. Providers take turns within a repeat, so that a busy machine slows all.

The two variables keep freed memory in the process; without them page faults of large results are timed too.

    MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000 \\
    python benchmarks/msda_cpu.py [--threads 2] [--repeats 7] [--write]
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from norm_cpu import cpu_model

from retrograd.ops.msda import eager, native
from retrograd.ops.msda.shapes import Levels
from retrograd.ops.msda.spec import MsdaSpec

PROVIDERS = ("native", "torch operations", "grid_sample")
RESULTS = Path(__file__).parent / "results" / "msda-cpu.md"
# Results may differ by this part of their largest element: sums of hundreds of terms in float32, and one rounding.
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8}
ONCE_S = 15  # what takes longer runs once

Inputs = dict[str, torch.Tensor]
Results = list[torch.Tensor]
Run = Callable[[], tuple[Results, tuple[float, float]]]


@dataclass(frozen=True)
class Shape:
    """One image with 8 heads, 32 channels each, 4 points a level."""

    name: str
    queries: int
    levels: tuple[tuple[int, int], ...]
    heads: int = 8
    channels: int = 32
    points: int = 4


_DETR = ((100, 167), (50, 84), (25, 42), (13, 21))
SHAPES = (
    Shape("Q 5000, levels 64² to 8²", 5000, ((64, 64), (32, 32), (16, 16), (8, 8))),
    Shape("DETR encoder, Q = S = 22223", 22223, _DETR),
)


def make_inputs(shape: Shape, dtype: torch.dtype) -> Inputs:
    """Points anywhere in their levels, a tenth of a pixel from the borders of cells; they stay in float32."""
    generator = torch.Generator().manual_seed(0)
    pixels = sum(h * w for h, w in shape.levels)
    per_point = (1, shape.queries, shape.heads, len(shape.levels), shape.points)
    size = torch.tensor(shape.levels).flip(1)[:, None]  # [L, 1, 2] (width, height)
    cell = (torch.rand(*per_point, 2, generator=generator) * size).floor()
    place = 0.1 + 0.8 * torch.rand(*per_point, 2, generator=generator)
    return {
        "value": torch.randn(1, pixels, shape.heads, shape.channels, generator=generator).to(dtype),
        "locations": (cell + place + 0.5) / size,  # x = p * size - 0.5; past the last column half outside
        "weights": torch.randn(*per_point, generator=generator).flatten(3).softmax(-1).view(per_point),
        "grad_out": torch.randn(1, shape.queries, shape.heads, shape.channels, generator=generator).to(dtype),
    }


def ours(module: Any, shape: Shape, data: Inputs) -> Run:
    """Both functions of an implementation."""
    spec, levels = MsdaSpec((shape.points,) * len(shape.levels)), Levels(shape.levels)
    inputs = (data["value"], levels, data["locations"].flatten(3, 4), data["weights"].flatten(3), spec)
    needs = dict(need_value=True, need_locations=True, need_weights=True)

    def run() -> tuple[Results, tuple[float, float]]:
        began = time.perf_counter()
        out = module.msda_fwd(*inputs)
        middle = time.perf_counter()
        grads = module.msda_bwd(data["grad_out"], *inputs, **needs)
        ended = time.perf_counter()
        return [out, *(g.flatten() for g in grads)], (middle - began, ended - middle)

    return run


def by_grid_sample(shape: Shape, data: Inputs) -> Run:
    """As models do it; locations and weights in the dtype of value, which grid_sample asks for."""
    names = ("value", "locations", "weights")
    value, locations, weights = (data[name].to(data["value"].dtype).clone().requires_grad_() for name in names)
    heads, channels, queries, points = shape.heads, shape.channels, shape.queries, shape.points

    def forward() -> torch.Tensor:
        grids, sampled = 2 * locations - 1, []
        for level, image in enumerate(value.split([h * w for h, w in shape.levels], 1)):
            image = image.flatten(2).transpose(1, 2).reshape(heads, channels, *shape.levels[level])
            grid = grids[:, :, :, level].transpose(1, 2).flatten(0, 1)  # [H, Q, P, 2]
            sampled.append(torch.nn.functional.grid_sample(image, grid, align_corners=False))  # [H, C, Q, P]
        shares = weights.transpose(1, 2).reshape(heads, 1, queries, len(shape.levels) * points)
        total = (torch.stack(sampled, dim=-2).flatten(-2) * shares).sum(-1)  # [H, C, Q]
        return total.view(1, heads * channels, queries).transpose(1, 2).contiguous()

    def run() -> tuple[Results, tuple[float, float]]:
        began = time.perf_counter()
        out = forward()
        middle = time.perf_counter()
        grads = torch.autograd.grad(out, (value, locations, weights), data["grad_out"].flatten(2))
        ended = time.perf_counter()
        return [out.detach().view(data["grad_out"].shape), *(g.flatten() for g in grads)], (
            middle - began,
            ended - middle,
        )

    return run


def check(shape: Shape, dtype: torch.dtype, name: str, got: Results, want: Results) -> None:
    """Stop where a provider's results are further from native's than `CLOSE`.

    Raises:
        SystemExit: they are.
    """
    if name == "grid_sample" and dtype != torch.float32:
        return  # its 16-bit locations are other points: nothing to compare
    for index, (tensor, wanted) in enumerate(zip(got, want, strict=True)):
        away = float((tensor.double() - wanted.double()).abs().max() / wanted.double().abs().max())
        if not away <= CLOSE[dtype]:
            raise SystemExit(f"{shape.name}, {dtype}, {name}: result {index} is {away:.1e} away from native's")


def measure(shape: Shape, dtype: torch.dtype, repeats: int) -> dict[str, tuple[float, float]]:
    """Median (forward, backward) milliseconds of each provider; the first run of all is checked and not timed."""
    data = make_inputs(shape, dtype)
    runs = {
        "native": ours(native, shape, data),
        "torch operations": ours(eager, shape, data),
        "grid_sample": by_grid_sample(shape, data),
    }
    want = runs["native"]()[0]
    times: dict[str, list[tuple[float, float]]] = {}
    for name, run in runs.items():
        got, took = run()
        check(shape, dtype, name, got, want)
        times[name] = [took] if sum(took) > ONCE_S else []
    for _ in range(repeats):
        for name, run in runs.items():
            if not times[name] or sum(times[name][0]) <= ONCE_S:
                times[name].append(run()[1])
    return {
        name: (1e3 * statistics.median(f for f, _ in took), 1e3 * statistics.median(b for _, b in took))
        for name, took in times.items()
    }


def table(repeats: int) -> list[str]:
    """Rows of a markdown table: milliseconds, and how many times longer than native each part took."""
    columns = [f"{name} {part} ms" for name in PROVIDERS for part in ("forward", "backward")]
    lines = ["| shape | dtype | " + " | ".join(columns) + " |", "|---" * (2 + len(columns)) + "|"]
    for shape in SHAPES:
        for dtype in CLOSE:
            took = measure(shape, dtype, repeats)
            cells = [
                f"{ms:.1f}" if name == "native" else f"{ms:.1f} (x{ms / took['native'][part]:.1f})"
                for name in PROVIDERS
                for part, ms in enumerate(took[name])
            ]
            lines.append(f"| {shape.name} | {str(dtype).removeprefix('torch.')} | " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Measure, print the table, write it with what it was measured on."""
    parser = argparse.ArgumentParser(description="Deformable attention on the CPU, forward and backward.")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.parent.name}/{RESULTS.name}")
    args = parser.parse_args()
    if (reason := native.why_not()) is not None:
        raise SystemExit(reason)
    torch.set_num_threads(args.threads)
    lines = [
        "# Deformable attention on the CPU",
        "",
        f"{cpu_model()} ({torch.backends.cpu.get_cpu_capability()}), {args.threads} threads; torch "
        f"{torch.__version__}, Python {platform.python_version()}; 1 image, 8 heads of 32 channels, 4 levels of 4 "
        f"points, median of {args.repeats} interleaved runs (one of what takes more than {ONCE_S} s), ms (times "
        "native).",
        "",
        "`native` and `torch operations` are retrograd's own functions without autograd, with locations and weights "
        "in float32 beside values of either dtype. `grid_sample` is `torch.nn.functional.grid_sample` a level and a "
        "weighted sum, through autograd; with bfloat16 its locations are bfloat16, so it samples other points and "
        "only its time is compared. In float32 all results agree within 1e-5 of the largest element, checked first.",
        "",
        "    MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000 python benchmarks/msda_cpu.py "
        f"--threads {args.threads} --repeats {args.repeats} --write",
        "",
    ]
    print("\n".join(lines))
    lines += table(args.repeats)
    if args.write:
        RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
