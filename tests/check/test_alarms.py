"""Alarms: what cancels in a cumulative sum is allowed before any randomly rounded run, and nothing more than after it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from specimens import with_backward

import retrograd as rg
from retrograd.check import oracle
from retrograd.check.op_runner import OpRunner
from retrograd.check.schema import Finding
from retrograd.check.stages import StageContext
from retrograd.check.tolerance import CONFIRMING

_STEPS = 33


def _decayed(x, g):
    """h = exp(g) h + x at each step."""
    h, outs = torch.zeros_like(x[:, 0]), []
    for x_t, g_t in zip(x.unbind(1), g.unbind(1), strict=True):
        h = h * g_t.exp() + x_t
        outs.append(h)
    return torch.stack(outs, 1)


def _backward(grad_out, x, g, factor=1.0, mixed=0.0):
    """The gradient of g as a sum over all later steps of what each reads less what it writes."""
    out, dh, dx = _decayed(x, g), torch.zeros_like(x[:, 0]), []
    for t in reversed(range(_STEPS)):
        dh = grad_out[:, t] + dh * (g[:, t + 1].exp() if t + 1 < _STEPS else 0.0)
        dx.insert(0, dh)
    dx = torch.stack(dx, 1)
    dg = (grad_out * out - dx * x).flip(1).cumsum(1).flip(1)
    return factor * dx, dg + mixed * dg.roll(1, 1)


def _op(**mistake):
    op = with_backward(_decayed, lambda grad_out, x, g: _backward(grad_out, x, g, **mistake))
    inputs = dict(x=rg.tensor("B", "T", "N"), g=rg.tensor("B", "T", "N", low=-1.0, high=-0.01))
    return rg.op(op, _decayed, inputs, sizes=dict(B=2, T=_STEPS, N=32), dtypes=["float32"])


def test_a_sum_of_smaller_errors_allows_less():
    spec = _op()
    context = StageContext.of(spec, "float32")
    run = context.runner.run(context.base)
    context.judge.against_truth(context.base, run)
    alarms, truth = context.judge.alarms, context.oracle.truth(context.base)
    known = alarms._sums["grad g", context.base.params]
    assert known is not None
    reference = context.runner.reference(context.base)
    few, every = (known.widened(reference, truth, tol).floor["grad g"] for tol in (truth.floor, truth.tol))
    assert bool((few <= every).all())
    assert bool((few < every).any())


def test_a_sum_that_is_known_takes_no_rounded_run(monkeypatch):
    counts = []
    make = oracle.rounded_runs

    def counted(reference, exact, unit, accumulate, runs, order):
        counts.append((reference.case.values, len(runs)))
        return make(reference, exact, unit, accumulate, runs, order)

    monkeypatch.setattr(oracle, "rounded_runs", counted)
    report = rg.verify(_op(), level="quick", only=["oracle", "extremes"])
    assert report.verdict == "proved", report.to_text()
    extremes = report.stage("extremes").cases
    assert sum(bool(values) for values, _ in counts) < extremes / 2
    assert any(not values for values, _ in counts)  # the ordinary case, which has shown what it is


@pytest.mark.parametrize("mistake", [dict(factor=1 + 2.0**-9), dict(mixed=2.0**-9), dict(mixed=1e-4)])
def test_its_mistakes_are_found(mistake):
    report = rg.verify(_op(**mistake), level="quick", only=["oracle"])
    assert report.verdict == "finding"


def test_a_mistake_in_a_sum_is_not_allowed_before_all_runs():
    spec = _op(mixed=2.0**-9)
    context = StageContext.of(spec, "float32")
    run = OpRunner(replace(spec), "float32", 0, "cpu").run(context.base)
    findings, _ = context.judge.against_truth(context.base, run)
    assert [f.tensor for f in findings] == ["grad g"]
    truth = context.oracle.truth(context.base)
    assert (
        context.judge.alarms.allowed(context.base, "grad g", run.grads["grad g"], truth.want["grad g"], truth) is None
    )
    assert context.judge.alarms.allowed(context.base, "out", run.outs["out"], truth.want["out"], truth)


def test_what_is_no_worse_than_what_is_told_is_not_confirmed_again():
    context = StageContext.of(_op(), "float32")
    base, alarms = context.base, context.judge.alarms
    truth = context.oracle.truth(base)
    want = truth.want["grad x"]
    assert want is not None
    got = (want + 5 * truth.tol["grad x"]).float()
    finding = Finding.of("wrong-value", "is another", base, tensor="grad x", excess=100.0)
    less, runs = replace(finding, excess=2.0), []
    for told in ([], [replace(finding, kind="vanished")], [less], [finding]):
        context.judge.begin_case(told)
        runs.append(alarms.confirmed(base, "grad x", got, want, truth).truth.runs)
    assert runs == [*[max(CONFIRMING)] * 3, context.oracle.noise_runs]
