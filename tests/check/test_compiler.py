"""The compiler stage: operators, torch.compile, torch.func."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import retrograd as rg
from retrograd.errors import SpecError

_PATH = Path(__file__).resolve().parent.parent / "mutants" / "compiler.py"
_MODULE = importlib.util.spec_from_file_location("compiler_mutants", _PATH)
mutants = importlib.util.module_from_spec(_MODULE)
_MODULE.loader.exec_module(mutants)

KINDS = dict(C01="fake", C02="schema")
X = dict(x=rg.tensor("M", "N"))


def _verify(fn, reference=None, **more):
    return rg.verify(rg.op(fn, reference or fn, X, **more), level="quick", only=["compiler"])


@pytest.mark.parametrize("name", ["C01", "C02", "C03"])
def test_only_this_stage_finds_the_mutant(name):
    report = rg.verify(mutants.MUTANTS[name], level="quick", only=["compiler"])
    assert report.verdict == "finding"
    if name in KINDS:
        assert KINDS[name] in {f.kind for f in report.findings}
    else:
        assert "torch.compile" in report.findings[0].what
    assert rg.verify(mutants.MUTANTS[name], level="quick", skip=["compiler"])


def test_strides_are_compared_where_opcheck_leaves_them_out(monkeypatch):
    monkeypatch.setattr(torch.library, "opcheck", lambda *_args, **_more: {"test_schema": "SUCCESS"})
    (finding,) = rg.verify(mutants.MUTANTS["C01"], level="quick", only=["compiler"]).findings
    assert finding.kind == "fake"
    assert "result 0 has strides (1, 7), its fake (48, 1)" in finding.what


def test_a_healthy_op_keeps_all_promises():
    report = _verify(F.gelu, transforms=["compile", "vjp", "vmap"])
    assert report, [f.what for f in report.findings]
    assert report.stage("compiler").power_text.endswith("compile, vjp, vmap")


def test_without_promises_nothing_is_compiled():
    report = _verify(F.gelu)
    assert report
    assert "declares nothing" in report.stage("compiler").power_text


def test_a_graph_break_is_a_finding():
    def breaks(x):
        torch._dynamo.graph_break()
        return x * x

    assert _verify(breaks, transforms=["compile"]).findings[0].kind == "raises"


def test_a_function_without_setup_context_is_no_vjp():
    report = _verify(mutants.DropsBackward.apply, lambda x: x * x, transforms=["vjp"])
    assert "setup_context" in report.findings[0].what


def test_wrong_batching_is_found():
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x / x.shape[0]

        @staticmethod
        def setup_context(ctx, inputs, _output):
            ctx.rows = inputs[0].shape[0]

        @staticmethod
        def backward(ctx, dy):
            return dy / ctx.rows

        @staticmethod
        def vmap(_info, _in_dims, x):
            return Scaled.apply(x), 0  # divides by the batch

    report = _verify(Scaled.apply, lambda x: x / x.shape[0], transforms=["vmap"])
    assert "vmap" in report.findings[0].what


def _with_jvp(factor):
    class Cubed(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x**3

        @staticmethod
        def setup_context(ctx, inputs, _output):
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx, dy):
            return 3 * dy * ctx.saved_tensors[0] ** 2

        @staticmethod
        def jvp(ctx, move):
            return factor * move * ctx.saved_tensors[0] ** 2

    return Cubed.apply


def test_forward_mode_is_compared_with_what_backwards_give():
    assert _verify(_with_jvp(3), lambda x: x**3, transforms=["jvp"])
    (finding,) = _verify(_with_jvp(2.99), lambda x: x**3, transforms=["jvp"]).findings
    assert finding.kind == "jvp"
    assert finding.what.startswith("in forward mode: slope out")
    (finding,) = _verify(mutants.DropsBackward.apply, lambda x: x * x, transforms=["jvp"]).findings
    assert "in forward mode" in finding.what
    assert _verify(lambda x: (x.sin(), x.prod(-1)), transforms=["jvp"])


def _larger(sign):
    class Larger(torch.autograd.Function):
        @staticmethod
        def forward(x, y):
            return torch.maximum(x, y)

        @staticmethod
        def setup_context(ctx, inputs, _output):
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx, dz):
            chosen = ctx.saved_tensors[0] > ctx.saved_tensors[1]
            return torch.where(chosen, dz, 0), torch.where(chosen, 0, dz)

        @staticmethod
        def jvp(ctx, dx, dy):
            return dy + sign * (ctx.saved_tensors[0] > ctx.saved_tensors[1]) * (dx - dy)

    return Larger.apply


def test_forward_mode_has_rounding_of_its_own():
    inputs = dict(x=rg.tensor("M", "N"), y=rg.tensor("M", "N"))
    healthy, broken = (
        rg.op(_larger(sign), torch.maximum, inputs, sizes=dict(M=100, N=100), transforms=["jvp"]) for sign in (1, -1)
    )
    assert rg.verify(healthy, level="quick", only=["compiler"])
    (finding,) = rg.verify(broken, level="quick", only=["compiler"]).findings
    assert finding.kind == "jvp"


def test_gradients_of_a_batch_of_grad_outs_are_those_of_each():
    class First(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            return 2 * x

        @staticmethod
        def backward(_, dy):
            return 2 * dy if "Batched" not in repr(dy) else 2.01 * dy

    assert _verify(F.gelu, transforms=["batched_grad"])
    assert "is_grads_batched" in _verify(First.apply, lambda x: 2 * x, transforms=["batched_grad"]).findings[0].what


def test_transforms_are_named():
    with pytest.raises(SpecError, match="transforms"):
        rg.op(F.gelu, inputs=X, transforms=["jit"])
    with pytest.raises(SpecError, match="transforms"):
        rg.op(F.gelu, inputs=X, transforms="compile")


def test_a_compiled_part_of_an_op_runs_where_operators_are_watched():
    # Dynamo compiles nothing below a dispatch mode, and calls that an error with fullgraph=True.
    inner = torch.compile(lambda x: x * 2, fullgraph=True, backend="eager")

    def op(x):
        return inner(x).sin()

    stages = ["oracle", "poison", "bounds"]
    assert rg.verify(rg.op(op, lambda x: (2 * x).sin(), dict(x=rg.tensor("N"))), level="quick", only=stages)
    broken = rg.verify(rg.op(op, lambda x: (2 * x).cos(), dict(x=rg.tensor("N"))), level="quick", only=stages)
    assert broken.verdict == "finding"
    unwritten = torch.compile(lambda x: torch.empty_like(x) * 0 + x, fullgraph=True, backend="eager")
    report = rg.verify(rg.op(unwritten, lambda x: x * 1, dict(x=rg.tensor("N"))), level="quick", only=["poison"])
    assert {f.kind for f in report.findings} == {"uninitialised"}


@torch.library.custom_op("retrograd_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda _, grad: 2 * grad)


def test_opcheck_is_left_to_level_full_where_nothing_is_wrong(monkeypatch):
    asked: list[str] = []
    stock = torch.library.opcheck
    monkeypatch.setattr(torch.library, "opcheck", lambda func, *a, **k: asked.append(str(func)) or stock(func, *a, **k))
    spec = rg.op(twice, lambda x: 2 * x, X)
    for level, calls in (("quick", []), ("full", ["retrograd_tests.twice.default"])):
        asked.clear()
        report = rg.verify(spec, level=level, only=["compiler"])
        assert report.stage("compiler").power_text == "1 custom operator"
        assert (bool(report), asked) == (True, calls)
    assert rg.verify(mutants.MUTANTS["C01"], level="quick", only=["compiler"]).findings
    assert asked[1:]
