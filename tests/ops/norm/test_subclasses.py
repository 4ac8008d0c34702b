"""Tensors that are not plain (collectives under way, fake ones, classes with operators), and modes that watch operators."""

from __future__ import annotations

import functools
from typing import Any

import extensions
import pytest
import torch
from norm_cases import INPUTS, Case, make_inputs, run
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from retrograd import ops
from retrograd.ops.norm import custom_op, functional

collectives = pytest.importorskip("torch.distributed._functional_collectives")
# Without a process group nothing is under way, but the address is as null as with one.
UnderWay = collectives.AsyncCollectiveTensor


class Wrapped(torch.Tensor):
    """A tensor that runs operators on the one inside it."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrapped = pytree.tree_map_only(Wrapped, lambda t: t.inner, (args, kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, Wrapped, func(*unwrapped[0], **unwrapped[1]))


def step(case: Case, wrap: Any, wrapped: str, norm: str, **options: Any) -> Case:
    """What `run` returns, with the tensor called `wrapped` wrapped after it has become a leaf."""
    leaves = {name: case[name].clone().requires_grad_() for name in INPUTS}
    given = {name: wrap(t) if name == wrapped else t for name, t in leaves.items()}
    y, s = getattr(ops, norm)(**given, eps=1e-6, prenorm=True, **options)
    grads = [wrap(case[name]) if name == wrapped else case[name] for name in ("grad_y", "grad_s")]
    torch.autograd.backward([y, s], grads)
    return {"y": y.detach(), "s": s.detach()} | {name: t.grad for name, t in leaves.items()}


class Begin(torch.autograd.Function):
    """A collective as autograd sees it: its result is under way."""

    @staticmethod
    def forward(_ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return UnderWay(tensor.clone())

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class BeginBackward(torch.autograd.Function):
    """The same in the backward: the gradient is under way."""

    @staticmethod
    def forward(_ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return UnderWay(grad.clone())


@pytest.mark.parametrize("shape", [(6, 16), (2, 3, 16)], ids=str)
@pytest.mark.parametrize("wrapped", INPUTS)
def test_inputs_are_waited_for(wrapped: str, shape: tuple[int, ...], norm: str, impl: str, device: str) -> None:
    case = make_inputs(shape, device=device)
    want = run(case, norm, prenorm=True, impl=impl)
    got = step(case, Begin.apply, wrapped, norm, impl=impl)
    assert {k: type(v) for k, v in got.items()} == dict.fromkeys(got, torch.Tensor)
    assert all(torch.equal(got[name], want[name]) for name in got)
    with torch.no_grad():
        given = {name: UnderWay(case[name]) for name in INPUTS}
        assert torch.equal(getattr(ops, norm)(**given, eps=1e-6, impl=impl), want["y"])


@pytest.mark.parametrize("shape", [(6, 16), (2, 3, 16)], ids=str)
def test_gradients_are_waited_for(shape: tuple[int, ...], norm: str, impl: str, device: str) -> None:
    case = make_inputs(shape, device=device)
    want = run(case, norm, prenorm=True, impl=impl)
    leaves = [case[name].requires_grad_() for name in INPUTS]
    outs = getattr(ops, norm)(*leaves, eps=1e-6, prenorm=True, impl=impl)
    grads = torch.autograd.grad([BeginBackward.apply(t) for t in outs], leaves, [case["grad_y"], case["grad_s"]])
    assert all(torch.equal(grad, want[name]) for name, grad in zip(INPUTS, grads, strict=True))


def test_halves_wait(impl: str, device: str) -> None:
    case = make_inputs((6, 16), device=device)
    tensors = [case[name] for name in INPUTS]
    want = functional.layer_norm_fwd(*tensors, impl=impl)
    got = functional.layer_norm_fwd(*map(UnderWay, tensors), impl=impl)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    tensors = [case["grad_y"], want[1], case["weight"], *want[2:], case["grad_s"]]
    want = functional.layer_norm_bwd(*tensors, bias_dtype=torch.float32, impl=impl)
    got = functional.layer_norm_bwd(*map(UnderWay, tensors), bias_dtype=torch.float32, impl=impl)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("wrapped", INPUTS)
def test_classes_with_operators_get_the_operator(wrapped: str, norm: str, impl: str, device: str) -> None:
    case = make_inputs((6, 16), device=device)
    want = run(case, norm, impl=impl)
    with torch.no_grad():
        given = {name: Wrapped(case[name]) if name == wrapped else case[name] for name in INPUTS}
        y = getattr(ops, norm)(**given, eps=1e-6, impl=impl)
    assert type(y) is Wrapped
    assert torch.equal(y.inner, want["y"])


def test_fake_tensors_stay_fake(norm: str, impl: str, device: str) -> None:
    mode = FakeTensorMode()
    case = {k: mode.from_tensor(v) for k, v in make_inputs((2, 3, 16), torch.bfloat16, device).items()}
    leaves = [case[name].requires_grad_() for name in INPUTS]
    with mode:
        y, s = getattr(ops, norm)(*leaves, prenorm=True, impl=impl)
        grads = torch.autograd.grad([y, s], leaves, [case["grad_y"], case["grad_s"]])
    for got, like in zip((y, s, *grads), (case["x"], case["x"], *leaves), strict=True):
        assert isinstance(got, FakeTensor)
        assert (got.shape, got.dtype, got.device) == (like.shape, like.dtype, like.device)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_traced_graphs_compute(mode: str, norm: str, impl: str, device: str) -> None:
    case, other = make_inputs((2, 3, 16), device=device), make_inputs((2, 3, 16), device=device)
    other["x"] = other["x"].flip(0)
    function = functools.partial(getattr(ops, norm), eps=1e-6, prenorm=True, impl=impl)
    graph = make_fx(function, tracing_mode=mode)(*(case[name] for name in INPUTS))
    want = run(other, norm, prenorm=True, impl=impl)
    assert all(torch.equal(got, want[name]) for got, name in zip(graph(*(other[k] for k in INPUTS)), "ys", strict=True))


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE], ids=str)
def test_selective_checkpointing_sees_the_norm(
    policy: CheckpointPolicy, norm: str, impl: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_inputs((2, 3, 16), device=device)
    want = run(case, norm, prenorm=True, impl=impl)
    forwards = []
    functions = custom_op.functions

    def counted(chosen: Any) -> Any:
        forwards.append(chosen)
        return functions(chosen)

    monkeypatch.setattr(custom_op, "functions", counted)

    def choose(_ctx: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        return policy if op is torch.ops.retrograd.norm_fwd.default else CheckpointPolicy.PREFER_RECOMPUTE

    leaves = [case[name].requires_grad_() for name in INPUTS]
    outs = checkpoint(
        functools.partial(getattr(ops, norm), eps=1e-6, prenorm=True, impl=impl),
        *leaves,
        use_reentrant=False,
        context_fn=functools.partial(create_selective_checkpoint_contexts, choose),
    )
    grads = torch.autograd.grad(outs, leaves, [case["grad_y"], case["grad_s"]])
    assert all(torch.equal(grad, want[name]) for name, grad in zip(INPUTS, grads, strict=True))
    # The forward, with MUST_RECOMPUTE the forward again, the backward.
    assert len(forwards) == (2 if policy is CheckpointPolicy.MUST_SAVE else 3)


def test_main_grad_is_added_under_a_mode(norm: str, impl: str, device: str) -> None:
    case = make_inputs((6, 16), device=device, given="weight")
    want = run(case, norm, impl=impl)
    weight = torch.nn.Parameter(case["weight"])
    weight.main_grad = torch.zeros(16, device=device)
    with FlopCounterMode(display=False):
        y = getattr(ops, norm)(case["x"], weight, eps=1e-6, impl=impl, accumulate_main_grad=True)
        y.backward(case["grad_y"])
    assert torch.equal(weight.main_grad, want["weight"])


@pytest.mark.skipif(extensions.why_no_compiler() is not None, reason="no C++ compiler here")
def test_native_code_refuses_a_null_address(norm: str) -> None:
    case = make_inputs((6, 16))
    y = getattr(ops, norm)(case["x"].requires_grad_(), impl="native")
    for nothing in (torch._efficientzerotensor((6, 16)), Wrapped(case["grad_y"])):
        with pytest.raises(TypeError, match=r"impl='native' got a (Tensor|Wrapped) without memory.*impl='torch'"):
            torch.autograd.grad(y, case["x"], nothing, retain_graph=True)
