"""What a verification costs, in runs, and that what is saved is not paid for with the verdict."""

from __future__ import annotations

import pytest
import torch
from specimens import with_backward

import retrograd as rg
from retrograd.check import cost, oracle
from retrograd.check.levels import BUDGETS
from retrograd.check.spec import dtype_name
from retrograd.check.stages import StageContext, extremes
from retrograd.check.tensor_comparison import compare, profile
from retrograd.check.tolerance import CONFIRM_RUNS


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
    # Forward for grad_out, float64, own precision, shapes alone for the cost of a size, of which the longest are tried with
    # the others lowered; the ordinary case has the runs that give the power.
    assert reference.runs <= 4 * cases + BUDGETS["quick"].noise_runs


def test_noise_runs_decide_between_rounding_and_a_fault():
    spec = _spec(off(4))
    context = StageContext.of(spec, "float32")
    truth, got = context.oracle.truth(context.base), context.runner.run(context.base).grads["grad x"]
    assert compare(got, truth.want["grad x"], truth.floor["grad x"]).wrong
    assert rg.verify(spec, level="quick", only=["oracle", "shapes"])
    report = rg.verify(_spec(off(4096)), level="quick", only=["oracle"])
    assert report.findings[0].tensor == "grad x"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_floor_is_never_above_the_tolerance(dtype):
    spec = _spec(_norm, dtypes=[dtype])
    context = StageContext.of(spec, dtype_name(dtype))
    for runs in (None, CONFIRM_RUNS):
        truth = context.oracle.truth(context.base, runs)
        for name, least in truth.floor.items():
            assert bool((least <= truth.tol[name]).all())
            assert bool((least < truth.tol[name]).any())


_NAN, _INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("got", "want", "tol", "ratio"),
    [
        ([1.0, 2.0], [1.0, 2.5], [0.0, 0.25], [0.0, 2.0]),
        ([1.0, 2.0], [1.5, 2.0], [0.0, 1.0], [_INF, 0.0]),
        ([_NAN, 2.0], [_NAN, 2.0], [1.0, 1.0], [0.0, 0.0]),
        ([_NAN, 2.0], [1.0, _NAN], [1.0, 1.0], [_INF, _INF]),
        ([_INF, -_INF], [_INF, -_INF], [_INF, 1.0], [0.0, 0.0]),
        ([_INF, 3.0], [-_INF, _INF], [1.0, 1.0], [_INF, _INF]),
        ([3.0, 4.0], [1.0, 4.0], [_NAN, 1.0], [_INF, 0.0]),
    ],
)
def test_a_comparison_of_what_is_not_finite(got, want, tol, ratio):
    found = compare(torch.tensor(got), *(torch.tensor(t, dtype=torch.float64) for t in (want, tol)))
    assert found.ratio.tolist() == ratio
    assert (found.worst, found.wrong) == (max(ratio), sum(r > 1 for r in ratio))
    assert found.index == (ratio.index(max(ratio)),)
    assert (str(found.got), str(found.want)) == (str(got[found.index[0]]), str(want[found.index[0]]))


def test_a_comparison_of_nothing_and_of_one_number():
    nothing = torch.empty(0, 3, dtype=torch.float64)
    assert (compare(nothing, nothing, nothing).worst, compare(nothing, nothing, nothing).index) == (0.0, ())
    one = compare(torch.tensor(2.0), torch.tensor(1.0).double(), torch.tensor(0.5).double())
    assert (one.worst, one.wrong, one.index, one.got, one.want) == (2.0, 1, (), 2.0, 1.0)


def test_the_histogram_counts_each_distance_once():
    ulps = [0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 4.0, 8.0, 16.0, 32.0, 1024.0, _NAN]
    want = 1.0 + torch.tensor(ulps, dtype=torch.float64) * 2.0**-23
    got = torch.ones(12)
    case = StageContext.of(_spec(_norm), "float32").base
    drawn = profile("out", got, want, compare(got, want, torch.ones_like(want)), case)
    assert drawn.ulp_counts == (2, 1, 2, 1, 1, 1, 1, 1, 2)


