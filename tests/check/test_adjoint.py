"""The adjoint stage, and the derivatives that it rests on."""

from __future__ import annotations

import importlib.util
import math
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from specimens import with_backward

import retrograd as rg
from retrograd.check import finite_differences
from retrograd.check.stages import StageContext

_PATH = Path(__file__).resolve().parent.parent / "mutants" / "adjoint.py"
_MODULE = importlib.util.spec_from_file_location("adjoint_mutants", _PATH)
mutants = importlib.util.module_from_spec(_MODULE)
_MODULE.loader.exec_module(mutants)

CASE = "M=7 N=48"  # the ordinary one
STEPS = [2.0**-k for k in range(4, 16)]


def _verify(fn, reference=None, inputs=None, case=None, **more):
    spec = rg.op(fn, reference, inputs or dict(x=rg.tensor("M", "N")), **more)
    return rg.verify(spec, level="full", only=["adjoint"], case=case)


@pytest.mark.parametrize("size", [1e-3, 1e-7, 1e-12])
def test_noise_is_estimated(size):
    generator = random.Random(3)
    found = []
    for _ in range(200):
        values = [math.exp(10 * size * k) + generator.gauss(0, size) for k in range(finite_differences.POINTS)]
        found.append(finite_differences.noise(values) / size)
    found.sort()
    assert 0.5 < found[100] < 2
    assert found[2] > 0.2


@pytest.mark.parametrize("seed", range(20))
def test_error_covers_the_truth(seed):
    generator = random.Random(seed)
    sigma = 10 ** generator.uniform(-10, -4)

    def quotient(h):
        return (math.sin(1 + h) - math.sin(1 - h) + generator.gauss(0, sigma * 2**0.5)) / (2 * h)

    found = finite_differences.extrapolate(quotient, STEPS, sigma)
    assert abs(found.value - math.cos(1)) < 3 * found.error
    assert found.error < 1e3 * sigma + 1e-8


@pytest.mark.parametrize("slope", [0.0, 3.0])
@pytest.mark.parametrize("sigma", [2.0**-9, 2.0**-24])
def test_steps_whose_noise_hides_the_slope_are_not_asked_for(slope, sigma):
    """What is left of a slope of 1 is 0, or with a wrong backward 3: that has to be seen over more noise."""
    asked, generator = [], random.Random(7)

    def unexplained(h):
        asked.append(h)
        return slope + generator.gauss(0, sigma) / (2**0.5 * h)

    found = finite_differences.extrapolate(unexplained, STEPS, sigma, 1.0)
    assert abs(found.value - slope) <= found.error < 1
    assert len(asked) == (len(STEPS) if sigma < 1e-3 else 7 if slope else 5)


def test_a_function_that_is_nowhere_smooth_has_no_derivative():
    def quotient(h):
        return sum(math.copysign(1, math.sin(2**k / h)) for k in range(9))

    assert finite_differences.extrapolate(quotient, STEPS, 1e-9).error > 0.1


@pytest.mark.parametrize("place", [1e-3, 3e-5, 1e-6])
def test_slopes_of_both_sides_hold_the_claim_at_a_bend(place):
    def quotient(h):  # of max(0, x - place) at 0, where the slope 0 is claimed
        return max(0.0, h - place) / h

    low, high = finite_differences.sides(quotient, STEPS, 1e-12)
    assert low <= 0 <= high


@pytest.mark.parametrize("sigma", [1e-12, 1e-8, 1e-6])
@pytest.mark.parametrize(("function", "apart"), [(abs, 2.0), (lambda h: 3 * h + max(0.0, h), 1.0), (math.exp, 0.0)])
def test_slopes_of_both_sides_are_apart_at_a_bend_alone(function, apart, sigma):
    generator = random.Random(1)

    def quotient(h):
        return (function(h) - function(0.0) + generator.gauss(0, sigma * 2**0.5)) / h

    bend = finite_differences.bend(quotient, STEPS, sigma)
    assert abs(bend.value - apart) <= bend.error < 0.1


@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_only_this_stage_finds_the_mutant(name):
    assert rg.verify(mutants.MUTANTS[name], level="quick", skip=["adjoint"]).verdict == "proved"
    report = rg.verify(mutants.MUTANTS[name], level="quick")
    assert {f.stage for f in report.findings} == {"adjoint"}
    assert report.findings[0].kind == "not-the-derivative"


