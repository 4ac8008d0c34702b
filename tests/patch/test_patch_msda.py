"""Deformable attention of detectors and segmenters of transformers with random weights, replaced and put back."""

# Signatures are those of mmcv and transformers, whose names are looked at.
# ruff: noqa: ARG004

from __future__ import annotations

import copy
import functools
import re

import pytest
import torch
from torch.nn.functional import grid_sample
from torch.testing import assert_close

from retrograd import patch

_BACKBONE = dict(embedding_size=8, hidden_sizes=[8, 16, 16, 24], depths=[1, 1, 1, 1], layer_type="basic")
_SWIN = dict(image_size=64, patch_size=4, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=2,
             out_features=["stage1", "stage2", "stage3", "stage4"])  # fmt: skip
_DETR = dict(d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
             encoder_ffn_dim=16, decoder_ffn_dim=16, num_queries=5)  # fmt: skip
_RT = dict(d_model=32, encoder_hidden_dim=32, decoder_in_channels=[32] * 3, encoder_layers=1, decoder_layers=2,
           encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, num_queries=5,
           encoder_in_channels=[16, 16, 24], anchor_image_size=None, num_denoising=0)  # fmt: skip
_MASK = dict(feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=16, encoder_layers=1,
             decoder_layers=2, num_attention_heads=2, num_queries=5, dim_feedforward=16)  # fmt: skip
_TEXT = dict(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
             max_position_embeddings=64)  # fmt: skip


def _config(transformers, name: str):
    resnet, swin = transformers.ResNetConfig, transformers.SwinConfig
    features = dict(out_features=["stage2", "stage3", "stage4"])
    if name == "DeformableDetr":
        backbone = resnet(**_BACKBONE, **features)
        return transformers.DeformableDetrConfig(
            **_DETR, num_feature_levels=3, backbone_config=backbone, use_timm_backbone=False, backbone=None
        )
    if name in ("RTDetr", "RTDetrV2"):
        backbone = transformers.RTDetrResNetConfig(**_BACKBONE, **features)
        return getattr(transformers, f"{name}Config")(**_RT, backbone_config=backbone)
    if name == "GroundingDino":
        return transformers.GroundingDinoConfig(
            **_DETR,
            num_feature_levels=3,
            text_config=transformers.BertConfig(**_TEXT),
            backbone_config=swin(**{**_SWIN, **features}),
        )
    config = getattr(transformers, f"{name}Config")
    return config(**_MASK, backbone_config=swin(**_SWIN))


# How many layers sample.
_MODELS = dict(DeformableDetr=3, RTDetr=2, RTDetrV2=2, GroundingDino=3, Mask2Former=1, OneFormer=1)


def _model(name: str) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(_config(transformers, name)).eval()
    if name == "OneFormer":  # the rest keeps layers in a list, which double() does not reach
        model = model.pixel_level_module
    with torch.no_grad():  # offsets begin as whole pixels, on kinks
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def _tensors(output) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    return [t for part in (output.values() if hasattr(output, "values") else output or ()) for t in _tensors(part)]


def _results(model: torch.nn.Module, name: str) -> list[torch.Tensor]:
    """Outputs that have a gradient, and the gradients of all parameters that they reach."""
    generator = torch.Generator().manual_seed(1)
    dtype = next(model.parameters()).dtype
    inputs = dict(pixel_values=torch.randn(2, 3, 64, 64, generator=generator, dtype=dtype))
    if name == "GroundingDino":
        inputs["input_ids"] = torch.randint(5, 64, (2, 6), generator=generator)
    outputs = [out for out in _tensors(model(**inputs)) if out.requires_grad and out.isfinite().all()]
    loss = sum((out * torch.randn(out.shape, generator=generator, dtype=dtype)).sum() for out in outputs)
    gradients = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    return [*(out.detach() for out in outputs), *(g for g in gradients if g is not None)]


