"""Gradients that are 0 because terms cancel in the reference: whoever computes them a second time is a rounding off."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from specimens import with_backward

import retrograd as rg
from retrograd.check import cancellation, tolerance
from retrograd.check.inputs import base_case
from retrograd.check.op_runner import OpRunner
from retrograd.check.oracle import Oracle

INPUTS = dict(x=rg.tensor("M", "N"), y=rg.tensor("M", "N"))


def _contrast(x, y):
    scores = x @ y.t()
    return (scores.logsumexp(1) - scores.diagonal()).mean()


def _contrast_torch(x, y):
    return torch.nn.functional.cross_entropy(x @ y.t(), torch.arange(len(x)))


def _shares(dy, x, y):
    """The shares computed anew, by an exponential that is an ulp off, as those of GPUs are."""
    scores = x @ y.t()
    shares = (scores - scores.logsumexp(1)[:, None]).exp() * (1 + 2.0**-23)
    d_scores = dy / len(x) * (shares - torch.eye(len(x), dtype=x.dtype))
    return d_scores @ y, d_scores.t() @ x


def _shares_of_two(dy, x, y):
    """One pair is taken for one of two."""
    dx, d_y = _shares(dy, x, y)
    return (dx, d_y) if len(x) > 1 else (dx - 1e-3 * dy * y, d_y)


@pytest.mark.parametrize("reference", [_contrast, _contrast_torch])
def test_what_cancels_may_leave_a_rounding_of_its_size_and_nothing_elsewhere(reference):
    runner = OpRunner(rg.op(_contrast, reference, INPUTS), "float32", 0, "cpu")
    left = {}
    for pairs in (1, 5):
        case = base_case(runner.spec, "float32").but(sizes={"M": pairs, "N": 8})
        truth = Oracle(runner, 2).truth(case)
        apart = cancellation.results_apart(runner.reference(case))
        left[pairs] = [
            cancellation.left(replace(runner.reference(case), tf32=tf32), truth, "grad x", apart)
            for tf32 in (False, True)
        ]
        size = runner.inputs(case)["y"].abs().max() * runner.reference(case).grad_outs()[0].abs()
    assert bool((left[1][0] > 0).all())
    assert bool((left[1][0] < 1e-4 * size).all())  # a mistake of a ten thousandth is none
    assert torch.allclose(left[1][1], left[1][0] * tolerance.TF32 / 2**-24)
    assert not torch.stack(left[5]).any()


@pytest.mark.parametrize("reference", [_contrast, _contrast_torch])
@pytest.mark.parametrize(("backward", "right"), [(_shares, True), (_shares_of_two, False)])
def test_shares_that_are_computed_a_second_time(reference, backward, right):
    spec = rg.op(with_backward(_contrast, backward), reference, INPUTS, sizes=dict(M=(1, 9), N=(8, 40)))
    report = rg.verify(spec, level="quick", only=["oracle", "shapes", "layouts"])
    assert (report.verdict == "proved") == right, [f.what for f in report.findings]
