"""Host time of eager calls: norms and deformable attention by C++ and by Python, beside others, in turn.

    python benchmarks/host_time.py [--rounds 9] [--only norm|msda|floor] [--json FILE]

On a GPU. Microseconds of one thread, the median over rounds of the mean of a loop, with the least and the greatest
round; in each round every contender has its loop, so that what the machine does meanwhile meets all of them. `floor`
is what autograd takes for a node that does nothing; `on one thread` is without the hop to autograd's thread of the
device (torch.autograd.set_multithreading_enabled). Exit code 0 whatever is measured.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from retrograd import ops
from retrograd.ops.msda import host as msda_host
from retrograd.ops.norm import host as norm_host

NORM_SHAPES = ((512, 4096), (7, 8192))
DETR = [(100, 167), (50, 84), (25, 42), (13, 21)]
MSDA_SHAPES = {"dec300": (1, 300, DETR), "dec900": (1, 900, DETR), "enc": (1, 0, DETR)}
MSDA_TRITON = "msda-triton"
Call = Callable[[], Any]


def loops(contenders: dict[str, Call], rounds: int, calls: int) -> dict[str, list[float]]:
    """Microseconds a call of each contender, by round."""
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, call in contenders.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(calls):
                call()
            us = (time.perf_counter() - began) / calls * 1e6
            if number:  # the first one warms up
                taken[name].append(us)
    torch.cuda.synchronize()
    return taken


def switched(host: Any, on: bool, call: Call) -> Call:
    """The call with or without the C++ path; switching takes part of a microsecond of a loop of hundreds."""
    entry = host.path.module.apply

    def run() -> Any:
        host.path.entry = entry if on else None
        return call()

    return run


def both(forward: Callable[..., Any], leaves: list[torch.Tensor], grads: list[torch.Tensor]) -> Call:
    """Forward and backward."""

    def call() -> Any:
        outs = forward(*leaves)
        return torch.autograd.grad(outs, leaves, grads)

    return call


def norm_cases() -> Iterator[tuple[str, dict[str, Call], int]]:
    """Each norm at each shape: its forward without a graph, and forward and backward."""
    for (m, n), centered, add in itertools.product(NORM_SHAPES, (False, True), (False, True)):
        x, residual = (torch.randn(m, n, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        weight, bias = (torch.randn(n, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        leaves = [x, weight, *([bias] if centered else []), *([residual] if add else [])]
        grads = [torch.randn_like(x).detach() for _ in range(1 + add)]

        def ours(x: Any, weight: Any, *rest: Any, centered: bool = centered, add: bool = add) -> Any:
            norm = ops.layer_norm if centered else ops.rms_norm
            bias, residual = rest[0] if centered else None, rest[-1] if add else None
            return norm(x, weight, bias, residual, eps=1e-5, prenorm=add)

        def by_torch(x: Any, weight: Any, *rest: Any, centered: bool = centered, add: bool = add) -> Any:
            s = x + rest[-1] if add else x
            sizes = (s.shape[-1],)
            y = F.layer_norm(s, sizes, weight, rest[0], 1e-5) if centered else F.rms_norm(s, sizes, weight, 1e-5)
            return (y, s) if add else y

        name = f"{'add + ' * add}{'LayerNorm' if centered else 'RMSNorm'} {m} x {n}"
        yield from _case(name, ours, {"torch": by_torch}, leaves, grads, norm_host, 200)


def msda_cases() -> Iterator[tuple[str, dict[str, Call], int]]:
    """Deformable attention of one image, value in two dtypes, and its fused form, beside others."""
    for (name, (batch, queries, levels)), dtype, deterministic in itertools.product(
        MSDA_SHAPES.items(), (torch.float32, torch.bfloat16), (False, True)
    ):
        size = sum(h * w for h, w in levels)
        places = (batch, queries or size, 8, len(levels), 4)
        value = torch.randn(batch, size, 8, 32, device="cuda", dtype=dtype, requires_grad=True)
        # Locations and weights; of the fused form offsets in pixels and logits.
        locations = torch.rand(*places, 2, device="cuda", requires_grad=True)
        weights = torch.rand(places, device="cuda", requires_grad=True)
        references = torch.rand(batch, places[1], len(levels), 2, device="cuda", requires_grad=True)
        logits = torch.randn(*places[:3], places[3] * places[4], device="cuda", requires_grad=True)
        grads = [torch.randn(batch, places[1], 8, 32, device="cuda", dtype=dtype)]
        options = {"deterministic": deterministic}

        def ours(value: Any, *rest: Any, levels: Any = levels, options: Any = options) -> Any:
            return ops.ms_deform_attn(value, levels, *rest, **options)

        def ours_fused(value: Any, *rest: Any, levels: Any = levels, options: Any = options) -> Any:
            return ops.ms_deform_attn_fused(value, levels, *rest, **options)

        label = f"{name} {str(dtype).removeprefix('torch.')}{' deterministic' * deterministic}"
        others = {} if deterministic or not queries else msda_others(levels)
        calls = 80 if queries else 10
        yield from _case(label, ours, others, [value, locations, weights], grads, msda_host, calls)
        others = {n: partial(from_offsets, attend, sizes_of(levels)) for n, attend in others.items()}
        leaves = [value, references, locations, logits]
        yield from _case(f"fused {label}", ours_fused, others, leaves, grads, msda_host, calls)


def sizes_of(levels: list[tuple[int, int]]) -> torch.Tensor:
    """[L, 2] (height, width)."""
    return torch.tensor(levels, device="cuda")


def msda_others(levels: list[tuple[int, int]]) -> dict[str, Callable[..., Any]]:
    """The formula with grid_sample, and msda-triton where it is installed; both in float32."""
    from retrograd.bench.ops.msda_providers import by_grid_sample

    shapes = sizes_of(levels)

    def formula(value: Any, *rest: Any) -> Any:
        return by_grid_sample(value.float(), tuple(levels), *rest).to(value.dtype)

    if find_spec("msda_triton") is None:
        return {"torch": formula}
    attend = importlib.import_module("msda_triton").multiscale_deformable_attention

    def peer(value: Any, *rest: Any) -> Any:
        return attend(value.float(), shapes, *rest, "zeros", False).to(value.dtype)

    return {"torch": formula, MSDA_TRITON: peer}


def from_offsets(attend: Any, shapes: Any, value: Any, references: Any, offsets: Any, logits: Any) -> Any:
    """The fused form as modules write it."""
    locations = references[:, :, None, :, None] + offsets / shapes.flip(1)[:, None]
    return attend(value, locations, logits.softmax(-1).view(offsets.shape[:-1]))


def floor_cases() -> Iterator[tuple[str, dict[str, Call], int]]:
    """Autograd around nothing: one node of torch's own whose backward makes a view, for a leaf on the GPU."""
    x = torch.randn(7, 8192, device="cuda", requires_grad=True)
    grad = torch.randn(7, 8192, device="cuda")
    here = torch.randn(7, 8, requires_grad=True)
    grad_here = torch.randn(7, 8)
    view = both(lambda t: t.view_as(t), [x], [grad])

    def on_this_thread() -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return view()

    yield "a view, forward + backward", {"torch": view}, 300
    yield "a view, forward + backward on one thread", {"torch": on_this_thread}, 300
    yield "the same on the CPU", {"torch": both(lambda t: t.view_as(t), [here], [grad_here])}, 300
    yield "torch.empty on the GPU", {"torch": lambda: torch.empty((7, 8192), device="cuda")}, 300


