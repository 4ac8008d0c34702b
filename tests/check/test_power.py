"""The oracle stage says when it could not tell the op from one of a lower precision."""

from __future__ import annotations

import pytest
import torch
from specimens import with_backward

import retrograd as rg


def _notes(fn, reference, **more):
    spec = rg.op(fn, reference, dict(x=rg.tensor("M", "N")), **more)
    report = rg.verify(spec, level="quick", only=["oracle"])
    assert report
    return report.stage("oracle").notes


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_a_sharp_reference_refuses_lower_precision(dtype):
    assert _notes(torch.sin, torch.sin, dtypes=[dtype]) == ()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bits_inside_are_refused_where_float32_is_promised(dtype):
    def wide(x):
        inside = x.float()
        return (torch.softmax(inside, -1) * inside).to(x.dtype)

    def narrow(x):
        return torch.softmax(x, -1) * x

    assert _notes(wide, wide, dtypes=[dtype], compute="float32") == ()
    spec = rg.op(narrow, wide, dict(x=rg.tensor("M", "N")), dtypes=[dtype], compute="float32")
    assert rg.verify(spec, level="quick", only=["oracle"]).verdict == "finding"


def test_a_reference_that_is_itself_coarse_has_no_power_and_says_so():
    def coarse(x):
        return torch.sin(x.bfloat16().float())

    (note,) = _notes(torch.sin, coarse)
    assert "no power against lower precision in float32: out, grad x would pass in float16" in note


def test_what_no_precision_changes_is_said_too():
    (note,) = _notes(torch.sign, torch.sign)
    assert "out would pass in float16" in note


@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_a_reference_that_refuses_a_lower_precision_itself_is_judged_all_the_same(factor):
    def rotated(x):
        turn = torch.stack([torch.stack([x.cos(), x.sin()]), torch.stack([-x.sin(), x.cos()])])
        assert bool(((turn[0] * turn[0]).sum(0) - 1).abs().max() < 1e-5)
        return turn.sum(0)

    spec = rg.op(lambda x: factor * rotated(x), rotated, dict(x=rg.tensor("N")))
    assert rg.verify(spec, level="quick", only=["oracle"]).verdict == ("proved" if factor == 1.0 else "finding")


# 6 % are two to four times what is attainable in bfloat16. As one factor it is a mistake; of either sign, without a
# pattern, it may be another algorithm, and nobody can tell.
@pytest.mark.parametrize(
    ("signs", "verdict", "kinds"), [(False, "finding", {"wrong-scale"}), (True, "undecided", set())]
)
def test_a_small_factor_that_all_elements_share_is_no_other_algorithm(signs, verdict, kinds):
    def backward(dy, x):
        off = 0.06 * torch.where(torch.arange(x.numel()).view_as(x) % 2 == 0, 1, -1 if signs else 1)
        return dy * x.cos() * (1 + off)

    spec = rg.op(with_backward(torch.sin, backward), torch.sin, dict(x=rg.tensor(8, 40)), dtypes=["bfloat16"])
    report = rg.verify(spec, level="quick", only=["oracle"])
    assert report.verdict == verdict, report
    assert {f.kind for f in report.findings} == kinds


# Four units of rounding, 1.6 % in bfloat16, are what a scale may be off: a factor below that is seen in float32 alone.
@pytest.mark.parametrize(("dtype", "verdict"), [("float32", "finding"), ("bfloat16", "proved")])
def test_what_sixteen_bits_cannot_show_is_seen_in_float32(dtype, verdict):
    softmax = with_backward(lambda x: x.logsumexp(-1), lambda dy, x: 0.992 * dy[:, None] * x.softmax(-1), once=True)
    spec = rg.op(softmax, lambda x: x.logsumexp(-1), dict(x=rg.tensor(8, 128)), dtypes=[dtype])
    assert rg.verify(spec, level="quick", only=["oracle"]).verdict == verdict


@pytest.mark.parametrize(("factor", "kinds"), [(1.0, set()), (0.9, {"wrong-value"})])
def test_elements_that_are_all_rounded_alike_have_no_wrong_scale(factor, kinds):
    """With one number as grad_out a mean of 34 rows has one gradient, 0.9982 of it in bfloat16 wherever one looks."""

    def backward(dy, x):
        return (factor * dy.float() / 34).to(dy.dtype).expand(34, -1)

    mean = with_backward(lambda x: x.mean(0), backward, once=True)
    inputs, sizes = dict(x=rg.tensor(34, "N")), dict(N=(1, 200, 96))
    spec = rg.op(mean, lambda x: x.mean(0), inputs, sizes=sizes, dtypes=["bfloat16"], compute="float32")
    report = rg.verify(spec, level="quick", only=["layouts"])
    assert {f.kind for f in report.findings} == kinds
