"""Numbers beside a NaN or an infinity, in the extremes stage, and what an op makes of one that float64 has a number for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from specimens import with_backward

import retrograd as rg
from retrograd.check import oracle


def _report(fn, reference, level="quick", **more):
    inputs = dict(x=rg.tensor("M", "N"), **more)
    return rg.verify(rg.op(fn, reference, inputs, dtypes=["float64", "float32"]), level=level, only=["extremes"])


def _nansum(x):
    return torch.nansum(x, -1)


def _others_scaled(x):
    return torch.where(x.isnan(), 0, x).sum(-1) * (1 + x.isnan().any())


_GRADIENT_OF_NAN = with_backward(_nansum, lambda dy, x: dy[:, None].expand_as(x))


@pytest.mark.parametrize(
    ("fn", "reference"),
    [
        (lambda x: torch.where(x.isnan(), 1, x).sum(-1), _nansum),
        (lambda x: torch.where(x.isnan(), -1, x).sum(-1), _nansum),
        (_others_scaled, _nansum),
        (_GRADIENT_OF_NAN, _nansum),
        (lambda x: torch.where(x.isnan(), 1, x), lambda x: x.nan_to_num(0.0)),
        (lambda x: torch.where(x.isnan(), 0, x).mean(-1), lambda x: torch.nanmean(x, -1)),
        (lambda x: x * (1 + x.isnan().any()), lambda x: x * 1.0),
    ],
)
def test_another_number_than_float64_has_is_found(fn, reference):
    report = _report(fn, reference)
    assert {(f.kind, f.case.values) for f in report.findings} == {("wrong-value", (("x", "nan"),))}


def _softmax(x):
    return torch.softmax(x, -1)


def _leaking(x):
    weights = torch.where(x == -torch.inf, 0.1, torch.exp(x - x.amax(-1, keepdim=True).detach()))
    return weights / weights.sum(-1, keepdim=True)


def _by_hand(x):
    weights = torch.exp(x - x.amax(-1, keepdim=True).detach())
    return weights / weights.sum(-1, keepdim=True)


def _shared_with_minus_inf(x):  # which is the largest beside a row of nothing else, and takes half of the gradient
    return torch.full_like(x[:, 0], -torch.inf).maximum(x.max(-1).values)


@pytest.mark.parametrize(
    ("fn", "reference", "extremes"),
    [
        (_leaking, _softmax, {"-inf"}),
        (lambda x: torch.where(x.isinf(), 1, x), lambda x: torch.where(x.isinf(), 0, x), {"inf", "-inf"}),
    ],
)  # fmt: skip
def test_another_number_for_an_infinity_is_found(fn, reference, extremes):
    report = _report(fn, reference, "full")
    assert {f.kind for f in report.findings} == {"wrong-value"}
    assert {f.case.values[0][1] for f in report.findings} <= extremes


@pytest.mark.parametrize(
    ("fn", "reference"),
    [
        (_by_hand, _softmax),
        (lambda x: x.max(-1).values, _shared_with_minus_inf),
        (lambda x: 1 / x, torch.reciprocal),
        (lambda x: torch.where(x.abs() == torch.inf, 0, x), lambda x: torch.where(x.isinf(), 0, x)),
        (lambda x: -F.relu(-x), lambda x: x.clamp(max=0)),
        (lambda x: x.clamp(-1, 1), F.hardtanh),
    ],
)
def test_the_same_number_for_an_infinity_by_another_way_is_right(fn, reference):
    assert _report(fn, reference, "full")


@pytest.mark.parametrize("level", ["quick", "full"])
@pytest.mark.parametrize(
    ("fn", "reference"),
    [
        (lambda x: torch.where(x.isnan(), 0, x).sum(-1), _nansum),
        (lambda x: torch.where(x == x, x, 0).sum(-1) / (x == x).sum(-1), lambda x: torch.nanmean(x, -1)),
        (lambda x: torch.nanmedian(x, -1).values, lambda x: torch.nanmedian(x, -1).values),
        (lambda x: torch.where(x != x, torch.zeros_like(x), x) * 2, lambda x: torch.where(x.isnan(), 0, x) * 2),
        (lambda x: torch.where(x.isfinite(), x, 0).exp(), lambda x: torch.where(x.isfinite(), x, 0).exp()),
    ],
)
def test_the_same_numbers_by_another_way_are_right(fn, reference, level):
    assert _report(fn, reference, level)


@pytest.mark.parametrize("level", ["quick", "full"])
def test_a_masked_softmax_that_reads_no_nan_of_masked_places_is_right(level):
    def softmax(x, kept):
        return F.softmax(x.masked_fill(~_one(kept), -torch.inf), -1)

    def by_hand(x, kept):
        shown = torch.where(_one(kept), x, -torch.inf)
        weights = torch.exp(shown - shown.amax(-1, keepdim=True).detach())
        return weights / weights.sum(-1, keepdim=True)

    def _one(kept):  # a row in which nothing is kept would be NaN
        return kept | ~kept.any(-1, keepdim=True)

    assert _report(by_hand, softmax, level, kept=rg.tensor("M", "N", dtype="bool"))


def test_which_way_a_comparison_with_a_nan_falls_is_a_convention():
    report = _report(
        lambda x: torch.where(x >= 0, 2.0, 1.0) + x.nan_to_num(0), lambda x: 2 - 1.0 * (x < 0) + x.nan_to_num(0)
    )
    assert report
    notes = "; ".join(note for stage in report.stages for note in stage.notes)
    assert "out not judged at M=7 N=48 x@nan: the reference decides by a NaN (lt), and which way that falls" in notes


def test_a_row_that_nan_switches_off_otherwise_is_a_convention():
    def hinge(x):
        return (1 - x[..., :1] + x).relu()

    def by_hand(x):
        apart = 1 - x[..., :1] + x
        return torch.where(apart <= 0, 0, apart)

    assert _report(by_hand, hinge)


def _scores(q, k):
    """Without a product of matrices: torch 2.11's in bfloat16 spreads a NaN to rows beside it on some processors."""
    return (q[:, :, None] * k[:, None]).sum(-1)


def _attention(q, k, v):
    return (torch.softmax(_scores(q, k), -1)[..., None] * v[:, None]).sum(-2)


def _largest_first(q, k, v):
    weights = _scores(q, k)
    weights = torch.exp(weights - weights.amax(-1, keepdim=True).detach())
    return (weights[..., None] * v[:, None]).sum(-2) / weights.sum(-1, keepdim=True)


def test_what_a_nan_does_not_reach_has_the_error_that_it_has_without_it(monkeypatch):
    made = []
    rounded = oracle.rounded_runs

    def counted(reference, *args):
        made.append(reference.case.values)
        return rounded(reference, *args)

    monkeypatch.setattr(oracle, "rounded_runs", counted)
    inputs = {name: rg.tensor("B", "T", "D") for name in "qkv"}
    report = rg.verify(rg.op(_largest_first, _attention, inputs, dtypes=["bfloat16"]), level="quick", only=["extremes"])
    assert report
    asked = {values[0][1] for values in made if values}
    assert () in made  # the spread at the ordinary case is the one
    assert asked
    assert "nan" not in asked

    def coarser(q, k, v):  # beside a NaN
        out = _largest_first(q, k, v)
        return torch.where(q.isnan().any(), out * 2, out)

    report = rg.verify(rg.op(coarser, _attention, inputs, dtypes=["bfloat16"]), level="quick", only=["extremes"])
    assert {(f.kind, f.case.values[0][1]) for f in report.findings} == {("wrong-value", "nan")}
