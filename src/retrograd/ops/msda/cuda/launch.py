"""Launcher of the kernels beside this file: macros, workspace, arguments; knows no formula."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from retrograd.ops.msda.arguments import MsdaGrads, MsdaInputs, MsdaSpec, NeededGrads, zero_grads
from retrograd.ops.msda.cuda import plan
from retrograd.runtime.cuda import driver, nvrtc
from retrograd.runtime.cuda.driver import aligned, arch_of

_FOLDER = Path(__file__).parent
HEADERS = tuple(_FOLDER / name for name in ("common.cuh", "gradients.cuh", "bins.cuh"))
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # enum Type
_ARCHITECTURES = range(90, 120)  # run on 9.0, compiled for 10.0 by the tests; 12.0 has less shared memory
# Threads of a CTA, and CTAs on an SM that registers are kept for.
_THREADS = {
    "forward": (1024, 1),
    "backward": (512, 1),
    "add": (384, 1),
    "count": (512, 2),
    "scan": (1024, 1),
    "reduce": (256, 2),
    "scatter": (512, 2),
    "cells": (256, 2),
}


class _Problem(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("value", "locations", "weights", "grad_out", "out", "grad_value")),
        *((name, ctypes.c_void_p) for name in ("grad_locations", "grad_weights", "shapes", "records", "numbers")),
        *((name, ctypes.c_void_p) for name in ("counts", "starts", "sums", "ticket")),
        *((name, ctypes.c_longlong) for name in ("pixels", "queries")),
    )


@cache
def _problem_type(levels: int) -> type[_Problem]:
    names = ("shapes_bytes", "images", "chunks", "band", "unit_queries", "tiled", "in_turn")
    fields = (("sizes", ctypes.c_int * (2 * levels)), *((name, ctypes.c_int) for name in names))
    return type("Problem", (_Problem,), {"_fields_": fields})


def why_not(inputs: MsdaInputs, spec: MsdaSpec) -> str | None:
    """Why the kernels of this module do not compute such a call, or None if they do."""
    value, _, locations, weights, references = inputs
    if not value.is_cuda:
        return f"value is on {value.device}"
    if references is not None:
        return "it has references"
    if (reason := _why_not_on(value.device.index)) is not None:
        return reason
    if others := {value.dtype, locations.dtype, weights.dtype} - _TYPES.keys():
        return f"a tensor is {others.pop()}, expected float32, float16 or bfloat16"
    return plan.why_not(_sizes(inputs, spec))


def forward_pays(inputs: MsdaInputs, spec: MsdaSpec) -> bool:
    """Whether `msda_fwd` computes the call, and faster than Triton."""
    return why_not(inputs, spec) is None and plan.forward_pays(_sizes(inputs, spec))


def backward_pays(inputs: MsdaInputs, spec: MsdaSpec) -> bool:
    """Whether `msda_bwd` computes the call, and faster than Triton."""
    return why_not(inputs, spec) is None and plan.backward_pays(_sizes(inputs, spec), spec.deterministic)


@cache
def _why_not_on(device_index: int) -> str | None:
    if torch.version.hip is not None:
        return "the GPU is AMD's"
    arch = arch_of(device_index)
    if arch in _ARCHITECTURES:
        return None
    return f"the GPU has compute capability {arch / 10}, expected 9.0 or more and less than 12.0"


def _check(inputs: MsdaInputs, spec: MsdaSpec) -> None:
    if (reason := why_not(inputs, spec)) is not None:
        raise ValueError(f"impl='cuda' cannot compute this call: {reason}; use impl='triton'")


def msda_fwd(inputs: MsdaInputs, spec: MsdaSpec) -> torch.Tensor:
    """The output; see `arguments`.

    Raises:
        NativeBuildError: there is no NVRTC.
        ValueError: `why_not` names a reason.

    Numerics: inside float32; shares of the corners are multiplied by the weight before the rows are added up, corner
    after corner, for each of up to 32 parts of the points, then the parts. Bitwise repeatable; the bits of a query do
    not depend on the other queries.
    """
    _check(inputs, spec)
    sizes, device = _sizes(inputs, spec), inputs.value.device
    shape = (sizes.batch, sizes.queries, sizes.heads, sizes.channels)
    if not inputs.value.numel() or not inputs.weights.numel():
        return inputs.value.new_zeros(shape)
    inputs = _readable(inputs)
    out = torch.empty(shape, dtype=inputs.value.dtype, device=device)
    work = _Work(inputs, spec, sizes, dict(out=out))
    with torch.cuda.device(device):
        _walk(work, "forward", plan.plan_forward(sizes, _processors(device.index), *_THREADS["forward"]))
    return out


def msda_bwd(grad_out: torch.Tensor, inputs: MsdaInputs, spec: MsdaSpec, needed: NeededGrads) -> MsdaGrads:
    """The gradients; see `arguments`.

    Raises:
        NativeBuildError: there is no NVRTC.
        ValueError: `why_not` names a reason.

    Numerics: inside float32. With spec.deterministic grad_value is bitwise repeatable: the samples are sorted by the
    cell they lie in, stably, and a warp adds up those of a pixel. Otherwise rows are added to it by float32 atomic
    additions, which flush subnormal sums: all samples of a cell at once after a sort where many touch a pixel, each on
    its own where few do. grad_locations and grad_weights are bitwise repeatable in each way, the last
    bits of the ways differ.

    Memory: with S * B * H pixels and Q * B * H * K samples, sorting takes 4 bytes a sample, or 16 if deterministic, and
    4 bytes a pixel and part of the queries (about 8 parts on an H200 where B * H * L is 128); additions take grad_value
    in float32 for 16-bit values.
    """
    _check(inputs, spec)
    sizes, device = _sizes(inputs, spec), inputs.value.device
    if not inputs.value.numel() or not inputs.weights.numel():
        return zero_grads(inputs, needed)
    dtypes = [t.dtype for t in inputs.tensors()]
    inputs = _readable(inputs)
    value, _, locations, weights, _ = inputs
    way = plan.way(sizes, spec.deterministic) if needed.value else None
    dots, adds = needed.locations or needed.weights, way is plan.Way.ADD
    with torch.cuda.device(device):
        grad_value = None
        if way is plan.Way.REDUCE:
            grad_value = torch.empty_like(value)
        elif way is not None:
            grad_value = torch.zeros(value.shape, dtype=torch.float32, device=device)
        grad_locations = torch.empty_like(locations) if needed.locations else None
        grads = (grad_value, grad_locations, torch.empty_like(weights) if needed.weights else None)
        results = dict(zip(("grad_value", "grad_locations", "grad_weights"), grads, strict=True))
        work = _Work(inputs, spec, sizes, results | dict(grad_out=aligned(grad_out.to(value.dtype))), dots=dots)
        if adds or (dots and way is not plan.Way.CELLS):
            threads = _THREADS["add" if adds else "backward"]
            _walk(work, "backward", plan.plan_queries(sizes, _processors(device.index), *threads, adds=adds), adds=adds)
        if way in (plan.Way.CELLS, plan.Way.REDUCE):
            _sort(work, reduces=way is plan.Way.REDUCE)
    return MsdaGrads(*(None if g is None else g.to(dtype) for g, dtype in zip(grads, dtypes, strict=True)))


class _Work(NamedTuple):
    """A call: contiguous inputs, other tensors by their names in `_Problem`, whether `dots` of them are wanted."""

    inputs: MsdaInputs
    spec: MsdaSpec
    sizes: plan.Sizes
    tensors: dict[str, torch.Tensor | None]
    dots: bool = False


def _sort(work: _Work, *, reduces: bool) -> None:
    """Sort the samples by cell, then add them up for each pixel or, unless it `reduces`, walk over the cells."""
    sizes, device = work.sizes, work.inputs.value.device
    sort = plan.plan_sort(sizes, _processors(device.index))
    image_heads = sizes.batch * sizes.heads

    def integers(count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.int32, device=device)

    samples = integers((4 if reduces else 1) * image_heads * sizes.samples)
    buffers = dict(
        records=samples if reduces else None,
        numbers=None if reduces else samples,
        counts=integers(image_heads * sort.chunks * sizes.pixels),
        starts=integers(image_heads * (sizes.pixels + 1)),
        sums=integers(image_heads * sort.chunks * sort.slices),
        ticket=integers(1),
    )
    problem = _problem(work._replace(tensors=work.tensors | buffers))
    problem.chunks, problem.band = sort.chunks, sort.band
    problem.unit_queries, problem.tiled = plan.SORT_UNIT, int(sizes.queries == sizes.pixels)

    def kernel(name: str, shared_bytes: int = 0, threads: int | None = None) -> driver.LoadedKernel:
        launch = (threads, 1) if threads is not None else _THREADS[name]
        macros = _macros(name, work if name == "cells" else work._replace(dots=False))
        return _kernel(device.index, name, macros, *launch, shared_bytes)

    chunks = image_heads * sort.chunks
    kernel("count", 4 * sort.band).launch(chunks, (problem,), rows=sort.bands)
    kernel("scan").launch(sort.slices, (problem,), rows=image_heads)
    if reduces:
        kernel("fill", 4 * sort.band, 32 * len(sizes.points)).launch(chunks, (problem,), rows=sort.bands)
        reduce = kernel("reduce")
        reduce.launch(reduce.max_clusters, (problem,))
    else:
        kernel("scatter", 4 * sort.band).launch(chunks, (problem,), rows=sort.bands)
        cells = kernel("cells")
        cells.launch(plan.cells_ctas(sizes, cells.threads), (problem,), rows=image_heads)


def _walk(work: _Work, name: str, launch: plan.WalkPlan, *, adds: bool = False) -> None:
    problem = _problem(work)
    problem.unit_queries, problem.tiled, problem.in_turn = launch.unit_queries, int(launch.tiled), int(launch.in_turn)
    macros = _macros(name, work, adds=adds)
    kernel = _kernel(work.inputs.value.device.index, name, macros, launch.threads, launch.blocks, 0)
    kernel.launch(launch.ctas, (problem,))


def _sizes(inputs: MsdaInputs, spec: MsdaSpec) -> plan.Sizes:
    value = inputs.value
    batch, pixels, heads, channels = value.shape
    return plan.Sizes(batch, pixels, inputs.weights.shape[1], heads, channels, spec.points, value.element_size())


def _readable(inputs: MsdaInputs) -> MsdaInputs:
    """With dense tensors, locations and weights in one dtype, float32 if they differ."""
    value, levels, locations, weights, _ = inputs
    if locations.dtype != weights.dtype:
        locations, weights = locations.float(), weights.float()
    return MsdaInputs(aligned(value), levels, aligned(locations), aligned(weights))


def _problem(work: _Work) -> Any:
    sizes, (value, levels, locations, weights, _) = work.sizes, work.inputs
    problem = _problem_type(len(sizes.points))()
    for name, tensor in (work.tensors | dict(value=value, locations=locations, weights=weights)).items():
        setattr(problem, name, 0 if tensor is None else tensor.data_ptr())
    problem.pixels, problem.queries, problem.images = sizes.pixels, sizes.queries, sizes.batch
    if levels.shapes is not None:
        shapes = levels.shapes.contiguous()
        problem.shapes, problem.shapes_bytes = shapes.data_ptr(), shapes.element_size()
    else:
        assert levels.sizes is not None
        for i, size in enumerate(n for pair in levels.sizes for n in pair):
            problem.sizes[i] = size
    return problem


def _macros(name: str, work: _Work, *, adds: bool = False) -> tuple[tuple[str, Any], ...]:
    """Of a kernel; `adds`: with additions to float32 sums."""
    spec, sizes = work.spec, work.sizes
    macros = dict(
        VALUE_TYPE=_TYPES[work.inputs.value.dtype],
        POINT_TYPE=_TYPES[work.inputs.locations.dtype],
        HEADS=sizes.heads,
        CHANNELS=sizes.channels,
        LEVELS=len(sizes.points),
        POINTS=",".join(map(str, sizes.points)),
        BORDER=int(spec.border),
        ALIGNED=int(spec.align_corners),
        DOTS=int(work.dots),
        ADD=int(adds),
        LANE_ELEMENTS=sizes.channels // sizes.lanes(adds or name in plan.SUMMING),
    )
    return tuple(macros.items())


def options_of(arch: str, macros: tuple[tuple[str, Any], ...], threads: int, blocks: int) -> tuple[str, ...]:
    """For NVRTC."""
    named = (*macros, ("THREADS", threads), ("BLOCKS", blocks))
    return (f"--gpu-architecture={arch}", "--std=c++17", *(f"-D{key}={value}" for key, value in named))


def compiled(name: str, options: tuple[str, ...]) -> bytes:
    """Machine code of a kernel, which has a file of its name."""
    return nvrtc.compile_cubin(_FOLDER / f"{name}.cu", options, HEADERS)


@cache
def _kernel(
    device_index: int, name: str, macros: tuple[tuple[str, Any], ...], threads: int, blocks: int, shared_bytes: int
) -> driver.LoadedKernel:
    cubin = compiled(name, options_of(f"sm_{arch_of(device_index)}", macros, threads, blocks))
    return driver.load(cubin, name, device_index, cluster=1, threads=threads, shared_bytes=shared_bytes)


@cache
def _processors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count
