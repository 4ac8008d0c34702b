"""Randomly rounded runs of a reference, several at once and one after another."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from specimens import with_backward

import retrograd as rg
from retrograd.check.as_written import AsWritten, Summing
from retrograd.check.inputs import base_case
from retrograd.check.last_run import near
from retrograd.check.op_runner import OpRunner
from retrograd.check.oracle import truth_of
from retrograd.check.reference import Batching
from retrograd.check.rounded_runs import moved_runs, rounded_runs
from retrograd.check.rounding import Float64
from retrograd.check.stages import StageContext

_UNIT = 2.0**-24
_TABLE = torch.linspace(0.1, 0.9, 48)


def _recurrence(x):
    """h = h / 2 + sin(x) at each step."""
    h, outs = torch.zeros_like(x[:, 0]), []
    for at_t in x.unbind(1):
        h = h * 0.5 + at_t.sin()
        outs.append(h)
    return torch.stack(outs, 1)


def _rotated(x):
    """A table that comes from whole numbers, which each run has to round its own way."""
    angle = torch.arange(x.shape[1], dtype=x.dtype) / 7
    return x * angle.cos() + angle.sin()


def _norm(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def _branching(x):
    return x * 2.5 if float(x.sum()) > 0 else x * 3.5


def _asking(x):
    return x * 2.5 if x.requires_grad else x.detach() * 2.5


def _in_place(x):
    return x * _TABLE.mul_(1.0)


def _reference(function):
    spec = rg.op(function, function, dict(x=rg.tensor("M", "N")), sizes=dict(M=6, N=48))
    context = StageContext.of(spec, "float32")
    return replace(context.runner.reference(context.base), elements=1)


def _spread(reference, runs=48):
    """Root of the mean square over runs of what rounding changes, by name and element."""
    exact = reference.run(torch.float64)
    batches = list(rounded_runs(reference, exact, _UNIT, _UNIT, range(runs)))
    results = {n: torch.cat([batch[n].detach() for batch in batches]) for n in exact}
    assert all(len(each) == runs for each in results.values())
    return {n: (results[n] - want).square().mean(0).sqrt() for n, want in exact.items()}


@pytest.mark.parametrize("function", [_recurrence, _rotated, _norm, torch.logsumexp, torch.special.gammaln])
def test_many_at_once_lie_as_far_apart_as_one_by_one(function):
    fn = (lambda x: torch.logsumexp(x, -1)) if function is torch.logsumexp else function
    reference = _reference(fn)
    at_once, single = _spread(reference), _spread(replace(reference, batching=Batching()))
    assert reference.batching.allowed, "it could not be run several times at once"
    for name, sigma in single.items():
        ratio = at_once[name].square().mean().sqrt() / sigma.square().mean().sqrt()
        assert 0.8 < float(ratio) < 1.25  # of 48 x 288 numbers; seeded
        # No element has less than a quarter of its spread: one draw for all runs would leave some with next to nothing.
        assert bool((at_once[name] >= sigma / 4).all())


class _WrongAtOnce(torch.autograd.Function):
    """Twice x; under vmap its gradient is that of x."""

    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(*_):
        pass

    @staticmethod
    def backward(_, dy):
        return 2 * dy

    @staticmethod
    def vmap(_, in_dims, x):
        return x + x.detach(), in_dims[0]


@pytest.mark.parametrize("function", [_branching, _in_place, _asking, _WrongAtOnce.apply])
def test_what_cannot_run_at_once_runs_one_by_one(function):
    reference = _reference(function)
    exact = reference.run(torch.float64)
    at_once = list(rounded_runs(reference, exact, _UNIT, _UNIT, range(6)))
    assert not reference.batching.allowed
    single = list(rounded_runs(replace(reference, batching=Batching()), exact, _UNIT, _UNIT, range(6)))
    for a, b in zip(at_once, single, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


def _off(units):
    def backward(dy, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (dx,) = torch.autograd.grad(_recurrence(x), x, dy)
        return dx * (1 + units * 2.0**-24)

    return with_backward(_recurrence, backward)


@pytest.mark.parametrize(("units", "verdict"), [(1, "proved"), (4096, "finding")])
def test_a_recurrence_is_proved_and_its_mistake_found(units, verdict):
    spec = rg.op(_off(units), _recurrence, dict(x=rg.tensor("M", "N")), sizes=dict(M=6, N=48))
    assert rg.verify(spec, level="quick", only=["oracle", "shapes"]).verdict == verdict


def _written(x, s, w):
    return torch.select_scatter(x * w, s * s, 1, 2)  # its gradient is wrong under vmap in torch 2.13


def _written_backward(factor):
    def backward(dy, x, s, w):
        rest = dy.clone()
        rest[:, 2] = 0
        return rest * w, factor * dy[:, 2] * s, rest * x

    return with_backward(_written, backward)


@pytest.mark.parametrize(("factor", "verdict"), [(2.0, "proved"), (2.6, "finding")])
def test_a_gradient_that_is_wrong_at_once_allows_nothing(factor, verdict):
    spec = rg.op(_written_backward(factor), _written, dict(x=rg.tensor("M", 5), s=rg.tensor("M"), w=rg.tensor("M", 5)))
    assert rg.verify(spec, level="quick", only=["oracle"]).verdict == verdict


def test_a_single_number_gives_its_precision_to_whole_numbers_and_constants_beside_it():
    far = torch.arange(4)
    with Float64():
        slope = torch.tensor(0.1, dtype=torch.float64)
        # Beside a tensor with dimensions PyTorch gives a single number's precision up: 0.05 * far is float32.
        assert (far * 0.05 * slope).dtype == torch.float64
        assert (far * slope).dtype == torch.float64
        assert (far * 0.05).add_(slope).dtype == torch.float32  # memory that is there keeps its precision


def _sloped(x, slope):
    return torch.softmax(x - torch.arange(x.shape[-1]) * 0.05 * torch.sigmoid(slope), -1)


def test_a_reference_that_multiplies_places_by_a_learned_number_is_a_truth():
    inputs = dict(x=rg.tensor("M", "N"), slope=rg.tensor())
    assert rg.verify(rg.op(_sloped, _sloped, inputs), level="quick", only=["oracle"])
    steeper = rg.op(lambda x, slope: _sloped(x, 1.1 * slope), _sloped, inputs)
    assert rg.verify(steeper, level="quick", only=["oracle"]).findings


@pytest.mark.parametrize("function", [_recurrence, _norm, _branching])
def test_moved_inputs_give_at_once_what_they_give_one_by_one(function):
    reference = _reference(function)
    shifts = [{"x": torch.full((6, 48), step, dtype=torch.float64)} for step in (-0.5, 0.25, 1.0)]
    batches = moved_runs(reference, shifts)
    assert len(batches) == (len(shifts) if function is _branching else 1)
    for name in ("out", "grad x"):
        at_once = torch.cat([batch[name] for batch in batches])
        for got, shift in zip(at_once, shifts, strict=True):
            want = reference.run(torch.float64, Float64(), shift=shift)[name]
            assert torch.allclose(got, want, rtol=2.0**-40, atol=2.0**-40)


def _lifting(x):
    return x.float().sin()


def _fused(x):
    return torch.nn.functional.silu(x)


@pytest.mark.parametrize(
    ("function", "alone"), [(_recurrence, True), (_norm, True), (_lifting, False), (_fused, False), (_branching, False)]
)
def test_a_reference_that_the_mode_leaves_as_it_is_runs_without_it(function, alone):
    reference = _reference(function)
    assert not isinstance(reference.exactly(), AsWritten)  # nothing is known yet
    exact = truth_of(reference, 2).want
    shift = {"x": torch.full((6, 48), 0.5, dtype=torch.float64)}
    moved_runs(reference, [shift, shift])
    assert isinstance(reference.exactly(), AsWritten) == alone
    again, mode, plain = reference.run(torch.float64, reference.exactly()), reference.exactly(), Float64()
    assert all(torch.equal(again[name], want) for name, want in exact.items())
    if alone:  # what a mode notes of the operators is known of it
        reference.run(torch.float64, plain)
        assert (mode.switches, mode.matrices, mode.elements) == (plain.switches, plain.matrices, plain.elements)
    summing, tracked = reference.exactly(track=True), Float64(track=True)
    assert isinstance(summing, Summing) == alone
    for each in (summing, tracked):
        again = reference.run(torch.float64, each)
        assert all(torch.equal(again[name], want) for name, want in exact.items())
    assert summing.peak == tracked.peak


def _picked(x, index):
    return x.index_select(0, index).sin()


@pytest.mark.parametrize(
    ("changes", "alone"),
    [
        (dict(), True), (dict(values={"x": "nan"}), True), (dict(layouts={"x": "expanded"}), True), (dict(draw=1), False),
        (dict(values={"index": "highest"}), False), (dict(layouts={"index": "expanded"}), False),
    ],
)  # fmt: skip
def test_other_whole_numbers_may_ask_for_other_operators(changes, alone):
    inputs = dict(x=rg.tensor("M", "N"), index=rg.tensor("M", dtype="int64", low=0, high="M"))
    context = StageContext.of(rg.op(_picked, _picked, inputs, sizes=dict(M=6, N=48)), "float32")
    truth_of(context.runner.reference(context.base), 2)
    shift = {"x": torch.full((6, 48), 0.5, dtype=torch.float64)}
    moved_runs(context.runner.reference(context.base), [shift, shift])
    assert isinstance(context.runner.reference(context.base.but(**changes)).exactly(), AsWritten) == alone


def _attention(q, k, v):
    scores = (q @ k.transpose(-1, -2)).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf)
    e = (scores - scores.amax(-1, keepdim=True).detach()).exp()
    return e / e.sum(-1, keepdim=True) @ v


def test_a_nan_leaves_what_other_rows_may_be_off_as_it_is():
    """In tf32 a gradient of scores is a difference of two products, whose terms are computed a second time."""
    inputs = dict.fromkeys("qkv", rg.tensor(3, 5, 8))
    runner = OpRunner(rg.op(_attention, _attention, inputs), "float32", 0, "cpu")
    base = base_case(runner.spec, "float32")
    plain, beside_nan = (
        truth_of(replace(runner.reference(case), tf32=True), 6) for case in (base, base.but(values=(("v", "nan"),)))
    )
    want, sigmas = plain.want["grad q"], [truth.spread(48).sigma["grad q"] for truth in (plain, beside_nan)]
    here = beside_nan.want["grad q"].isfinite()
    assert 0.4 < float(here.double().mean()) < 1
    ratio = (sigmas[1] / sigmas[0])[here]
    assert bool(((ratio > 0.5) & (ratio < 2)).all())
    assert float((sigmas[1] / want.abs())[here].median()) < 0.01  # a mistake of a tenth is none


@pytest.mark.parametrize(("turns", "share"), [(False, 0.5), (True, 0.9)])
def test_pairs_in_tf32_stay_apart_if_asked(turns, share):
    """A product over itself, some operators on: 1 where it is the same one."""

    def over_itself(a, b):
        y = ((a @ b) * 1.5).neg().mul(2.0).neg().mul(3.0).neg().mul(4.0)
        return y / y.abs().detach()

    def asking(a, b):  # for a value, so that runs are made in turn
        return over_itself(a, b) if float(a.detach().sum()) else a @ b

    function = asking if turns else over_itself
    spec = rg.op(function, function, dict(a=rg.tensor(40, 16), b=rg.tensor(16, 8)))
    runner = OpRunner(spec, "float32", 0, "cpu")
    reference = replace(runner.reference(base_case(spec, "float32")), tf32=True)
    together, apart = (
        truth_of(replace(reference, apart=apart), 6).spread(24).sigma["out"].mean() for apart in (False, True)
    )
    assert together < share * apart
    # Two products of 16 terms whose factors lack up to 2^-10 each, beside a sum of random signs that is four of them.
    assert 2.0**-13 < apart < 2.0**-7


@pytest.mark.parametrize("far", [0.0, 1.0])
def test_what_is_no_number_in_both_says_nothing_of_how_near_two_runs_are(far):
    generator = torch.Generator().manual_seed(0)
    t = torch.randn(6, 20, dtype=torch.float64, generator=generator)
    for number in (torch.nan, torch.inf):
        one = t.clone()
        one[2, 3] = one[3, 4] = number
        other = one * (1 + 1e-4) + far
        assert near(other, one) == (not far)
        other[0] = number  # and in one of them alone it is another dimension
        assert not near(other, one)


@pytest.mark.parametrize("far", [0.0, 1.0])
def test_large_runs_are_held_against_each_other_by_a_sample(far):
    generator = torch.Generator().manual_seed(0)
    t = torch.randn(4, 64, 512, dtype=torch.float64, generator=generator)
    assert near(t * (1 + 1e-4) + far, t) == (not far)
    # Where few elements hold all of the size, the rest may be rounding: they are asked.
    t *= 1e-9
    t[0, 1, 2] = 1.0
    assert near(t + 1e-9 * torch.randn(t.shape, dtype=t.dtype, generator=generator), t)
    assert near(torch.zeros_like(t), torch.zeros_like(t))
    assert not near(t, torch.zeros_like(t))
