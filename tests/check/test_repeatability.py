"""Bits that nobody promised, faults of the checker's own, faults of some inputs only: what is told, and what goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from corpus import corpus
from torch.autograd.function import once_differentiable

import retrograd as rg
from retrograd.check.spec import OpSpec


def square(**more) -> OpSpec:
    more = dict(reference=lambda x: x * x, inputs=dict(x=rg.tensor("M", "N"))) | more
    fn = more.pop("fn")
    return rg.op(fn, **more)


class Seldom:
    """x * x whose last bit is off in one call of `period`: less often than repeats would show."""

    def __init__(self, period: int) -> None:
        self.calls, self.period = 0, period

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * x * (1 + 2e-7 * (self.calls % self.period == 0))


@pytest.mark.parametrize("stage", ["poison", "state", "mutation"])
def test_noise_too_rare_for_repeats_is_no_fault(stage):
    for period in range(2, 40):
        report = rg.verify(square(fn=Seldom(period)), level="quick", only=[stage])
        assert report, (period, [f.what for f in report.findings])


@pytest.mark.parametrize("deterministic", [None, False])
@pytest.mark.parametrize("name", ["S01", "S02", "S04", "S05"])
def test_state_is_found_in_ops_that_promise_no_bits(name, deterministic):
    spec = replace(corpus("mutants")[name], deterministic=deterministic)
    assert rg.verify(spec, level="quick", only=["state"]).findings


def test_an_op_that_promises_its_bits_is_held_to_them():
    report = rg.verify(square(fn=Seldom(7), deterministic=True), level="quick", only=["state"])
    assert report.findings


def test_a_fault_of_the_checker_is_not_told_as_one_of_the_op(monkeypatch):
    def broken(*_args):
        raise KeyError("distance")

    monkeypatch.setattr("retrograd.check.judge.compare_stored", broken)
    report = rg.verify(square(fn=lambda x: x * x), level="quick", only=["contract", "oracle", "state"])
    assert report.verdict == "undecided"
    assert [s.status for s in report.stages] == ["passed", "undecided", "passed"]
    reason = report.stage("oracle").reason
    assert reason.startswith("the check itself failed, not the op: KeyError: 'distance' (")
    assert "test_repeatability.py:" in reason


class Product(torch.autograd.Function):
    """x * w; without a gradient of x the backward finds nothing saved."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(*([x, w] if ctx.needs_input_grad[0] else []))
        return x * w

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        return dy * w, (dy * x).sum(0)


def test_a_subset_that_raises_is_named_and_stops_no_other_stage():
    spec = rg.op(Product.apply, lambda x, w: x * w, dict(x=rg.tensor("M", "N"), w=rg.tensor("N")), name="product")
    report = rg.verify(spec, level="quick", only=["contract", "shapes", "state"])
    (finding,) = report.findings
    assert (finding.stage, finding.kind, finding.tensor) == ("contract", "subset", "w")
    assert finding.what.startswith("when only w require(s) a gradient, the backward raised ValueError: ")
    assert [s.status for s in report.stages] == ["failed", "passed", "passed"]


def test_the_smallest_case_has_the_error_of_the_first():
    def fussy(x):
        if x.shape[-1] % 2:
            raise TypeError("an odd N")
        if not x.is_contiguous():
            raise ValueError("\x1b[91mstrides\x1b[0m")
        return x * x

    report = rg.verify(square(fn=fussy, sizes=dict(N=(1, 64))), level="quick", only=["layouts"])
    said = sorted(f.what for f in report.findings)
    assert said == ["the forward raised ValueError: strides"]
    assert dict(report.findings[0].case.sizes)["N"] == 2


@pytest.mark.parametrize("wrong", ["always", "sometimes"])
def test_what_is_wrong_at_each_run_is_no_matter_of_repeats(wrong):
    calls = []

    def noisy(x):
        calls.append(None)
        off = 1.25 if wrong == "always" or len(calls) % 5 == 0 else 1.0
        return x * x * off * (1 + 2e-7 * (len(calls) % 3))

    stage = rg.verify(square(fn=noisy, deterministic=False), level="quick", only=["determinism"]).stage("determinism")
    assert [f.kind for f in stage.findings] == (["wrong-value"] if wrong == "sometimes" else [])
    assert any("which is wrong at each" in note for note in stage.notes) == (wrong == "always")
