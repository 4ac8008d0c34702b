"""Norms of a model replaced in place and put back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.testing import assert_close

from retrograd import nn, patch


class LlamaRMSNorm(torch.nn.Module):
    """The usual shape of this class: float32 inside, the weight multiplied last."""

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden_states.dtype)


class GemmaRMSNorm(torch.nn.Module):
    """Weights around zero, everything in float32."""

    def __init__(self, size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(size))
        self.eps = 1e-5

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).type_as(x)


class OwnNorm(torch.nn.LayerNorm):
    """A subclass may do anything: this one shifts what LayerNorm gives."""

    def forward(self, x):
        return super().forward(x) + 1.0


class Block(torch.nn.Module):
    def __init__(self, size=16):
        super().__init__()
        self.norm1 = torch.nn.RMSNorm(size, eps=1e-6)
        self.linear = torch.nn.Linear(size, size)
        self.norm2 = torch.nn.LayerNorm(size)
        self.own = OwnNorm(size)

    def forward(self, x):
        return self.own(x + self.norm2(self.linear(self.norm1(x))))


LIKE = {
    "LlamaRMSNorm": patch.RmsLike(),
    "GemmaRMSNorm": patch.RmsLike(eps="eps", weight_offset=1.0, promotes=False),
}


@pytest.fixture(autouse=True)
def _on_device(device):
    with torch.device(device):
        yield


def gradients(module, x, grad_out):
    x = x.detach().clone().requires_grad_()
    y = module(x)
    return y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], grad_out)


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = torch.nn.Sequential(Block(), torch.nn.Sequential(Block(), torch.nn.GELU()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.fixture
def batch():
    torch.manual_seed(1)
    return torch.randn(2, 3, 5, 16)


def test_same_results_same_objects_and_back(model, batch):
    x, grad_out = batch
    before = gradients(model, x, grad_out)
    kinds = [type(m) for m in model.modules()]
    objects = [*map(id, model.parameters()), *map(id, model.modules())]
    names = list(model.state_dict())
    handle = patch.norms(model)
    assert handle.names == ("0.norm1", "0.norm2", "1.0.norm1", "1.0.norm2")
    assert type(model[0].norm1) is nn.RMSNorm
    assert type(model[0].norm2) is nn.LayerNorm
    assert type(model[0].own) is OwnNorm
    assert set(handle.left) == {"0.own", "1.0.own"}
    assert "as LayerLike(eps='eps', weight_offset=" in handle.left["0.own"]
    assert repr(handle).startswith("<4 norms replaced; left 0.own, 1.0.own: as LayerLike(")
    assert objects == [*map(id, model.parameters()), *map(id, model.modules())]
    assert names == list(model.state_dict())
    for got, want in zip(gradients(model, x, grad_out), before, strict=True):
        assert_close(got, want)
    handle.undo()
    handle.undo()
    assert kinds == [type(m) for m in model.modules()]
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, x, grad_out), before, strict=True))


def test_context_manager_undoes_also_after_an_error(model):
    with pytest.raises(ZeroDivisionError), patch.norms(model):
        _ = 1 / 0
    assert type(model[0].norm1) is torch.nn.RMSNorm


def test_options_are_set_and_taken_away(model, batch):
    with patch.norms(model, deterministic=False, out_dtype=torch.float16):
        assert model[0].norm1.deterministic is False
        assert model[0].norm1(batch[0]).dtype == torch.float16
    assert "deterministic" not in model[0].norm1.__dict__
    assert "out_dtype" not in model[0].norm1.__dict__
    with pytest.raises(TypeError, match="not an option"):
        patch.norms(model, epsilon=1e-3)
    with pytest.raises(TypeError, match="RmsLike"):
        patch.norms(model, weight_offset=1.0)


def test_hooks_stay(model, batch):
    seen = []
    model[0].norm1.register_forward_hook(lambda module, args, y: seen.append("forward"))
    model[0].norm1.register_full_backward_hook(lambda module, gx, gy: seen.append("backward"))
    with patch.norms(model):
        gradients(model, *batch)
    assert seen == ["forward", "backward"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, GemmaRMSNorm])
def test_norms_of_other_libraries(kind, weight_dtype, dtype):
    torch.manual_seed(0)
    model = torch.nn.Sequential(kind(32).to(weight_dtype))
    torch.nn.init.normal_(model[0].weight, 0.5, 0.2)
    x, grad_out = torch.randn(2, 6, 32).to(dtype)
    want = model(x)
    exact = [t.double() for t in gradients(copy.deepcopy(model).double(), x.double(), grad_out.double())]
    with patch.norms(model, {kind.__name__: LIKE[kind.__name__]}, recognise=False) as handle:
        assert handle.names == ("0",)
        assert isinstance(model[0], kind)
        assert type(model[0]).__name__ == kind.__name__
        found = gradients(model, x, grad_out.to(want.dtype))
    assert type(model[0]) is kind
    assert found[0].dtype == want.dtype
    for got, truth in zip(found, exact, strict=True):
        assert_close(got, truth.to(got.dtype))


def test_patching_twice_changes_nothing_more(model):
    first = patch.norms(model)
    assert patch.norms(model).names == ()
    like = torch.nn.Sequential(LlamaRMSNorm(8))
    patch.norms(like, {"LlamaRMSNorm": patch.RmsLike()})
    assert patch.norms(like, {"LlamaRMSNorm": patch.RmsLike()}).names == ()
    first.undo()


def test_a_norm_without_the_named_eps_is_refused_and_nothing_changes(model):
    model.append(GemmaRMSNorm(16))
    with pytest.raises(ValueError, match=r"`2` is a GemmaRMSNorm without `variance_epsilon`"):
        patch.norms(model, {GemmaRMSNorm: patch.RmsLike()})
    assert type(model[0].norm1) is torch.nn.RMSNorm


def test_a_forward_on_the_instance_is_refused(model):
    model[0].norm2.forward = lambda x: x
    with pytest.raises(ValueError, match="forward of its own"):
        patch.norms(model)


def test_undo_refuses_what_it_did_not_leave(model):
    handle = patch.norms(model)
    model[0].norm2.__class__ = OwnNorm
    with pytest.raises(RuntimeError, match=r"`0\.norm2` is a OwnNorm by now"):
        handle.undo()
    assert type(model[0].norm1) is nn.RMSNorm


def test_a_model_that_is_a_norm():
    module = torch.nn.RMSNorm(8)
    with patch.norms(module):
        assert type(module) is nn.RMSNorm


def test_compiles_without_graph_breaks(model, batch):
    model.append(LlamaRMSNorm(16))
    want = gradients(model, *batch)
    with patch.norms(model):
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        found = gradients(compiled, *batch)
    for got, expected in zip(found, want, strict=True):
        assert_close(got, expected)
