"""Values and gradients: against torch's grid_sample in float64, and on the rounding floor in every dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msda_cases import (
    INPUTS,
    LEVELS,
    SAME_BITS,
    Case,
    arguments,
    assert_within_budget,
    defined,
    make_inputs,
    run,
    truth,
)
from torch.testing import assert_close

from retrograd.ops import ms_deform_attn
from retrograd.ops.msda import torch_impl

HALVES = [torch.bfloat16, torch.float16]


def by_grid_sample(case: Case, padding_mode: str, align_corners: bool) -> dict[str, torch.Tensor]:
    """Output and gradients by way of torch's own sampling, as other libraries do it without kernels."""
    value, levels, locations, weights = (
        t.detach().requires_grad_() if isinstance(t, torch.Tensor) else t for t in arguments(case)
    )
    batch, _, heads, channels = value.shape
    _, queries, _, _, points, _ = locations.shape
    parts = []
    for level, (image, (h, w)) in enumerate(zip(value.split([h * w for h, w in levels], 1), levels, strict=True)):
        sampled = torch.nn.functional.grid_sample(
            image.permute(0, 2, 3, 1).reshape(batch * heads, channels, h, w),
            (2 * locations[:, :, :, level] - 1).transpose(1, 2).reshape(batch * heads, queries, points, 2),
            padding_mode=padding_mode,
            align_corners=align_corners,
        )
        parts.append(sampled.view(batch, heads, channels, queries, points).permute(0, 3, 1, 4, 2))
    out = (torch.stack(parts, 3) * weights[..., None]).sum((3, 4))
    grads = torch.autograd.grad(out, (value, locations, weights), case["grad_out"])
    return {"out": out.detach(), **dict(zip(INPUTS, grads, strict=True))}


def test_equals_grid_sample_in_float64(mode: dict[str, Any], impl: str, device: str) -> None:
    case = make_inputs(dtype=torch.float64, device=device, align_corners=mode["align_corners"])
    got, want = run(case, **mode, impl=impl), by_grid_sample(case, **mode)
    reference = defined(case, **mode)
    for name, tensor in want.items():
        assert_close(got[name], tensor, msg=lambda text, name=name: f"{name}: {text}")
        assert_close(reference[name], tensor, msg=lambda text, name=name: f"reference, {name}: {text}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("beside", [None, torch.float32], ids=["same", "float32-beside"])
def test_within_budget(
    beside: torch.dtype | None, dtype: torch.dtype, mode: dict[str, Any], impl: str, device: str
) -> None:
    if beside is not None and dtype not in HALVES:
        pytest.skip("float32 beside float32 is the same, beside float64 an error")
    case = make_inputs(dtype=dtype, device=device, beside=beside, align_corners=mode["align_corners"])
    got = run(case, **mode, impl=impl)
    assert {name: got[name].dtype for name in INPUTS} == {name: case[name].dtype for name in INPUTS}
    assert got["out"].dtype == dtype
    assert_within_budget(got, truth(case, **mode), case)


@pytest.mark.parametrize("name", ["sampling_locations", "attention_weights"])
def test_one_tensor_in_float32(name: str, impl: str, device: str) -> None:
    case = make_inputs(dtype=torch.bfloat16, device=device)
    case[name] = case[name].float()
    got = run(case, impl=impl)
    assert {n: got[n].dtype for n in INPUTS} == {n: case[n].dtype for n in INPUTS}
    assert_within_budget(got, truth(case), case)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_16_bit_results_lie_on_the_floor(dtype: torch.dtype, mode: dict[str, Any], impl: str, device: str) -> None:
    """The truth rounded once is the bar; 10 % for the float32 arithmetic inside, whose unit is 2^-13 or less of it."""
    options = dict(queries=64, channels=32, align_corners=mode["align_corners"])
    case = make_inputs(dtype=dtype, device=device, **options)
    got, want = run(case, **mode, impl=impl), truth(case, **mode)
    for name, tensor in got.items():
        value = want[name][0]
        floor = (value.to(dtype).double() - value).norm()
        assert (tensor.double() - value).norm() <= 1.1 * floor, name


def test_blocks_of_queries_make_no_difference(impl: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_inputs(device=device)
    whole = run(case, impl=impl)
    monkeypatch.setattr(torch_impl, "_BLOCK_ELEMENTS", 1000)
    parts = run(case, impl=impl)
    for name in ("out", "sampling_locations", "attention_weights"):
        assert torch.equal(parts[name], whole[name]), name
    assert_within_budget(parts, truth(case), case)  # grad_value is added in another order


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 0, 0]], ids=str)
def test_points_per_level(counts: list[int], mode: dict[str, Any], impl: str, device: str) -> None:
    case = make_inputs(points=5, device=device, align_corners=mode["align_corners"])
    chosen = [level * 5 + point for level, count in enumerate(counts) for point in range(count)]
    packed = case | {
        name: case[name].flatten(3, 4)[:, :, :, chosen] for name in ("sampling_locations", "attention_weights")
    }
    got = run(packed, points_per_level=counts, **mode, impl=impl)
    # The others weigh nothing, but for the value they are still there.
    keep = torch.zeros(20, device=device)
    keep[chosen] = 1
    full = case | {"attention_weights": case["attention_weights"] * keep.view(4, 5)}
    want = run(full, **mode, impl=impl)
    assert_close(got["out"], want["out"])
    assert_close(got["value"], want["value"])
    for name in ("sampling_locations", "attention_weights"):
        assert_close(got[name], want[name].flatten(3, 4)[:, :, :, chosen])


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("layout", ["permuted", "sliced", "expanded"])
def test_strides(layout: str, name: str, impl: str, device: str) -> None:
    """A dense tensor of permuted strides is where a copy made inside would take the gradient with it."""
    case = make_inputs(device=device)
    tensor = case[name]
    if layout == "permuted":
        laid = tensor.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "sliced":
        laid = torch.stack([tensor, tensor.new_full(tensor.shape, torch.nan)], dim=-1)[..., 0]
    else:
        case[name] = tensor[:1].expand_as(tensor).contiguous()
        laid = tensor[:1].expand_as(tensor)
    assert not laid.is_contiguous()
    want, got = run(case, impl=impl, **SAME_BITS), run(case | {name: laid}, impl=impl, **SAME_BITS)
    for result, expected in want.items():
        assert torch.equal(got[result], expected), result
        assert expected.any(), result


