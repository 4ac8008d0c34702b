"""The fused form: conventions of the reference points, dtypes, gradients, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msda_cases import LEVELS, make_inputs
from torch.testing import assert_close

from retrograd.ops import ms_deform_attn, ms_deform_attn_fused
from retrograd.ops.msda.fused import locations_of
from retrograd.ops.msda.shapes import Levels

NAMES = ("value", "reference_points", "sampling_offsets", "attention_logits")


def fused_inputs(dtype: torch.dtype, device: str, *, boxes: bool, beside: torch.dtype | None = None) -> dict[str, Any]:
    """value, reference points [B, Q, L, 2 or 4], offsets [B, Q, H, L, P, 2] of some pixels, logits [B, Q, H, L P]."""
    case = make_inputs(dtype=torch.float64, device=device)
    generator = torch.Generator().manual_seed(5)
    shape = case["attention_weights"].shape
    reference = 0.2 + 0.6 * torch.rand(*shape[:2], len(LEVELS), 4 if boxes else 2, generator=generator).to(device)
    offsets = torch.randn(*shape, 2, generator=generator).to(device)
    made = dict(
        reference_points=reference,
        sampling_offsets=offsets,
        attention_logits=case["attention_weights"].flatten(3),
    )
    return dict(value=case["value"].to(dtype)) | {name: t.to(beside or dtype) for name, t in made.items()}


def by_hand(case: dict[str, Any], **options: Any) -> torch.Tensor:
    """Locations and weights as Deformable-DETR's module writes them."""
    reference, offsets = case["reference_points"], case["sampling_offsets"]
    points = offsets.shape[4]
    if reference.shape[-1] == 2:
        normalizer = torch.tensor(LEVELS, dtype=offsets.dtype, device=offsets.device).flip(1)
        locations = reference[:, :, None, :, None, :] + offsets / normalizer[None, None, None, :, None, :]
    else:
        locations = reference[:, :, None, :, None, :2] + offsets / points * reference[:, :, None, :, None, 2:] * 0.5
    weights = case["attention_logits"].softmax(-1).view(offsets.shape[:-1])
    return ms_deform_attn(case["value"], LEVELS, locations, weights, **options)


