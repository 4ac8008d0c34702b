"""The shipped specs of deformable attention: every name resolves, and each runs once against its truth."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

import retrograd as rg
from retrograd.catalog import SHIPPED, msda, msda_names, resolve
from retrograd.check.stages import StageContext, compiler
from retrograd.check.stages.oracle import judged


@pytest.mark.parametrize("name", [n for n in SHIPPED if n in msda_names()])
def test_spec_runs_and_agrees_with_its_reference(name: str, device: str) -> None:
    spec = resolve(name)
    assert spec.name == name
    if name.endswith(("_cpu", "_torch")):
        device = "cpu"
    for dtype in spec.dtypes:
        context = StageContext.of(spec, dtype, device=device)
        outcome = judged(context, context.base)
        assert outcome.findings == []
        # Rounding moves a location by up to W / 2 units of a pixel either way, and samples with it. A truth that wanders
        # between cells would forgive anything.
        assert outcome.power < msda._SIZES["W"][1] * torch.finfo(getattr(torch, dtype)).eps


@pytest.mark.parametrize("name", [name for name, (_, impl) in msda_names().items() if not impl])
def test_no_point_lies_near_a_border(name: str) -> None:
    variant = msda._VARIANTS[msda_names()[name][0]]
    sizes = dict(B=2, Q=20, H=2, C=4, P=3, W=23)
    for dtype in variant.dtypes:
        inputs = msda._inputs(variant, 3, getattr(torch, dtype), sizes)
        if variant.boxes is not None:
            continue
        levels, counts = inputs["spatial_shapes"], msda._points(sizes, variant.uneven)
        p = inputs["sampling_locations"].double()
        p = p if variant.uneven else p.flatten(3, 4)
        size = msda._per_point(levels, counts)
        x = p * (size - 1) if variant.options.get("align_corners") else p * size - 0.5
        assert float((x - x.round()).abs().min()) > 0.02


def test_names_and_specs_agree() -> None:
    assert list(msda.SPECS) == list(msda_names())
    assert {parts[0] for parts in msda_names().values()} == set(msda._VARIANTS)


# vmap runs the addcmul_ of the interpolation once for each sample, and says that this is slow.
@pytest.mark.filterwarnings(f"ignore:{re.escape('There is a performance drop')}:UserWarning")
def test_under_vmap_gradients_of_16_bit_values_are_added_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    # vmap is checked in the first dtype of a spec, and compiling is another test's business.
    spec = replace(resolve("ms_deform_attn_mixed_torch"), dtypes=("bfloat16",), transforms=("vmap",))
    context = StageContext.of(spec, "bfloat16")
    assert compiler.check(context, context.base).findings == []
    monkeypatch.setattr("retrograd.ops.msda.torch_impl.is_functorch_wrapped", lambda tensor: False)
    (found,) = compiler.check(context, context.base).findings
    assert found.tensor == "grad value"


class _Spoilt(torch.autograd.Function):
    """Its input; backward forgets the batches from the third on, or all where there are as many queries as a block."""

    @staticmethod
    def forward(ctx, value, block, queries):
        ctx.first = 0 if block and queries and queries % block == 0 else None if block else 2
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        if ctx.first is not None:
            grad[ctx.first :] = 0
        return grad, None, None


# At level quick an ordinary case has two batches and 13 queries; a third batch and whole blocks are the sweep's.
@pytest.mark.parametrize(("block", "level"), [(None, "quick"), (16, "full")])
def test_what_is_wrong_beyond_the_ordinary_sizes_is_in_the_sweep(block: int | None, level: str) -> None:
    right = resolve("ms_deform_attn_torch")

    def spoilt(value, shapes, locations, weights):
        return right.fn(_Spoilt.apply(value, block, locations.shape[1]), shapes, locations, weights)

    for fn, verdict in ((spoilt, "finding"), (right.fn, "proved")):
        spec = replace(right, fn=fn, dtypes=("float32",))
        report = rg.verify(spec, level=level, only=["shapes"], device="cpu")
        assert report.verdict == verdict
        assert {f.tensor for f in report.findings} <= {"grad value"}
