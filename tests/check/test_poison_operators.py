"""The poison stage inside custom operators: memory that only the operator's own kernel sees."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from corpus import corpus
from specimens import with_backward

import retrograd as rg
from retrograd.check.stages.poison import Fill, deterministic


@pytest.fixture
def scaled():
    """An operator that adds what it finds in fresh memory, times 0 or 1."""
    with torch.library._scoped_library("retrograd_test", "FRAGMENT") as library:
        library.define("scaled(Tensor x, bool reads) -> Tensor")

        def kernel(x: torch.Tensor, reads: bool) -> torch.Tensor:
            out = torch.empty_like(x)
            return torch.mul(x, 2) + out * 0 if reads else torch.mul(x, 2, out=out)

        library.impl("scaled", kernel, "CompositeExplicitAutograd")
        yield torch.ops.retrograd_test.scaled


def test_memory_inside_an_operator_is_filled_in_deterministic_mode_only(scaled):
    x = torch.ones(5)
    with Fill(float("nan"), 1) as mode:
        scaled(x, True)
    assert mode.operators
    with deterministic(fill=False):
        assert torch.equal(scaled(x, False), 2 * x)
    with deterministic(fill=True):
        assert torch.equal(scaled(x, False), 2 * x)
        assert scaled(x, True).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


class _Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, operator, reads=True):
        ctx.operator, ctx.reads = operator, reads
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return ctx.operator(grad, ctx.reads), None, None


def test_verify_catches_it(scaled):
    spec = rg.op(lambda x: _Reads.apply(x, scaled), lambda x: x * 2, dict(x=rg.tensor("M", "N")))
    assert rg.verify(spec, level="quick", only=["poison"]).findings


def test_an_operator_that_refuses_deterministic_mode_is_no_finding(scaled):
    def refuses(x):
        if torch.are_deterministic_algorithms_enabled():
            raise RuntimeError("adds atomically")
        return _Reads.apply(x, scaled, False)

    report = rg.verify(rg.op(refuses, lambda x: x * 2, dict(x=rg.tensor("M", "N"))), level="quick")
    assert report
    assert any("adds atomically" in note for note in report.stage("poison").notes)


def test_verify_leaves_a_healthy_operator_alone(scaled):
    spec = rg.op(lambda x: _Reads.apply(x, scaled, False), lambda x: x * 2, dict(x=rg.tensor("M", "N")))
    assert rg.verify(spec, level="quick")


def test_another_path_under_a_mode_is_no_lost_memory() -> None:
    """Ops may take operators that a mode sees where one is active, with other last bits."""

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            if torch.utils._python_dispatch._get_current_dispatch_mode() is None:
                return g * x.cos()
            return g * (torch.pi / 2 - x).sin()

    spec = rg.op(Watched.apply, torch.sin, dict(x=rg.tensor("M", "N")), dtypes=["float32"])
    assert rg.verify(spec, level="quick", only=["poison"])


def test_memory_that_only_odd_sizes_leave_unwritten_is_found():
    spec = corpus("mutants")["W11"]
    finding = rg.verify(spec, level="quick", only=["poison"]).findings[0]
    assert finding.tensor == "grad x"
    assert "N" in dict(finding.case.sizes)
    # Sizes that may not be another are left as they are.
    fixed = replace(spec, sizes=dict(M=[7], N=[48]))
    assert rg.verify(fixed, level="quick", only=["poison"]).stage("poison").cases == 1


def _strided(x, weight):
    return torch.nn.functional.conv1d(x, weight, stride=2)


@pytest.mark.parametrize("fresh", [torch.empty_like, torch.zeros_like])
def test_columns_that_a_stride_does_not_reach_are_found_where_their_memory_is_fresh(fresh):
    """Mutant V03 as its report has it; in the corpus it begins with ones, which are no fresh memory."""

    def backward(dy, x, weight):
        with torch.enable_grad():
            leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
            dx, dw = torch.autograd.grad(_strided(*leaves), leaves, dy)
        reached = 2 * (dy.shape[-1] - 1) + weight.shape[-1]
        out = fresh(dx)
        out[..., :reached] = dx[..., :reached]
        return out, dw

    inputs = dict(x=rg.tensor("B", "C", "L"), w=rg.tensor("K", "C", 3))
    spec = rg.op(with_backward(_strided, backward), _strided, inputs, sizes=dict(L=(5, 24)))
    report = rg.verify(spec, level="quick", only=["poison"])
    assert {f.tensor for f in report.findings} == ({"grad x"} if fresh is torch.empty_like else set())
