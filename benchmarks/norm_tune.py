"""Time launch plans of the norm kernels against each other on one GPU: the source of the tables in `ops/norm/plan.py`
and of the plans in `ops/norm/cuda/forward.py`.

Every plan is compiled beforehand in parallel, checked against float64 on a few rows, and timed by replaying a CUDA
graph of calls that rotate through inputs larger than the L2 cache. Differences of few per cent show by turns only.

    python benchmarks/norm_tune.py --what bwd --n 1024,4096 [--op rms|ln|addrms|addln] [--turns] [--out FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from retrograd.ops.norm.cuda import WidePlan, backward, forward
from retrograd.ops.norm.cuda.inputs import HEADER
from retrograd.ops.norm.plan import (
    Kind,
    finalizer_tile,
    plan_backward,
    plan_forward,
    stays_with_triton,
)
from retrograd.ops.norm.spec import NormSpec
from retrograd.runtime.cuda import nvrtc
from retrograd.runtime.triton.gpu import Backend, Gpu, ceil_div, next_power_of_2

DTYPE = torch.bfloat16
COLD_BYTES = 512 * 1024**2
MOST_FEW = 4096  # rows that are read twice, to see where that ends to be worth it
ROWS = {256: 131072, 512: 65536, 2000: 4096}


def rows_of(n: int) -> int:
    """Rows of the shape that stands for width n."""
    return ROWS.get(n, max(1024, min(32768, 2**28 // n)))


def tiles(n: int, elements: list[int], per_thread: list[int]) -> list[tuple[int, int, int]]:
    """(block_m, block_n, warps) with so many elements a tile and a thread."""
    width = next_power_of_2(n)
    found = set()
    for size, share in itertools.product(elements, per_thread):
        rows = max(1, size // width)
        warps = rows * width // (32 * share)
        if 1 <= warps <= 32:
            found.add((rows, width, warps))
    return sorted(found)


def sliced(n: int, sms: int, itemsize: int = 2) -> list[dict[str, Any]]:
    """Settings of the backward SLICES kernel."""
    found = []
    widths = [(2048, 4, 4), (2048, 4, 3), (4096, 4, 2), (4096, 4, 3), (4096, 8, 2), (4096, 8, 3),
              (8192, 8, 1), (8192, 8, 2), (8192, 16, 1), (8192, 16, 2), (16384, 16, 1)]  # fmt: skip
    for (width, warps, resident), stages, ahead in itertools.product(widths, (3, 4), (2, 3, 4)):
        if n < 2 * width or (stages - 1) * 4 * width * itemsize * resident > 210 * 1024:
            continue
        slices, slots = ceil_div(n, width), sms * resident
        groups = slots // slices
        if groups:
            found.append(dict(kind=Kind.SLICES, block_m=1, block_n=width, num_warps=warps, num_stages=stages,
                              max_registers=min(255, 65536 // (32 * warps * resident) // 8 * 8), ahead=ahead,
                              slices=slices, slice_n=64 * ceil_div(n, 64 * slices), groups=groups))  # fmt: skip
    return found


def clustered(n: int, itemsize: int = 2) -> list[dict[str, Any]]:
    """Settings of the backward CLUSTERS kernel."""
    found = []
    for cluster, warps, slots in itertools.product((1, 2, 4, 8, 16), (8, 16), (3, 4, 6)):
        slice_n = n // cluster
        if n % cluster or slice_n % (32 * warps * 16 // itemsize) or not 16 <= slice_n // (32 * warps) <= 64:
            continue
        if slots * 2 * itemsize * slice_n <= 216 * 1024:
            found.append(dict(kind=Kind.CLUSTERS, block_m=1, block_n=slice_n, num_warps=warps, num_stages=slots,
                              slices=cluster, slice_n=slice_n))  # fmt: skip
    return found


def forward_plans(op: str, m: int, n: int, sms: int) -> list[Any]:
    """Plans to try."""
    centered, add = "ln" in op, "add" in op
    base = plan_forward(m, n, 2, Gpu(Backend.CUDA, sms), centered=centered, streams=2 if add else 1)
    plans: list[Any] = [base]
    if base.static_n:  # as if the row filled its tile, and as it is without its width in the kernel
        plans.append(replace(base, static_n=False))
        full = plan_forward(m, base.block_n, 2, Gpu(Backend.CUDA, sms), centered=centered, streams=2 if add else 1)
        plans += [full] if full.kind is Kind.TILE else []
    if next_power_of_2(n) <= 32768:
        sizes = [1024, 2048, 4096, 8192, 16384, 32768]
        caches = [("evict_last", ""), ("evict_first", ".cs"), ("", "")]
        for (rows, width, warps), early, (loads, stores) in itertools.product(
            tiles(n, sizes, [8, 16, 32]), (False, True), caches
        ):
            plans.append(replace(base, kind=Kind.TILE, block_m=rows, block_n=width, num_warps=warps, early=early,
                                 programs=ceil_div(m, rows), loads=loads, stores=stores, unroll=1))  # fmt: skip
    for width, warps, unroll in itertools.product((512, 1024, 2048, 4096, 8192, 16384), (1, 2, 4, 8, 16, 32), (1, 2)):
        if width < n <= 8 * width and width // (32 * warps) in (8, 16):
            plans.append(replace(base, kind=Kind.LOOPED, block_m=1, block_n=width, num_warps=warps, programs=m,
                                 early=False, loads="", stores="", unroll=unroll))  # fmt: skip
    if not stays_with_triton(2 * n, centered=centered, residual=add):
        plans += wide_plans(n, centered, add)
    return list(dict.fromkeys(plans))


def wide_dtypes(centered: bool, add: bool) -> Any:
    """Of the tensors of the clustered kernel."""
    bias, residual = DTYPE if centered else None, DTYPE if add else None
    return forward.ForwardKind(
        x=DTYPE, residual=residual, weight=DTYPE, bias=bias, y=DTYPE, s=DTYPE, centered=centered, own_s=add
    )


def wide_plans(n: int, centered: bool, add: bool) -> list[WidePlan]:
    """Plans of the clustered kernel, the chosen one first."""
    dtypes = wide_dtypes(centered, add)
    plans = [forward.plan_wide(n, dtypes)]
    for cluster, threads, resident in itertools.product(forward._CLUSTERS, (256, 512, 1024), (1, 2, 3, 4, 6)):
        size = forward._slice_bytes(n, dtypes, cluster)
        if size < 24 * 1024 or not 768 <= threads * resident <= 1536 or resident * (size + 3 * 1024) > 226 * 1024:
            continue
        most = forward._batch(n, dtypes, cluster, threads, 65536 // (threads * resident) // 16 * 8)
        for batch, bulk in itertools.product({most, max(1, most // 2)}, (False, True)):
            plans.append(WidePlan(cluster, threads, resident, batch, bulk, size))
        if centered and forward._may_hold(n, dtypes, cluster, threads):
            for batch, hold in itertools.product({max(1, most // 2), most}, (2, 4, 6)):
                plans.append(WidePlan(cluster, threads, resident, batch, False, size, hold))
    return plans


def backward_plans(op: str, m: int, n: int, sms: int) -> list[Any]:
    """Plans to try."""
    streams = 3 if "add" in op else 2
    base = plan_backward(m, n, 1, 2, Gpu(Backend.CUDA, sms), centered="ln" in op, streams=streams)
    plans = [base]
    if next_power_of_2(n) <= 16384:
        for (rows, width, warps), stages, resident in itertools.product(
            tiles(n, [2048, 4096, 8192, 16384], [16, 32, 64]), (2, 3, 4), (1, 2, 3, 4, 6, 8)
        ):
            threads = warps * 32 * resident
            if threads > 2048 or threads < 256 or stages * 2 * rows * width * 2 * resident > 220 * 1024:
                continue
            programs = min(ceil_div(m, rows), sms * resident)
            p, cols = finalizer_tile(programs)
            plans.append(replace(base, kind=Kind.TILE, block_m=rows, block_n=width, num_warps=warps, num_stages=stages,
                                 programs=programs, parts=programs, slices=1, slice_n=0,
                                 finalize_block_p=p, finalize_block_n=cols))  # fmt: skip
    finalizers = [(128, 32), (128, 8), (256, 16), (256, 8), (512, 8)] if n <= 8192 else []
    for p, cols in finalizers if base.kind is not Kind.FEW else []:
        plans.append(replace(base, finalize_block_p=p, finalize_block_n=cols))
    if m <= MOST_FEW and next_power_of_2(n) <= 8192:
        few = plan_backward(min(m, 64), n, 1, 2, Gpu(Backend.CUDA, sms), centered="ln" in op, streams=streams)
        few = replace(few, programs=ceil_div(m, few.block_m))
        for p, cols in [(8, 128), (16, 64), (32, 32), (64, 32), (64, 16), (128, 8), (128, 16)]:
            plans.append(replace(few, finalize_block_p=p, finalize_block_n=cols))
    for setting in sliced(n, sms):
        groups = min(ceil_div(m, setting["block_m"]), setting.pop("groups"))
        plans.append(replace(base, **setting, programs=groups * setting["slices"], parts=groups))
    for setting in clustered(n) if streams == 2 and n >= 8192 else []:
        plans.append(replace(base, **setting, max_registers=None, ahead=2))
    return list(dict.fromkeys(plans))


def call(what: str, op: str, n: int, plan: Any, t: dict[str, Any]) -> Any:
    """One forward or backward of `op` with a plan."""
    from retrograd.ops.norm.arguments import BackwardTensors, NormTensors, WantedGrads, WantedOutput
    from retrograd.ops.norm.cuda import norm_fwd_wide
    from retrograd.ops.norm.triton import norm_bwd, norm_fwd

    spec = NormSpec("ln" in op, 1e-6)
    if what == "fwd":
        tensors = NormTensors(x=t["x"], weight=t["w"], bias=t["b"], residual=t["r"])
        forward = norm_fwd_wide if isinstance(plan, WidePlan) else norm_fwd
        return forward(tensors, spec, WantedOutput(out_dtype=DTYPE, s_dtype=DTYPE), plan=plan)
    saved = BackwardTensors(grad_out=t["g"], s=t["x"], weight=t["w"], mean=t["mean"], rstd=t["rstd"], grad_s=t["r"])
    bias, residual = (None if t[name] is None else DTYPE for name in ("b", "r"))
    return norm_bwd(saved, spec, WantedGrads(x=DTYPE, weight=DTYPE, bias=bias, residual=residual), plan=plan)


def tensors(op: str, m: int, n: int, device: str) -> dict[str, Any]:
    """Inputs; random on a GPU, never touched otherwise."""
    make = torch.randn if device == "cuda" else torch.empty
    x = make(m, n, device=device, dtype=DTYPE)
    stats = x.float().pow(2).mean(1).rsqrt() if device == "cuda" else torch.empty(m)
    mean = (x.float().mean(1) if device == "cuda" else torch.empty(m)) if "ln" in op else None
    return dict(x=x, g=make(m, n, device=device, dtype=DTYPE), w=make(n, device=device, dtype=DTYPE),
                b=make(n, device=device, dtype=DTYPE) if "ln" in op else None,
                r=make(m, n, device=device, dtype=DTYPE) if "add" in op else None, mean=mean, rstd=stats)  # fmt: skip


def compiled(plan: Any) -> Any:
    """What a kernel depends on."""
    return plan if isinstance(plan, WidePlan) else replace(plan, programs=0)


def compile_one(job: tuple[str, str, int, int, Any]) -> str:
    """Compile what a plan launches, without a GPU; the reason if it cannot be."""
    what, op, m, n, plan = job
    if isinstance(plan, WidePlan):
        dtypes = wide_dtypes("ln" in op, "add" in op)
        options = forward.options_of(n, dtypes, plan)
        nvrtc.compile_cubin(forward.SOURCE, ("--gpu-architecture=sm_90", *options), (HEADER,))  # into the cache
        return ""
    if plan.kind is Kind.CLUSTERS:
        centered = "ln" in op
        kind = backward.BackwardKind(DTYPE, DTYPE, DTYPE, DTYPE, centered, True, centered, False)
        options = backward.options_of(n, kind, plan)
        nvrtc.compile_cubin(backward.SOURCE, ("--gpu-architecture=sm_90", *options), (HEADER,))
        return ""
    from retrograd.codegen import facts_of, recording, target_named
    from retrograd.runtime.triton.planned_gpu import planning

    try:
        with planning(target_named("sm_90")), recording("sm_90") as launches:
            call(what, op, n, plan, tensors(op, min(m, 4096), n, "cpu"))
        return "; ".join(f"{f.registers} regs {f.spill_bytes} spill" for f in map(facts_of, launches[:1]))
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]


class Replay:
    """Calls in a CUDA graph that goes round the sets; `times` of a call in ms."""

    def __init__(self, run: Any, sets: list[dict[str, Any]]) -> None:
        large = sets[0]["x"].nbytes > 128 * 1024**2
        self._calls, self.times = max(4 if large else 12, len(sets)), []
        self._kept: list[Any] = []
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            run(sets[0])
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=stream):
                for i in range(self._calls):
                    if large:
                        self._kept.clear()  # outputs of many plans would not fit: each call writes to the same place
                    self._kept.append(run(sets[i % len(sets)]))

    def take(self) -> None:
        """One replay that does not count, since L2 still has somebody else's dirty lines, and one that does."""
        self._graph.replay()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self._graph.replay()
        stop.record()
        torch.cuda.synchronize()
        self.times.append(start.elapsed_time(stop) / self._calls)


