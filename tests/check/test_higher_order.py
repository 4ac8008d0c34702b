"""The higher_order stage: gradients of gradients."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from specimens import with_backward

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


# Right to any order: the backward is made of differentiable operations on inputs.
sine = with_backward(torch.sin, lambda dy, x: dy * torch.cos(x))


once = with_backward(torch.sin, lambda dy, x: dy * torch.cos(x), once=True)


def test_right_and_refused_are_both_left_alone():
    assert _verify(sine).stage("higher_order").power < 1e-4
    refused = _verify(once)
    assert refused
    assert "refused" in refused.stage("higher_order").power_text


def test_the_refusal_is_what_autograd_grad_hides():
    x = torch.randn(3, requires_grad=True)
    g = torch.randn(3, requires_grad=True)
    (gx,) = torch.autograd.grad(once(x), x, g, create_graph=True)
    assert torch.autograd.grad(gx.sum(), x, allow_unused=True) == (None,)  # why the stage does not ask this way
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gx.sum().backward()


def test_promises_are_held_to():
    assert _verify(sine, double_backward="right")
    assert _verify(once, double_backward="raises")
    assert _verify(sine, double_backward=True)
    assert _verify(once, double_backward=False)
    assert _verify(once, double_backward="right").findings[0].kind == "raises"
    assert _verify(sine, double_backward="raises").findings[0].kind == "does-not-raise"
    with pytest.raises(SpecError, match="double_backward"):
        _op(sine, double_backward="maybe")


def test_no_double_backward_is_a_note_that_names_the_line():
    report = _verify(mutants.into_memory, torch.exp)
    assert report.verdict == "proved"
    (note,) = report.stage("higher_order").notes
    backward = mutants.IntoMemory.backward.__code__
    assert f"on IntoMemory.backward (higher_order.py:{backward.co_firstlineno})" in note
    assert "once_differentiable" in note
    assert report.stage("higher_order").power_text == "no double backward"


def test_no_double_backward_of_a_custom_operator_names_what_somebody_can_decorate():
    @torch.library.custom_op("higher_order_test::power", mutates_args=())
    def power(x: torch.Tensor) -> torch.Tensor:
        return x.exp()

    power.register_fake(torch.empty_like)

    def backward(ctx, dy):
        return torch.from_numpy((dy * ctx.out).detach().numpy())

    power.register_autograd(backward, setup_context=lambda ctx, inputs, output: setattr(ctx, "out", output))
    (note,) = _verify(power, torch.exp).stage("higher_order").notes
    assert "once_differentiable on the backward that register_autograd is given" in note
    once = torch.autograd.function.once_differentiable(backward)
    power.register_autograd(once, setup_context=lambda ctx, inputs, output: setattr(ctx, "out", output))
    assert not _verify(power, torch.exp).stage("higher_order").notes


def test_no_double_backward_is_a_finding_where_it_is_promised():
    report = _verify(mutants.into_memory, torch.exp, double_backward=True)
    assert {f.kind for f in report.findings} == {"silently-constant"}
    assert _verify(mutants.into_memory, torch.exp, double_backward=False).findings[0].kind == "does-not-raise"


def test_what_a_backward_has_compiled_runs_as_it_is_written():
    # For the CPU it takes a compiler of C++, and 20 s: no other stage has a GPU's code compiled for it.
    pytest.importorskip("triton")  # without it no kernel is executed here, and what a person compiles is compiled
    compiled = []

    def backend(graph, _):
        compiled.append(graph)
        return graph.forward

    slope = torch.compile(torch.cos, backend=backend)
    assert _verify(with_backward(torch.sin, lambda dy, x: dy * slope(x)))
    assert not compiled


def test_a_part_of_a_second_derivative_is_silently_wrong():
    # Of x from a kernel, of w differentiable: the sum of both is neither right nor refused.
    def backward(dy, x, w):
        with torch.no_grad():
            dx = dy * w * torch.cos(x)
        return dx, dy * torch.sin(x)

    reference = lambda x, w: torch.sin(x) * w  # noqa: E731
    inputs = dict(x=rg.tensor("M", "N"), w=rg.tensor("M", "N"))
    report = rg.verify(with_backward(reference, backward), reference=reference, inputs=inputs, only=["higher_order"])
    assert report.verdict == "finding"


def test_linear_ops_have_no_second_derivative_to_miss():
    assert _verify(with_backward(lambda x: 2 * x, lambda dy, _x: 2 * dy), lambda x: 2 * x)


def test_a_reference_without_a_second_derivative_decides_nothing():
    def reference(x):
        return once(x)

    report = _verify(sine, reference)
    assert report
    assert "cannot be judged" in report.stage("higher_order").notes[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the noise of a reference must be made where it runs")
def test_it_runs_on_a_gpu():
    assert rg.verify(_op(sine), level="quick", device="cuda", only=["contract", "oracle", "higher_order"])
    report = rg.verify(mutants.MUTANTS["HX01"], level="quick", device="cuda", only=["higher_order"])
    assert KINDS["HX01"] in {f.kind for f in report.findings}


@pytest.mark.parametrize("reference", [torch.atan2, lambda x: x.no_such_name])
def test_a_mistake_of_the_reference_is_said_of_it(reference):
    with pytest.raises(SpecError, match=r"the reference raises (TypeError|AttributeError)"):
        rg.verify(torch.sin, reference=reference, inputs={"x": rg.tensor("N")}, level="quick", only=["oracle"])


def test_a_gradient_that_is_another_under_a_graph_is_found():
    """As of a backward that differentiates anew and hands on what lies in `.grad`, which is nothing under a graph."""

    def lost(dy, x):
        return torch.zeros_like(dy) if torch.is_grad_enabled() else dy * torch.cos(x)

    report = _verify(with_backward(torch.sin, lost))
    assert [(f.kind, f.tensor) for f in report.findings] == [("wrong-value", "grad x")]
    assert report.findings[0].what.startswith("with create_graph=True grad x")
    wrong = _verify(with_backward(torch.sin, lambda dy, x: 2 * dy * torch.cos(x)))  # which other stages tell
    assert all(f.tensor != "grad x" for f in wrong.findings)
