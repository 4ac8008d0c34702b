"""Deformable attention in CUDA C++: plans and machine code without a GPU; on one, each way to grad_value at real sizes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from msda_cases import arguments, assert_within_budget, make_inputs, run, truth

from retrograd.errors import NativeBuildError
from retrograd.ops import ms_deform_attn
from retrograd.ops.msda.cuda import launch, plan
from retrograd.runtime.cuda import nvrtc

PYRAMID = [(64, 48), (32, 24), (16, 12), (8, 6)]
ENCODER = plan.Sizes(4, 22223, 22223, 8, 32, (4, 4, 4, 4), 4)
DECODER = plan.Sizes(4, 22223, 300, 8, 32, (4, 4, 4, 4), 2)
ODD = plan.Sizes(1, 7, 5, 3, 8, (1, 0, 3), 4)
ALL_SIZES = (ENCODER, DECODER, ODD)
BINARIES = "triton.backends.nvidia"
# `add` is the backward with additions; every other kernel has a file of its name.
KERNELS = ("add", "backward", "cells", "combine", "count", "fill", "forward", "reduce", "scan", "scatter")


@pytest.mark.parametrize("sizes", ALL_SIZES, ids=["encoder", "decoder", "odd"])
@pytest.mark.parametrize("name", launch._THREADS)
def test_plan_reaches_every_query(name: str, sizes: plan.Sizes) -> None:
    threads, blocks = launch._THREADS[name]
    if name == "forward":
        chosen = plan.plan_forward(sizes, 132, threads, blocks)
    else:
        chosen = plan.plan_queries(sizes, 132, threads, blocks, adds=name == "add")
    if chosen.tiled:
        assert chosen.unit_queries % plan.UNIT_WIDTH == 0
    assert chosen.unit_queries >= 1
    assert chosen.ctas >= 1
    # Every thread that fills a table has an entry to fill.
    assert chosen.threads >= plan.MAX_POINTS


def test_every_kernel_has_a_file() -> None:
    files = {path.stem for path in launch._FOLDER.glob("*.cu")}
    assert files == set(KERNELS) - {"add"}
    assert set(launch._FOLDER.glob("*.cuh")) == set(launch.HEADERS)


def test_addresses_are_in_the_order_of_the_struct() -> None:
    text = (launch._FOLDER / "common.cuh").read_text()
    struct = text[text.index("struct Problem {") :]
    names = re.findall(r"^ +(?:const char|char|Record|unsigned|float)\* (\w+);", struct[: struct.index("}")], re.M)
    assert names == [slot.name.lower() for slot in launch._ADDRESSES]


@pytest.mark.parametrize("sizes", ALL_SIZES, ids=["encoder", "decoder", "odd"])
def test_plan_of_the_sort(sizes: plan.Sizes) -> None:
    sort = plan.plan_sort(sizes, 132)
    assert sort.bands * sort.band >= sort.bins == sizes.pixels
    assert sort.bands == 1 or sort.band % 1024 == 0
    assert 1 <= sort.chunks <= max(1, sizes.queries)
    threads = launch._THREADS["cells"][0]
    assert plan.cells_ctas(sizes, threads) * threads // (sizes.channels // 4) * plan.SEGMENT >= sizes.samples


def test_way_of_the_sums() -> None:
    assert plan.way(ENCODER, deterministic=False) is plan.Way.CELLS
    assert plan.way(DECODER, deterministic=False) is plan.Way.ADD
    assert plan.way(ENCODER, deterministic=True) is plan.Way.ORDERED
    assert plan.way(ENCODER, deterministic=True, known=False) is plan.Way.REDUCE
    assert plan.way(DECODER, deterministic=True) is plan.Way.REDUCE


def test_cells_have_a_row_and_a_column_more() -> None:
    sort = plan.plan_sort(ODD, 132, ((2, 3), (1, 1)))
    assert sort.bins == 3 * 4 + 2 * 2
    assert plan.parts(ODD, sort) == sort.bins + 1
    threads = launch._THREADS["combine"][0]
    assert plan.combine_ctas(ENCODER, threads) * threads >= ENCODER.pixels * ENCODER.channels // 4


def test_the_faster_of_the_two_is_chosen() -> None:
    narrow = plan.Sizes(**(vars(DECODER) | {"element_bytes": 4}))
    many = plan.Sizes(**(vars(DECODER) | {"points": (16, 16, 16, 16)}))
    assert plan.forward_pays(ENCODER)
    assert plan.forward_pays(many)
    assert not plan.forward_pays(DECODER)
    assert not plan.forward_pays(narrow)
    assert plan.backward_pays(ENCODER, deterministic=False)
    assert plan.backward_pays(narrow, deterministic=True)
    assert not plan.backward_pays(narrow, deterministic=False)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(channels=48), "power of two"),
        (dict(channels=256), "up to 128"),
        (dict(channels=4, element_bytes=2), "16 bytes"),
        (dict(pixels=1 << 20), "4 GiB"),
        (dict(points=(64, 65)), "points"),
        (dict(points=(1,) * 17), "levels"),
    ],
    ids=lambda v: v if isinstance(v, str) else next(iter(v)),
)
def test_what_does_not_fit_is_said(change: dict[str, Any], said: str) -> None:
    assert plan.why_not(ENCODER) is None
    assert said in (plan.why_not(plan.Sizes(**(vars(ENCODER) | change))) or "")


def test_a_cpu_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`value` is on cpu, expected cuda for impl='cuda'"):
        ms_deform_attn(*arguments(make_inputs(device="cpu")), impl="cuda")


def _has_nvrtc() -> bool:
    try:
        nvrtc.version()
    except NativeBuildError:
        return False
    return True


def _facts(name: str, arch: str, sizes: plan.Sizes, tmp_path: Path, **macros: int) -> tuple[str, str]:
    """(what ptxas used, machine code) of a kernel as the launcher asks for it."""
    binaries = Path(pytest.importorskip(BINARIES).__file__).parent / "bin"
    types = dict(VALUE_TYPE=0 if sizes.element_bytes == 4 else 1, POINT_TYPE=0)
    shape = dict(HEADS=sizes.heads, CHANNELS=sizes.channels, LEVELS=len(sizes.points))
    points = dict(POINTS=",".join(map(str, sizes.points)))
    lanes = sizes.lanes(bool(macros.get("ADD")) or name in plan.SUMMING)
    rest = dict(BORDER=0, ALIGNED=0, DOTS=1, ADD=0, ORDERED=0, LANE_ELEMENTS=sizes.channels // lanes)
    threads, blocks = launch._THREADS.get("add" if macros.get("ADD") else name, (32 * len(sizes.points), 1))
    options = launch.options_of(arch, tuple((types | shape | points | rest | macros).items()), threads, blocks)
    cubin = tmp_path / "msda.cubin"
    cubin.write_bytes(launch.compiled(name, options))
    read = [
        subprocess.run([binaries / tool, *flags, cubin], capture_output=True, text=True, check=True).stdout
        for tool, *flags in (("cuobjdump", "--dump-resource-usage"), ("nvdisasm",))
    ]
    return read[0], read[1]


@pytest.mark.dealt(4)
@pytest.mark.skipif(not _has_nvrtc(), reason="no NVRTC here: it comes with PyTorch for CUDA")
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("sizes", [ENCODER, DECODER], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*KERNELS, "ordered cells", "ordered fill"])
def test_machine_code(name: str, sizes: plan.Sizes, arch: str, tmp_path: Path) -> None:
    """No spills; rows come 16 bytes a load, and go 16 bytes an addition without a fence."""
    adds, ordered = name == "add", name in ("combine", "ordered cells", "ordered fill")
    file = "backward" if adds else name.removeprefix("ordered ")
    usage, code = _facts(file, arch, sizes, tmp_path, ADD=int(adds), ORDERED=int(ordered))
    assert "STACK:0" in usage, usage
    assert "LOCAL:0" in usage, usage
    if name in ("forward", "backward", "reduce", "fill"):
        assert re.search(r"(LDG|STG)\.E\.128", code)
    if name == "ordered cells":
        assert not re.search(r"REDG|ATOM", code)
    if name in ("cells", "add"):
        assert re.search(r"REDG\.E\.ADD\.F32x4", code)
        assert "MEMBAR" not in code


gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="needs a GPU of compute capability 9.0 or more",
)
WAYS = {
    "add": (dict(queries=20), False),
    "cells": (dict(queries=900), False),
    "ordered": (dict(queries=900), True),
    "reduce": (dict(queries=300), True),
}


def _case(way: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[dict[str, Any], bool]:
    sizes, deterministic = WAYS[way]
    given = dict(heads=8, points=4, channels=32, beside=torch.float32) | sizes | options
    return make_inputs(PYRAMID, dtype, "cuda", **given), deterministic


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_real_sizes(way: str, dtype: torch.dtype, mode: dict[str, Any]) -> None:
    case, deterministic = _case(way, dtype, align_corners=mode["align_corners"])
    got = run(case, **mode, impl="cuda", deterministic=deterministic)
    assert_within_budget(got, truth(case, **mode), case)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [True, False])
def test_queries_that_are_pixels(deterministic: bool) -> None:
    """Then units are tiles; sizes known to the device alone, a level of one row among them, give the same."""
    levels = [(37, 53), (19, 27), (1, 9)]
    pixels = sum(h * w for h, w in levels)
    case = make_inputs(levels, torch.float32, "cuda", queries=pixels, heads=8, points=4, channels=32)
    want = truth(case)
    for shapes in (levels, torch.tensor(levels, device="cuda"), torch.tensor(levels, device="cuda", dtype=torch.int32)):
        given = case | {"spatial_shapes": shapes}
        assert_within_budget(run(given, impl="cuda", deterministic=deterministic), want, case)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [True, False])
def test_more_pixels_than_shared_memory_has_bins(deterministic: bool) -> None:
    levels = [(250, 200), (30, 20)]
    case = make_inputs(levels, torch.float32, "cuda", batch=1, queries=10000, heads=2, points=4, channels=8)
    sizes = plan.Sizes(1, 50600, 10000, 2, 8, (4, 4), 4)
    assert plan.plan_sort(sizes, 132).bands == 2
    assert plan.plan_sort(sizes, 132, tuple(levels)).bands == 2
    assert plan.way(sizes, deterministic) is (plan.Way.ORDERED if deterministic else plan.Way.CELLS)
    assert_within_budget(run(case, impl="cuda", deterministic=deterministic), truth(case), case)


@gpu
@pytest.mark.gpu
def test_a_level_wider_than_the_fast_path_can_number() -> None:
    levels = [(2, (1 << 23) + 10), (3, 5)]
    case = make_inputs(levels, torch.float32, "cuda", batch=1, queries=40, heads=1, points=2, channels=4)
    got = ms_deform_attn(*arguments(case), impl="cuda")
    want, size = truth(case)["out"]
    assert_within_budget({"out": got}, {"out": (want, size)}, case)


@gpu
@pytest.mark.gpu
def test_pixels_of_no_level_have_no_gradient() -> None:
    case, _ = _case("reduce")
    inside = sum(h * w for h, w in PYRAMID)
    case["value"] = torch.cat([case["value"], case["value"][:, :77]], dim=1)
    case["spatial_shapes"] = torch.tensor(PYRAMID, device="cuda")
    for deterministic in (True, False):
        # Memory that was something else before.
        torch.full_like(case["value"], 7.0)
        got = run(case, impl="cuda", deterministic=deterministic)["value"]
        assert not got[:, inside:].any()
        assert got[:, :inside].any()


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", ["value", "grad_out"])
def test_a_bad_number_stays_where_it_is(way: str, what: str) -> None:
    """Rows that stand in for corners outside, and pixels of the same block, do not see it."""
    case, deterministic = _case(way)
    # A point that touches nothing has gradients of 0 here, of 0 times a bad number in torch's operations.
    case["sampling_locations"].clamp_(0.01, 0.99)
    case[what][0, 0, 0, 5] = float("nan")
    case[what][1, 3, 1] = float("inf")
    got = run(case, impl="cuda", deterministic=deterministic)
    want = run(case, impl="torch", deterministic=deterministic)
    for name, tensor in want.items():
        assert torch.equal(got[name].isfinite(), tensor.isfinite()), name


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("place", ["anywhere", "one pixel", "outside"])
def test_the_same_bits_every_time(place: str) -> None:
    case = make_inputs(PYRAMID, torch.bfloat16, "cuda", beside=torch.float32, queries=2000, heads=8, channels=32)
    if place != "anywhere":
        case["sampling_locations"].fill_(0.4 if place == "one pixel" else 3.0)
    want = run(case, impl="cuda", deterministic=True)
    side = torch.cuda.Stream()
    for repeat in range(40):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side if repeat % 2 else torch.cuda.current_stream()):
            got = run(case, impl="cuda", deterministic=True)
        torch.cuda.current_stream().wait_stream(side)
        assert all(torch.equal(got[name], want[name]) for name in want), repeat
    if place == "outside":
        assert not any(tensor.any() for tensor in want.values())


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_in_a_graph_and_without_waiting(way: str) -> None:
    case, deterministic = _case(way)
    case["spatial_shapes"] = torch.tensor(PYRAMID, device="cuda")
    want = run(case, impl="cuda", deterministic=deterministic)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(case, impl="cuda", deterministic=deterministic)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(case, impl="cuda", deterministic=deterministic)
    for tensor in got.values():
        tensor.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    for name, tensor in want.items():
        if deterministic or name != "value":
            assert torch.equal(got[name], tensor), name
        assert got[name].isfinite().all(), name


@gpu
@pytest.mark.gpu
def test_sizes_decide_unless_told() -> None:
    """C of 12 has no kernel here: None takes Triton's, an explicit choice says so."""
    case = make_inputs(PYRAMID, torch.float32, "cuda", queries=10, channels=12)
    assert_within_budget(run(case), truth(case), case)
    with pytest.raises(
        ValueError, match=r"impl='cuda' cannot compute this call: C is no power of two; use impl='triton'"
    ):
        run(case, impl="cuda")