def graph_ms(run: Any, sets: list[dict[str, Any]]) -> float:
    """Median time of one call."""
    replay = Replay(run, sets)
    for _ in range(4):
        replay.take()
    return statistics.median(replay.times)


def by_turns(what: str, op: str, m: int, n: int, plans: list[Any]) -> list[tuple[float, Any]]:
    """(us of a call, plan), fastest first: the plans take 12 turns, so that a GPU that grows warm favours none."""
    sets = input_sets(what, op, m, n)
    replays = [Replay(partial(call, what, op, n, plan), sets) for plan in plans]
    for _ in range(12):
        for replay in replays:
            replay.take()
    return sorted(
        ((1e3 * statistics.median(r.times), plan) for r, plan in zip(replays, plans, strict=True)), key=lambda t: t[0]
    )


def gigabytes_of(what: str, op: str, m: int, n: int) -> float:
    """Useful bytes of a call in GB."""
    moved = (2 if what == "fwd" else 3) + (2 if "add" in op and what == "fwd" else 1 if "add" in op else 0)
    return moved * m * n * DTYPE.itemsize / 1e9


def input_sets(what: str, op: str, m: int, n: int) -> list[dict[str, Any]]:
    """As many inputs as do not fit into L2."""
    count = ceil_div(COLD_BYTES, int(1e9 * gigabytes_of(what, op, m, n)))
    return [tensors(op, m, n, "cuda") for _ in range(max(2, min(16, count)))]


