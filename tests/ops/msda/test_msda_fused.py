"""The fused form: conventions of the reference points, dtypes, gradients, what is kept in memory, errors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from msda_cases import LEVELS, SAME_BITS, Case, assert_within_budget, make_inputs, truth
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from retrograd.ops import ms_deform_attn, ms_deform_attn_fused
from retrograd.ops.msda import autograd, dispatch, fused
from retrograd.ops.msda import plan as plans
from retrograd.ops.msda.arguments import Levels, MsdaInputs, MsdaSpec
from retrograd.ops.msda.dispatch import functions
from retrograd.ops.msda.fused import locations_of
from retrograd.ops.types import Impl
from retrograd.runtime.triton.gpu import Backend, Gpu, next_power_of_2

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
        # Divided by a number on a GPU, a tensor is multiplied by its reciprocal.
        count = torch.tensor(float(points), dtype=offsets.dtype, device=offsets.device)
        locations = reference[:, :, None, :, None, :2] + offsets / count * reference[:, :, None, :, None, 2:] * 0.5
    weights = case["attention_logits"].softmax(-1).view(offsets.shape[:-1])
    return ms_deform_attn(case["value"], LEVELS, locations, weights, **options)


@pytest.mark.parametrize("boxes", [False, True], ids=["points", "boxes"])
@pytest.mark.parametrize("rows", [1, 2])
def test_few_queries_by_triton(
    rows: int, boxes: bool, mode: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All points of a row in one tile, as a plan for few rows has it on NVIDIA."""
    case = fused_inputs(torch.float32, device, boxes=boxes)
    block_c = next_power_of_2(case["value"].shape[-1])
    monkeypatch.setattr(plans, "plan_forward", lambda *_: plans.SamplePlan(rows, block_c, 1, together=True))
    got = ms_deform_attn_fused(case["value"], LEVELS, *(case[name] for name in NAMES[1:]), **mode, impl="triton")
    assert_close(got, by_hand(case, **mode, impl="torch"))


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
    if not functions(Impl(impl)).fused:
        assert torch.equal(found[0][0], found[1][0])  # the same operations in the same order
    else:
        assert_close(found[0][0], found[1][0])
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
        if name == "out" and functions(Impl(impl)).fused:
            continue  # the tile decides in which order a kernel adds up a softmax; see test_within_budget_of_the_definition
        assert got.dtype == case.get(name, case["value"]).dtype
        assert torch.equal(got, want.to(got.dtype)), name


@pytest.mark.parametrize("boxes", [False, True], ids=["points", "boxes"])
def test_points_per_level_in_float64(boxes: bool, impl: str, device: str) -> None:
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
    value = torch.ones(1, 6, 1, 4, device=device)
    reference = torch.full((1, 3, 2, 2), 0.5, device=device, requires_grad=True)
    offsets = torch.ones(1, 3, 1, 2, 2, 2, device=device, requires_grad=True)
    out = ms_deform_attn_fused(value, levels, reference, offsets, torch.zeros(1, 3, 1, 4, device=device), impl=impl)
    grads = torch.autograd.grad(out.sum(), (reference, offsets))
    assert all(g.isfinite().all() for g in (out, *grads))