def _case(
    name: str,
    ours: Callable[..., Any],
    others: dict[str, Callable[..., Any]],
    leaves: list[torch.Tensor],
    grads: list[torch.Tensor],
    host: Any,
    calls: int,
) -> Iterator[tuple[str, dict[str, Call], int]]:
    def without_graph(forward: Callable[..., Any]) -> Call:
        def call() -> Any:
            with torch.no_grad():
                return forward(*leaves)

        return call

    def on_this_thread(forward: Callable[..., Any]) -> Call:
        inner = both(forward, leaves, grads)

        def call() -> Any:
            with torch.autograd.set_multithreading_enabled(False):
                return inner()

        return call

    ways = {"forward": without_graph, "forward + backward": lambda f: both(f, leaves, grads)}
    for label, wrap in (ways | {"forward + backward on one thread": on_this_thread}).items():
        contenders = {"C++": switched(host, True, wrap(ours)), "Python": switched(host, False, wrap(ours))}
        yield f"{name}, {label}", contenders | {n: wrap(f) for n, f in others.items()}, calls


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=["norm", "msda", "floor"])
    parser.add_argument("--json", type=Path, help="a file for the times of all rounds")
    chosen = parser.parse_args()
    for host in (norm_host, msda_host):
        host.build()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {chosen.rounds} rounds")
    print("| call | C++ us | Python us | torch us | msda-triton us | C++ of torch's | of Python's | of msda-triton's |")
    print("|---|---|---|---|---|---|---|---|")
    kinds = {"floor": floor_cases, "norm": norm_cases, "msda": msda_cases}
    for make in (kinds[chosen.only],) if chosen.only else kinds.values():
        for name, contenders, calls in make():
            taken = loops(contenders, chosen.rounds, calls)
            middle = {n: statistics.median(times) for n, times in taken.items()}
            cells = [
                f"{middle[n]:.1f} ({min(taken[n]):.1f} to {max(taken[n]):.1f})" if n in middle else ""
                for n in ("C++", "Python", "torch", MSDA_TRITON)
            ]
            others = ("torch", "Python", MSDA_TRITON)
            cells += [f"{middle['C++'] / middle[n]:.2f}" if {n, "C++"} <= set(middle) else "" for n in others]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
            if chosen.json:
                with chosen.json.open("a") as file:
                    file.write(json.dumps({"case": name, "us": taken}) + "\n")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
