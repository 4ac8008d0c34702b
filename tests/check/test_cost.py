"""What a verification costs, in runs, and that what is saved is not paid for with the verdict."""

from __future__ import annotations

import pytest
import torch
from specimens import with_backward

import retrograd as rg
from retrograd.check.compare import compare
from retrograd.check.spec import dtype_name
from retrograd.check.tolerance import CONFIRM_RUNS
from retrograd.check.workbench import BUDGETS, Workbench


def _norm(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Counted:
    """A reference that counts its runs."""

    def __init__(self):
        self.runs = 0

    def __call__(self, x):
        self.runs += 1
        return _norm(x)


def off(units):
    """_norm with a gradient that is off by units of rounding: 4 are more than storing explains, less than the formula."""

    def backward(dy, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (dx,) = torch.autograd.grad(_norm(x), x, dy)
        return dx * (1 + units * 2.0**-24)

    return with_backward(_norm, backward)


def _spec(fn, reference=_norm, **more):
    return rg.op(fn, reference, dict(x=rg.tensor("M", "N")), sizes=dict(N=(1, 512)), **more)


def test_what_is_right_needs_no_noise_runs_in_a_sweep():
    reference = Counted()
    report = rg.verify(_spec(_norm, reference), level="quick", only=["layouts", "shapes"])
    assert report
    cases = sum(s.cases for s in report.stages)
    # Forward for grad_out, float64, own precision; the ordinary case has the runs that give the power.
    assert reference.runs <= 3 * cases + BUDGETS["quick"].noise_runs


def test_noise_runs_decide_between_rounding_and_a_fault():
    spec = _spec(off(4))
    bench = Workbench(spec, "float32", 0, "cpu", BUDGETS["quick"], "quick")
    truth, got = bench.truth(bench.base), bench.run(bench.base).grads["grad x"]
    assert compare(got, truth.want["grad x"], truth.floor["grad x"]).wrong
    assert rg.verify(spec, level="quick", only=["oracle", "shapes"])
    report = rg.verify(_spec(off(4096)), level="quick", only=["oracle"])
    assert report.findings[0].tensor == "grad x"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_floor_is_never_above_the_tolerance(dtype):
    spec = _spec(_norm, dtypes=[dtype])
    bench = Workbench(spec, dtype_name(dtype), 0, "cpu", BUDGETS["quick"], "quick")
    for runs in (None, CONFIRM_RUNS):
        truth = bench.truth(bench.base, runs)
        for name, least in truth.floor.items():
            assert bool((least <= truth.tol[name]).all())
            assert bool((least < truth.tol[name]).any())