def test_what_is_too_large_by_its_dimensions_is_not_drawn():
    drawn = []

    def values(generator, shape, dtype):
        drawn.append(shape)
        return torch.randn(shape, generator=generator, dtype=dtype)

    spec = rg.op(torch.sin, torch.sin, dict(x=rg.tensor("N", "N", values=values)))
    assert rg.verify(spec, level="quick", only=["shapes"])
    assert max(rows for rows, _ in drawn) == 1025


def test_elements_of_a_case_are_counted_once_for_all_dtypes(monkeypatch):
    counted, count = [], cost.elements

    def counting(runner, case, *limits):
        counted.append(case.sizes)
        return count(runner, case, *limits)

    monkeypatch.setattr(cost, "elements", counting)
    assert rg.verify(_spec(_norm, dtypes=["float32", "bfloat16"]), level="quick")
    assert len(counted) == len(set(counted))
    assert 0 < len(counted) < BUDGETS["quick"].shapes


def test_elements_are_the_same_on_meta_tensors_and_in_memory():
    context = StageContext.of(_spec(_norm), "float32")
    case = context.base.but(sizes={"M": 3, "N": 5})
    in_memory, on_meta = (cost._counted_on(context.runner, case, device).elements for device in ("cpu", "meta"))
    assert 3 * 5 < in_memory == on_meta


def test_counting_ends_where_there_are_too_many():
    steps = []

    def cumulative(x):
        total = torch.zeros_like(x[..., 0])
        for step in range(x.shape[-1]):
            steps.append(step)
            total = total + x[..., step]
        return total

    runner = StageContext.of(_spec(cumulative, cumulative), "float32").runner
    case = runner.base.but(sizes={"M": 8, "N": 512})
    whole = cost.elements(runner, case, 10**9)
    assert len(steps) == 512
    assert whole > cost.elements(runner, case, 1000) > 1000
    assert len(steps) < 512 + 100
    assert cost.elements(runner, case, 10**9, 10**6) > 10**9  # of 10,000 elements an operator: a hundred of them
    assert len(steps) < 512 + 200


def _scan(x, decay, bias):
    """A recurrence of 320 steps, each of a few operators, which counts as eleven million elements."""
    h, steps = torch.zeros_like(x), []
    for step in range(320):
        h = torch.sigmoid(decay) * h + (x + bias if step % 2 else x)
        steps.append(h)
    return torch.stack(steps).mean(0)


def _scanned(fn=_scan, **more):
    inputs = {name: rg.tensor("M", "N") for name in ("x", "decay", "bias")}
    return rg.op(fn, _scan, inputs, sizes=dict(M=4, N=8), dtypes=["float32"], **more)


def _extremes(spec, seed=0, level="quick"):
    context = StageContext.of(spec, "float32", seed=seed, level=level)
    return [case.values for case in extremes.cases(context)], context


def test_of_a_dear_reference_each_input_has_a_large_extreme_another_one_for_each_seed():
    of_seeds = []
    for seed in range(3):
        chosen, context = _extremes(_scanned(), seed)
        finite = dict(values[0] for values in chosen if len(values) == 1 and values[0][1] != "nan")
        assert list(finite) == ["x", "decay", "bias"]
        assert set(finite.values()) == {"mean", "-mean", "1e4"}
        assert [values for values in chosen if values[0][1] == "nan"] == [((n, "nan"),) for n in finite]
        assert context.left_out == {"finite extremes": (3, 15)}
        of_seeds.append(finite)
    assert len({finite["decay"] for finite in of_seeds}) == 3
    assert len(_extremes(_scanned(), level="full")[0]) > 3 * 8  # nothing is left out there
    assert len(_extremes(_spec(_norm))[0]) == 6  # nor of what is cheap


@pytest.mark.parametrize("count", [3, 4])
def test_of_many_inputs_without_a_gpu_every_other_extreme_has_other_parameters(count, monkeypatch):
    monkeypatch.setattr(StageContext, "emulated", lambda self: True)
    names = "abcd"[:count]
    spec = rg.op(torch.add, torch.add, {name: rg.tensor("N") for name in names}, params=dict(eps=[1e-6, 1e-2, 1.0]))
    cases = extremes.cases(StageContext.of(spec, "float32"))
    singles = [case for case in cases if len(case.values) == 1]
    chosen = [case.values[0] for case in singles]
    if count < 4:
        assert len(chosen) == 2 * len(set(chosen))
        return
    assert len(chosen) == len(set(chosen)) == 4 * 6
    first = [case.values[0] for case in singles if dict(case.params)["eps"] == 1e-6]
    assert len(first) == len(chosen) // 2
    assert {name for name, _ in first} == {name for name, _ in set(chosen) - set(first)} == set(names)
    assert {extreme for _, extreme in first} == {extreme for _, extreme in set(chosen) - set(first)}
    assert {dict(case.params)["eps"] for case in cases} == {1e-6, 1e-2, 1.0}


