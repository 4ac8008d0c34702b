"""torch.compile, torch.export and torch.library: one graph, results of eager."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from msda_cases import DEVICE, INPUTS, LEVELS, SAME_BITS, arguments, make_inputs, run
from torch._dynamo.testing import CompileCounterWithBackend

from retrograd.nn import MSDeformAttn
from retrograd.ops import ms_deform_attn, ms_deform_attn_fused
from retrograd.ops.msda.dispatch import functions
from retrograd.ops.types import Impl

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def shapes_as(form: str) -> Any:
    """LEVELS as a list or a tensor."""
    return LEVELS if form == "list" else torch.tensor(LEVELS)


@pytest.mark.parametrize("form", ["list", "tensor"])
def test_same_bits_as_eager(form: str, mode: dict[str, Any], impl: str) -> None:
    case = make_inputs() | {"spatial_shapes": shapes_as(form)}
    want = run(case, **mode, impl=impl, **SAME_BITS)
    leaves = case | {name: case[name].requires_grad_() for name in INPUTS}
    compiled = torch.compile(
        lambda *a: ms_deform_attn(*a, **mode, impl=impl, **SAME_BITS), backend="aot_eager", fullgraph=True
    )
    out = compiled(*arguments(leaves))
    grads = torch.autograd.grad(out, [leaves[name] for name in INPUTS], case["grad_out"])
    assert torch.equal(out, want["out"])
    assert all(torch.equal(g, want[name]) for g, name in zip(grads, INPUTS, strict=True))


@pytest.mark.parametrize("frozen", INPUTS)
def test_subsets(frozen: str, impl: str) -> None:
    case = make_inputs()
    want = run(case, frozen=(frozen,), impl=impl, **SAME_BITS)
    leaves = case | {name: case[name].requires_grad_(name != frozen) for name in INPUTS}
    compiled = torch.compile(lambda *a: ms_deform_attn(*a, impl=impl, **SAME_BITS), backend="aot_eager", fullgraph=True)
    names = [name for name in INPUTS if name != frozen]
    grads = torch.autograd.grad(compiled(*arguments(leaves)), [leaves[n] for n in names], case["grad_out"])
    assert all(torch.equal(g, want[name]) for g, name in zip(grads, names, strict=True))


@pytest.mark.parametrize("form", ["list", "tensor"])
def test_queries_do_not_recompile(form: str, impl: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    shapes = shapes_as(form)
    compiled = torch.compile(
        lambda v, p, a: ms_deform_attn(v, shapes, p, a, impl=impl), backend=counter, fullgraph=True
    )
    for queries, most in ((4, 1), (5, 2), (6, 2), (33, 2)):
        case = make_inputs(queries=queries)
        value, _, locations, weights = arguments(case)
        assert torch.equal(compiled(value, locations, weights), run(case, impl=impl)["out"])
        assert counter.frame_count <= most


def test_image_sizes_do_not_recompile(impl: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")

    def call(image: torch.Tensor, p: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        h, w = image.shape[1:3]
        return ms_deform_attn(image.flatten(1, 2), [(h, w)], p, a, impl=impl)

    compiled = torch.compile(call, backend=counter, fullgraph=True)
    for (h, w), most in (((4, 5), 1), ((6, 7), 2), ((9, 11), 2)):
        case = make_inputs([(h, w)])
        value, _, locations, weights = arguments(case)
        got = compiled(value.unflatten(1, (h, w)), locations, weights)
        assert torch.equal(got, run(case, impl=impl)["out"])
        assert counter.frame_count <= most


@pytest.mark.dealt(2)
def test_inductor(impl: str) -> None:
    torch.manual_seed(0)
    module = MSDeformAttn(32, len(LEVELS), 4, 3, impl=impl).to(DEVICE)
    torch.nn.init.normal_(module.sampling_offsets.weight, std=0.1)
    query, reference = torch.randn(2, 5, 32), torch.rand(2, 5, len(LEVELS), 2)
    value = torch.randn(2, sum(h * w for h, w in LEVELS), 32)
    found = []
    for call in (module, torch.compile(module, fullgraph=True)):
        inputs = [t.to(DEVICE, copy=True).requires_grad_() for t in (query, reference, value)]
        out = call(*inputs, LEVELS)
        found.append([out, *torch.autograd.grad(out.square().sum(), [*inputs, *module.parameters()])])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


def test_wrong_pixels_are_noticed_when_a_traced_tensor_is_read(impl: str) -> None:
    case = make_inputs()
    compiled = torch.compile(lambda *a: ms_deform_attn(*a, impl=impl), backend="aot_eager", fullgraph=True)
    with pytest.raises(ValueError, match="pixels in all, expected"):
        compiled(case["value"], torch.tensor(LEVELS) + 1, *arguments(case)[2:])


class Plain(torch.nn.Module):
    """The op and its fused form as a model calls them."""

    def __init__(self, impl: str, fused: bool) -> None:
        super().__init__()
        self.impl, self.fused = impl, fused

    def forward(self, value: torch.Tensor, shapes: torch.Tensor, p: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        if self.fused:
            reference = p.mean((2, 4))
            return ms_deform_attn_fused(value, shapes, reference, p, a.flatten(3), impl=self.impl)
        return ms_deform_attn(value, shapes, p, a, impl=self.impl)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_export(fused: bool, strict: bool, impl: str) -> None:
    case = make_inputs()
    args = (case["value"], torch.tensor(LEVELS), *arguments(case)[2:])
    module = Plain(impl, fused)
    batch, queries = torch.export.Dim("batch", min=2), torch.export.Dim("queries", min=2)
    dynamic = ({0: batch}, None, {0: batch, 1: queries}, {0: batch, 1: queries})
    program = torch.export.export(module, args, dynamic_shapes=dynamic, strict=strict)
    assert any("ms_deform_attn_fwd" in str(node.target) for node in program.graph.nodes)
    other = make_inputs(batch=3, queries=7, seed=8)
    args = (other["value"], torch.tensor(LEVELS), *arguments(other)[2:])
    got, want = program.module()(*args), module(*args)
    if fused and functions(Impl(impl)).fused:
        torch.testing.assert_close(got, want)  # the kernel's softmax, another one's in the graph
    else:
        assert torch.equal(got, want)


@pytest.mark.parametrize("form", ["list", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype: torch.dtype, form: str, mode: dict[str, Any]) -> None:
    case = make_inputs(dtype=dtype, beside=torch.float32)
    flat = [h for size in LEVELS for h in size]
    levels = (None, flat) if form == "list" else (torch.tensor(LEVELS), [])
    value = case["value"].requires_grad_()
    locations = case["sampling_locations"].flatten(3, 4).requires_grad_()
    weights = case["attention_weights"].flatten(3).requires_grad_()
    spec = ([3] * len(LEVELS), mode["padding_mode"] == "border", mode["align_corners"], True)
    torch.library.opcheck(
        torch.ops.retrograd.ms_deform_attn_fwd.default, (value, *levels, locations, weights, *spec, "torch")
    )
    plain = [t.detach() for t in (case["grad_out"], value, locations, weights)]
    for needs in itertools.product((False, True), repeat=3):
        torch.library.opcheck(
            torch.ops.retrograd.ms_deform_attn_bwd.default,
            (plain[0], plain[1], *levels, *plain[2:], *spec, *needs, "torch"),
            test_utils=("test_schema", "test_faketensor"),
        )


def test_second_derivative_of_the_operator(impl: str) -> None:
    case = make_inputs([(3, 4)], torch.float64, batch=1, queries=2, heads=2, points=2, channels=2)
    value, shapes, locations, weights = (
        t.requires_grad_() if isinstance(t, torch.Tensor) else t for t in arguments(case)
    )
    spec = ([2], False, False, True, impl)

    def call(v: torch.Tensor, p: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        sizes = [n for size in shapes for n in size]
        return torch.ops.retrograd.ms_deform_attn_fwd(v, None, sizes, p.flatten(3, 4), a.flatten(3), *spec)

    assert torch.autograd.gradgradcheck(call, (value, locations, weights))
