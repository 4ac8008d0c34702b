"""Other libraries' signatures, and a model of transformers with one line changed."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from msda_cases import LEVELS, arguments, make_inputs, run
from torch.testing import assert_close

from retrograd.ops.msda import adapters

STARTS = torch.tensor([sum(h * w for h, w in LEVELS[:i]) for i in range(len(LEVELS))])


def test_signatures() -> None:
    def names(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)

    detr = ["value", "value_spatial_shapes", "value_level_start_index", "sampling_locations", "attention_weights"]
    assert names(adapters.MSDeformAttnFunction.apply) == [*detr, "im2col_step"]
    assert names(adapters.MultiScaleDeformableAttnFunction.apply) == [*detr, "im2col_step"]
    assert names(adapters.MultiScaleDeformableAttention().forward) == [
        "value",
        "value_spatial_shapes",
        "value_spatial_shapes_list",
        "level_start_index",
        "sampling_locations",
        "attention_weights",
        "im2col_step",
    ]
    assert names(adapters.multiscale_deformable_attention) == [
        "img",
        "img_shapes",
        "sampling_points",
        "attention_weights",
        "padding_mode",
        "align_corners",
    ]


@pytest.mark.parametrize("name", ["MSDeformAttnFunction", "MultiScaleDeformableAttnFunction"])
def test_functions_of_the_cuda_family(name: str, device: str) -> None:
    case = make_inputs(device=device)
    value, shapes, locations, weights = arguments(case)
    want = run(case)["out"].flatten(2)
    shapes = torch.tensor(shapes, device=device)
    apply = getattr(adapters, name).apply
    assert torch.equal(apply(value, shapes, STARTS.to(device), locations, weights, 64), want)
    with pytest.raises(ValueError, match=r"`value_level_start_index` is .*expected \[0, 63, 83, 86\]"):
        apply(value, shapes.cpu(), STARTS + 1, locations, weights, 64)


def test_layer_of_hugging_face(device: str) -> None:
    case = make_inputs(device=device)
    value, shapes, locations, weights = arguments(case)
    want = run(case)["out"].flatten(2)
    layer, tensor = adapters.MultiScaleDeformableAttention(), torch.tensor(shapes, device=device)
    assert not list(layer.parameters())
    for listed in (shapes, None):
        assert torch.equal(layer(value, tensor, listed, STARTS.to(device), locations, weights, 64), want)


def test_function_of_msda_triton(mode: dict[str, Any], device: str) -> None:
    case = make_inputs(device=device)
    img, shapes, points, weights = arguments(case)
    got = adapters.multiscale_deformable_attention(img, torch.tensor(shapes), points, weights, *mode.values())
    assert torch.equal(got, run(case, **mode)["out"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("beside", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_any_mix_of_dtypes(beside: torch.dtype, dtype: torch.dtype, device: str) -> None:
    """As autocast makes them: locations and weights in one dtype, value in another."""
    case = make_inputs(dtype=dtype, beside=beside, device=device)
    value, shapes, locations, weights = arguments(case)
    out = adapters.MSDeformAttnFunction.apply(value, torch.tensor(shapes), STARTS, locations, weights, 64)
    assert out.dtype == dtype


def test_deformable_detr_with_one_line_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients of a small random encoder and decoder: equal to its own sampling in float64."""
    pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    from transformers import DeformableDetrConfig, ResNetConfig
    from transformers.models.deformable_detr import modeling_deformable_detr as theirs

    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], out_features=["stage2", "stage3", "stage4"]
    )
    config = DeformableDetrConfig(
        use_timm_backbone=False,
        backbone=None,
        use_pretrained_backbone=False,
        backbone_config=backbone,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_queries=7,
        dropout=0.0,
    )

    def outputs(layer: type[torch.nn.Module]) -> list[torch.Tensor]:
        monkeypatch.setattr(theirs, "MultiScaleDeformableAttention", layer)
        torch.manual_seed(0)
        model = theirs.DeformableDetrModel(config).double().eval()
        assert any(type(m) is layer for m in model.modules())
        with torch.no_grad():
            # A new model samples whole pixels away from pixel centres: exactly where the derivative jumps, and where
            # the rounding of 2 p - 1 decides on which side grid_sample ends up.
            for name, parameter in model.named_parameters():
                if name.endswith("sampling_offsets.bias"):
                    parameter.add_(0.37)
        pixels = torch.randn(2, 3, 64, 96, dtype=torch.float64)
        out = model(pixel_values=pixels).last_hidden_state
        used = [p for p in model.parameters() if p.requires_grad]
        grads = torch.autograd.grad(out.sin().sum(), used, allow_unused=True)
        return [out, *(g for g in grads if g is not None)]

    found = [outputs(layer) for layer in (theirs.MultiScaleDeformableAttention, adapters.MultiScaleDeformableAttention)]
    assert len(found[0]) > 50
    for got, want in zip(*found, strict=True):
        assert_close(got, want)
