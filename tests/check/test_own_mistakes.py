"""Mistakes in the checker's own code: said of it, and told neither as a finding nor as a refusal of the reference."""

from __future__ import annotations

import pytest
import torch

import retrograd as rg
from retrograd.errors import SpecError


def _of_nothing():
    """A function that takes nothing of what it is called with."""


def _verify(fn, reference, stage, **more):
    inputs = {"x": rg.tensor("M", "N")}
    return rg.verify(fn, reference=reference, inputs=inputs, level="quick", only=[stage], **more)


@pytest.mark.parametrize(
    ("function", "stage"),
    [
        ("stages.higher_order.second_order", "higher_order"),
        ("forward_mode.slopes", "compiler"),
        ("op_runner.grads_of", "contract"),
        ("oracle.real_dtype", "oracle"),
        ("rounded_runs._batch", "oracle"),
        ("kinks.reach", "kinks"),
        ("kink_search.moved_runs", "kinks"),
        ("cost.tree_leaves", "shapes"),
    ],
)
def test_a_mistake_of_the_checker_is_said_of_it(monkeypatch, function, stage):
    monkeypatch.setattr(f"retrograd.check.{function}", _of_nothing)
    report = _verify(torch.relu, torch.relu, stage, transforms=["jvp"])
    assert report.verdict == "undecided", report
    assert "the check itself failed, not the op: TypeError" in report.stages[0].reason


@pytest.mark.parametrize("kind", [AssertionError, AttributeError, KeyError, NameError, TypeError])
@pytest.mark.parametrize("stage", ["oracle", "kinks", "shapes"])
def test_what_a_reference_refuses_is_no_mistake_of_the_checker(kind, stage):
    calls = []

    def reference(x):
        if x.dtype == torch.float32 or x.is_meta:  # it has no formula for them
            calls.append(x)
            raise kind("float64 alone")
        return torch.relu(x)

    assert _verify(torch.relu, reference, stage).verdict == "proved"
    assert calls


def test_kinks_that_raise_are_a_mistake_of_the_description():
    spec = rg.op(torch.relu, torch.relu, {"x": rg.tensor("N")}, kinks=lambda: {})
    with pytest.raises(SpecError, match="`kinks` of relu raised TypeError"):
        rg.verify(spec, level="quick", only=["kinks"])
