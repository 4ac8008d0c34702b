"""Results of which rounding decides whether they are numbers: not judged, with a note, and nothing else is let off."""

from __future__ import annotations

import pytest
import torch

import retrograd as rg


def _distance(x):
    """Where x is small its square is lost beside 1 in bfloat16: the acosh of 1 or less, 0 or NaN, its slope infinite."""
    return torch.acosh(torch.sqrt(1 + x * x))


SMALL = dict(x=rg.tensor("N", low=0.01, high=0.06))


def test_a_logarithm_of_what_rounding_makes_0_is_left_alone():
    spec = rg.op(_distance, _distance, SMALL, dtypes=["bfloat16"])
    report = rg.verify(spec, level="quick", only=["oracle", "shapes", "layouts"])
    assert not report.findings
    notes = [note for stage in report.stages for note in stage.notes]
    assert any("decides whether they are numbers" in note for note in notes)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_gradient_that_is_no_number_where_rounding_leaves_it_one_is_found(number):
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return _distance(x)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            slope = 1 / torch.sqrt(1 + x * x)
            return torch.where(x > 1.5, torch.full_like(x, number), slope * g)

    spec = rg.op(Broken.apply, _distance, dict(x=rg.tensor("N", low=0.5, high=2.0)), dtypes=["bfloat16"])
    assert rg.verify(spec, level="quick", only=["oracle"]).verdict == "finding"


def test_a_table_whose_last_bin_rounding_leaves_is_judged_but_for_its_kinks():
    def lookup(x):
        bins = torch.arange(1.0, 9.0, dtype=x.dtype).cumsum(0)
        return x * bins[(x * 8).floor().long()]

    spec = rg.op(lookup, lookup, dict(x=rg.tensor("N", low=0.0, high=0.99)), dtypes=["bfloat16"])
    report = rg.verify(spec, level="quick", only=["oracle", "kinks"])
    assert report.verdict == "proved", report
    assert any("are not judged" in note for stage in report.stages for note in stage.notes)


def test_a_wrong_gradient_at_kinks_is_found_where_the_reference_takes_what_rounding_makes():
    class Relu(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clamp_min(0)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return torch.where(x == 0, 3 * g, (x > 0) * g)

    spec = rg.op(Relu.apply, lambda x: x.clamp_min(0), dict(x=rg.tensor("N")), dtypes=["bfloat16"])
    assert rg.verify(spec, level="quick", only=["kinks"]).verdict == "finding"


@pytest.mark.parametrize("names", [None, 3])
def test_stages_that_are_no_sequence_are_refused(names):
    spec = rg.op(torch.relu, torch.relu, dict(x=rg.tensor("N")))
    with pytest.raises(rg.errors.UsageError, match=r"`only` is .*expected a sequence of stages"):
        rg.verify(spec, only=names)