def test_a_single_wrong_element_is_named():
    def one_off(dy, x):
        dx = dy * torch.cos(x)
        dx[2, 3] += 0.01
        return dx

    spec = rg.op(with_backward(torch.sin, one_off), None, dict(x=rg.tensor(4, 5)))
    finding = rg.verify(spec, level="quick", only=["adjoint"]).findings[0]
    assert finding.index == (2, 3)
    assert finding.got - finding.want == pytest.approx(0.01, rel=0.05)


def test_each_of_several_wrong_gradients_is_told_and_only_one_is_asked_of_in_smaller_cases():
    def forward(x, y, z):
        return x.sin() * y.cos() + z.square()

    def backward(dy, x, y, z):
        return dy * x.sin() * y.cos(), dy * x.sin() * y.sin(), dy * z

    inputs = {name: rg.tensor("M", "N") for name in "xyz"}
    spec = rg.op(with_backward(forward, backward), None, inputs, dtypes=["float32"])
    report = rg.verify(spec, level="quick", only=["adjoint"])
    assert {f.tensor for f in report.findings} == {"grad x", "grad y", "grad z"}
    assert {f.wrong for f in report.findings} == {1}
    assert report.stages[0].runs < 6000


def test_power_is_real():
    def scaled(by):
        # A case that is asked for is not shrunk, which takes ten times as long as to find it.
        return _verify(with_backward(torch.exp, lambda dy, x: dy * torch.exp(x) * (1 + by)), case=CASE)

    power = scaled(0).stage("adjoint").power
    assert power < 1e-3
    assert scaled(10 * power).verdict == "finding"
    assert scaled(power / 100).verdict == "proved"