@pytest.mark.parametrize("boxes", [False, True], ids=["points", "boxes"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_as_the_module_of_deformable_detr(
    dtype: torch.dtype, boxes: bool, mode: dict[str, Any], impl: str, device: str
) -> None:
    case = fused_inputs(dtype, device, boxes=boxes)
    leaves = [case[name].requires_grad_() for name in NAMES]
    found = []
    for out in (
        ms_deform_attn_fused(leaves[0], LEVELS, *leaves[1:], **mode, impl=impl),
        by_hand(case, **mode, impl=impl),
    ):
        found.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
    assert torch.equal(found[0][0], found[1][0])  # the same operations in the same order
    for name, got, want in zip(NAMES, *(f[1:] for f in found), strict=True):
        assert_close(got, want, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("beside", [None, torch.float32], ids=["same", "float32-beside"])
@pytest.mark.parametrize("boxes", [False, True], ids=["points", "boxes"])
def test_16_bit_inputs_are_computed_in_float32(
    boxes: bool, beside: torch.dtype | None, dtype: torch.dtype, impl: str, device: str
) -> None:
    case = fused_inputs(dtype, device, boxes=boxes, beside=beside)
    wide = {name: tensor.float() for name, tensor in case.items()}
    found = []
    for inputs in (case, wide):
        leaves = [inputs[name].requires_grad_() for name in NAMES]
        out = ms_deform_attn_fused(leaves[0], LEVELS, *leaves[1:], impl=impl)
        found.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    for got, want, name in zip(*found, ("out", *NAMES), strict=True):
        assert got.dtype == case.get(name, case["value"]).dtype
        assert torch.equal(got, want.to(got.dtype)), name


@pytest.mark.parametrize("boxes", [False, True], ids=["points", "boxes"])
def test_points_per_level(boxes: bool, impl: str, device: str) -> None:
    """Levels are independent but for the softmax: one level's points repeated with half the weight change nothing."""
    case = fused_inputs(torch.float64, device, boxes=boxes)
    counts = [1, 2, 1, 2]
    offsets, logits = case["sampling_offsets"][..., :1, :], case["attention_logits"].unflatten(-1, (4, -1))[..., :1]
    want = ms_deform_attn_fused(case["value"], LEVELS, case["reference_points"], offsets, logits.flatten(3), impl=impl)
    repeats = torch.tensor(counts, device=device)
    split = logits.flatten(3).repeat_interleave(repeats, -1) - repeats.log().repeat_interleave(repeats)
    offsets = offsets.flatten(3, 4)
    if boxes:  # a box is divided among the points of its level
        offsets = offsets * repeats[:, None]
    packed = offsets.repeat_interleave(repeats, 3)
    got = ms_deform_attn_fused(
        case["value"], LEVELS, case["reference_points"], packed, split, points_per_level=counts, impl=impl
    )
    assert_close(got, want)


def test_empty_level_gives_no_nan(impl: str, device: str) -> None:
    levels = [(0, 4), (2, 3)]
    value = torch.ones(1, 6, 1, 2, device=device)
    reference = torch.full((1, 3, 2, 2), 0.5, device=device, requires_grad=True)
    offsets = torch.ones(1, 3, 1, 2, 2, 2, device=device, requires_grad=True)
    out = ms_deform_attn_fused(value, levels, reference, offsets, torch.zeros(1, 3, 1, 4, device=device), impl=impl)
    grads = torch.autograd.grad(out.sum(), (reference, offsets))
    assert all(g.isfinite().all() for g in (out, *grads))


GOOD = dict(
    value=torch.zeros(2, 84, 3, 8),
    spatial_shapes=[(7, 9), (7, 3)],
    reference_points=torch.zeros(2, 5, 2, 2),
    sampling_offsets=torch.zeros(2, 5, 3, 2, 4, 2),
    attention_logits=torch.zeros(2, 5, 3, 8),
)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(reference_points=torch.zeros(2, 5, 2)), ValueError, r"`reference_points` has shape \(2, 5, 2\).*\[B, Q, L, 2 or 4\]"),
        (dict(reference_points=torch.zeros(2, 5, 2, 3)), ValueError, r"`reference_points` has shape .*expected \[B, Q, L, 2\] for points or"),
        (dict(reference_points=torch.zeros(2, 5, 1, 2)), ValueError, r"`reference_points` has shape .*expected \(2, 5, 2, 2\)"),
        (dict(sampling_offsets=torch.zeros(2, 5, 3, 8, 2)), ValueError, r"`sampling_offsets` has shape .*with points_per_level"),
        (dict(attention_logits=torch.zeros(2, 5, 3, 2, 4)), ValueError, r"`attention_logits` has shape .*expected \(2, 5, 3, 8\)"),
        (dict(attention_logits=torch.zeros(2, 5, 3, 8).double()), TypeError, r"`attention_logits` has dtype torch\.float64"),
        (dict(points_per_level=[4, 4]), ValueError, r"`sampling_offsets` has shape"),
        (dict(padding_mode="reflect"), ValueError, r"`padding_mode` is 'reflect'"),
        (dict(impl="fast"), ValueError, r"`impl` is 'fast'"),
    ],
)  # fmt: skip
def test_wrong_arguments(change: dict[str, Any], error: type[Exception], message: str) -> None:
    ms_deform_attn_fused(**GOOD)
    with pytest.raises(error, match=message):
        ms_deform_attn_fused(**(GOOD | change))


@pytest.mark.parametrize("last", [2, 4], ids=["points", "boxes"])
def test_sizes_nobody_has_read_follow_the_offsets(last: int) -> None:
    """While a graph is traced the sizes may be a tensor on the host, with everything else on a GPU (here: meta)."""
    reference, offsets = torch.empty(2, 5, 2, last, device="meta"), torch.empty(2, 5, 3, 4, 2, device="meta")
    locations = locations_of(reference, offsets, Levels(None, torch.tensor([[3, 4], [1, 2]])), (2, 2))
    assert locations.device.type == "meta"
    assert locations.shape == offsets.shape
