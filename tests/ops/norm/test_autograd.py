"""What the autograd node does around the kernels: saved tensors, second derivatives, main_grad, checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from norm_cases import Case, make_inputs, run
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from retrograd import ops
from retrograd.ops.norm import autograd
from retrograd.ops.norm.arguments import WantedGrads


def call(norm: str, case: Case, **options: Any) -> Any:
    """The norm of a case's tensors."""
    args = {name: case[name] for name in ("x", "weight", "bias", "residual") if name in case}
    return getattr(ops, norm)(**args, **options)


def leaves(case: Case) -> list[torch.Tensor]:
    """The inputs of a case, made to require gradients."""
    return [case[name].requires_grad_() for name in ("x", "weight", "bias", "residual") if name in case]


def test_only_s_is_used(norm: str, impl: str, device: str) -> None:
    case = make_inputs((2, 3, 65), torch.bfloat16, device, stream_dtype=torch.float32)
    x, weight, bias, residual = leaves(case)
    _, s = call(norm, case, prenorm=True, impl=impl)
    s.backward(case["grad_s"])
    assert torch.equal(x.grad, case["grad_s"].bfloat16())
    assert torch.equal(residual.grad, case["grad_s"])
    assert weight.grad is None
    assert bias.grad is None


def test_only_y_is_used(norm: str, impl: str, device: str) -> None:
    case = make_inputs((7, 65), device=device)
    want = run(case, norm, impl=impl)
    got = leaves(case)
    y, _ = call(norm, case, prenorm=True, eps=1e-6, impl=impl)
    y.backward(case["grad_y"])
    for tensor, name in zip(got, ("x", "weight", "bias", "residual"), strict=True):
        assert torch.equal(tensor.grad, want[name]), name


@pytest.mark.parametrize("given", ["weight", "weight residual"])
@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8)], ids=str)
def test_second_derivative_is_refused(shape: tuple[int, ...], given: str, norm: str, impl: str, device: str) -> None:
    case = make_inputs(shape, device=device, given=given)
    x, *others = leaves(case)
    loss = call(norm, case, impl=impl).sum()  # its gradient does not require one itself
    grads = torch.autograd.grad(loss, [x, *others], create_graph=True)
    with pytest.raises(RuntimeError, match=r"cannot be differentiated again.*rms_norm_reference"):
        torch.autograd.grad(grads[0].sum() + x.sum(), x)
    with pytest.raises(RuntimeError, match=r"cannot be differentiated again"):
        grads[1].sum().backward()


def test_forward_mode_is_refused(norm: str, impl: str, device: str) -> None:
    x = torch.randn(3, 8, device=device)
    with forward_ad.dual_level(), pytest.raises((RuntimeError, NotImplementedError), match=r"(?i)forward.mode|jvp"):
        getattr(ops, norm)(forward_ad.make_dual(x, torch.ones_like(x)), impl=impl)


@pytest.mark.parametrize("name", ["x", "weight"])
def test_change_after_the_forward_is_noticed(name: str, norm: str, impl: str, device: str) -> None:
    for shape in ((3, 8), (2, 3, 8)):
        case = make_inputs(shape, device=device, given="weight")
        x = case["x"].requires_grad_()
        y = call(norm, case, impl=impl)
        with torch.no_grad():
            case[name].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        assert x.grad is None


def test_gradients_share_no_memory(norm: str, impl: str, device: str) -> None:
    for shape in ((3, 8), (2, 3, 8)):
        case = make_inputs(shape, device=device)
        tensors = leaves(case)
        for _ in range(2):
            call(norm, case, impl=impl).backward(case["grad_y"])
        assert len({t.grad.untyped_storage().data_ptr() for t in tensors}) == len(tensors)
        assert torch.equal(tensors[0].grad, tensors[3].grad)


def test_results_may_be_changed_in_place(norm: str, impl: str, device: str) -> None:
    for shape in ((3, 8), (2, 3, 8)):
        case = make_inputs(shape, device=device)
        x = leaves(case)[0]
        call(norm, case, impl=impl).mul_(2).sum().backward()
        doubled, x.grad = x.grad, None
        call(norm, case, impl=impl).sum().backward()
        assert torch.equal(doubled, 2 * x.grad)  # a power of two passes through every product unchanged