def placed(
    levels: Sequence[tuple[int, int]],
    counts: Sequence[int],
    *,
    boxes: bool,
    device: str,
    dtype: torch.dtype = torch.float32,
    beside: torch.dtype | None = None,
    **options: Any,
) -> Case:
    """Inputs whose points lie where those of `make_inputs` do, with `counts` points of each level."""
    case = make_inputs(levels, torch.float64, device, points=max(counts), **options)
    kept = torch.tensor([p < n for n in counts for p in range(max(counts))], device=device)
    locations = case.pop("sampling_locations").flatten(3, 4)[:, :, :, kept]
    logits = 2 * case.pop("attention_weights").flatten(3)[..., kept]
    generator = torch.Generator().manual_seed(5)
    shape = (*locations.shape[:2], len(levels), 4 if boxes else 2)
    reference = (0.2 + 0.6 * torch.rand(shape, generator=generator, dtype=torch.float64)).to(device)
    offsets = []
    for level, part in enumerate(locations.split(list(counts), dim=3)):
        away = part - reference[:, :, None, level, None, :2]
        if boxes:
            offsets.append(away * 2 * counts[level] / reference[:, :, None, level, None, 2:])
        else:
            h, w = levels[level]
            offsets.append(away * torch.tensor([max(w, 1), max(h, 1)], device=device))
    tensors = dict(reference_points=reference, sampling_offsets=torch.cat(offsets, dim=3), attention_logits=logits)
    case |= {name: case[name].to(dtype) for name in ("value", "grad_out")}
    return case | {name: tensor.to(beside or dtype) for name, tensor in tensors.items()}


def run(case: Case, counts: Sequence[int], *, frozen: Sequence[str] = (), **options: Any) -> dict[str, torch.Tensor]:
    """Output and gradients by name; arguments named in `frozen` require no gradient."""
    leaves = {name: case[name].detach().requires_grad_(name not in frozen) for name in NAMES}
    value, *rest = leaves.values()
    out = ms_deform_attn_fused(value, case["spatial_shapes"], *rest, points_per_level=counts, **options)
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    grads = torch.autograd.grad(out, list(wanted.values()), case["grad_out"])
    return {"out": out.detach(), **dict(zip(wanted, grads, strict=True))}