def test_what_overflows_is_found_beside_a_dear_reference():
    def naive(x, decay, bias):
        large = torch.exp(decay)
        return _scan(x, torch.log(large / (1 + large)) - torch.log1p(-large / (1 + large)), bias)

    report = rg.verify(_scanned(naive), level="quick", only=["extremes"])
    assert {f.case.values[0][0] for f in report.findings} == {"decay"}
    assert rg.verify(_scanned(), level="quick", only=["extremes", "layouts"])


def test_beside_a_dear_reference_strides_that_repeat_are_held_against_the_same_numbers(monkeypatch):
    asked = []
    truth = oracle.Oracle.truth

    def noted(self, case, *args, **more):
        asked.extend(layout for _, layout in case.layouts)
        return truth(self, case, *args, **more)

    monkeypatch.setattr(oracle.Oracle, "truth", noted)
    assert rg.verify(_scanned(), level="quick", only=["layouts"])
    assert not {"expanded", "scalar"} & set(asked)
    assert rg.verify(_spec(_norm), level="quick", only=["layouts"])
    assert {"expanded", "scalar"} <= set(asked)

    def by_stride(x, decay, bias):
        return _scan(x, decay, bias) * (1.25 if decay.stride(0) == 0 else 1.0)

    report = rg.verify(_scanned(by_stride), level="quick", only=["layouts"])
    assert {(f.kind, dict(f.case.layouts)["decay"]) for f in report.findings} <= {
        (kind, "expanded") for kind in ("wrong-value", "wrong-scale")
    }
    assert report.findings


_RUNS = []  # of the module: what a formula closes over is copied for each run


def _recurrence(x, w):
    h, outputs = torch.zeros_like(x[:, 0]), []
    for x_t in x.unbind(1):
        h = torch.tanh(h * w + x_t)
        outputs.append(h)
    return torch.stack(outputs, 1)


def _counted(x, w):
    _RUNS.append(1)
    return _recurrence(x, w)


class _Recurrence(torch.autograd.Function):
    """h = tanh(h w + x) with a gradient of x that `spoil` makes of the right one."""

    @staticmethod
    def forward(ctx, spoil, x, w):
        ctx.save_for_backward(x, w)
        ctx.spoil = spoil
        return _recurrence(x, w)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        x, w = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            dx, dw = torch.autograd.grad(_recurrence(x, w), (x, w), g)
        return None, ctx.spoil(dx), dw


def _never_written(dx: torch.Tensor) -> torch.Tensor:
    return torch.cat([dx[:, :-1], torch.full_like(dx[:, -1:], torch.nan)], 1)


def _each_seventh_is_larger(dx: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.arange(dx.shape[1])[:, None] % 7 == 3, 1.5 * dx, dx)


# As many runs as half of what was needed where each mistake that is known was looked for in each of 200 operators.
@pytest.mark.parametrize(
    ("spoil", "stage", "most"),
    [(_never_written, "oracle", 40), (_each_seventh_is_larger, "oracle", 73), (lambda dx: dx + 1e-3, "algebra", 35)],
    ids=["never written", "larger", "not linear"],
)
def test_what_is_wrong_with_a_recurrence_is_explained_in_few_runs_of_its_formula(spoil, stage, most):
    _RUNS.clear()
    inputs = dict(x=rg.tensor("B", "T", "D"), w=rg.tensor("D"))
    sizes = dict(B=[2], T=[2, 64], D=[8])
    spec = rg.op(lambda x, w: _Recurrence.apply(spoil, x, w), _counted, inputs, sizes=sizes, dtypes=["float32"])
    report = rg.verify(spec, level="quick", only=[stage])
    assert report.findings[0].tensor == "grad x"
    assert len(_RUNS) <= most
