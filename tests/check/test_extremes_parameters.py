"""Extremes meet other combinations of parameters than the first."""

from __future__ import annotations

import pytest
import torch
from specimens import with_backward

import retrograd as rg


def _op(fn, reference=None, **more):
    return rg.op(fn, reference or fn, dict(x=rg.tensor("M", "N")), **more)


_KINDS = dict(kind=["tanh", "quotient"])


def _squashed(x, kind):
    return torch.tanh(x) if kind == "tanh" else x / (1 + x.abs())


def test_extremes_meet_other_parameters_than_the_first():
    quotient = with_backward(lambda x: x / (1 + x.abs()), lambda dy, x: dy / (1 + x.abs().clamp(max=100)).square())
    wrong = _op(lambda x, kind: torch.tanh(x) if kind == "tanh" else quotient(x), _squashed, params=_KINDS)
    findings = rg.verify(wrong, level="quick", only=["extremes"]).findings
    assert {dict(f.case.params)["kind"] for f in findings} == {"quotient"}
    assert rg.verify(wrong, level="quick", skip=["extremes"])
    assert rg.verify(_op(_squashed, params=_KINDS), level="full", only=["extremes"])


@pytest.mark.parametrize("level", ["quick", "full"])
def test_every_combination_of_parameters_meets_an_extreme(level):
    seen = set()

    def noted(x, a, b):
        seen.add((a, b))
        return x * a * b

    spec = _op(noted, lambda x, a, b: x * a * b, params=dict(a=[1.0, 2.0], b=[1.0, 3.0]))
    assert rg.verify(spec, level=level, only=["extremes"])
    assert seen == {(1.0, 1.0), (1.0, 3.0), (2.0, 1.0), (2.0, 3.0)}