@pytest.mark.parametrize(
    "fn", [F.relu, torch.abs, F.hardtanh, lambda x: x.sort(-1).values, lambda x: F.smooth_l1_loss(x, x.flip(0))]
)
def test_kinks_are_no_fault(fn):
    assert _verify(fn, dtypes=["float32"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_precisions(dtype):
    report = _verify(torch.tanh, dtypes=[dtype])
    assert report
    assert (report.stage("adjoint").power < 1e-7) == (dtype == "float64")


def _apart(x, z):
    return torch.cat([x.sin(), 300 * z.sin()])


def _coarse(x, z):
    return torch.cat([x.sin(), (3000 * z).sin()])


@pytest.mark.parametrize("emulated", [False, True])
@pytest.mark.parametrize(("fn", "weak"), [(_apart, []), (_coarse, ["z"])])
def test_a_sharp_input_beside_a_coarse_one_has_its_own_power(fn, weak, emulated, monkeypatch):
    monkeypatch.setattr(StageContext, "emulated", lambda self: emulated)  # kernels that move all inputs at once

    def verified(times):
        def backward(dy, x, z):
            return tuple(g * f for g, f in zip(torch.func.vjp(fn, x, z)[1](dy), (times, 1), strict=True))

        inputs = dict(x=rg.tensor("M", "N"), z=rg.tensor("M", "N"))
        wrong = with_backward(fn, backward)
        # The op is its own reference: nothing but the forward shows the mistake.
        return rg.verify(rg.op(wrong, wrong, inputs, dtypes=["float16"]), level="quick", only=["adjoint"], case=CASE)

    right, wrong = verified(1), verified(2)
    notes = [note for note in right.stage("adjoint").notes if "no power" in note]
    # Of kernels without a GPU it is the reference that says it, in float64.
    assert [note.split()[4] for note in notes] == ([] if emulated else weak)
    assert right.verdict == "proved"
    assert [f.tensor for f in wrong.findings] == ["grad x"]


def _kernel(fn, dtype, inputs=None):
    inputs = inputs or {name: rg.tensor("M", "N") for name in ("x", "y")}
    report = rg.verify(rg.op(fn, fn, inputs, dtypes=[dtype]), level="quick", only=["adjoint"])
    return report.stage("adjoint")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_few_bits_it_is_the_reference_that_is_differentiated(dtype, monkeypatch):
    """Lines of a kernel without a GPU say less than the oracle; only a mistake of both is left, which this shows too."""
    monkeypatch.setattr(StageContext, "emulated", lambda self: True)
    right = _kernel(lambda x, y: torch.cat([3000 * x.sin(), y.exp()]), dtype)
    assert (right.status, right.power, right.power_text, right.runs) == ("passed", None, "by the reference", 2)
    assert "too coarse for differences" in right.notes[0]
    wrong = _kernel(lambda x, y: torch.cat([3000 * x.sin(), y.detach().exp() + 0 * y]), dtype)
    assert [finding.tensor for finding in wrong.findings] == ["grad y"]
    assert "the reference has the same mistake" in wrong.findings[0].what
    alone = with_backward(lambda x, y: x + y, lambda dy, x, y: (dy, -dy))  # without oracle, and not by the reference
    own = rg.op(alone, lambda x, y: x + y, {name: rg.tensor("M", "N") for name in ("x", "y")}, dtypes=[dtype])
    assert [f.tensor for f in rg.verify(own, level="quick", only=["adjoint"]).findings] == ["grad y"]
    assert _kernel(lambda x, y: x * y.exp(), "float32").power > 0


def test_at_kinks_differences_say_nothing_of_a_reference_and_lines_of_the_op_have_to(monkeypatch):
    monkeypatch.setattr(StageContext, "emulated", lambda self: True)
    x = torch.randn(7, 48, generator=torch.Generator().manual_seed(0)).relu()
    kinks = _kernel(lambda x, y: x.relu() * y, "float16", dict(x=x, y=x + 1))
    assert kinks.findings == ()
    assert kinks.power_text != "by the reference"


@pytest.mark.parametrize("mode", ["floor", "trunc"])
def test_a_forward_that_jumps_everywhere_has_no_slope(mode):
    def whole(x, y):
        return torch.div(x, y, rounding_mode=mode)

    generator = torch.Generator().manual_seed(0)
    x, y = (9 * torch.randn(shape, generator=generator) for shape in ((5, 10, 5), (10, 5)))
    assert _verify(whole, whole, dict(x=x, y=y))

    broken = with_backward(whole, lambda dy, x, y: (dy / y, 0 * y))
    report = rg.verify(rg.op(broken, whole, dict(x=x, y=y.abs() + 1)), level="quick")
    assert {f.tensor for f in report.findings} == {"grad x"}


def test_a_result_stored_in_less_than_its_input_is_no_fault():
    for x in (torch.tensor(-8.4784), torch.linspace(-9, 9, 25)):
        assert _verify(lambda x: x.bfloat16(), lambda x: x.bfloat16(), dict(x=x))


def test_ranges_are_not_left():
    seen = []

    def log(x):
        seen.append(float(x.detach().min()))
        return torch.log(x)

    assert _verify(log, inputs=dict(x=rg.tensor("N", low=0.1, high=1.0)))
    assert min(seen) >= 0.1


def test_a_surrogate_gradient_is_declared():
    def straight_through(x):
        return x + (torch.round(4 * x) / 4 - x).detach()

    assert _verify(straight_through).verdict == "finding"
    spec = rg.op(straight_through, None, dict(x=rg.tensor("M", "N")), surrogate=True)
    report = rg.verify(spec, level="quick")
    assert report
    assert "surrogate" in report.stage("adjoint").reason


class _ReusesItsInput(torch.autograd.Function):
    """exp, which keeps what its backward needs where its input was."""

    @staticmethod
    def forward(ctx, x, factor):
        y = x.detach().exp()
        ctx.save_for_backward(x.data.copy_(factor * y))
        return y

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.saved_tensors[0], None


@pytest.mark.parametrize(("factor", "kinds"), [(1.0, []), (1.1, ["not-the-derivative"])])
def test_an_op_that_writes_to_its_input_is_asked_what_it_was_given(factor, kinds):
    """Of a cross entropy that keeps its gradient there, the stage compared moves with gradients, in 1,121 runs."""
    report = _verify(lambda x: _ReusesItsInput.apply(x, factor), torch.exp)
    assert [f.kind for f in report.findings] == kinds
    assert report.stage("adjoint").power < 1e-2
    assert kinds or report.stage("adjoint").runs < 150