def sampled_by_hand(case: Case, counts: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Locations and weights as the docstring defines them, level by level."""
    reference, offsets = case["reference_points"].to(dtype), case["sampling_offsets"].to(dtype)
    parts = []
    for level, part in enumerate(offsets.split(list(counts), dim=3)):
        near = reference[:, :, None, level, None]  # [B, Q, 1, 1, 2 or 4]
        if near.shape[-1] == 2:
            h, w = case["spatial_shapes"][level]
            parts.append(near + part / torch.tensor([max(w, 1), max(h, 1)], dtype=dtype, device=part.device))
        else:
            count = torch.tensor(float(counts[level]), dtype=dtype, device=part.device)  # see `by_hand`
            parts.append(near[..., :2] + part / count * near[..., 2:] * 0.5)
    return torch.cat(parts, dim=3), case["attention_logits"].to(dtype).softmax(-1)


def fused_truth(case: Case, counts: Sequence[int], **options: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """`truth` of the plain op where float32 puts the points, and from there to the inputs by autograd in float64."""
    exact = {name: case[name].detach().double().requires_grad_() for name in NAMES}
    locations, weights = sampled_by_hand(case | exact, counts, torch.float64)
    low, _ = sampled_by_hand(case, counts, torch.float32)
    plain = case | {"sampling_locations": low, "attention_weights": weights.detach()}
    found = truth(plain, **options, points_per_level=counts)
    onto, about = found["sampling_locations"], found["attention_weights"]
    grads = torch.autograd.grad((locations, weights), list(exact.values())[1:], (onto[0], about[0]))
    # Every coefficient of a location's derivative is positive once the inputs are.
    size = {name: tensor.detach().abs().requires_grad_() for name, tensor in exact.items()}
    reach, _ = sampled_by_hand(case | size, counts, torch.float64)
    sizes = torch.autograd.grad(reach, [size["reference_points"], size["sampling_offsets"]], onto[1])
    # w (g - sum of w g)
    weights = weights.detach()
    spread = weights * (about[1] + (weights * about[1]).sum(-1, keepdim=True))
    return {name: found[name] for name in ("out", "value")} | dict(
        zip(NAMES[1:], zip(grads, (*sizes, spread), strict=True), strict=True)
    )


def steps_of_the_fused_form(case: Case) -> dict[str, int]:
    """Roundings that the plain op does not have.

    A weight is exp(l - m) / sum. The difference and its scaling to a power of 2 are rounded once each, which counts
    as often as the difference is large, in the sum less than once for each of its K terms: x exp(-x) < 1. exp itself
    is off by 2 ulp, that is 4, above and below; the sum takes K, its reciprocal and the product with it one each.
    From locations to offsets and references there are at most 4 products and quotients, and a sum over heads and
    points. From weights to logits there are a sum of K products and 3 more.
    """
    logits = case["attention_logits"].double()
    points = logits.shape[-1]
    apart = (logits.amax(-1) - logits.amin(-1)).max().item() if logits.numel() else 0
    weight = 2 * math.ceil(apart) + 2 * points + 10
    own = {
        "reference_points": 4 + logits.shape[2] * points,
        "sampling_offsets": 4,
        "attention_logits": 4 + points + weight,  # w stands there twice
    }
    return {name: weight + own.get(name, 0) for name in ("out", *NAMES)}


UNEVEN = ([(7, 9), (0, 4), (5, 4), (1, 1)], [3, 1, 2, 1])
EVEN = (LEVELS, [2, 2, 2, 2])
MANY = ([(3, 4), (4, 3)], [33, 2])  # more logits than the kernel has columns at once
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize("boxes", [False, True], ids=["points", "boxes"])
@pytest.mark.parametrize(
    ("shape", "dtype", "beside"),
    [
        pytest.param(UNEVEN, F32, None, id="uneven-float"),
        pytest.param(EVEN, BF16, F32, id="even-bfloat16-float"),
        pytest.param(UNEVEN, F16, None, id="uneven-half"),
        pytest.param(MANY, F32, None, id="many-float"),
    ],
)
def test_within_budget_of_the_definition(
    shape: tuple[Any, ...],
    dtype: torch.dtype,
    beside: torch.dtype | None,
    boxes: bool,
    mode: dict[str, Any],
    impl: str,
    device: str,
) -> None:
    levels, counts = shape
    aligned = mode["align_corners"]
    case = placed(
        levels, counts, boxes=boxes, device=device, dtype=dtype, beside=beside, align_corners=aligned, queries=5
    )
    want = fused_truth(case, counts, **mode)
    counted = case | {"attention_weights": case["attention_logits"]}
    got = run(case, counts, **mode, impl=impl)
    assert_within_budget(got, want, counted, steps_of_the_fused_form(case))


@pytest.mark.parametrize("boxes", [False, True], ids=["points", "boxes"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_heads_in_turn(dtype: torch.dtype, boxes: bool, device: str) -> None:
    """More points of a query than a program of the way back has at once: heads in turn, of the last turn some."""
    pytest.importorskip("retrograd.ops.msda.triton")
    levels, counts = MANY
    case = placed(levels, counts, boxes=boxes, device=device, dtype=dtype, beside=F32, heads=11, queries=3, channels=4)
    assert plans.plan_points(11, sum(counts), Gpu(Backend.CUDA, 132)).block_h < 11
    counted = case | {"attention_weights": case["attention_logits"]}
    got = run(case, counts, impl="triton")
    assert_within_budget(got, fused_truth(case, counts), counted, steps_of_the_fused_form(case))


@pytest.mark.parametrize("boxes", [False, True], ids=["points", "boxes"])
@pytest.mark.parametrize("in_memory", [False, True], ids=["known", "in-memory"])
def test_made_locations_are_those_of_the_composition(in_memory: bool, boxes: bool, device: str) -> None:
    """Bits of locations and, but for the last ones, of weights; what is not dense or aligned is copied."""
    triton = pytest.importorskip("retrograd.ops.msda.triton")
    levels, counts = UNEVEN
    case, spec = placed(levels, counts, boxes=boxes, device=device, queries=5), MsdaSpec(tuple(counts))
    value, reference, offsets, logits = (case[name] for name in NAMES)
    known = Levels(None, torch.tensor(levels, device=device)) if in_memory else Levels(tuple(levels))
    want = fused.sampled(MsdaInputs(value, known, offsets, logits, reference), spec)
    odd = [torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for t in (offsets, logits, reference)]
    turned = [t.transpose(0, -1).contiguous().transpose(0, -1) for t in (offsets, logits, reference)]
    for tensors in ((offsets, logits, reference), odd, turned):
        got = triton.sampled(MsdaInputs(value, known, *tensors), spec)
        # Where a level has no pixel nobody asks where its points lie, and sizes may come as none at all.
        seen = torch.tensor([h * w > 0 for (h, w), n in zip(levels, counts, strict=True) for _ in range(n)])
        assert torch.equal(got.locations[:, :, :, seen], want.locations[:, :, :, seen])
        assert_close(got.weights, want.weights)


SMALL = ([(3, 4), (2, 3)], [2, 1])


def small(device: str, *, boxes: bool = False, **options: Any) -> Case:
    """A case that is computed quickly without a GPU, with rows of 16 bytes for CUDA C++."""
    sizes = dict(batch=2, queries=3, heads=2, channels=16 // options.get("dtype", torch.float32).itemsize)
    return placed(*SMALL, boxes=boxes, device=device, **(sizes | options))


def about_borders(size: int, near: torch.Tensor, parts: int, side: torch.Tensor | None) -> torch.Tensor:
    """[N, R] float32 offsets that put points at and next to borders of cells, seen from each of R references."""
    borders = (torch.arange(-1, size + 1) + 0.5).double()[:, None] / size  # x = 0, 1, ... and outside
    away = borders - near.double()
    middle = (away * size if side is None else away * 2 * parts / side.double()).float()  # [size + 2, R]
    around = [middle]
    for towards in (math.inf, -math.inf):
        other = middle
        for _ in range(4):
            other = torch.nextafter(other, torch.full_like(other, towards))
            around.append(other)
    return torch.cat(around)


@pytest.mark.parametrize("boxes", [False, True], ids=["points", "boxes"])
def test_cells_are_those_of_the_composition(boxes: bool, mode: dict[str, Any], impl: str, device: str) -> None:
    """A weight of 1 among weights of 0 is 1 in every softmax, so that bits of outputs tell bits of locations."""
    levels, points = [(7, 9), (5, 3)], 2
    generator = torch.Generator().manual_seed(3)
    near = torch.rand(16, generator=generator)
    side = 0.1 + torch.rand(16, generator=generator) if boxes else None
    rows = []
    for h, w in levels:
        x, y = (about_borders(size, near, points, side) for size in (w, h))
        rows.append(torch.stack([x, y[torch.arange(len(x)) % len(y)]], dim=-1))  # [N of the level, R, 2]
    rows = [part.repeat(math.ceil(max(map(len, rows)) / len(part)), 1, 1)[: max(map(len, rows))] for part in rows]
    offsets = torch.stack(rows, dim=2).flatten(0, 1)  # [Q, L, 2], one point of each level
    queries = len(offsets)
    offsets = offsets[None, :, None, :, None].expand(1, queries, 1, 2, points, 2).contiguous()
    reference = torch.stack([near, near] if side is None else [near, near, side, side], dim=-1)
    reference = reference.repeat(queries // 16, 1)[None, :, None].expand(-1, -1, 2, -1)
    logits = torch.full((1, queries, 1, 2 * points), -math.inf)
    logits.view(-1, 2 * points).scatter_(1, (torch.arange(queries) % (2 * points))[:, None], 0.0)
    locations = locations_of(reference, offsets.flatten(3, 4), Levels(tuple(levels)), (points,) * 2)
    x = locations[0, :, 0, 0, 0] * 9 - 0.5
    for distance in (x - x.round(), x.round() - x):  # on a border, and as near to it as float32 gets on both sides
        assert ((distance >= 0) & (distance <= 9 * torch.finfo(torch.float32).eps)).sum() > queries // 8
    value = torch.randn(1, 7 * 9 + 5 * 3, 1, 4, generator=generator)
    value, reference, offsets, logits, locations = (
        t.to(device) for t in (value, reference, offsets, logits, locations)
    )
    got = ms_deform_attn_fused(value, levels, reference, offsets, logits, **mode, impl=impl)
    weights = logits.softmax(-1)
    assert ((weights == 0) | (weights == 1)).all()
    each = (points,) * 2
    assert torch.equal(got, ms_deform_attn(value, levels, locations, weights, points_per_level=each, **mode, impl=impl))


@pytest.mark.parametrize("boxes", [False, True], ids=["points", "boxes"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_only_the_inputs_are_saved(dtype: torch.dtype, boxes: bool, impl: str, device: str) -> None:
    case = small(device, boxes=boxes, dtype=dtype)
    leaves = [case[name].requires_grad_() for name in NAMES]
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ms_deform_attn_fused(leaves[0], SMALL[0], *leaves[1:], points_per_level=SMALL[1], impl=impl)
    assert sorted(t.data_ptr() for t in saved) == sorted(t.data_ptr() for t in leaves)
    assert sum(t.nbytes for t in saved) == sum(t.nbytes for t in leaves)


def test_without_gradients_nothing_is_kept(impl: str, device: str) -> None:
    case = small(device)
    out = run(case, SMALL[1], impl=impl)["out"]
    value, *rest = (case[name] for name in NAMES)
    again = ms_deform_attn_fused(value, SMALL[0], *rest, points_per_level=SMALL[1], impl=impl)
    assert again.grad_fn is None
    assert torch.equal(again, out)


def test_the_kernel_needs_no_locations(
    device: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Neither with gradients nor without; the choice by sizes takes the kernel too."""
    pytest.importorskip("retrograd.ops.msda.triton")
    case = small(device)
    want = run(case, SMALL[1], impl="triton")["out"]

    def refuse(*_: Any) -> Any:
        raise AssertionError("locations were made")

    stock = dispatch.functions
    monkeypatch.setattr(dispatch, "functions", lambda impl: stock(impl)._replace(sampled=refuse))
    for cached in (dispatch.resolve, dispatch._by_sizes):  # nor may what refuses be kept for the tests that follow
        cached.cache_clear()
        request.addfinalizer(cached.cache_clear)
    value, *rest = (case[name] for name in NAMES)
    for needed in (False, True):
        value = value.detach().requires_grad_(needed)
        out = ms_deform_attn_fused(value, SMALL[0], *rest, points_per_level=SMALL[1], impl="triton")
        assert torch.equal(out, want)
    with pytest.raises(AssertionError, match="locations were made"):
        ms_deform_attn_fused(value, SMALL[0], *rest, points_per_level=SMALL[1], impl="torch")
    assert dispatch._by_sizes().fused


def test_strides_and_sizes_in_a_tensor(device: str) -> None:
    """What the launcher is given: copies of what is not dense, pairs that one load can read, sizes in memory."""
    triton = pytest.importorskip("retrograd.ops.msda.triton")
    case, spec = small(device, boxes=True), MsdaSpec(tuple(SMALL[1]))
    given = [case[name] for name in NAMES]

    def launched(levels: Levels, value: torch.Tensor, references: torch.Tensor, *beside: torch.Tensor) -> torch.Tensor:
        return triton.msda_fwd(MsdaInputs(value, levels, *beside, references), spec)

    want = launched(Levels(tuple(SMALL[0])), *given)
    in_memory = Levels(None, torch.tensor(SMALL[0], device=device))
    odd = [torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for t in given[1:3]]
    turned = [t.transpose(0, -1).contiguous().transpose(0, -1) for t in given]
    for value, *rest in (given, turned, [given[0], *odd, given[3]]):
        assert torch.equal(launched(in_memory, value, *rest), want)


FROZEN = [c for n in range(4) for c in itertools.combinations(NAMES, n)]


@pytest.mark.parametrize("boxes", [False, True], ids=["points", "boxes"])
@pytest.mark.parametrize("frozen", FROZEN, ids=lambda f: "+".join(f) or "none")
def test_subsets_of_the_inputs(
    frozen: tuple[str, ...], boxes: bool, impl: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = small(device, boxes=boxes)
    want = run(case, SMALL[1], impl=impl, **SAME_BITS)
    asked = []
    stock = autograd.MsdaFunction.backward

    def spy(ctx: Any, grad_out: torch.Tensor) -> Any:
        backward = ctx.call.functions.backward

        def recorded(*args: Any) -> Any:
            asked.append(args[-1][:3])
            return backward(*args)

        ctx.call = ctx.call._replace(functions=ctx.call.functions._replace(backward=recorded))
        grads = stock(ctx, grad_out)
        asked.append(tuple(g is not None for g in grads))
        return grads

    monkeypatch.setattr(autograd.MsdaFunction, "backward", staticmethod(spy))
    got = run(case, SMALL[1], frozen=frozen, impl=impl, **SAME_BITS)
    value, reference, offsets, logits = (name not in frozen for name in NAMES)
    assert asked == [(value, reference or offsets, logits), (value, offsets, logits, reference, *[False] * 3)]
    if device == "cuda":  # what nobody needs is compiled away, and what is left contracts other products
        counted = case | {"attention_weights": case["attention_logits"]}
        assert_within_budget(got, fused_truth(case, SMALL[1]), counted, steps_of_the_fused_form(case))
    else:
        assert all(torch.equal(got[name], want[name]) for name in got)


@pytest.mark.parametrize("boxes", [False, True], ids=["points", "boxes"])
def test_twice_by_gradcheck_in_float64(boxes: bool, mode: dict[str, Any], impl: str, device: str) -> None:
    aligned = mode["align_corners"]
    sizes = dict(batch=1, queries=1, heads=2, channels=1, align_corners=aligned)
    case = small(device, boxes=boxes, dtype=torch.float64, **sizes)

    def call(value: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return ms_deform_attn_fused(value, SMALL[0], *rest, points_per_level=SMALL[1], **mode, impl=impl)

    leaves = [case[name].requires_grad_() for name in NAMES]
    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


def test_create_graph_counts_each_input_once_in_float64(impl: str, device: str) -> None:
    """Where logits are computed from offsets, their own derivative must not be counted again."""
    case = small(device, dtype=torch.float64, batch=1, queries=2)
    offsets = case["sampling_offsets"].requires_grad_()
    rest = (case["reference_points"], offsets, offsets.tanh().sum(-1))
    out = ms_deform_attn_fused(case["value"], SMALL[0], *rest, points_per_level=SMALL[1], impl=impl)
    (want,) = torch.autograd.grad(out, offsets, case["grad_out"], retain_graph=True)
    (got,) = torch.autograd.grad(out, offsets, case["grad_out"], create_graph=True)
    assert_close(got, want)
    assert got.requires_grad


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved-tensor-hooks", "reentrant"])
def test_activation_checkpointing(reentrant: bool, impl: str, device: str) -> None:
    case = small(device)
    want = run(case, SMALL[1], impl=impl, **SAME_BITS)
    value, *rest = leaves = [case[name].requires_grad_() for name in NAMES]

    def call(value: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return ms_deform_attn_fused(value, SMALL[0], *rest, points_per_level=SMALL[1], impl=impl, **SAME_BITS)

    checkpoint(call, value, *rest, use_reentrant=reentrant).backward(case["grad_out"])
    assert all(torch.equal(leaf.grad, want[name]) for name, leaf in zip(NAMES, leaves, strict=True))


def test_autocast_changes_nothing(impl: str, device: str) -> None:
    case = small(device)
    want = run(case, SMALL[1], impl=impl, **SAME_BITS)
    with torch.autocast(device, dtype=torch.bfloat16):
        got = run(case, SMALL[1], impl=impl, **SAME_BITS)
    assert all(got[name].dtype == want[name].dtype and torch.equal(got[name], want[name]) for name in want)


def test_mixed_dtypes(impl: str, device: str) -> None:
    """16-bit references beside float32 offsets, as a 16-bit module with boxes kept in float32 has them, and reverse."""
    case = small(device, boxes=True, dtype=torch.bfloat16)
    want = run(case | {name: case[name].float() for name in NAMES[1:3]}, SMALL[1], impl=impl, **SAME_BITS)
    for wide in (("reference_points",), ("sampling_offsets",)):
        got = run(case | {name: case[name].float() for name in wide}, SMALL[1], impl=impl, **SAME_BITS)
        for name in want:
            dtype = torch.float32 if name in wide else torch.bfloat16
            assert got[name].dtype == dtype
            assert torch.equal(got[name], want[name].to(dtype)), name


@pytest.mark.parametrize("logit", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "-inf"])
def test_logits_without_a_softmax(logit: float, impl: str, device: str) -> None:
    """NaN and infinity make the query's head NaN, -inf a weight of 0 unless all logits are -inf."""
    case = small(device)
    value, reference, offsets, logits = (case[name] for name in NAMES)
    logits[0, 1, 0, 2] = logit
    logits[1, 2, 1] = -math.inf
    out = ms_deform_attn_fused(value, SMALL[0], reference, offsets, logits, points_per_level=SMALL[1], impl=impl)
    expected = torch.zeros_like(out, dtype=torch.bool)
    expected[0, 1, 0] = logit != -math.inf
    expected[1, 2, 1] = True
    assert torch.equal(out.isnan(), expected)


def test_negated_views(impl: str, device: str) -> None:
    """z.conj().imag is in memory with the other sign."""
    case = small(device)
    want = run(case, SMALL[1], impl=impl, **SAME_BITS)
    views = {name: torch._neg_view(-case[name]) for name in NAMES}
    assert all(view.is_neg() for view in views.values())
    got = run(case | views, SMALL[1], impl=impl, **SAME_BITS)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_nothing_at_all(impl: str, device: str) -> None:
    """Sizes of 0: queries, images, levels."""
    for batch, queries, levels in ((2, 0, [(2, 3)]), (0, 3, [(2, 3)]), (2, 3, [(0, 3)]), (2, 3, [])):
        value = torch.ones(batch, sum(h * w for h, w in levels), 2, 4, device=device, requires_grad=True)
        shape = (batch, queries, 2, len(levels), 3)
        made = (torch.ones(batch, queries, len(levels), 4), torch.ones(*shape, 2), torch.ones(shape).flatten(3))
        rest = [t.to(device).requires_grad_() for t in made]
        out = ms_deform_attn_fused(value, levels, *rest, impl=impl)
        assert out.shape == (batch, queries, 2, 4)
        grads = torch.autograd.grad(out.sum(), (value, *rest))
        assert all(g.shape == t.shape and not g.any() for g, t in zip(grads, (value, *rest), strict=True))


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a CUDA graph")
@pytest.mark.parametrize("boxes", [False, True], ids=["points", "boxes"])
def test_captured_in_a_graph(boxes: bool) -> None:
    """Tables of the levels are on the device by then, also where they were made in inference mode."""
    case, other = small("cuda", boxes=boxes), small("cuda", boxes=boxes)
    other = {name: t.flip(0) if isinstance(t, torch.Tensor) else t for name, t in other.items()}
    with torch.inference_mode():
        ms_deform_attn_fused(case["value"], SMALL[0], *(case[name] for name in NAMES[1:]), points_per_level=SMALL[1])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run(case, SMALL[1], deterministic=True)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(case, SMALL[1], deterministic=True)
    for name in (*NAMES, "grad_out"):
        case[name].copy_(other[name])
    graph.replay()
    want = run(other, SMALL[1], deterministic=True)
    assert all(torch.equal(got[name], want[name]) for name in want)
