"""MSDeformAttn: the paper's initialisation, names of Deformable-DETR, masks, boxes, dtypes, compilation."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch.testing import assert_close

from retrograd import nn

LEVELS = [(6, 5), (3, 4)]
PIXELS = 42


def make(**options):
    torch.manual_seed(0)
    return nn.MSDeformAttn(**(dict(d_model=32, n_levels=2, n_heads=4, n_points=3) | options))


def inputs(boxes=False, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(2, 7, 32, generator=generator)
    reference = torch.rand(2, 7, 2, 4 if boxes else 2, generator=generator)
    return [t.to(dtype) for t in (query, reference, torch.randn(2, PIXELS, 32, generator=generator))]


def randomise(module):
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def by_hand(module, query, reference, value):
    """Zeros padding and edges by torch's grid_sample, as the module of Deformable-DETR falls back to."""
    batch, queries, _ = query.shape
    heads, points, levels = module.n_heads, module.n_points, module.n_levels
    v = module.value_proj(value).view(batch, -1, heads, 8)
    offsets = module.sampling_offsets(query).view(batch, queries, heads, levels, points, 2)
    weights = module.attention_weights(query).view(batch, queries, heads, -1).softmax(-1)
    if reference.shape[-1] == 2:
        size = torch.tensor(LEVELS, dtype=query.dtype).flip(1)
        p = reference[:, :, None, :, None] + offsets / size[:, None]
    else:
        p = reference[:, :, None, :, None, :2] + offsets / points * reference[:, :, None, :, None, 2:] * 0.5
    parts = []
    for level, (image, (h, w)) in enumerate(zip(v.split([h * w for h, w in LEVELS], 1), LEVELS, strict=True)):
        image = image.permute(0, 2, 3, 1).reshape(batch * heads, 8, h, w)
        grid = (2 * p[:, :, :, level] - 1).transpose(1, 2).flatten(0, 1)
        parts.append(torch.nn.functional.grid_sample(image, grid, align_corners=False))
    sampled = torch.stack(parts, -2).flatten(-2).view(batch, heads, 8, queries, -1)  # [B, H, C, Q, K]
    out = (sampled * weights.transpose(1, 2)[:, :, None]).sum(-1).permute(0, 3, 1, 2).flatten(2)
    return module.output_proj(out)


@pytest.mark.parametrize("boxes", [False, True], ids=["points", "boxes"])
def test_equals_the_formula(boxes):
    module = randomise(make(dtype=torch.float64))
    found = []
    for function in (module, lambda *a: by_hand(module, *a[:3])):
        args = [t.requires_grad_() for t in inputs(boxes, torch.float64)]
        out = function(*args, LEVELS)
        found.append([out, *torch.autograd.grad(out.sin().sum(), [*args, *module.parameters()])])
    for got, want in zip(*found, strict=True):
        assert_close(got, want)


def test_starts_as_the_paper():
    module = nn.MSDeformAttn()
    assert (module.d_model, module.n_levels, module.n_heads, module.n_points) == (256, 4, 8, 4)
    assert not module.sampling_offsets.weight.any()
    assert not module.attention_weights.weight.any()
    for layer in (module.attention_weights, module.value_proj, module.output_proj):
        assert not layer.bias.any()
    bound = math.sqrt(6 / 512)
    for layer in (module.value_proj, module.output_proj):
        assert 0.9 * bound < float(layer.weight.detach().abs().max()) <= bound
    bias = module.sampling_offsets.bias.view(8, 4, 4, 2)
    assert torch.equal(bias, bias[:, :1].expand_as(bias))
    directions = torch.tensor([(1, 0), (1, 1), (0, 1), (-1, 1), (-1, 0), (-1, -1), (0, -1), (1, -1)])
    steps = torch.arange(1, 5)
    # Angles up to 2 pi in float32 are off by two units in the last place; four steps out, four times that.
    slack = 4 * 2 * 2 * math.pi * torch.finfo(torch.float32).eps
    assert_close(bias[:, 0], (directions[:, None] * steps[:, None]).float(), atol=slack, rtol=0)


def test_names_are_those_of_deformable_detr():
    layers = ("sampling_offsets", "attention_weights", "value_proj", "output_proj")
    assert list(make().state_dict()) == [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]


def test_padding_is_not_seen():
    module = randomise(make())
    query, reference, value = inputs()
    mask = torch.zeros(2, PIXELS, dtype=torch.bool)
    mask[1, 5:17] = True
    want = module(query, reference, value, LEVELS, mask)
    other = value.clone()
    other[mask] = torch.randn_like(other[mask])
    assert torch.equal(module(query, reference, other, LEVELS, mask), want)
    assert not torch.equal(module(query, reference, other, LEVELS), want)
    assert torch.equal(want[0], module(query, reference, value, LEVELS)[0])


def test_points_for_each_level():
    module = randomise(make(n_points=[2, 5]))
    assert module.sampling_offsets.out_features == 4 * 7 * 2
    assert module(*inputs(), LEVELS).shape == (2, 7, 32)
    steps = nn.MSDeformAttn(32, 2, 4, [2, 5]).sampling_offsets.bias.view(4, 7, 2)[0, :, 0]
    assert_close(steps, torch.tensor([1.0, 2, 1, 2, 3, 4, 5]))


def test_autocast_samples_in_float32():
    module = randomise(make())
    args = inputs()
    want = module(*args, LEVELS).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = module(*args, LEVELS)
    assert got.dtype == torch.bfloat16
    # The four projections round to bfloat16, 2^-9 each, and offsets of up to 4 pixels move a sample by 2^-7 pixels.
    scale = float(want.abs().max())
    assert float((got.float() - want).abs().max()) <= (4 * 2**-9 + 2 * 2**-7) * 2 * scale


def test_options_are_used_and_shown():
    module = make(padding_mode="border", align_corners=True)
    assert "padding_mode=border, align_corners=True" in repr(module)
    assert repr(make()).startswith("MSDeformAttn(\n  d_model=32, n_levels=2, n_heads=4, n_points=3\n")
    args = inputs()
    assert not torch.equal(module(*args, LEVELS), make()(*args, LEVELS))
    with pytest.raises(ValueError, match="`impl` is 'fast'"):
        make(impl="fast")(*args, LEVELS)


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"`d_model` is 30, expected a multiple of n_heads, 4"):
        make(d_model=30)
    with pytest.raises(ValueError, match=r"`n_points` is \[1, 2, 3\], expected .* 2 of them"):
        make(n_points=[1, 2, 3])
    query, reference, value = inputs()
    with pytest.raises(ValueError, match=r"pixels in all, expected 41"):
        make()(query, reference, value[:, 1:], LEVELS)
    with pytest.raises(ValueError, match=r"`reference_points` has shape"):
        make()(query, reference[:, :, :1], value, LEVELS)


def test_copies():
    module = randomise(make())
    args = inputs()
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(*args, LEVELS), module(*args, LEVELS))


@pytest.mark.parametrize("form", ["list", "tensor"])
def test_compiles_without_graph_breaks(form):
    module = randomise(make())
    shapes = LEVELS if form == "list" else torch.tensor(LEVELS)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    found = []
    for function in (module, compiled):
        args = [t.requires_grad_() for t in inputs()]
        out = function(*args, shapes)
        found.append([out, *torch.autograd.grad(out.sin().sum(), [*args, *module.parameters()])])
    for got, want in zip(*found, strict=True):
        assert_close(got, want)
