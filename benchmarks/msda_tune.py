"""Variants of the CUDA kernels of deformable attention, and what bounds them, on one GPU in one process.

Kernels by the profiler; whole backwards by replayed graphs with cold inputs; and `cells`, `backward` and `reduce` with
one of their costs taken out of the source, which says what that cost is: additions, reads of value, reads of grad_out.

    python benchmarks/msda_tune.py [--shapes enc800,enc800b1] [--dtypes float32,bfloat16] [--out FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from retrograd.bench.ops.msda import make_data, shape_of
from retrograd.bench.timing import CudaTimer
from retrograd.ops.msda import autograd, dispatch, fused
from retrograd.ops.msda import plan as plans
from retrograd.ops.msda.arguments import Levels, MsdaGrads, MsdaInputs, MsdaSpec, NeededGrads
from retrograd.ops.msda.cuda import launch
from retrograd.ops.msda.triton import launch as triton_launch
from retrograd.ops.msda.triton import launches

ALL = NeededGrads(True, True, True)
Backward = Callable[[torch.Tensor, MsdaInputs, MsdaSpec], MsdaGrads]
# Costs to take out: file, text, what stands there instead. Sums stay needed, since nobody knows that they are no 1e38.
WITHOUT = {
    "additions": {
        "gradients.cuh": (
            "    for (int v = 0; v < VEC; v += 4) {\n",
            "    for (int v = 0; v < VEC; v += 4) {\n        if (share * g[v] + share * g[v + 1] != 1e38f) continue;\n",
        )
    },
    "reads of value": {
        "common.cuh": (
            "    if constexpr (SAFE) {\n        // The first",
            "    where = make_uint2(SAFE ? 15u : 0u, 0u);\n    if constexpr (SAFE) {\n        // The first",
        )
    },
    "reads of grad_out": {
        "cells.cu": ("group].z + j", "group].z * 0u + j"),
        "reduce.cu": ("query * PIXEL_BYTES);\n            }", "query * 0u);\n            }"),
    },
}


def usual(grad_out: torch.Tensor, inputs: MsdaInputs, spec: MsdaSpec) -> MsdaGrads:
    return launch.msda_bwd(grad_out, inputs, spec, ALL)


_launched: set[tuple[Any, ...]] = set()  # arguments of `launch._kernel`


def _compile(kernel: tuple[Any, ...]) -> None:
    device, name, macros, threads, blocks, _ = kernel
    launch.compiled(name, launch.options_of(f"sm_{launch.arch_of(device)}", macros, threads, blocks))


@contextmanager
def recorded() -> Iterator[None]:
    """Which kernels are launched inside is known afterwards."""
    loaded = launch._kernel

    def kernel(*args: Any) -> Any:
        _launched.add(args)
        return loaded(*args)

    launch._kernel = kernel
    launch._planned.cache_clear()
    try:
        yield
    finally:
        launch._kernel = loaded


@contextmanager
def edited(names: tuple[str, ...]) -> Iterator[None]:
    """Kernels compiled from sources without these costs."""
    folder, headers = launch._FOLDER, launch.HEADERS
    with tempfile.TemporaryDirectory() as temporary:
        for file in folder.glob("*.cu*"):
            shutil.copy(file, temporary)
        for name in names:
            for file, (text, instead) in WITHOUT[name].items():
                path = Path(temporary) / file
                source = path.read_text()
                if source.count(text) != 1:
                    raise ValueError(f"{file} has {text!r} {source.count(text)} times, expected once")
                path.write_text(source.replace(text, instead))
        launch._FOLDER, launch.HEADERS = Path(temporary), tuple(Path(temporary) / header.name for header in headers)
        loaded = launch._kernel
        launch._kernel = cache(loaded.__wrapped__)
        launch._planned.cache_clear()
        with ThreadPoolExecutor() as pool:
            list(pool.map(_compile, _launched))
        try:
            yield
        finally:
            launch._FOLDER, launch.HEADERS, launch._kernel = folder, headers, loaded
            launch._planned.cache_clear()


class Case:
    """A shape and dtype with inputs that do not fit into L2."""

    def __init__(self, shape: str, dtype: str, timer: CudaTimer) -> None:
        self.timer, self.sizes = timer, shape_of(shape)
        points = (self.sizes.points,) * len(self.sizes.levels)
        self.specs = {det: MsdaSpec(points, False, False, det) for det in (False, True)}
        self.sets, self.calls = timer.plan(self.sizes.bytes_moved("bwd", dtype, "float32"))
        data = make_data(self.sizes, dtype, "float32", "cuda", fused=isinstance(self, FusedCase))
        self.data = [self._inputs(*next(data)) for _ in range(self.sets)]

    def _inputs(self, tensors: dict[str, Any], grads: dict[str, Any]) -> tuple[torch.Tensor, MsdaInputs]:
        value, locations, weights = (tensors[name].detach() for name in ("value", "locations", "weights"))
        b, q, h = weights.shape[:3]
        levels = Levels(self.sizes.levels)
        return grads["out"], MsdaInputs(value, levels, locations.view(b, q, h, -1, 2), weights.view(b, q, h, -1))

    def call(self, backward: Backward, deterministic: bool, i: int = 0) -> list[torch.Tensor | None]:
        grad_out, inputs = self.data[i]
        return list(backward(grad_out, inputs, self.specs[deterministic]))[:3]

    def us(self, backward: Backward, deterministic: bool) -> float:
        with self.timer.scope():
            return 1e3 * self.timer.time(lambda i: self.call(backward, deterministic, i), self.sets, self.calls).ms

    def kernels(self, backward: Backward, deterministic: bool) -> dict[str, float]:
        """Microseconds of each kernel, the mean of the calls on all sets, cold."""
        self.call(backward, deterministic)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for i in range(self.sets):
                self.call(backward, deterministic, i)
            torch.cuda.synchronize()
        spans: dict[str, list[float]] = defaultdict(list)
        for event in profiler.events() or ():
            if str(event.device_type) == "DeviceType.CUDA":
                spans[event.name[:40]].append(event.time_range.elapsed_us())
        return {name: round(sum(times) / self.sets, 1) for name, times in spans.items()}


def variants(case: Case) -> Iterator[tuple[str, Any]]:
    """(what, microseconds) of everything there is to compare."""
    default, ordered = case.us(usual, False), case.us(usual, True)
    yield "default", default
    yield "deterministic", ordered
    yield "deterministic / default", ordered / default
    yield "kernels of default", case.kernels(usual, False)
    yield "kernels of deterministic", case.kernels(usual, True)


THREADS = {
    "cells": ((256, 3), (128, 4), (128, 6)),
    "reduce": ((256, 3), (128, 4), (128, 6), (512, 1)),
    "backward": ((384, 1), (768, 1), (256, 3), (1024, 1)),
    "scatter": ((1024, 1), (1024, 2), (256, 2)),
}


def threads(case: Case) -> Iterator[tuple[str, Any]]:
    """Microseconds of kernels with other threads a CTA and CTAs a multiprocessor."""
    for name, others in THREADS.items():
        chosen = launch._THREADS[name]
        for other in (chosen, *others):
            launch._THREADS[name] = other
            launch._planned.cache_clear()
            yield f"{name} {other}", case.kernels(usual, name in ("reduce", "backward")).get(name)
        launch._THREADS[name] = chosen
        launch._planned.cache_clear()


def costs(case: Case) -> Iterator[tuple[str, Any]]:
    """Microseconds of kernels without one of their costs, and without all."""
    with recorded():
        for deterministic in (False, True):
            case.call(usual, deterministic)
    for names in (("additions",), ("reads of value",), ("reads of grad_out",), tuple(WITHOUT)):
        with edited(names):
            for deterministic in (False, True):
                kept = {
                    name: us
                    for name, us in case.kernels(usual, deterministic).items()
                    if name in ("cells", "backward", "reduce")
                }
                yield f"{'deterministic' if deterministic else 'default'} without {', '.join(names)}", kept


def by_triton(grad_out: torch.Tensor, inputs: MsdaInputs, spec: MsdaSpec) -> MsdaGrads:
    return triton_launch.msda_bwd(grad_out, inputs, spec, ALL)


def forward_of(function: Callable[[MsdaInputs, MsdaSpec], torch.Tensor]) -> Backward:
    return lambda _, inputs, spec: MsdaGrads(function(inputs, spec))


def triton_plans(case: Case) -> Iterator[tuple[str, Any]]:
    """Triton kernels by other plans: a forward with all points together, levels of a backward apart."""
    forward = forward_of(triton_launch.msda_fwd)
    chosen = plans.plan_forward, plans.plan_backward
    itemsize = case.data[0][1].value.element_size()
    usual_plan = plans.plan_samples(case.sizes.channels, itemsize, triton_launch.gpu_of(case.data[0][0]))
    tiles = [replace(usual_plan, block_q=q, num_warps=warps, together=True) for q, warps in ((1, 1), (2, 1), (4, 4))]
    try:
        for plan in (usual_plan, *tiles):
            plans.plan_forward = lambda *_: plan  # noqa: B023
            launches._LAUNCHES.clear()
            yield (
                f"triton forward {plan.block_q} rows {plan.num_warps} warps together {plan.together}",
                case.us(forward, False),
            )
        for apart in (False, True):
            plans.plan_backward = lambda *a, **k: replace(chosen[1](*a, **k), apart=apart)  # noqa: B023
            launches._LAUNCHES.clear()
            yield f"triton backward, levels apart {apart}", case.us(by_triton, False)
    finally:
        plans.plan_forward, plans.plan_backward = chosen
        launches._LAUNCHES.clear()
    yield "cuda forward", case.us(forward_of(launch.msda_fwd), False)
    yield "cuda backward", case.us(usual, False)


class FusedCase(Case):
    """The fused form, of whose inputs the references need no gradient."""

    def _inputs(self, tensors: dict[str, Any], grads: dict[str, Any]) -> tuple[torch.Tensor, MsdaInputs]:
        value, offsets, logits, references = (
            tensors[name].detach() for name in ("value", "offsets", "logits", "references")
        )
        inputs = MsdaInputs(value, Levels(self.sizes.levels), offsets.flatten(3, 4), logits, references)
        return grads["out"], inputs


def of_points(functions: dispatch.Functions, grad_out: torch.Tensor, inputs: MsdaInputs, spec: MsdaSpec) -> MsdaGrads:
    return autograd._gradients(grad_out, inputs, dispatch.MsdaCall(spec, functions), ALL)


def points_plans(case: FusedCase) -> Iterator[tuple[str, Any]]:
    """The fused backward by torch operations, and by kernels of several numbers of points and warps a program."""
    chosen, functions = (
        (plans._POINTS, plans._POINT_WARPS),
        dispatch.functions_for(None, torch.float32, torch.device("cuda")),
    )
    by_torch = functions._replace(sampled=fused.sampled, sampled_bwd=fused.sampled_bwd)
    yield "fused backward by torch operations", case.us(partial(of_points, by_torch), False)
    for plan in (chosen, *itertools.product((128, 256, 512, 1024), (1, 2, 4))):
        plans._POINTS, plans._POINT_WARPS = plan
        launches._LAUNCHES.clear()
        backward = partial(of_points, functions)
        yield f"fused backward, {plan[0]} points and {plan[1]} warps a program", case.us(backward, False)
    plans._POINTS, plans._POINT_WARPS = chosen
    launches._LAUNCHES.clear()
    yield "kernels of it", case.kernels(partial(of_points, functions), False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="enc800,enc800b1")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--costs", action="store_true", help="kernels without one of their costs, too")
    parser.add_argument("--threads", action="store_true", help="other threads a CTA, too")
    parser.add_argument("--plans", action="store_true", help="plans of Triton's kernels instead")
    parser.add_argument("--points", action="store_true", help="plans of the fused form's own kernels instead")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    timer, began = CudaTimer(), time.monotonic()
    for shape in args.shapes.split(","):
        for dtype in args.dtypes.split(","):
            case = (FusedCase if args.points else Case)(shape, dtype, timer)
            of_kind = {args.plans: triton_plans, args.points: points_plans}
            steps = [of_kind[True](case)] if True in of_kind else [variants(case)]
            steps += [costs(case)] * args.costs + [threads(case)] * args.threads
            for what, us in itertools.chain.from_iterable(steps):
                print(f"{shape} {dtype} {what}: {us}  [{time.monotonic() - began:.0f} s]", flush=True)
                if args.out:
                    with args.out.open("a") as lines:
                        print(json.dumps(dict(shape=shape, dtype=dtype, what=what, us=us)), file=lines)
            del case
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
