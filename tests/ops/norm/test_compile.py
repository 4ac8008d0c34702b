"""torch.compile and torch.library: one graph, no recompilation for another number of rows, results of eager."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from norm_cases import INPUTS, make_inputs
from torch._dynamo.testing import CompileCounterWithBackend

from retrograd import ops
from retrograd.ops.norm import custom_op

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(torch.nn.Module):
    """Two norms with what stands between them in a model."""

    def __init__(self, norm: str, impl: str, n: int) -> None:
        super().__init__()
        self.norm, self.impl = getattr(ops, norm), impl
        self.weight = torch.nn.Parameter(torch.linspace(-1, 2, n))
        self.bias = torch.nn.Parameter(torch.linspace(1, -1, n))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, s = self.norm(x, self.weight, self.bias, residual, prenorm=True, impl=self.impl)
        return self.norm(torch.nn.functional.silu(y), self.weight, weight_offset=1.0, impl=self.impl), s


def assert_as_eager(module: torch.nn.Module, compiled: Any, shape: tuple[int, ...], device: str, exact: bool) -> None:
    """Results and gradients of the compiled module are those of the module."""
    case = make_inputs(shape, device=device, given="residual")
    found = []
    for function in (module, compiled):
        inputs = [case[name].clone().requires_grad_() for name in ("x", "residual")]
        out = function(*inputs)
        grads = torch.autograd.grad(out, [*inputs, *module.parameters()], [case["grad_y"], case["grad_s"]])
        found.append([*out, *grads])
    for eager, got in zip(*found, strict=True):
        if exact:
            assert torch.equal(got, eager)
        else:
            torch.testing.assert_close(got, eager)  # silu is compiled to other code


@pytest.mark.parametrize("dims", [2, 3], ids=lambda d: f"{d}d")
def test_rows_do_not_recompile(dims: int, norm: str, impl: str, device: str) -> None:
    module = Block(norm, impl, 64).to(device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    # The second number of rows makes them symbolic; those after it must find that code.
    for m, most in ((4, 1), (5, 2), (6, 2), (33, 2), (2, 2)):
        assert_as_eager(module, compiled, (m, 64) if dims == 2 else (m, 3, 64), device, exact=True)
        assert counter.frame_count <= most


def test_rows_marked_dynamic_compile_once(norm: str, impl: str, device: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    function = getattr(ops, norm)
    compiled = torch.compile(lambda x, w: function(x, w, impl=impl), backend=counter, fullgraph=True)
    weight = torch.ones(64, device=device, requires_grad=True)
    for m in (3, 4, 17):
        x = torch.randn(m, 64, device=device, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0)
        compiled(x, weight).sum().backward()
        assert x.grad is not None
    assert counter.frame_count == 1


@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "residual", "x weight", ""])
@pytest.mark.parametrize("root", ["y", "s", "ys"])
def test_any_subset_of_gradients(root: str, wanted: str, norm: str, device: str) -> None:
    case = make_inputs((5, 3, 16), torch.bfloat16, device, vector_dtype=torch.float32, stream_dtype=torch.float32)
    function = getattr(ops, norm)

    def loss(*args: torch.Tensor) -> torch.Tensor:
        y, s = function(*args, prenorm=True, impl="torch")
        return sum((t.float() * t.float()).sum() for t, name in ((y, "y"), (s, "s")) if name in root)

    found = []
    for call in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        inputs = [case[name].clone().requires_grad_(name in wanted.split()) for name in INPUTS]
        value = call(*inputs)
        if value.requires_grad:
            value.backward()
        found.append([value.detach(), *(t.grad for t in inputs)])
    for eager, got in zip(*found, strict=True):
        # The operator gives zeros where the node gives nothing.
        assert torch.equal(got, eager) if eager is not None else got is None or not got.any()


@pytest.mark.dealt(2)
def test_inductor(norm: str, device: str) -> None:
    module = Block(norm, "torch", 64).to(device)
    compiled = torch.compile(module, fullgraph=True)
    assert_as_eager(module, compiled, (7, 64), device, exact=False)


def test_default_implementation_is_chosen_when_run(norm: str, device: str) -> None:
    function = getattr(ops, norm)
    x = torch.randn(5, 64, device=device)
    compiled = torch.compile(lambda x: function(x), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), function(x))
    assert compiled(x.double()).dtype == torch.float64


def test_wrong_arguments_are_refused_while_tracing(norm: str) -> None:
    compiled = torch.compile(lambda x, w: getattr(ops, norm)(x, w), backend="aot_eager")
    with pytest.raises(Exception, match=r"`weight` has shape \(4,\), expected \(8,\)"):
        compiled(torch.zeros(4, 8), torch.ones(4))


def test_main_grad_breaks_the_graph(norm: str) -> None:
    weight = torch.nn.Parameter(torch.ones(8))
    weight.main_grad = torch.zeros(8)
    function, x = getattr(ops, norm), torch.randn(4, 8)
    call = lambda x: function(x, weight, accumulate_main_grad=True).sum()  # noqa: E731
    with pytest.raises(Exception, match=r"main_grad.*torch\.compile cannot trace"):
        torch.compile(call, backend="aot_eager", fullgraph=True)(x)
    torch.compile(call, backend="aot_eager")(x).backward()
    want = weight.main_grad.clone()
    assert want.any()
    call(x).backward()
    assert torch.equal(weight.main_grad, 2 * want)


@pytest.mark.parametrize("heads", [0, 1, 3])
@pytest.mark.parametrize("wanted", ["x", "weight", "bias"])
def test_heads(wanted: str, heads: int, norm: str, device: str) -> None:
    case = make_inputs((5, heads, 16), device=device, given="weight bias", heads=True)
    function = getattr(ops, norm)
    found = []
    for call in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        inputs = [case[name].clone().requires_grad_(name == wanted) for name in ("x", "weight", "bias")]
        call(*inputs, impl="torch").backward(case["grad_y"])
        found.append(next(t.grad for t in inputs if t.requires_grad))
    assert torch.equal(*found)


SPEC = (1e-6, 0.5, True, None)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("given", ["", "weight", "bias residual", "weight bias residual"])
@pytest.mark.parametrize("centered", [False, True], ids=["rms_norm", "layer_norm"])
def test_opcheck(centered: bool, given: str, heads: int, device: str) -> None:
    case = make_inputs((6, 16), torch.bfloat16, device, given=given, stream_dtype=torch.float32)
    vectors = [case[name].expand(heads, 16) if heads > 1 else case[name] for name in ("weight", "bias") if name in case]
    vectors = dict(zip([name for name in ("weight", "bias") if name in case], vectors, strict=True))
    tensors = [case["x"], vectors.get("weight"), vectors.get("bias"), case.get("residual")]
    tensors = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
    s_dtype = torch.bfloat16 if tensors[3] is None else torch.float32
    args = (*tensors, centered, *SPEC, torch.bfloat16, s_dtype, True, True, "torch")
    torch.library.opcheck(torch.ops.retrograd.norm_fwd.default, args)
    with torch.no_grad():
        _, s, mean, rstd = torch.ops.retrograd.norm_fwd(*args)
    saved = s if s.numel() else tensors[0].detach()
    weight = None if tensors[1] is None else tensors[1].detach()
    given_bwd = (case["grad_y"], saved, weight, mean if centered else None, rstd, case["grad_s"])
    for dtypes in itertools.product((torch.bfloat16, None), (torch.float32, None)):
        wanted = (*dtypes, torch.float32, torch.bfloat16)
        args = (*given_bwd, centered, *SPEC, *wanted, heads, "torch")
        torch.library.opcheck(torch.ops.retrograd.norm_bwd.default, args, test_utils=("test_schema", "test_faketensor"))


def test_results_of_the_backward_operator_share_no_memory(device: str) -> None:
    case = make_inputs((6, 16), device=device)
    rstd = torch.ones(6, device=device)
    args = (case["grad_y"], case["x"], case["weight"], None, rstd, None, False, *SPEC)
    x, residual, *_ = torch.ops.retrograd.norm_bwd(*args, torch.float32, torch.float32, None, None, 1, "torch")
    assert torch.equal(x, residual)
    assert x.untyped_storage().data_ptr() != residual.untyped_storage().data_ptr()


def test_second_derivative_of_the_operator_is_refused(device: str) -> None:
    case = make_inputs((6, 16), device=device)
    x, weight = case["x"].requires_grad_(), case["weight"]
    args = (x, weight, None, None, False, *SPEC, torch.float32, torch.float32, True, True, "torch")
    y, *_ = torch.ops.retrograd.norm_fwd(*args)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        grad.sum().backward()


def test_operators_are_named_after_the_library() -> None:
    assert custom_op._LIBRARY.ns == "retrograd"
