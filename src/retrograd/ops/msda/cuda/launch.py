"""Launcher of the kernels beside this file: macros, workspace, arguments; knows no formula."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from retrograd.ops.msda.arguments import MsdaGrads, MsdaInputs, MsdaSpec, NeededGrads, zero_grads
from retrograd.ops.msda.cuda import plan
from retrograd.ops.msda.slots import Slot
from retrograd.runtime.cpp.recipe import Buffer, DriverCall, Recipe
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
    "scatter": (1024, 1),
    "cells": (256, 2),
    "combine": (128, 10),
}


# The addresses in `Problem`, in their order.
_ADDRESSES = (
    *(Slot.VALUE, Slot.LOCATIONS, Slot.WEIGHTS, Slot.GRAD_OUT, Slot.OUT, Slot.GRAD_VALUE, Slot.GRAD_LOCATIONS),
    *(Slot.GRAD_WEIGHTS, Slot.SHAPES, Slot.RECORDS, Slot.NUMBERS, Slot.COUNTS, Slot.STARTS, Slot.SUMS, Slot.TICKET),
    Slot.PARTIALS,
)


class _Problem(ctypes.Structure):
    _fields_ = (
        ("addresses", ctypes.c_void_p * len(_ADDRESSES)),
        *((name, ctypes.c_longlong) for name in ("pixels", "queries", "bins")),
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
    value, _, locations, weights, _ = inputs
    shape = (value.shape[0], locations.shape[1], *value.shape[2:])
    if not value.numel() or not weights.numel():
        return value.new_zeros(shape)
    inputs = _readable(inputs)
    out = torch.empty(shape, dtype=value.dtype, device=value.device)
    _run(_call_of(inputs, spec), inputs, {Slot.OUT: out})
    return out


def msda_bwd(grad_out: torch.Tensor, inputs: MsdaInputs, spec: MsdaSpec, needed: NeededGrads) -> MsdaGrads:
    """The gradients; see `arguments`.

    Raises:
        NativeBuildError: there is no NVRTC.
        ValueError: `why_not` names a reason.

    Numerics: inside float32. With spec.deterministic grad_value is bitwise repeatable: the samples are sorted by the
    cell they lie in, stably, and added up in that order, up to 64 of a cell and then the cells around a pixel, or where
    few touch a pixel or the sizes of the levels are in a tensor of the GPU, all of a pixel by a warp. Otherwise rows
    are added to it by float32 atomic additions, which flush subnormal sums: all samples of a cell at once after a sort
    where many touch a pixel, each on its own where few do. grad_locations and grad_weights are bitwise repeatable in
    each way, the last bits of the ways differ.

    Memory: with S * B * H pixels and Q * B * H * K samples, sorting takes 4 bytes a sample and 4 bytes a pixel and part
    of the queries (about 8 parts on an H200 where B * H * L is 128); additions take grad_value in float32 for 16-bit
    values. If deterministic, cells in their order take 16 * C bytes a cell, and one more for each 64 samples, which is
    four times value in float32 and more; a warp a pixel 16 bytes a sample instead.
    """
    _check(inputs, spec)
    if not inputs.value.numel() or not inputs.weights.numel():
        return zero_grads(inputs, needed)
    dtypes = [t.dtype for t in inputs.tensors()]
    inputs = _readable(inputs)
    value, _, locations, weights, _ = inputs
    tensors = _run(
        _call_of(inputs, spec, needed),
        inputs,
        {
            Slot.GRAD_OUT: aligned(grad_out.to(value.dtype)),
            Slot.GRAD_LOCATIONS: torch.empty_like(locations) if needed.locations else None,
            Slot.GRAD_WEIGHTS: torch.empty_like(weights) if needed.weights else None,
        },
    )
    grads = (tensors.get(slot) for slot in (Slot.GRAD_VALUE, Slot.GRAD_LOCATIONS, Slot.GRAD_WEIGHTS))
    return MsdaGrads(*(None if g is None else g.to(dtype) for g, dtype in zip(grads, dtypes, strict=True)))


def recipe(inputs: MsdaInputs, spec: MsdaSpec, needed: NeededGrads | None = None) -> Recipe | None:
    """The launches of `msda_fwd`, or of `msda_bwd` for what is `needed`; None where tensors are converted before."""
    if why_not(inputs, spec) is not None or inputs.locations.dtype != inputs.weights.dtype:
        return None
    call = _call_of(inputs, spec, needed)
    with torch.cuda.device(call.device_index):
        launches, buffers = _planned(call)
    pointer = ctypes.sizeof(ctypes.c_void_p)
    places = tuple((pointer * i, int(slot)) for i, slot in enumerate(_ADDRESSES))
    calls = (
        DriverCall(
            function=kernel.function,
            grid=(ctas, rows, 1),
            threads=kernel.threads,
            shared_bytes=kernel.shared_bytes,
            block=bytes(problem),
            addresses=places,
        )
        for kernel, ctas, rows, problem in launches
    )
    return Recipe(tuple(calls), buffers)


class _Call(NamedTuple):
    """All that the launches of a call depend on beside addresses."""

    device_index: int
    sizes: plan.Sizes
    spec: MsdaSpec
    value_dtype: torch.dtype
    point_dtype: torch.dtype  # of locations and weights
    levels: tuple[tuple[int, int], ...]  # their sizes; () where these are in a tensor
    shapes_bytes: int  # of an integer of that tensor; 0 without
    needed: NeededGrads | None  # None in the forward


class _Launch(NamedTuple):
    kernel: driver.LoadedKernel
    ctas: int
    rows: int
    problem: Any  # its struct, without addresses


_Planned = tuple[tuple[_Launch, ...], tuple[Buffer, ...]]


def _call_of(inputs: MsdaInputs, spec: MsdaSpec, needed: NeededGrads | None = None) -> _Call:
    value, levels, locations, _, _ = inputs
    shapes_bytes = 0 if levels.shapes is None else levels.shapes.element_size()
    sizes = () if levels.shapes is not None else levels.sizes or ()
    return _Call(
        value.device.index, _sizes(inputs, spec), spec, value.dtype, locations.dtype, sizes, shapes_bytes, needed
    )


def _run(call: _Call, inputs: MsdaInputs, others: dict[Slot, torch.Tensor | None]) -> dict[int, torch.Tensor | None]:
    """Launch; all tensors by their slots."""
    value, levels, locations, weights, _ = inputs
    shapes = None if levels.shapes is None else levels.shapes.contiguous()
    tensors: dict[int, torch.Tensor | None] = {
        **{Slot.VALUE: value, Slot.SHAPES: shapes, Slot.LOCATIONS: locations, Slot.WEIGHTS: weights},
        **others,
    }
    with torch.cuda.device(value.device):
        launches, buffers = _planned(call)
        for slot, dtype, shape, zeros in buffers:
            tensors[slot] = (torch.zeros if zeros else torch.empty)(shape, dtype=dtype, device=value.device)
        held = (tensors.get(slot) for slot in _ADDRESSES)
        addresses = [0 if t is None else t.data_ptr() for t in held]
        for kernel, ctas, rows, problem in launches:
            filled = type(problem).from_buffer_copy(problem)
            filled.addresses[:] = addresses
            kernel.launch(ctas, (filled,), rows=rows)
    return tensors


@lru_cache(maxsize=4096)
def _planned(call: _Call) -> _Planned:
    """The launches and what is allocated for them; its device has to be the current one."""
    sizes, processors = call.sizes, _processors(call.device_index)
    if call.needed is None:
        return (_walk(call, "forward", plan.plan_forward(sizes, processors, *_THREADS["forward"])),), ()
    known = bool(call.levels)
    way = plan.way(sizes, call.spec.deterministic, known) if call.needed.value else None
    dots, adds = call.needed.locations or call.needed.weights, way is plan.Way.ADD
    launches, buffers = [], []
    if way is not None:
        shape = (sizes.batch, sizes.pixels, sizes.heads, sizes.channels)
        summed = way in (plan.Way.ADD, plan.Way.CELLS)
        buffers.append(Buffer(Slot.GRAD_VALUE, torch.float32 if summed else call.value_dtype, shape, zeros=summed))
    if adds or (dots and way not in (plan.Way.CELLS, plan.Way.ORDERED)):
        threads = _THREADS["add" if adds else "backward"]
        launches.append(_walk(call, "backward", plan.plan_queries(sizes, processors, *threads, adds=adds), dots, adds))
    if way is not None and not adds:
        sort, work = _sort(call, dots, way)
        launches += sort
        buffers += work
    return tuple(launches), tuple(buffers)


def _sort(call: _Call, dots: bool, way: plan.Way) -> _Planned:
    """Sort the samples by cell, then add them up for each pixel, or walk over the cells."""
    sizes, reduces, ordered = call.sizes, way is plan.Way.REDUCE, way is plan.Way.ORDERED
    sort = plan.plan_sort(sizes, _processors(call.device_index), call.levels if ordered else ())
    image_heads = sizes.batch * sizes.heads
    counts = {
        Slot.RECORDS if reduces else Slot.NUMBERS: (4 if reduces else 1) * image_heads * sizes.samples,
        Slot.COUNTS: image_heads * sort.chunks * sort.bins,
        Slot.STARTS: image_heads * (sort.bins + 1),
        Slot.SUMS: image_heads * sort.chunks * sort.slices,
        Slot.TICKET: 1,
        **({Slot.PARTIALS: image_heads * plan.parts(sizes, sort) * 4 * sizes.channels} if ordered else {}),
    }
    problem = _problem(call)
    problem.bins, problem.chunks, problem.band = sort.bins, sort.chunks, sort.band
    problem.unit_queries, problem.tiled = plan.SORT_UNIT, int(sizes.queries == sizes.pixels)

    def launch(name: str, ctas: int | None, rows: int, shared_bytes: int = 0) -> _Launch:
        bounds = (32 * len(sizes.points), 1) if name == "fill" else _THREADS[name]
        macros = _macros(name, call, dots and name == "cells", ordered=ordered)
        kernel = _kernel(call.device_index, name, macros, *bounds, shared_bytes)
        return _Launch(kernel, ctas or kernel.max_clusters, rows, problem)

    chunks, band_bytes = image_heads * sort.chunks, 4 * sort.band
    names = ["count", "scan", "scatter" if way is plan.Way.CELLS else "fill", "reduce" if reduces else "cells"]
    grids: dict[str, tuple[int | None, int]] = {
        "count": (chunks, sort.bands),
        "scan": (sort.slices, image_heads),
        "scatter": (chunks, sort.bands),
        "fill": (chunks, sort.bands),
        "reduce": (None, 1),  # as many as there is place for
        "cells": (plan.cells_ctas(sizes, _THREADS["cells"][0]), image_heads),
        "combine": (plan.combine_ctas(sizes, _THREADS["combine"][0]), image_heads),
    }
    launches = tuple(
        launch(name, *grids[name], band_bytes if name in ("count", "scatter", "fill") else 0)
        for name in names + ["combine"] * ordered
    )
    return launches, tuple(Buffer(slot, torch.int32, (count,)) for slot, count in counts.items())


def _walk(call: _Call, name: str, walk: plan.WalkPlan, dots: bool = False, adds: bool = False) -> _Launch:
    problem = _problem(call)
    problem.unit_queries, problem.tiled, problem.in_turn = walk.unit_queries, int(walk.tiled), int(walk.in_turn)
    kernel = _kernel(call.device_index, name, _macros(name, call, dots, adds), walk.threads, walk.blocks, 0)
    return _Launch(kernel, walk.ctas, 1, problem)


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


def _problem(call: _Call) -> Any:
    sizes = call.sizes
    problem = _problem_type(len(sizes.points))()
    problem.pixels, problem.queries, problem.images = sizes.pixels, sizes.queries, sizes.batch
    problem.shapes_bytes = call.shapes_bytes
    for i, size in enumerate(n for pair in call.levels for n in pair):
        problem.sizes[i] = size
    return problem


def _macros(
    name: str, call: _Call, dots: bool, adds: bool = False, ordered: bool = False
) -> tuple[tuple[str, Any], ...]:
    """Of a kernel; `dots`: with gradients of locations and weights, `adds`: with additions to float32 sums."""
    spec, sizes = call.spec, call.sizes
    macros = dict(
        VALUE_TYPE=_TYPES[call.value_dtype],
        POINT_TYPE=_TYPES[call.point_dtype],
        HEADS=sizes.heads,
        CHANNELS=sizes.channels,
        LEVELS=len(sizes.points),
        POINTS=",".join(map(str, sizes.points)),
        BORDER=int(spec.border),
        ALIGNED=int(spec.align_corners),
        DOTS=int(dots),
        ADD=int(adds),
        ORDERED=int(ordered),
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
