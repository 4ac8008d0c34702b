"""The higher_order stage: gradients of gradients."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch.autograd.function import once_differentiable

import retrograd as rg
from retrograd.errors import SpecError

_PATH = Path(__file__).resolve().parent.parent / "mutants" / "higher_order.py"
_MODULE = importlib.util.spec_from_file_location("higher_order_mutants", _PATH)
mutants = importlib.util.module_from_spec(_MODULE)
_MODULE.loader.exec_module(mutants)

KINDS = dict(R37="wrong-value", L15="wrong-value", HX01="silently-constant", HX02="silently-constant")


def _op(fn, reference=torch.sin, **more):
    return rg.op(fn, reference, dict(x=rg.tensor("M", "N")), **more)


def _verify(*args, **more):
    return rg.verify(_op(*args, **more), level="quick", only=["higher_order"])


@pytest.mark.parametrize("name", KINDS)
def test_only_this_stage_finds_the_mutant(name):
    report = rg.verify(mutants.MUTANTS[name], level="quick", only=["higher_order"])
    assert KINDS[name] in {f.kind for f in report.findings}
    # R30's fault comes with HX02: what is kept beside save_for_backward is not checked for changes in place.
    assert rg.verify(mutants.MUTANTS[name], level="quick", skip=["higher_order", "mutation"])


class Sine(torch.autograd.Function):
    """Right to any order: the backward is made of differentiable operations on inputs."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.sin(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return dy * torch.cos(x)


class Once(Sine):
    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return Sine.backward(ctx, dy)


def test_right_and_refused_are_both_left_alone():
    assert _verify(Sine.apply).stage("higher_order").power < 1e-4
    refused = _verify(Once.apply)
    assert refused
    assert "refused" in refused.stage("higher_order").power_text


def test_the_refusal_is_what_autograd_grad_hides():
    x = torch.randn(3, requires_grad=True)
    g = torch.randn(3, requires_grad=True)
    (gx,) = torch.autograd.grad(Once.apply(x), x, g, create_graph=True)
    assert torch.autograd.grad(gx.sum(), x, allow_unused=True) == (None,)  # why the stage does not ask this way
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gx.sum().backward()


def test_promises_are_held_to():
    assert _verify(Sine.apply, double_backward="right")
    assert _verify(Once.apply, double_backward="raises")
    assert _verify(Once.apply, double_backward="right").findings[0].kind == "raises"
    assert _verify(Sine.apply, double_backward="raises").findings[0].kind == "does-not-raise"
    with pytest.raises(SpecError, match="double_backward"):
        _op(Sine.apply, double_backward="maybe")


def test_linear_ops_have_no_second_derivative_to_miss():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x):
            return 2 * x

        @staticmethod
        def backward(_ctx, dy):
            return 2 * dy

    assert _verify(Double.apply, lambda x: 2 * x)


def test_a_reference_without_a_second_derivative_decides_nothing():
    def reference(x):
        return Once.apply(x)

    report = _verify(Sine.apply, reference)
    assert report
    assert "cannot be judged" in report.stage("higher_order").notes[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the noise of a reference must be made where it runs")
def test_it_runs_on_a_gpu():
    assert rg.verify(_op(Sine.apply), level="quick", device="cuda", only=["contract", "oracle", "higher_order"])
    report = rg.verify(mutants.MUTANTS["HX01"], level="quick", device="cuda", only=["higher_order"])
    assert KINDS["HX01"] in {f.kind for f in report.findings}
