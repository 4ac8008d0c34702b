"""What only the Triton kernels do: plans, grad_value in a fixed order, copies, launches that need no GPU."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from msda_cases import Case, arguments, assert_within_budget, make_inputs, run, truth

from retrograd.ops import ms_deform_attn
from retrograd.ops.msda import plan as plans
from retrograd.ops.msda.arguments import Levels, MsdaInputs, MsdaSpec, NeededGrads
from retrograd.ops.msda.shapes import flat
from retrograd.runtime.triton.gpu import Backend, Gpu

pytest.importorskip("triton")

GPUS = [Gpu(Backend.CUDA, 108, 80), Gpu(Backend.CUDA, 132), Gpu(Backend.HIP, 304, 0, lanes=64)]
SMALL = dict(levels=[(3, 4), (2, 2)], batch=2, queries=5, heads=2, points=2)


def small(device: str, **options: Any) -> Case:
    """A case that is computed quickly without a GPU."""
    return make_inputs(**(SMALL | options), device=device)


def backward(case: Case, points: int = 2, **options: Any) -> torch.Tensor:
    """grad_value of the deterministic mode, by the launcher."""
    from retrograd.ops.msda.triton import msda_bwd

    value, sizes, locations, weights = arguments(case)
    spec = MsdaSpec((points,) * len(sizes), deterministic=True)
    inputs = flat(MsdaInputs(value, Levels(tuple(sizes)), locations, weights))
    needed = NeededGrads(value=True, locations=False, weights=False)
    return msda_bwd(case["grad_out"], inputs, spec, needed, **options).value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fixed_order_is_right(dtype: torch.dtype, mode: dict[str, Any], device: str) -> None:
    case = small(device, dtype=dtype, align_corners=mode["align_corners"])
    got = run(case, **mode, impl="triton", deterministic=True)
    assert_within_budget(got, truth(case, **mode), case)


@pytest.mark.parametrize("where", ["one pixel", "one corner", "far outside"])
def test_fixed_order_of_any_distribution(where: str, device: str) -> None:
    """All points in one cell make one long list; out of reach there is none."""
    case = small(device, queries=17)
    case["sampling_locations"].fill_({"one pixel": 0.4, "one corner": 1.0, "far outside": 9.0}[where])
    got = run(case, impl="triton", deterministic=True)
    assert_within_budget(got, truth(case), case)
    assert got["value"].any() == (where != "far outside")


def test_fixed_order_does_not_depend_on_the_launch(device: str) -> None:
    """Images sorted together and the rest of the batch change no bit; tiles of pixels none but where lanes add up."""
    case = small(device, queries=23)
    want = backward(case)
    usual = plans.plan_ordered(8, 4, Gpu(Backend.CUDA, 132))
    for block_p in (1, 8, 64):
        got = backward(case, ordered=dataclasses.replace(usual, block_p=block_p))
        if device == "cuda":  # the last sum, over partial sums in several lanes, is laid out with the tile
            assert_within_budget({"value": got}, {"value": truth(case)["value"]}, case)
        else:
            assert torch.equal(got, want)
    names = ("value", "sampling_locations", "attention_weights", "grad_out")
    one = case | {name: case[name][1:] for name in names}
    assert torch.equal(backward(one), want[1:])
    assert torch.equal(backward(case | {name: case[name].flip(0) for name in names}).flip(0), want)


def test_order_of_the_list_counts(device: str) -> None:
    """The bits come from the order of the samples: with another order of queries they differ somewhere."""
    case = small(device, queries=61)
    case["sampling_locations"].fill_(0.4)
    turned = case | {n: case[n].flip(1) for n in ("sampling_locations", "attention_weights", "grad_out")}
    want, other = backward(case), backward(turned)
    assert not torch.equal(want, other)
    assert_within_budget({"value": other}, {"value": truth(case)["value"]}, case)


def test_images_are_sorted_in_parts(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from retrograd.ops.msda.triton import launch

    case = small(device)
    want = backward(case)
    asked = []
    stock = launch._gather_part
    monkeypatch.setattr(launch, "_gather_part", lambda *a: asked.append(len(a[1])) or stock(*a))
    monkeypatch.setattr(plans, "SORTED_AT_ONCE", 1)
    assert torch.equal(backward(case), want)
    assert asked == [1, 1]


@pytest.mark.parametrize("sizes", [[(2, 3)] * 9, [(3, 4), (2, 2)]], ids=["more-levels-than-arguments", "tensor"])
def test_levels_in_a_tensor(sizes: list[tuple[int, int]], device: str) -> None:
    case = small(device, levels=sizes, batch=1)
    got = run(case, impl="triton", deterministic=True)
    assert_within_budget(got, truth(case), case)
    shapes = torch.tensor(sizes, dtype=torch.int32, device=device).t().contiguous().t()
    again = run(case | {"spatial_shapes": shapes}, impl="triton", deterministic=True)
    assert all(torch.equal(again[name], got[name]) for name in got)


@pytest.mark.parametrize("beside", [torch.float32, torch.float16], ids=str)
def test_pairs_that_are_not_aligned(beside: torch.dtype, device: str) -> None:
    """x and y are read by one load, for which a tensor that starts at an odd number has to be copied."""
    case = small(device, dtype=torch.float16, beside=beside, batch=1)
    want = run(case, impl="triton", deterministic=True)
    p = case["sampling_locations"]
    odd = torch.cat([p.new_zeros(1), p.flatten()])[1:].view(p.shape)
    assert odd.is_contiguous()
    assert odd.data_ptr() % (2 * odd.element_size())
    got = run(case | {"sampling_locations": odd}, impl="triton", deterministic=True)
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_few_queries(
    rows: int, dtype: torch.dtype, mode: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All points of a row in one tile, levels apart in the backward: as a plan for few rows has it on NVIDIA."""
    chosen = plans.plan_samples

    def few(*args: Any, **options: Any) -> plans.SamplePlan:
        return dataclasses.replace(chosen(*args, **options), block_q=rows, num_warps=1, together=True, apart=True)

    monkeypatch.setattr(plans, "plan_forward", lambda channels, itemsize, *_: few(channels, itemsize, GPUS[1]))
    monkeypatch.setattr(plans, "plan_backward", lambda channels, itemsize, *_, dots: few(channels, itemsize, GPUS[1]))
    case = small(device, dtype=dtype, points=3, align_corners=mode["align_corners"])
    assert_within_budget(run(case, **mode, impl="triton"), truth(case, **mode), case)