@pytest.mark.parametrize("name", _MODELS)
def test_results_and_gradients_of_models_stay(name: str) -> None:
    model = _model(name)
    truth = _results(copy.deepcopy(model).double(), name)
    before = _results(model, name)
    generator = torch.random.get_rng_state()
    handle = patch.msda(model)
    assert torch.equal(torch.random.get_rng_state(), generator)
    assert (len(handle.names), handle.left) == (_MODELS[name], {})
    after = _results(model, name)
    for got, stock, want in zip(after, before, truth, strict=True):
        # Neither is exact, as in test_patch_transformers.py; a wrong derivative is 1000 times that.
        error = (got - want).abs().max()
        assert error <= 4 * (stock - want).abs().max() + 4 * torch.finfo(torch.float32).eps * want.abs().max()
    handle.undo()
    assert all(torch.equal(got, want) for got, want in zip(_results(model, name), before, strict=True))


def test_saved_loaded_and_copied(tmp_path) -> None:
    model = _model("Mask2Former")
    before = _results(model, "Mask2Former")
    with patch.msda(model) as handle:
        assert patch.msda(model).names == ()  # ours is not replaced again
        after = _results(model, "Mask2Former")
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path)
        twin = copy.deepcopy(model)
    assert handle.names
    assert all(torch.equal(a, b) for a, b in zip(_results(loaded, "Mask2Former"), before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(_results(twin, "Mask2Former"), after, strict=True))


def _sampled(value, spatial_shapes, locations, weights):
    """What mmcv's and Deformable-DETR's functions compute, by grid_sample."""
    batch, _, heads, channels = value.shape
    sizes = [(int(h), int(w)) for h, w in spatial_shapes]
    parts = []
    for level, pixels in enumerate(value.split([h * w for h, w in sizes], dim=1)):
        image = pixels.permute(0, 2, 3, 1).reshape(batch * heads, channels, *sizes[level])
        grid = (2 * locations[:, :, :, level] - 1).transpose(1, 2).flatten(0, 1)
        parts.append(grid_sample(image, grid, align_corners=False))  # [B * H, C, Q, P]
    both = torch.stack(parts, dim=-2).flatten(-2) * weights.transpose(1, 2).flatten(3).flatten(0, 1)[:, None]
    return both.sum(-1).view(batch, heads * channels, -1).transpose(1, 2)


class MultiScaleDeformableAttnFunction(torch.autograd.Function):
    """mmcv's signature. `scale` is the mistake of a broken one: its gradient of the weights is that much too large."""

    scale = 1.0

    @staticmethod
    def forward(
        ctx, value, value_spatial_shapes, value_level_start_index, sampling_locations, attention_weights, im2col_step
    ):
        ctx.shapes = value_spatial_shapes
        ctx.save_for_backward(value, sampling_locations, attention_weights)
        return _sampled(value, value_spatial_shapes, sampling_locations, attention_weights)

    @classmethod
    def _scaled(cls, ctx, grad_output):
        inputs = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            out = _sampled(inputs[0], ctx.shapes, *inputs[1:])
        value, locations, weights = torch.autograd.grad(out, inputs, grad_output)
        return value, None, None, locations, cls.scale * weights, None

    @staticmethod
    def backward(ctx, grad_output):
        return MultiScaleDeformableAttnFunction._scaled(ctx, grad_output)


class ScaledFunction(MultiScaleDeformableAttnFunction):
    scale = 1.001

    @staticmethod
    def backward(ctx, grad_output):
        return ScaledFunction._scaled(ctx, grad_output)


class UnavailableFunction(MultiScaleDeformableAttnFunction):
    @staticmethod
    def forward(
        ctx, value, value_spatial_shapes, value_level_start_index, sampling_locations, attention_weights, im2col_step
    ):
        raise RuntimeError("not compiled with GPU support")


def border_sampled(value, value_spatial_shapes, sampling_locations, attention_weights):
    """Samples the border outside, which is another function than ours."""
    return _sampled(value, value_spatial_shapes, sampling_locations.clamp(0, 1), attention_weights)


def renamed(forward):
    """As mmcv wraps the forward of its layer."""

    @functools.wraps(forward)
    def wrapped(*args, residual=None, **named):
        return forward(*args, **named)

    return wrapped


class Layer(torch.nn.Module):
    """mmcv's layer, without its projections."""

    def __init__(self):
        super().__init__()
        self.value_proj = torch.nn.Linear(3, 3)

    @renamed
    def forward(self, value, shapes, locations, weights):
        area = shapes.prod(-1)
        start = area.cumsum(0) - area
        return MultiScaleDeformableAttnFunction.apply(self.value_proj(value), shapes, start, locations, weights, 64)


class ScaledAttention(Layer):
    def forward(self, value, shapes, locations, weights):
        return ScaledFunction.apply(self.value_proj(value), shapes, None, locations, weights, 64)


class BorderAttention(Layer):
    def forward(self, value, shapes, locations, weights):
        return border_sampled(self.value_proj(value), shapes, locations, weights)


class CudaAttention(Layer):
    def forward(self, value, shapes, locations, weights):
        return UnavailableFunction.apply(self.value_proj(value), shapes, None, locations, weights, 64)


class UnknownDeformableAttention(Layer):
    def forward(self, value, shapes, locations, weights):
        return _sampled(self.value_proj(value), shapes, locations, weights)


def _layer_inputs():
    generator = torch.Generator().manual_seed(0)
    shapes = torch.tensor([[4, 5], [2, 3]])
    value = torch.randn(2, 26, 2, 3, generator=generator)
    return (
        value,
        shapes,
        torch.rand(2, 7, 2, 2, 2, 2, generator=generator),
        torch.rand(2, 7, 2, 2, 2, generator=generator),
    )


def listed(value, value_spatial_shapes, sampling_locations, attention_weights, num_points_list, method="default"):
    """D-FINE's signature: points of all levels side by side."""
    if method != "default":
        return value.new_zeros(())
    locations, weights = sampling_locations.unflatten(3, (2, -1)), attention_weights.unflatten(3, (2, -1))
    return _sampled(value, value_spatial_shapes, locations, weights)


class CoreAttention(Layer):
    """Keeps its function as an attribute, as D-FINE does."""

    def __init__(self):
        super().__init__()
        self.core, self.method = listed, "default"

    def forward(self, value, shapes, locations, weights):
        flat = locations.flatten(3, 4), weights.flatten(3, 4)
        return self.core(self.value_proj(value), shapes.tolist(), *flat, [2, 2], self.method)


@pytest.mark.parametrize("kind", [Layer, CoreAttention])
def test_signatures_of_mmcv_and_d_fine(kind) -> None:
    layer, inputs = kind(), _layer_inputs()
    before = layer(*inputs)
    with patch.msda(layer) as handle:
        assert (handle.names, handle.left) == (("",), {})
        assert isinstance(layer, kind)
        assert_close(layer(*inputs), before)
        torch._dynamo.reset()
        assert_close(torch.compile(layer, backend="aot_eager", fullgraph=kind is Layer)(*inputs), before)
        if kind is CoreAttention:
            layer.method = "discrete"
            assert layer(*inputs).shape == ()
            layer.method = "default"
    assert torch.equal(layer(*inputs), before)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (ScaledAttention, r"what it computes is not ms_deform_attn: grad weights\[.*\] is"),
        (BorderAttention, r"what it computes is not ms_deform_attn: out.* is"),
        (CudaAttention, "it cannot be run on cpu: .*not compiled with GPU support"),
        (UnknownDeformableAttention, "it calls nothing that takes maps, points and weights by names that are known"),
    ],
)
def test_what_computes_something_else_is_left_and_told(layer, reason) -> None:
    model = torch.nn.Sequential(layer())
    handle = patch.msda(model)
    assert handle.names == ()
    (told,) = handle.left.values()
    assert re.search(reason, told)
    assert type(model[0]) is layer