def events_ms(run: Any) -> float:
    """Median time of one call between events; a copy inside a graph is another, slower, engine."""
    times = []
    for _ in range(21):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times[1:])


def wrong(what: str, op: str, n: int, plan: Any, base: dict[str, Any]) -> str:
    """Results that differ from float64 by more than rounding explains, on the rows at hand."""
    x, w, r = base["x"].double(), base["w"].double(), base["r"]
    got = call(what, op, n, plan, base)
    if what == "fwd":
        s = (x + (0 if r is None else r.double())).to(DTYPE).double()
        c = s - s.mean(1, keepdim=True) if "ln" in op else s
        want = c * (c.pow(2).mean(1, keepdim=True) + 1e-6).rsqrt() * w + (
            0 if base["b"] is None else base["b"].double()
        )
        pairs = [("y", got.y, want)]
    else:
        g, rstd = base["g"].double(), base["rstd"].double()[:, None]
        h = (x - base["mean"].double()[:, None] if "ln" in op else x) * rstd
        gw = g * w
        ds = gw - h * (gw * h).mean(1, keepdim=True) - (gw.mean(1, keepdim=True) if "ln" in op else 0)
        ds = ds * rstd + (0 if r is None else r.double())
        pairs = [("dx", got.x, ds), ("dw", got.weight, (g * h).sum(0))]
        if "ln" in op:
            pairs.append(("db", got.bias, g.sum(0)))
    bad = []
    for name, a, want in pairs:
        floor = (want.to(DTYPE).double() - want).norm()
        if not (a.double() - want).norm() <= 1.3 * floor:
            bad.append(f"{name} {float((a.double() - want).norm() / floor):.2g}x floor")
    return ", ".join(bad)