def test_frozen_vectors_ask_for_nothing(norm: str, impl: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[WantedGrads] = []
    stock = autograd.gradients

    def spy(ctx: Any, backward: Any, *grads: Any) -> Any:
        def recorded(tensors: Any, spec: Any, wanted: WantedGrads) -> Any:
            asked.append(wanted)
            return backward(tensors, spec, wanted)

        return stock(ctx, recorded, *grads)

    monkeypatch.setattr(autograd, "gradients", spy)
    case = make_inputs((7, 65), device=device)
    run(case, norm, impl=impl, frozen=("weight", "bias"))
    run(case, norm, impl=impl, frozen=("x", "bias", "residual"))
    run(case, norm, impl=impl, frozen=("x", "weight", "residual"))
    single = torch.float32
    # The gradient of a bias alone is a sum that takes no kernel.
    assert asked == [WantedGrads(x=single, residual=single), WantedGrads(weight=single)]


def test_without_gradients_nothing_is_kept(norm: str, impl: str, device: str) -> None:
    case = make_inputs((2, 3, 65), device=device)
    y, s = call(norm, case, prenorm=True, impl=impl)
    assert y.grad_fn is None
    assert s.grad_fn is None
    leaves(case)
    with torch.no_grad():
        assert torch.equal(call(norm, case, impl=impl), y)
    with torch.inference_mode():
        assert torch.equal(call(norm, case, impl=impl), y)


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved-tensor-hooks", "reentrant"])
def test_activation_checkpointing(reentrant: bool, norm: str, impl: str, device: str) -> None:
    case = make_inputs((2, 7, 65), torch.bfloat16, device)
    tensors = leaves(case)

    def block(*args: torch.Tensor) -> torch.Tensor:
        return getattr(ops, norm)(*args, impl=impl)

    block(*tensors).backward(case["grad_y"])
    want = [t.grad for t in tensors]
    for t in tensors:
        t.grad = None
    checkpoint(block, *tensors, use_reentrant=reentrant).backward(case["grad_y"])
    assert all(torch.equal(t.grad, w) for t, w in zip(tensors, want, strict=True))


def test_autocast_changes_nothing(norm: str, impl: str, device: str) -> None:
    case = make_inputs((33, 65), torch.bfloat16, device, vector_dtype=torch.float32, stream_dtype=torch.float32)
    want = run(case, norm, impl=impl, prenorm=True)
    with torch.autocast(device, dtype=torch.float16):
        got = run(case, norm, impl=impl, prenorm=True)
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("heads", [None, 1, 3])
@pytest.mark.parametrize("given", ["weight", "bias", "weight bias residual"])
def test_gradients_added_to_main_grad(given: str, heads: int | None, norm: str, impl: str, device: str) -> None:
    case = make_inputs((5, heads or 2, 65), torch.bfloat16, device, given=given, heads=heads is not None)
    options = {"impl": impl, "eps": 1e-6}
    single = {n: t.float() if n in ("weight", "bias") else t for n, t in case.items()}
    want = run(single, norm, **options)
    vectors = [name for name in ("weight", "bias") if name in case]
    for name in vectors:
        case[name] = torch.nn.Parameter(case[name])
        case[name].main_grad = torch.ones_like(case[name], dtype=torch.float32)
    case["x"].requires_grad_()
    for _ in range(2):
        call(norm, case, accumulate_main_grad=True, **options).backward(case["grad_y"])
    for name in vectors:
        assert case[name].grad is None
        assert case[name].grad_added_to_main_grad is True
        # Two gradients and two additions, each rounded once to float32.
        error = (case[name].main_grad.double() - 1 - 2 * want[name].double()).abs()
        assert bool((error <= 4 * 2.0**-24 * (1 + 2 * want[name].double().abs())).all()), name
    assert torch.equal(case["x"].grad, 2 * want["x"])


def test_main_grad_of_a_bias_alone(norm: str, impl: str, device: str) -> None:
    case = make_inputs((5, 65), device=device, given="weight bias")
    case["bias"] = torch.nn.Parameter(case["bias"])
    case["bias"].main_grad = torch.zeros(65, device=device)
    call(norm, case, accumulate_main_grad=True, impl=impl).backward(case["grad_y"])
    torch.testing.assert_close(case["bias"].main_grad, case["grad_y"].sum(dim=0))


@pytest.mark.parametrize("heads", [False, True], ids=["shared", "heads"])
def test_main_grad_of_any_strides(heads: bool, norm: str, impl: str, device: str) -> None:
    case = make_inputs((5, 3, 16), device=device, given="weight bias", heads=heads)
    want = run(case, norm, impl=impl)
    buffers = {}
    for name in ("weight", "bias"):
        case[name] = torch.nn.Parameter(case[name])
        buffers[name] = torch.zeros(*case[name].shape, 2, device=device)
        case[name].main_grad = buffers[name][..., 0]
    call(norm, case, accumulate_main_grad=True, eps=1e-6, impl=impl).backward(case["grad_y"])
    for name, buffer in buffers.items():
        assert torch.equal(case[name].main_grad, want[name]), name
        assert not buffer[..., 1].any(), name


@pytest.mark.parametrize(
    ("buffer", "message"),
    [(None, r"`weight` has no main_grad"), (torch.zeros(8).half(), r"expected torch\.float32 \(8,\) on cpu")],
    ids=["missing", "dtype"],
)
def test_main_grad_must_fit(buffer: torch.Tensor | None, message: str, norm: str) -> None:
    weight = torch.nn.Parameter(torch.ones(8))
    if buffer is not None:
        weight.main_grad = buffer
    with pytest.raises(ValueError, match=message):
        getattr(ops, norm)(torch.ones(2, 8), weight, accumulate_main_grad=True)
