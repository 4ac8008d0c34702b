"""What the autograd node does around the implementations: saved tensors, subsets, second derivatives, errors."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from msda_cases import INPUTS, LEVELS, SAME_BITS, arguments, assert_within_budget, make_inputs, run, truth
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from retrograd.ops import ms_deform_attn
from retrograd.ops.msda import autograd, ms_deform_attn_reference

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, in fake tensors and make_fx

SUBSETS = [c for n in range(3) for c in itertools.combinations(INPUTS, n)]


@pytest.mark.parametrize("frozen", SUBSETS, ids=lambda f: "+".join(f) or "none")
def test_only_what_is_needed(frozen: tuple[str, ...], impl: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_inputs(device=device)
    want = run(case, impl=impl, **SAME_BITS)
    asked = []
    stock = autograd.MsdaFunction.backward

    def spy(ctx: Any, grad_out: torch.Tensor) -> Any:
        backward = ctx.call.functions.backward

        def recorded(*args: Any) -> Any:
            asked.append(args[-1][:3])
            return backward(*args)

        ctx.call = ctx.call._replace(functions=ctx.call.functions._replace(backward=recorded))
        return stock(ctx, grad_out)

    monkeypatch.setattr(autograd.MsdaFunction, "backward", staticmethod(spy))
    got = run(case, frozen=frozen, impl=impl, **SAME_BITS)
    assert asked == [tuple(name not in frozen for name in INPUTS)]
    if device == "cuda":  # what nobody needs is compiled away, and what is left contracts other products
        assert_within_budget(got, truth(case), case)
    else:
        assert all(torch.equal(got[name], want[name]) for name in got)


def test_without_gradients_nothing_is_kept(impl: str, device: str) -> None:
    case = make_inputs(device=device)
    out = ms_deform_attn(*arguments(case), impl=impl)
    assert out.grad_fn is None
    for name in INPUTS:
        case[name].requires_grad_()
    with torch.no_grad():
        assert torch.equal(ms_deform_attn(*arguments(case), impl=impl), out)
    with torch.inference_mode():
        assert torch.equal(ms_deform_attn(*arguments(case), impl=impl), out)


@pytest.mark.parametrize("name", INPUTS)
def test_change_after_the_forward_is_noticed(name: str, impl: str, device: str) -> None:
    case = make_inputs(device=device)
    case["value"].requires_grad_()
    out = ms_deform_attn(*arguments(case), impl=impl)
    with torch.no_grad():
        case[name].mul_(0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_result_may_be_changed_in_place(impl: str, device: str) -> None:
    case = make_inputs(device=device)
    value = case["value"].requires_grad_()
    ms_deform_attn(*arguments(case), impl=impl, **SAME_BITS).mul_(2).sum().backward()
    doubled, value.grad = value.grad, None
    ms_deform_attn(*arguments(case), impl=impl, **SAME_BITS).sum().backward()
    assert torch.equal(doubled, 2 * value.grad)


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved-tensor-hooks", "reentrant"])
def test_activation_checkpointing(reentrant: bool, impl: str, device: str) -> None:
    case = make_inputs(device=device)
    want = run(case, impl=impl, **SAME_BITS)
    for name in INPUTS:
        case[name].requires_grad_()
    call = lambda *args: ms_deform_attn(*args, impl=impl, **SAME_BITS)  # noqa: E731
    checkpoint(call, *arguments(case), use_reentrant=reentrant).backward(case["grad_out"])
    assert all(torch.equal(case[name].grad, want[name]) for name in INPUTS)


def test_gradcheck_twice(mode: dict[str, Any], impl: str) -> None:
    case = make_inputs(
        [(3, 4), (2, 3)],
        torch.float64,
        batch=1,
        queries=2,
        heads=2,
        points=2,
        channels=2,
        align_corners=mode["align_corners"],
    )
    value, shapes, locations, weights = (
        t.requires_grad_() if isinstance(t, torch.Tensor) else t for t in arguments(case)
    )

    def call(v: torch.Tensor, p: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        return ms_deform_attn(v, shapes, p, a, **mode, impl=impl)

    assert torch.autograd.gradcheck(call, (value, locations, weights))
    assert torch.autograd.gradgradcheck(call, (value, locations, weights))


def test_second_derivative_counts_each_input_once(impl: str) -> None:
    """Where weights are computed from locations, their own derivative must not be counted again."""
    case = make_inputs([(3, 4)], torch.float64, batch=1, queries=2, heads=2, points=2, channels=2)
    locations = case["sampling_locations"].requires_grad_()

    def twice(function: Any, **options: Any) -> torch.Tensor:
        weights = locations.square().sum(-1)
        out = function(case["value"], [(3, 4)], locations, weights, **options)
        (grad,) = torch.autograd.grad(out.square().sum(), locations, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), locations)[0]

    torch.testing.assert_close(twice(ms_deform_attn, impl=impl), twice(ms_deform_attn_reference))


def test_gradient_penalty_in_16_bit(impl: str, device: str) -> None:
    case = make_inputs(dtype=torch.bfloat16, beside=torch.float32, device=device)
    value = case["value"].requires_grad_()
    out = ms_deform_attn(*arguments(case), impl=impl)
    (grad,) = torch.autograd.grad(out, value, torch.ones_like(out, requires_grad=True), create_graph=True)
    assert grad.dtype == torch.bfloat16
    assert grad.requires_grad


def test_forward_mode_is_refused(impl: str, device: str) -> None:
    value, *others = arguments(make_inputs(device=device))
    refused = pytest.raises((RuntimeError, NotImplementedError), match=r"(?i)forward.mode|jvp")
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(value, torch.ones_like(value))
        with refused:
            ms_deform_attn(dual, *others, impl=impl)


@pytest.mark.parametrize("form", ["list", "tensor"])
def test_fake_tensors(form: str, impl: str) -> None:
    case = make_inputs()
    if form == "tensor":
        case["spatial_shapes"] = torch.tensor(LEVELS)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        inputs = [
            fake.from_tensor(t).requires_grad_(t.is_floating_point()) if isinstance(t, torch.Tensor) else t
            for t in arguments(case)
        ]
        out = ms_deform_attn(*inputs, impl=impl)
        assert out.shape == case["grad_out"].shape
        grads = torch.autograd.grad(out.sum(), [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad])
    assert [g.shape for g in grads] == [case[name].shape for name in INPUTS]


def test_make_fx_sees_the_operators(impl: str) -> None:
    case = make_inputs()

    def gradient(value: torch.Tensor) -> torch.Tensor:
        out = ms_deform_attn(value, *arguments(case)[1:], impl=impl, **SAME_BITS)
        return torch.autograd.grad(out, value, case["grad_out"])[0]

    graph = make_fx(gradient)(case["value"].requires_grad_())
    called = [str(node.target) for node in graph.graph.nodes]
    assert any("ms_deform_attn_bwd" in name for name in called), called
    assert torch.equal(graph(case["value"]), run(case, impl=impl, **SAME_BITS)["value"])


def test_deterministic_follows_torch(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_inputs()
    told = []
    stock = autograd.MsdaFunction.apply
    monkeypatch.setattr(
        autograd.MsdaFunction, "apply", staticmethod(lambda *a: told.append(a[-1].spec.deterministic) or stock(*a))
    )
    for enabled, given in ((False, None), (False, True), (False, False), (True, None), (True, True)):
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(enabled)
        try:
            run(case, deterministic=given, impl=impl)
        finally:
            torch.use_deterministic_algorithms(before)
    assert told == [False, True, False, True, True]
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="deterministic=False adds grad_value atomically"):
            run(case, deterministic=False, impl=impl)
    finally:
        torch.use_deterministic_algorithms(False)


V, P, A = (2, 84, 3, 8), (2, 5, 3, 2, 4, 2), (2, 5, 3, 2, 4)
GOOD = dict(
    value=torch.zeros(V),
    spatial_shapes=[(7, 9), (7, 3)],
    sampling_locations=torch.zeros(P),
    attention_weights=torch.zeros(A),
)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(value=[1.0]), TypeError, r"`value` is a list, expected a torch\.Tensor"),
        (dict(value=torch.zeros(V, dtype=torch.int32)), TypeError, r"`value` has dtype torch\.int32, expected float32"),
        (dict(value=torch.zeros(2, 84, 24)), ValueError, r"`value` has shape \(2, 84, 24\), expected \[B, S, H, C\].*unflatten"),
        (dict(spatial_shapes=[(7, 9), (3, 3)]), ValueError, r"72 pixels in all, expected 84 to match value\.shape\[1\]"),
        (dict(spatial_shapes=torch.tensor([[7, 9], [3, 3]])), ValueError, r"72 pixels in all, expected 84"),
        (dict(spatial_shapes=torch.tensor([[7.0, 9.0], [7.0, 3.0]])), TypeError, r"`spatial_shapes` has dtype torch\.float32"),
        (dict(spatial_shapes=torch.tensor([7, 9, 7, 3])), ValueError, r"`spatial_shapes` has shape \(4,\), expected \[L, 2\]"),
        (dict(spatial_shapes=[(7, 9), (-7, -3)]), ValueError, r"expected heights and widths of 0 or more"),
        (dict(spatial_shapes=[(7, 9, 1)]), ValueError, r"expected a pair \(height, width\)"),
        (dict(spatial_shapes=[(7.0, 9.0)]), TypeError, r"`spatial_shapes` is .*expected a tensor \[L, 2\]"),
        (dict(spatial_shapes=7), TypeError, r"`spatial_shapes` is 7"),
        (dict(spatial_shapes=torch.zeros(2, 2, dtype=torch.int64, device="meta")), ValueError, r"`spatial_shapes` is on meta, expected cpu like value"),
        (dict(sampling_locations=torch.zeros(2, 5, 3, 3, 4, 2)), ValueError, r"`sampling_locations` has shape .* expected \(2, 5, 3, 2, 4, 2\), that is \[B, Q, H, L, P, 2\]"),
        (dict(sampling_locations=torch.zeros(2, 5, 3, 8, 2)), ValueError, r"`sampling_locations` has shape .* with points_per_level"),
        (dict(sampling_locations=torch.zeros(P).half()), TypeError, r"`sampling_locations` has dtype torch\.float16, expected torch\.float32 beside value"),
        (dict(attention_weights=torch.zeros(2, 5, 3, 2, 3)), ValueError, r"`attention_weights` has shape \(2, 5, 3, 2, 3\), expected \(2, 5, 3, 2, 4\)"),
        (dict(attention_weights=torch.zeros(A, dtype=torch.float64)), TypeError, r"`attention_weights` has dtype torch\.float64, expected torch\.float32"),
        (dict(attention_weights=torch.zeros(A, device="meta")), ValueError, r"`attention_weights` is on meta, expected cpu like value"),
        (dict(value=torch.zeros(V).double()), TypeError, r"`sampling_locations` has dtype torch\.float32, expected torch\.float64 beside value"),
        (dict(value=torch.zeros(V).half(), sampling_locations=torch.zeros(P).bfloat16()), TypeError, r"expected torch\.float16 or torch\.float32 beside value of torch\.float16"),
        (dict(points_per_level=[4]), ValueError, r"`points_per_level` is \[4\], expected 2 numbers"),
        (dict(points_per_level=[4, 4.0]), TypeError, r"`points_per_level` is \[4, 4\.0\], expected a list of ints"),
        (dict(points_per_level=[4, 4]), ValueError, r"expected \(2, 5, 3, 8, 2\), that is \[B, Q, H, sum\(points_per_level\), 2\]"),
        (dict(padding_mode="reflection"), ValueError, r"`padding_mode` is 'reflection', expected 'zeros' or 'border'"),
        (dict(impl="hip"), ValueError, r"`impl` is 'hip', expected one of 'triton', 'cuda', 'native', 'torch'"),
    ],
)  # fmt: skip
def test_wrong_arguments(change: dict[str, Any], error: type[Exception], message: str) -> None:
    ms_deform_attn(**GOOD)
    with pytest.raises(error, match=message):
        ms_deform_attn(**(GOOD | change))


def test_a_tensor_that_promises_too_many_pixels_reads_nothing(impl: str, device: str) -> None:
    """What a GPU would be given unchecked: a level beyond S counts as empty."""
    from retrograd.ops.msda.arguments import Levels, MsdaInputs, MsdaSpec, NeededGrads
    from retrograd.ops.msda.dispatch import FAMILY, functions

    value, p, a = torch.ones(1, 12, 1, 4), torch.full((1, 3, 1, 4, 2), 0.5), torch.ones(1, 3, 1, 4)
    value, p, a = value.to(device), p.to(device), a.to(device)
    chosen = functions(FAMILY.choose(impl, value.dtype, value.device))
    for shapes, filled in (
        ([[3, 4], [1, 1]], 1),
        ([[2, 3], [2, 3]], 2),
        ([[100000, 100000], [2, 2]], 0),
        ([[-2, 2], [2, 2]], 0),
    ):
        levels, spec = Levels(None, torch.tensor(shapes, device=device)), MsdaSpec((2, 2))
        inputs = MsdaInputs(value, levels, locations=p, weights=a)
        out = chosen.forward(inputs, spec)
        assert (out == 2 * filled).all(), shapes
        grads = chosen.backward(out, inputs, spec, NeededGrads(value=True, locations=True, weights=True))
        assert float(grads[0].sum()) == pytest.approx(3 * 4 * filled * 2 * float(out[0, 0, 0, 0]))
        assert all(math.isfinite(float(g.sum())) for g in grads[:3])
