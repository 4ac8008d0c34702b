"""Shrinking: the smallest case, and what is said of failures that come only sometimes."""

from __future__ import annotations

import random

import pytest
import torch
from specimens import with_backward

import retrograd as rg
from retrograd.check import shrink
from retrograd.check.inputs import base_case
from retrograd.check.schema import Case

SPEC = rg.op(torch.sin, torch.sin, dict(x=rg.tensor("M", "N")), params=dict(mode=["plain", "odd"], eps=[1e-6, 1e-2]))
FIRST = base_case(SPEC, "float32").but(sizes=dict(M=300, N=200))


def _shrunk(rule, first=FIRST, spec=SPEC):
    case, tried = shrink.shrink(spec, first, lambda c: rule(dict(c.sizes), dict(c.params), c))
    assert tried[case]
    return case, shrink.where(tried)


@pytest.mark.parametrize(
    ("rule", "smallest", "said"),
    [
        (lambda s, p, c: True, dict(M=1, N=1), "every case tried"),
        (lambda s, p, c: s["M"] > 129, dict(M=130, N=1), "only M > 129 (130 fails, 129 passes)"),
        (lambda s, p, c: s["N"] > 19, dict(M=1, N=20), "only N > 19 (20 fails, 19 passes)"),
        (lambda s, p, c: s["M"] >= 17 and s["N"] >= 5, dict(M=17, N=5), ""),
        (lambda s, p, c: s["M"] * s["N"] > 4096, dict(M=21, N=196), ""),
    ],
    ids=["all", "rows", "columns", "both", "product"],
)
def test_sizes_go_to_the_border_of_the_failure(rule, smallest, said):
    case, where = _shrunk(rule)
    assert dict(case.sizes) == smallest
    assert said in where


def test_options_layouts_values_and_draws_become_plain_where_they_do_not_matter():
    first = FIRST.but(params=dict(mode="odd", eps=1e-2), layouts=dict(x="rows", grad_out="sliced"), draw=2)
    case, _ = _shrunk(lambda s, p, c: p["mode"] == "odd" and c.layout("x") == "rows", first)
    assert dict(case.params) == dict(mode="odd", eps=1e-6)
    assert case.layouts == (("x", "rows"),)
    assert (case.draw, dict(case.sizes)) == (0, dict(M=1, N=1))
    case, _ = _shrunk(lambda s, p, c: True, FIRST.but(values=dict(x="nan")))
    assert case.values == ()


def test_sizes_that_are_not_allowed_are_not_tried():
    spec = rg.op(torch.sin, torch.sin, dict(x=rg.tensor("M", "N")), sizes=dict(M=(5, 512), N=[200, 64, 16]))
    first = base_case(spec, "float32").but(sizes=dict(M=300, N=200))
    case, _ = _shrunk(lambda s, p, c: s["M"] >= 9, first, spec)
    assert dict(case.sizes) == dict(M=9, N=16)


def _sometimes(rate: float, seed: int):
    """A failure of a given rate beyond M=17, N=5, and how often it was asked for."""
    draw = random.Random(seed)
    asked = []

    def fails(case: Case) -> bool:
        asked.append(case)
        sizes = dict(case.sizes)
        return sizes["M"] >= 17 and sizes["N"] >= 5 and draw.random() < rate

    return fails, asked


def test_what_always_fails_is_asked_once_a_case():
    fails, asked = _sometimes(1.0, 0)
    again = shrink.RepeatedCheck(fails, FIRST, again=fails(FIRST))
    assert (again.repeats, again.text()) == (1, "")
    _, tried = shrink.shrink(SPEC, FIRST, again)
    assert len(asked) == again.runs + len(tried) - 1  # the first is known to fail


@pytest.mark.parametrize("seed", range(5))
def test_what_sometimes_fails_is_asked_until_it_would_have_shown(seed):
    """Rate 1/5: that three runs of three fail, and it counts as one that always does, has a chance of 0.8 %."""
    fails, asked = _sometimes(0.2, seed)
    again = shrink.RepeatedCheck(fails, FIRST, again=fails(FIRST))
    assert 1 < again.repeats <= shrink._MOST_RUNS
    assert "not always" in again.text()
    case, _ = shrink.shrink(SPEC, FIRST, again)
    # A case that fails is missed in 1 % of the tries, which are few enough not to end before the first size is done.
    assert 17 <= dict(case.sizes)["M"] <= 24
    assert dict(case.sizes)["N"] >= 5
    assert len(asked) <= shrink._MOST_SPENT + 2 * shrink._MOST_RUNS


def test_what_does_not_come_again_is_not_shrunk():
    calls = []

    def backward(dy, _x):
        calls.append(dy)
        return dy * (3 if len(calls) == 1 else 2)

    spec = rg.op(with_backward(lambda x: x * 2, backward), lambda x: x * 2, dict(x=rg.tensor("M", "N")))
    (finding,) = rg.verify(spec, level="quick", only=["oracle"]).findings
    assert finding.case.text() == "M=7 N=48"
    assert "not always: in 0 of 30 further runs" in finding.where


def test_each_fault_of_a_stage_is_told_with_its_own_cases():
    def forward(x, y):
        if x.stride(0) == 1:
            raise ValueError("rows, not columns")
        return x.sin() * y * (1.5 if x.storage_offset() else 1.0)

    def backward(dy, x, y):
        return dy * x.cos() * y, dy * x.sin() * (2.0 if 0 in dy.stride() else 1.0)

    inputs = dict(x=rg.tensor("M", "N"), y=rg.tensor("M", "N"))
    op = rg.op(with_backward(forward, backward), lambda x, y: x.sin() * y, inputs, dtypes=["float32"])
    where = {f.tensor or f.kind: f.where for f in rg.verify(op, level="quick", only=["layouts"]).findings}
    assert where["raises"].startswith("only with x:transposed")
    assert where["out"].startswith("only with x:offset")
    assert "smallest: M=1" in where["grad y"]  # of the worst one smaller cases were tried