@pytest.mark.parametrize("points", [(4, 4), (3, 1)], ids=str)
def test_levels_apart_give_the_same_bits(points: tuple[int, int], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Points of a level meet no other's; levels of unlike numbers of points stay together."""
    from retrograd.ops.msda.triton import msda_bwd

    value, sizes, _, _ = arguments(small(device))
    locations, weights = (
        torch.rand(2, 5, 2, sum(points), 2, device=device),
        torch.rand(2, 5, 2, sum(points), device=device),
    )
    inputs, grad_out = (
        MsdaInputs(value, Levels(tuple(sizes)), locations, weights),
        torch.rand(2, 5, 2, 8, device=device),
    )
    needed = NeededGrads(value=False, locations=True, weights=True)
    results = []
    for apart in (False, True):
        plan = dataclasses.replace(plans.plan_samples(8, 4, GPUS[1], dots=True), apart=apart)
        monkeypatch.setattr(plans, "plan_backward", lambda *_, plan=plan, **__: plan)
        results.append(msda_bwd(grad_out, inputs, MsdaSpec(points), needed))
    for together, apart in zip(results[0][1:3], results[1][1:3], strict=True):
        assert torch.equal(together, apart)


def test_few_rows_wait_for_memory_together() -> None:
    h200, amd = GPUS[1], GPUS[2]
    assert plans.plan_forward(32, 4, 16, 2400, h200).together
    assert not plans.plan_forward(32, 4, 16, 177784, h200).together
    assert not plans.plan_forward(32, 4, 128, 2400, h200).together  # too many numbers for a warp
    assert plans.plan_forward(32, 4, 16, 2400, amd) == plans.plan_samples(32, 4, amd)
    assert plans.plan_backward(32, 4, 2400, h200, dots=False).apart
    assert not plans.plan_backward(32, 4, 177784, h200, dots=False).apart
    assert not plans.plan_backward(32, 4, 2400, amd, dots=False).apart


@pytest.mark.parametrize("channels", [1, 3, 20])
def test_any_number_of_channels_and_points(channels: int, device: str) -> None:
    """More points than channels: results are stored in several runs; the last columns of a tile are masked."""
    case = small(device, channels=channels, points=5, batch=1)
    for deterministic in (False, True):
        assert_within_budget(run(case, impl="triton", deterministic=deterministic), truth(case), case)


def test_corners_outside_are_not_multiplied_by_zero(device: str) -> None:
    """An infinite pixel of the next level must not show, though its address follows."""
    case = small(device, levels=[(2, 2), (1, 4)], batch=1)
    case["sampling_locations"][:, :, :, 0] = 0.99
    case["sampling_locations"][:, :, :, 1] = -4.0
    case["value"][:, 4:] = math.inf
    got = run(case, impl="triton")
    assert all(tensor.isfinite().all() for tensor in got.values())


def test_gradient_that_is_not_dense(device: str) -> None:
    case = small(device)
    want = run(case, impl="triton", deterministic=True)
    g = case["grad_out"]
    laid = case | {"grad_out": g.transpose(1, 3).contiguous().transpose(1, 3)}
    got = run(laid, impl="triton", deterministic=True)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_float64_is_refused(device: str) -> None:
    with pytest.raises(TypeError, match=r"`value` has dtype torch\.float64, .*use impl='torch'"):
        ms_deform_attn(*arguments(small(device, dtype=torch.float64)), impl="triton")


def test_none_takes_triton_on_a_gpu_only() -> None:
    from retrograd.ops.msda.dispatch import FAMILY
    from retrograd.ops.types import Impl

    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert FAMILY.choose(None, torch.bfloat16, gpu) is Impl.TRITON
    assert FAMILY.choose(None, torch.float64, gpu) is Impl.TORCH
    assert FAMILY.choose(None, torch.float32, cpu) is not Impl.TRITON


@pytest.mark.outside
def test_triton_on_cpu_says_what_it_needs() -> None:
    t = torch.zeros
    with pytest.raises(RuntimeError, match=r"impl='triton' on a CPU tensor needs `with retrograd.cpu_triton\(\):`"):
        ms_deform_attn(t(1, 4, 1, 4), [(2, 2)], t(1, 1, 1, 1, 1, 2), t(1, 1, 1, 1, 1), impl="triton")


@pytest.mark.parametrize("gpu", GPUS, ids=lambda g: f"{g.backend.value}-{g.arch}")
def test_plans_are_launchable(gpu: Gpu) -> None:
    for channels in (1, 2, 3, 4, 8, 16, 30, 32, 64, 100, 128, 256, 1024):
        for itemsize in (2, 4):
            for dots in (False, True):
                tile = plans.plan_samples(channels, itemsize, gpu, dots=dots)
                assert tile == plans.plan_samples.__wrapped__(channels, itemsize, gpu, dots=dots)
                assert tile.block_c >= channels
                assert tile.block_q & (tile.block_q - 1) == 0
                assert tile.num_warps * (64 if gpu.backend is Backend.HIP else 32) <= 1024
                with pytest.raises(dataclasses.FrozenInstanceError):
                    tile.block_q = 3
    # What the order of a sum depends on is the same for any dtype and GPU.
    assert len({plans.plan_ordered(64, itemsize, gpu).entries for itemsize in (2, 4) for gpu in GPUS}) == 1


@pytest.mark.parametrize("points", [(4, 4), (3, 0, 5, 1), (0, 0), (40,), (8, 8, 8), (1,)], ids=str)
@pytest.mark.parametrize("width", [1, 4, 8, 32])
def test_segments(points: tuple[int, ...], width: int) -> None:
    """Every point once, every level begun once and in order, never more than fits between two stores."""
    waiting, begun, counts = 0, [], [0] * len(points)
    for level, count, stored in plans.segments(points, width):
        if level >= 0:
            begun.append(level)
        counts[begun[-1]] += count
        waiting += count
        assert waiting <= width
        if stored:
            assert stored == waiting
            waiting = 0
    assert not waiting
    assert begun == list(range(len(points)))
    assert counts == list(points)
