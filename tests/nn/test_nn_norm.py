"""Modules in place of torch's: constructor, state_dict, outputs, and what people do with modules."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from retrograd import nn

PAIRS = [(nn.RMSNorm, torch.nn.RMSNorm), (nn.LayerNorm, torch.nn.LayerNorm)]
SHAPES = [32, (32,), (4, 8)]


@pytest.fixture(autouse=True)
def _on_device(device):
    with torch.device(device):
        yield


def gradients(module, x, grad_out):
    x = x.detach().clone().requires_grad_()
    y = module(x)
    return y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], grad_out)


def randomise(module):
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
    return module


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_same_results_and_gradients_as_torch(ours, theirs, shape, affine, dtype):
    torch.manual_seed(0)
    a = randomise(ours(shape, elementwise_affine=affine, dtype=dtype))
    b = theirs(shape, elementwise_affine=affine, dtype=dtype)
    b.load_state_dict(a.state_dict())
    x = torch.randn(5, 3, *b.normalized_shape, dtype=dtype)
    grad_out = torch.randn_like(x)
    for got, want in zip(gradients(a, x, grad_out), gradients(b, x, grad_out), strict=True):
        assert_close(got, want)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mixed_dtypes(ours, theirs, x_dtype, dtype):
    torch.manual_seed(0)
    module = ours(64, dtype=dtype)
    x = torch.randn(7, 64).to(x_dtype)
    y = module(x)
    assert y.dtype == x_dtype
    assert_close(y, theirs(64)(x.float()).to(x_dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_eps_none_is_torchs(dtype):
    x = (1e-3 * torch.randn(6, 16)).to(dtype)  # mean squares near eps
    assert_close(nn.RMSNorm(16)(x), torch.nn.RMSNorm(16)(x))


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_it_is_one_of_torchs(ours, theirs):
    a, b = ours((4, 8)), theirs((4, 8))
    assert isinstance(a, theirs)
    assert a.state_dict().keys() == b.state_dict().keys()
    b.load_state_dict(a.state_dict(), strict=True)
    a.load_state_dict(b.state_dict(), strict=True)
    assert repr(a) == repr(b)
    again = pickle.loads(pickle.dumps(a))
    assert type(again) is ours
    assert_close(copy.deepcopy(a)(torch.ones(2, 4, 8)), again(torch.ones(2, 4, 8)))


def test_layer_norm_without_bias():
    module = nn.LayerNorm(16, bias=False)
    assert list(module.state_dict()) == ["weight"]
    x = torch.randn(3, 16)
    assert_close(module(x), torch.nn.LayerNorm(16, bias=False)(x))


@pytest.mark.parametrize("ours", [nn.RMSNorm, nn.LayerNorm])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_residual(ours, shape):
    torch.manual_seed(0)
    module = ours(shape)
    x, residual = torch.randn(2, 5, *module.normalized_shape)
    y, s = module(x, residual, prenorm=True)
    assert_close(s, x + residual)
    assert_close(y, module(x + residual))
    assert_close(module(x, residual), y)
    assert module(x, prenorm=True)[1].shape == x.shape


def test_options_are_used_and_shown():
    module = nn.RMSNorm(32, eps=1e-6, weight_offset=1.0, residual_dtype=torch.float32, out_dtype=torch.float16)
    assert not module.weight.any()
    assert "weight_offset=1.0" in repr(module)
    x = torch.randn(4, 32).bfloat16()
    y, s = module(x, x, prenorm=True)
    assert (y.dtype, s.dtype) == (torch.float16, torch.float32)
    assert_close(y, torch.nn.RMSNorm(32, eps=1e-6)(s).half())
    with pytest.raises(TypeError, match="`deterministc` is not an option"):
        nn.RMSNorm(32, deterministc=True)


@pytest.mark.parametrize("affine", [True, False])
def test_wrong_shapes_are_refused(affine):
    module = nn.LayerNorm((4, 8), elementwise_affine=affine)
    with pytest.raises(ValueError, match="normalized_shape"):
        module(torch.ones(2, 8, 4))
    with pytest.raises(ValueError, match="residual"):
        module(torch.ones(2, 4, 8), torch.ones(4, 8))


@pytest.mark.parametrize("ours", [nn.RMSNorm, nn.LayerNorm])
def test_compiles_without_graph_breaks(ours):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(16, 16), randomise(ours(16)), torch.nn.Linear(16, 16))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 16)
    grad_out = torch.randn_like(x)
    for got, want in zip(gradients(compiled, x, grad_out), gradients(module, x, grad_out), strict=True):
        assert_close(got, want)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(16, 16), randomise(nn.RMSNorm(16)), torch.nn.GELU())
    x, grad_out = torch.randn(2, 6, 16)
    plain = gradients(module, x, grad_out)

    class Checkpointed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    if reentrant:  # .grad only: this kind of checkpoint does not work with autograd.grad
        Checkpointed()(x.clone().requires_grad_()).backward(grad_out)
        found = [parameter.grad for parameter in module.parameters()]
        want = plain[2:]
    else:
        found, want = gradients(Checkpointed(), x, grad_out), plain
    for got, expected in zip(found, want, strict=True):
        assert torch.equal(got, expected)
