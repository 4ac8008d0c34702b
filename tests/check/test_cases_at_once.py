"""Truths of cases that differ in what their inputs hold: all at once give what each gives alone."""

from __future__ import annotations

import pytest
import torch

import retrograd as rg
from retrograd.check.cases_at_once import exact_runs
from retrograd.check.stages import StageContext

_ALIKE = 2.0**-40  # of the largest element: float64's own digits but for sums in another order
_EXTREMES = ("mean", "1e4", "zero", "1e-6", "constant")


def _norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def _branching(x, weight):
    return x * weight if float(x.detach().sum()) > 0 else x - weight


def _overflowing(x, weight):
    return x * weight / (x.square().square().square().square().mean(-1, keepdim=True) + 1.0) ** 0.0625


def _context(function, calls=None):
    def reference(x, weight):
        if calls is not None:
            calls.append(1)
        return function(x, weight)

    inputs = dict(x=rg.tensor("M", "N"), weight=rg.tensor("N"))
    return StageContext.of(rg.op(function, reference, inputs, sizes=dict(M=6, N=40)), "float32")


def _cases(context, extremes=_EXTREMES):
    return [context.base.but(values=((name, extreme),)) for name in ("x", "weight") for extreme in extremes]


def _truths(context, cases, *, together):
    if together:
        context.oracle.expect(cases)
    return [context.oracle.truth(case) for case in cases]


def test_truths_and_tolerances_are_those_of_each_alone() -> None:
    at_once = _context(_norm)
    cases = _cases(at_once)
    pairs = zip(cases, *(_truths(c, cases, together=c is at_once) for c in (at_once, _context(_norm))), strict=True)
    for case, truth, alone in pairs:
        assert truth.switches == alone.switches, case
        for name, want in alone.want.items():
            allowed = _ALIKE * want.abs().max()
            assert bool(((truth.want[name] - want).abs() <= allowed).all()), (case, name)
            # The same noise around truths 2^29 times nearer than float32's rounding is wide.
            assert torch.allclose(truth.tol[name], alone.tol[name], rtol=2.0**-20, atol=0.0), (case, name)


def test_a_case_is_not_taken_for_another() -> None:
    context = _context(_norm)
    cases = _cases(context)
    sizes = [float(t.want["out"].abs().max()) for t in _truths(context, cases, together=True)]
    by_weight = dict(zip(_EXTREMES, sizes[len(_EXTREMES) :], strict=True))
    assert by_weight["1e4"] > 1e3 > 10 > by_weight["zero"] > 0.1 > by_weight["1e-6"]


def test_the_reference_runs_once_for_all() -> None:
    calls = {}
    for together in (True, False):
        counted: list[int] = []
        context = _context(_norm, counted)
        cases = _cases(context)
        for truth in _truths(context, cases, together=together):
            assert truth.tol["out"].shape == (6, 40)
        calls[together] = len(counted)
    assert calls[True] < calls[False] - (len(_cases(_context(_norm))) - 3)  # one, two to compare, one for all


@pytest.mark.parametrize(
    ("function", "extremes"), [(_branching, _EXTREMES), (_overflowing, _EXTREMES), (_norm, ("mean",))]
)
def test_what_cannot_run_at_once_runs_alone(function, extremes) -> None:
    """A reference that asks for a value, one with numbers that may overflow in some case, too few cases."""
    context, alone = _context(function), _context(function)
    cases = _cases(context, extremes)
    for truth, wanted in zip(
        _truths(context, cases, together=True), _truths(alone, cases, together=False), strict=True
    ):
        assert truth.peak == wanted.peak
        for name, want in wanted.want.items():
            assert torch.equal(truth.want[name], want), name
    references = [context.runner.reference(case) for case in cases]
    if len(extremes) > 1:
        assert not exact_runs(references)


def test_errors_of_a_transform_are_those_of_its_own_case() -> None:
    """What a scale of 1e4 leaves of float32 in a transform is allowed at 1e4, and not at 1e-6 beside it."""

    def halved(x):
        return torch.fft.irfft(torch.fft.rfft(x) * 0.5, n=x.shape[-1])

    spec = rg.op(halved, halved, dict(x=rg.tensor("M", "N")), sizes=dict(M=6, N=40))
    context = StageContext.of(spec, "float32")
    cases = [context.base.but(values=(("x", extreme),)) for extreme in _EXTREMES]
    by_extreme = dict(zip(_EXTREMES, _truths(context, cases, together=True), strict=True))
    small, large = (float(by_extreme[e].tol["out"].max()) for e in ("1e-6", "1e4"))
    assert 1e9 < large / small < 1e11