def main() -> None:
    """Compile, check, time, print the best plans."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", default="fwd,bwd")
    parser.add_argument("--op", default="rms")
    parser.add_argument("--n", default="256,512,1024,2048,4096,8192,16384,32768,65536,131072")
    parser.add_argument("--only", default="", help="kinds: tile, few, slices, clusters, looped, wide")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--first", type=int, help="only so many plans, the chosen one first")
    parser.add_argument("--keep", type=int, default=4, help="best plans printed")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--turns", action="store_true", help="time the best once more, by turns")
    parser.add_argument("--compile-only", action="store_true")
    args = parser.parse_args()
    jobs = []
    for what, op, n in itertools.product(args.what.split(","), args.op.split(","), map(int, args.n.split(","))):
        m = args.rows or rows_of(n)
        plans = (forward_plans if what == "fwd" else backward_plans)(op, m, n, 132)
        jobs += [(what, op, m, n, p) for p in plans[: args.first]
                 if not args.only or ("wide" if isinstance(p, WidePlan) else p.kind.value) in args.only]  # fmt: skip
    began = time.monotonic()
    single = {(j[0], j[1], j[3], compiled(j[4])): j for j in jobs}
    with ProcessPoolExecutor(min(14, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        notes = dict(zip(single, pool.map(compile_one, single.values()), strict=True))
    print(f"{len(jobs)} plans, {len(single)} compiled in {time.monotonic() - began:.0f} s", flush=True)
    if args.compile_only:
        for key, note in notes.items():
            print(key, note)
        return
    size = 1024**3
    a, b = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    copy = 2 * size / events_ms(lambda: b.copy_(a)) / 1e6
    print(f"copy {copy:.0f} GB/s", flush=True)
    lines = []
    for shape, group in itertools.groupby(jobs, key=lambda j: j[:4]):
        torch.cuda.empty_cache()
        group_plans = [job[4] for job in group]  # the first is the one that the tables have now
        rows = time_plans(*shape, group_plans, notes, copy)
        best = show(rows, args.keep)
        if args.turns:
            for us, plan in by_turns(*shape, best):
                share = gigabytes_of(*shape) / us * 1e6 / copy
                chosen = "*" if plan == group_plans[0] else " "
                print(f"  by turns {chosen} {share:.1%} {us:.1f} us {said(plan)}", flush=True)
        lines += rows
        if args.out:
            args.out.write_text("".join(json.dumps(r | dict(plan=str(r["plan"]))) + "\n" for r in lines))


def time_plans(
    what: str, op: str, m: int, n: int, plans: list[Any], notes: dict[Any, str], copy: float
) -> list[dict[str, Any]]:
    """A record for each plan at one shape: the time of a call and its share of the copy bandwidth `copy` in GB/s."""
    gigabytes, sets = gigabytes_of(what, op, m, n), input_sets(what, op, m, n)
    small = {k: v[:512] if v is not None and v.shape[0] == m and k not in "wb" else v for k, v in sets[0].items()}
    rows = []
    for plan in plans:
        note = notes[what, op, n, compiled(plan)]
        row: dict[str, Any] = dict(what=what, op=op, m=m, n=n, note=note, plan=plan)
        try:
            row["wrong"] = wrong(what, op, n, plan, small)
            ms = graph_ms(partial(call, what, op, n, plan), sets)
            row |= dict(us=1e3 * ms, share=gigabytes / ms * 1e3 / copy)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:150]
        rows.append(row)
    return rows


def said(plan: Any) -> str:
    """A plan without the name of its class."""
    return str(plan).split("(", 1)[1]


def show(rows: list[dict[str, Any]], keep: int) -> list[Any]:
    """Print and return the best plans of a shape, and the one that the table has now."""
    good = sorted((r for r in rows if "us" in r), key=lambda r: r["us"])
    failed = [r["error"] for r in rows if "error" in r]
    head = "{what} {op} {m}x{n}".format(**rows[0])
    print(f"== {head}: {len(rows)} plans, {len(failed)} errors {failed[:1]}", flush=True)
    shown = good[:keep] + [r for r in rows[:1] if r not in good[:keep]]
    for r in shown:
        figures = f"{r.get('share', 0):.1%} {r.get('us', 0):.1f} us"
        print(f"  {figures} {said(r['plan'])} [{r['note']}] {r.get('wrong')}", flush=True)
    return [r["plan"] for r in shown if "us" in r]


if __name__ == "__main__":
    main()