def test_strides_of_the_gradient(impl: str, device: str) -> None:
    case = make_inputs(device=device)
    g = case["grad_out"]
    want = run(case, impl=impl, **SAME_BITS)
    for laid in (g.transpose(1, 3).contiguous().transpose(1, 3), g.repeat_interleave(2, -1)[..., ::2]):
        got = run(case | {"grad_out": laid}, impl=impl, **SAME_BITS)
        assert all(torch.equal(got[name], want[name]) for name in want)
    ones = torch.ones((), device=device).expand_as(g)
    got, want = (
        run(case | {"grad_out": ones}, impl=impl, **SAME_BITS),
        run(case | {"grad_out": ones.contiguous()}, impl=impl, **SAME_BITS),
    )
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_negated_views(impl: str, device: str) -> None:
    """z.conj().imag is in memory with the other sign."""
    case = make_inputs(queries=3, device=device)
    names = (*INPUTS, "grad_out")
    want = run(case, impl=impl, **SAME_BITS)
    views = {name: torch._neg_view(-case[name]) for name in names}
    assert all(view.is_neg() for view in views.values())
    for name in names:
        got = run(case | {name: views[name]}, impl=impl, **SAME_BITS)
        assert all(torch.equal(got[result], want[result]) for result in want), name


@pytest.mark.parametrize("size", ["batch", "queries", "heads", "points", "channels"])
def test_nothing_at_all(size: str, mode: dict[str, Any], impl: str, device: str) -> None:
    case = make_inputs(device=device, **{size: 0})
    got = run(case, **mode, impl=impl)
    assert got["out"].shape == case["grad_out"].shape
    for name in INPUTS:
        assert got[name].shape == case[name].shape
    assert not any(tensor.any() for tensor in got.values())
    assert torch.equal(defined(case, **mode)["out"], got["out"])


@pytest.mark.parametrize("levels", [[], [(0, 0)], [(0, 5), (3, 0)], [(0, 3), (2, 2)]], ids=str)
def test_empty_levels(levels: list[tuple[int, int]], mode: dict[str, Any], impl: str, device: str) -> None:
    case = make_inputs(levels, device=device, align_corners=mode["align_corners"])
    got = run(case, **mode, impl=impl)
    assert_within_budget(got, truth(case, **mode), case)
    empty = [i for i, (h, w) in enumerate(levels) if not h * w]
    assert not got["sampling_locations"][:, :, :, empty].any()
    assert not got["attention_weights"][:, :, :, empty].any()


def test_shapes_in_every_form(impl: str, device: str) -> None:
    case = make_inputs(device=device)
    wide, narrow = (torch.tensor(LEVELS, dtype=dtype, device=device) for dtype in (torch.int64, torch.int32))
    on_device = (wide, narrow, wide.t().contiguous().t())
    on_host = (torch.tensor(LEVELS), tuple(LEVELS), [list(p) for p in LEVELS], [torch.Size(p) for p in LEVELS])
    # A fixed order needs the sizes: where the host has to wait for them another one is taken on a GPU.
    for forms in (on_device, on_host):
        first, *others = [run(case | {"spatial_shapes": form}, impl=impl, **SAME_BITS) for form in forms]
        assert_within_budget(first, truth(case), case)
        assert all(torch.equal(got[name], first[name]) for got in others for name in first)


def test_the_same_bits_every_time(impl: str, device: str) -> None:
    case = make_inputs(queries=257, device=device)
    want = run(case, impl=impl, deterministic=True)
    for _ in range(5):
        got = run(case, impl=impl, deterministic=True)
        assert all(torch.equal(got[name], want[name]) for name in want)


def test_autocast_changes_nothing(impl: str, device: str) -> None:
    case = make_inputs(dtype=torch.bfloat16, beside=torch.float32, device=device)
    want = run(case, impl=impl, **SAME_BITS)
    with torch.autocast(device, dtype=torch.float16):
        got = run(case, impl=impl, **SAME_BITS)
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name


def test_queries_do_not_see_each_other(impl: str, device: str) -> None:
    case = make_inputs(device=device)
    want = ms_deform_attn(*arguments(case), impl=impl)
    one = [t[:, 3:4] if i > 1 else t for i, t in enumerate(arguments(case))]
    assert torch.equal(ms_deform_attn(*one, impl=impl), want[:, 3:4])
