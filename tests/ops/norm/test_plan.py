"""Launch plans of the norms: limits, coverage and what they depend on."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from retrograd import cpu_triton
from retrograd.ops.norm.arguments import NormTensors, WantedOutput
from retrograd.ops.norm.plan import (
    BACKWARD_TILE_LIMIT,
    DW_BLOCK_M,
    FORWARD_TILE_LIMIT,
    Kind,
    plan_backward,
    plan_forward,
    stays_with_triton,
)
from retrograd.ops.norm.spec import NormSpec
from retrograd.ops.norm.triton import norm_fwd
from retrograd.runtime.triton.gpu import Backend, Gpu, ceil_div, next_power_of_2

H200 = Gpu(Backend.CUDA, 132)
# A few multiprocessors only (a partition of a GPU), an AMD GPU, as which Triton's interpreter is planned for, too.
GPUS = {
    "H200": H200,
    "7-sms": Gpu(Backend.CUDA, 7),
    "MI300X": Gpu(Backend.HIP, 304, 0, lanes=64),
    "interpreted": Gpu(Backend.HIP, 2, 0, lanes=2048),
}
# Widths on both sides of every threshold: one column, below and above a power of two, the tile limits, odd and wide.
WIDTHS = [
    1, 2, 63, 64, 65, 768, 1000, 1024, 2000, 5120, 8192, 8193, 16384, 16385, 32768, 32769, 33333, 65536, 131072, 262144,
]  # fmt: skip


@pytest.mark.parametrize("n", WIDTHS, ids=lambda n: f"N{n}")
@pytest.mark.parametrize("rows", [1, 7, 33, 32768], ids=lambda m: f"M{m}")
@pytest.mark.parametrize("itemsize", [2, 4], ids=["16-bit", "32-bit"])
@pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))
def test_plans_cover_the_input(gpu: Gpu, itemsize: int, rows: int, n: int) -> None:
    for centered, heads in ((False, 1), (True, 1), (False, 3)):
        forward = plan_forward(rows, n, itemsize, gpu, centered=centered)
        assert forward.programs * forward.block_m >= rows
        # RMSNorm of one tensor is walked where the walk is faster.
        walked = gpu.backend is Backend.CUDA and not centered and itemsize == 2 and n in (8192, 16384)
        fits = next_power_of_2(n) <= FORWARD_TILE_LIMIT[gpu.backend]
        assert (forward.kind is Kind.TILE) == (fits and not walked)
        assert forward.kind is not Kind.TILE or forward.block_n >= n
        for streams, parts in ((2, None), (3, None), (2, 5)):
            backward = plan_backward(rows, n, heads, itemsize, gpu, centered=centered, streams=streams, parts=parts)
            held = next_power_of_2(n) <= BACKWARD_TILE_LIMIT[gpu.backend]
            few = held and parts is None and rows < 32768
            assert (backward.kind is Kind.FEW) == few
            assert (backward.kind is Kind.TILE) == (held and not few)
            if few:
                assert backward.parts == 0
                assert backward.programs * backward.block_m >= rows
            else:
                # A part without rows would be a row of the buffer that costs traffic and holds only zeros.
                per_part = {Kind.TILE: backward.block_m, Kind.SLICES: 1, Kind.LOOPED: DW_BLOCK_M}[backward.kind]
                assert 1 <= backward.parts <= min(ceil_div(rows, per_part), parts or rows)
            assert backward.kind is not Kind.SLICES or backward.slices * backward.slice_n >= n
            for plan in (forward, backward):
                for field, value in dataclasses.asdict(plan).items():
                    if "block" in field or field == "num_warps":
                        assert value & (value - 1) == 0, field
                assert plan.num_warps * (64 if gpu.backend is Backend.HIP else 32) <= 1024


@pytest.mark.parametrize("n", WIDTHS, ids=lambda n: f"N{n}")
@pytest.mark.parametrize("centered", [False, True], ids=["rms", "ln"])
def test_how_a_row_is_added_up_does_not_depend_on_the_number_of_rows(n: int, centered: bool) -> None:
    for gpu in GPUS.values():
        shapes = set()
        for rows in (1, 2, 7, 512, 4096, 1 << 20):
            # When vectors come and where results are stored to have no part in them.
            forward = plan_forward(rows, n, 2, gpu, centered=centered)
            forward = dataclasses.replace(forward, programs=0, loads="", stores="", early=False)
            backward = plan_backward(rows, n, 1, 2, gpu, centered=centered)
            kind = Kind.TILE if backward.kind is Kind.FEW else backward.kind  # the same tile holds a row
            shapes.add((forward, kind, backward.block_m, backward.block_n,
                        backward.num_warps, backward.slices, backward.slice_n))  # fmt: skip
        assert len(shapes) == 1


def test_programs_are_capped_by_the_multiprocessors() -> None:
    one, two = (plan_backward(1 << 20, 4096, 1, 2, Gpu(Backend.CUDA, sms)) for sms in (132, 264))
    assert two.programs == 2 * one.programs
    assert one.programs % 132 == 0


def test_slices_of_a_row_are_resident_together() -> None:
    for n in (16384, 65536, 131072, 262144):
        for centered, streams in ((False, 2), (False, 3), (True, 2), (True, 3)):
            plan = plan_backward(4096, n, 1, 2, H200, centered=centered, streams=streams)
            assert plan.kind is Kind.SLICES
            assert plan.max_registers is not None
            resident = 65536 // (plan.max_registers * 32 * plan.num_warps)
            assert plan.programs <= resident * H200.num_sms


def test_small_inputs_pass_the_caches_and_others_stay_longer_than_what_is_written() -> None:
    small, large, narrow = (plan_forward(rows, n, 2, H200) for rows, n in ((512, 4096), (8192, 4096), (512, 256)))
    wider = plan_forward(512, 8192, 2, H200, centered=True)
    with_residual = plan_forward(512, 4096, 2, H200, streams=2)
    assert (wider.loads, wider.stores) == (with_residual.loads, with_residual.stores) == ("evict_first", ".cs")
    assert (small.loads, small.stores) == ("", "")
    assert (large.loads, large.stores) == (narrow.loads, narrow.stores) == ("evict_last", "")
    on_amd = plan_forward(512, 4096, 2, Gpu(Backend.HIP, 1, 0, lanes=64))
    assert (on_amd.loads, on_amd.stores) == ("", "")


def test_rows_that_do_not_fill_their_tile_are_compiled_for_their_width() -> None:
    for gpu in GPUS.values():
        cuda = gpu.backend is Backend.CUDA
        layer = {n: plan_forward(4096, n, 2, gpu, centered=True).static_n for n in (96, 768, 1024, 3579, 3584, 4096)}
        assert layer == {96: False, 768: cuda, 1024: False, 3579: False, 3584: cuda, 4096: False}
        rms = [plan_forward(4096, n, 2, gpu).static_n for n in (768, 3584)]
        with_residual = [plan_forward(4096, n, 2, gpu, streams=2).static_n for n in (3072, 3584)]
        assert (rms, with_residual) == ([False, cuda], [cuda, False])


def test_wide_rows_that_do_not_fill_their_tile_go_to_clusters_unless_they_are_walked() -> None:
    widths = (4000, 8192, 10240, 12288, 16384, 20480, 32768)
    stays = {
        (centered, residual): [stays_with_triton(n, centered=centered, residual=residual) for n in widths]
        for centered in (False, True)
        for residual in (False, True)
    }
    assert stays[False, False] == [True, True, False, True, True, False, True]
    assert stays[False, True] == [True, True, False, False, True, False, True]
    assert stays[True, True] == [True, True, False, False, True, False, False]
    assert stays[True, False] == [True, True, False, False, False, False, False]


def test_a_row_that_the_gpu_cannot_hold_is_walked() -> None:
    small = Gpu(Backend.CUDA, 7)
    assert plan_forward(64, 1 << 20, 2, small).kind is Kind.LOOPED
    assert plan_backward(64, 1 << 20, 1, 2, small).kind is Kind.LOOPED


@pytest.mark.parametrize("n", [1024, 8192, 65536], ids=lambda n: f"N{n}")
def test_fixed_parts_are_the_same_on_every_gpu(n: int) -> None:
    plans = [plan_backward(4096, n, 1, 2, Gpu(Backend.CUDA, sms), parts=32) for sms in (7, 108, 132)]
    assert len(set(plans)) == 1
    assert plans[0].parts == 32


def test_stages_fit_shared_memory() -> None:
    for itemsize, streams in ((2, 2), (2, 3), (4, 2), (4, 3)):
        for n in (256, 512, 1024, 2048, 4096, 8192):
            plan = plan_backward(1 << 15, n, 1, itemsize, H200, streams=streams)
            held = (plan.num_stages - 1) * streams * itemsize * plan.block_m * plan.block_n
            assert held * (plan.programs // 132) <= 160 * 1024


def test_plans_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan_forward(8, 100, 4, H200).block_m = 1


@pytest.mark.parametrize("centered", [False, True], ids=["rms", "ln"])
@pytest.mark.parametrize("n", [700, 1500])
def test_a_row_has_the_same_bits_whether_its_width_is_compiled_or_not(n: int, centered: bool) -> None:
    gen = torch.Generator().manual_seed(0)
    x, weight, residual = (torch.randn(*size, generator=gen).bfloat16() for size in ((5, n), (n,), (5, n)))
    tensors = NormTensors(x, weight, residual=residual)
    plan = plan_forward(5, n, 2, H200, centered=centered, streams=2)
    wanted = WantedOutput(torch.bfloat16, torch.bfloat16)
    with cpu_triton(pretend=False):
        compiled, not_compiled = (
            norm_fwd(tensors, NormSpec(centered, 1e-6), wanted, plan=dataclasses.replace(plan, static_n=static))
            for static in (True, False)
        )
    for one, other in zip(compiled, not_compiled, strict=True):
        if one is None or other is None:
            assert one is other
        else:
            assert torch.equal(one, other)
