"""The kinks stage, and what the oracle accepts at points without a derivative."""

from __future__ import annotations

import importlib.util
import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from specimens import with_backward

import retrograd as rg
from retrograd.check import kinks
from retrograd.check.rounding import Float64
from retrograd.check.stages import StageContext
from retrograd.errors import SpecError

_PATH = Path(__file__).resolve().parent.parent / "mutants" / "kinks.py"
_MODULE = importlib.util.spec_from_file_location("kinks_mutants", _PATH)
mutants = importlib.util.module_from_spec(_MODULE)
_MODULE.loader.exec_module(mutants)

X = dict(x=rg.tensor("M", "N"))


def _context(reference, inputs=None, **more):
    spec = rg.op(reference, reference, inputs or X, **more)
    return StageContext.of(spec, "float32", level="full")


def _places(context, name="x"):
    moved = context.runner.inputs(context.base.but(values=((name, "kink"),)))[name]
    return moved[moved != context.runner.inputs(context.base)[name]]


@pytest.mark.parametrize("name", mutants.MUTANTS)
@pytest.mark.parametrize("seed", range(3))
def test_only_this_stage_finds_the_mutant(name, seed):
    # The higher_order stage would see a zero second derivative where a mutant's backward has none to offer: it raises.
    report = rg.verify(mutants.MUTANTS[name], level="quick", seed=seed, only=["kinks"])
    assert "at kinks of the forward" in report.findings[0].what
    if seed == 0:
        assert rg.verify(mutants.MUTANTS[name], level="quick", skip=["kinks"])


def _normed_relu(x, w, scale, shift):
    return F.relu(F.layer_norm(F.linear(x, w), (8,), scale, shift))


def _opening(x, k):
    """The largest of sums of a smallest: (x - k) + k ties with x in several windows, whatever the input."""
    low = (F.pad(x, (1, 1), value=10.0).unfold(-1, 3, 1) - k).amin(-1)
    return (F.pad(low, (1, 1), value=-10.0).unfold(-1, 3, 1) + k.flip(0)).amax(-1)


# Of eight kinks in one sum a few sampled directions miss corners, and what rounding decides in ties that no input does.
@pytest.mark.parametrize("seed", [1, 5])
def test_gradients_that_many_kinks_decide_are_left_alone(seed):
    inputs = dict(x=rg.tensor("M", 6), w=rg.tensor(8, 6), scale=rg.tensor(8), shift=rg.tensor(8))
    assert rg.verify(rg.op(_normed_relu, _normed_relu, inputs), level="quick", seed=seed, only=["kinks"])
    inputs = dict(x=rg.tensor("M", 9), k=rg.tensor(3, low=0.0, high=0.5))
    assert rg.verify(rg.op(_opening, _opening, inputs), level="quick", seed=seed, only=["kinks"])


# At these seeds every kink that halving alone leads to has slopes of opposite signs, between which their sum lies.
@pytest.mark.parametrize("seed", [5, 8])
def test_kinks_with_near_sides_are_tried_too(seed):
    assert rg.verify(mutants.MUTANTS["K01"], level="quick", seed=seed, only=["kinks"]).findings


@pytest.mark.parametrize("fn", [F.relu, torch.abs, F.hardtanh, F.leaky_relu, lambda x: F.max_pool1d(x, 3, 2)])
def test_kinks_are_found_and_right_ops_left_alone(fn):
    context = _context(fn, sizes=dict(N=(3, 64)))
    assert len(_places(context))
    assert rg.verify(context.spec, level="full", only=["kinks"])


def test_a_case_without_values_has_every_input_put_at_kinks():
    spec = rg.op(F.relu, F.relu, X)
    report = rg.verify(spec, level="quick", only=["kinks", "extremes"], case="M=3 N=20")
    assert report
    assert "one-sided" in report.stage("kinks").power_text


def test_places_are_the_ones():
    assert _places(_context(F.relu)).abs().max() == 0
    assert set(_places(_context(F.hardtanh)).abs().tolist()) == {1.0}
    pixels = (_places(_context(mutants.interpolate, dict(x=rg.tensor("N", low=-1.0, high=1.0)))) + 1) * 16 - 0.5
    assert (pixels - pixels.round()).abs().max() < 1e-4


@pytest.mark.parametrize("fn", [torch.sin, F.gelu, lambda x: torch.softmax(x, -1), lambda x: x @ x.mT, F.softplus])
def test_smooth_functions_have_none(fn):
    assert not len(_places(_context(fn)))


def test_bends_of_the_slope_are_no_kinks():
    context = _context(lambda x: F.smooth_l1_loss(x, torch.zeros_like(x), reduction="none"))
    # What the reference decides there shows the places, and the gradient is judged as anywhere.
    assert set(_places(context).abs().tolist()) == {0.0, 1.0}
    assert not any(
        bool(at.any()) for at in context.oracle.interval(context.base.but(values=(("x", "kink"),))).at.values()
    )


@pytest.mark.parametrize(
    ("fn", "reference"),
    [
        (lambda x: torch.where(x < 0, 0, x), F.relu),  # slope 1 at zero, the reference has 0
        (lambda x: torch.where(x < 0, -x, x), torch.abs),
        (lambda x: x.max(-1).values, lambda x: x.sort(-1).values[..., -1]),  # another one of the ties
    ],
)
def test_either_side_is_right_in_every_stage(fn, reference):
    report = rg.verify(rg.op(fn, reference, X, sizes=dict(N=(1, 512))), level="full")
    assert report, [f.what for f in report.findings]


def test_the_oracle_says_that_it_accepted_a_side():
    x = torch.tensor([[-1.0, 0.0, 2.0, 3.0]])
    report = rg.verify(rg.op(lambda x: x * (x >= 0), F.relu, dict(x=x)), level="quick", only=["oracle"])
    assert report
    assert "1 of 4 elements of grad x are at kinks of the forward, such as [0, 1]" in report.stage("oracle").notes[0]


def test_a_wrong_value_beside_a_kink_is_still_wrong():
    off = with_backward(F.relu, lambda dy, x: dy * (x > 0) * 1.001)
    x = torch.tensor([[-1.0, 0.0, 2.0, 3.0]])
    assert rg.verify(rg.op(off, F.relu, dict(x=x)), level="quick", only=["oracle"]).verdict == "finding"


def test_declared_kinks_widen_the_reach():
    """A kink that the reference has beside where the op has it, by more than rounding explains."""
    away = 2e-6

    def op(x):
        return F.relu(x - 1)

    def reference(x):
        return F.relu(x - (1 + away))

    x = torch.tensor([1 + away / 2, 2.0, 0.5], dtype=torch.float64)

    def distance(x):
        return dict(x=(x - 1).abs())

    spec = rg.op(op, reference, dict(x=x), dtypes=["float32"])
    context = StageContext.of(spec, "float32")
    assert not context.oracle.interval(context.base).at["grad x"].any()
    declared = rg.op(op, reference, dict(x=x), dtypes=["float32"], kinks=distance)
    context = StageContext.of(declared, "float32")
    assert context.oracle.interval(context.base).at["grad x"].tolist() == [True, False, False]
    with pytest.raises(SpecError, match="kinks"):
        rg.op(op, reference, dict(x=x), kinks=3)


def test_odds_are_those_of_the_model():
    """A million uniform coordinates, pixels 1/16 apart: the odds are the share of floats whose cell float32 mistakes."""
    spec = rg.op(mutants.interpolate, mutants.interpolate, dict(x=rg.tensor("N", low=-1.0, high=1.0)))
    note = rg.verify(spec, level="full", only=["kinks"]).stage("kinks").notes[0]
    odds = float(re.search(r"in ([\d.e-]+) % with a million", note).group(1)) / 100
    generator = torch.Generator().manual_seed(0)
    missed, drawn = 0, 4_000_000
    for _ in range(5):
        x = (torch.rand(drawn, generator=generator, dtype=torch.float64) * 2 - 1).float()
        missed += int((((x + 1) * 16 - 0.5).floor() != ((x.double() + 1) * 16 - 0.5).floor()).sum())
    expected = 1 - math.exp(-missed / 20)
    assert expected / 4 < odds < min(4 * expected, 1.0)


def test_ties_of_many_have_one_interval():
    context = _context(lambda x: x.amax(-1), dict(x=torch.ones(2, 40)))
    interval = context.oracle.interval(context.base)
    assert interval.at["grad x"].sum() > 8
    (g,) = context.runner.grad_outs(context.base)
    share = (g[:, None] / 40).expand(2, 40)
    accepted = interval.outside("grad x", share) == 0
    assert accepted[interval.at["grad x"]].all()
    assert kinks.around(torch.zeros(3)).tolist() == [1, 1, 1]


# --- Decisions ------------------------------------------------------------------------

LEVEL = 30


def _nearest(table, x):
    return table[(x * LEVEL - 0.5).round().clamp(0, LEVEL - 1).long()]


def _inside(table, x):
    """Nearest neighbours, for coordinates in [0, 1] alone: no point beside the edge may be asked for."""
    assert bool(((x >= 0) & (x <= 1)).all())
    return _nearest(table, x)


class OtherFormula(torch.autograd.Function):
    """Nearest neighbours by way of [-1, 1], as grid_sample has them; `factor` of the gradient is 1 if it is right."""

    factor = 1.0

    @staticmethod
    def forward(ctx, table, x):
        index = (((2 * x - 1 + 1) * LEVEL - 1) / 2).round().clamp(0, LEVEL - 1).long()
        ctx.save_for_backward(table, index)
        return table[index]

    @classmethod
    def backward(cls, ctx, dy):
        table, index = ctx.saved_tensors
        return torch.zeros_like(table).index_add(0, index, cls.factor * dy), None


class Unscaled(OtherFormula):
    factor = 256.0  # beyond what jumps of size 1 explain, which is all that is known of a slice with some of them


def _at_borders(seed, dtype, sizes):
    """Eight coordinates at borders between cells or of the range, to the rounding, and one in the middle of a cell."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.cat([torch.arange(1, 7) / LEVEL, torch.tensor([0.0, 1.0, 20.5 / LEVEL])]).to(dtype)
    return dict(table=torch.randn(LEVEL, generator=generator).to(dtype), x=x)


@pytest.mark.parametrize("reference", [_nearest, _inside])
@pytest.mark.parametrize("seed", range(3))
def test_either_side_of_a_jump_is_right(reference, seed):
    spec = rg.op(OtherFormula.apply, reference, _at_borders)
    context = StageContext.of(spec, "float32", seed=seed)
    run, truth = context.runner.run(context.base), context.oracle.truth(context.base)
    assert run.outs["out"].ne(truth.want["out"]).any(), "no coordinate fell into the other cell"
    assert kinks.flips(context.runner.reference(context.base))["round"] >= 1
    assert rg.verify(spec, level="quick", seed=seed, only=["oracle", "layouts"])
    broken = rg.op(Unscaled.apply, reference, _at_borders)
    assert "grad table" in {f.tensor for f in rg.verify(broken, level="quick", seed=seed, only=["oracle"]).findings}


@pytest.mark.parametrize(
    ("fn", "operator"),
    [
        (lambda x: x + (4 * x).round(), "round"),
        (lambda x: x + (x > 0.5), "gt"),
        (lambda x: x + x.trunc(), "trunc"),
        (lambda x: x + 2.0 * torch.sign(x - 0.25), "sign"),
    ],
)
def test_steps_are_found_by_what_is_decided(fn, operator):
    context = _context(fn)
    case = context.base.but(values=(("x", "kink"),))
    assert len(_places(context))
    assert operator in kinks.flips(context.runner.reference(case))
    report = rg.verify(context.spec, level="full", only=["kinks"])
    assert report, [f.what for f in report.findings]
    assert f"{operator} " in " ".join(report.stage("kinks").notes)


def test_places_of_selections_are_decisions():
    context = _context(lambda x: x.sort(-1).values + x.topk(1).values + F.max_pool1d(x, 2), sizes=dict(M=[1], N=[2]),
                   inputs=lambda seed, dtype, sizes: dict(x=torch.full((1, 2), 0.3, dtype=dtype)))  # fmt: skip
    decisions = kinks.decisions(context.runner.reference(context.base), Float64(record=True))
    assert {"sort", "topk", "max_pool2d_with_indices"} <= {name for name, _ in decisions}


@pytest.mark.parametrize("fn", [torch.sin, lambda x: torch.softmax(x, -1), lambda x: F.rms_norm(x, x.shape[-1:])])
def test_what_decides_nothing_has_no_flips(fn):
    context = _context(fn, sizes=dict(N=(2, 64)))
    assert kinks.flips(context.runner.reference(context.base)) == {}


def _maximum(share):
    def backward(dy, x):
        top = (x == x.amax(-1, keepdim=True)).to(x.dtype)
        return dy[..., None] * share(top)

    return with_backward(lambda x: x.amax(-1), backward)


_SHARES = {
    "equally": lambda top: top / top.sum(-1, keepdim=True),
    "to the first": lambda top: top * (top.cumsum(-1) == 1),
    "to the last": lambda top: top * (top.flip(-1).cumsum(-1).flip(-1) == 1),
}
_TIES = dict(level="quick", only=["extremes", "layouts", "kinks"])


@pytest.mark.parametrize("share", _SHARES)
def test_equal_maxima_may_share_a_gradient_in_any_way(share):
    assert rg.verify(rg.op(_maximum(_SHARES[share]), lambda x: x.amax(-1), X, sizes=dict(N=(1, 64))), **_TIES)


@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_shares_that_do_not_add_up_are_found(factor):
    spec = rg.op(_maximum(lambda top: factor * top), lambda x: x.amax(-1), X, sizes=dict(N=(1, 64)))
    report = rg.verify(spec, **_TIES)
    assert report.verdict == "finding"
    if factor == 1.0:  # each is between 0 and all of it
        assert {f.kind for f in report.findings} == {"beyond-kink"}
        assert "summed over dim 1" in report.findings[0].what


@pytest.mark.parametrize("at_zero", [0.0, 0.5, 1.0])
def test_kinks_of_each_element_have_no_sum_to_keep(at_zero):
    spec = rg.op(with_backward(F.relu, lambda dy, x: dy * torch.heaviside(x, x.new_tensor(at_zero))), F.relu, X)
    assert rg.verify(spec, level="quick", skip=["higher_order", "adjoint"])


def test_level_quick_looks_for_none_in_large_tensors_and_says_so(monkeypatch):
    from retrograd.check.stages import kinks as stage

    broken = mutants.MUTANTS["K01"]
    assert rg.verify(broken, level="quick", only=["kinks"]).findings
    monkeypatch.setattr(stage, "_LARGE", 8)
    (result,) = rg.verify(broken, level="quick", only=["kinks"]).stages
    assert "no kinks are looked for" in result.notes[0]
    assert rg.verify(broken, level="full", only=["kinks"]).findings


def _stable(x):
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def test_a_largest_number_that_cancels_is_no_kink():
    healthy = rg.verify(_stable, reference=_stable, inputs=dict(x=rg.tensor("M", "N")), level="quick", only=["kinks"])
    assert (healthy.stage("kinks").status, healthy.stage("kinks").runs) == ("passed", 0)
    spec = rg.op(_stable, _stable, dict(x=rg.tensor("M", "N")))
    context = StageContext.of(spec, "float32")
    assert context.oracle.truth(context.base).switches == frozenset()


@pytest.mark.parametrize("formula", [
    lambda x: x / x.amax(-1, keepdim=True),
    lambda x: (x - x.amax(-1, keepdim=True)).exp(),
    lambda x: _stable(x) + torch.relu(x),
    lambda x: _stable(x) * x.max(-1, keepdim=True).values,
])  # fmt: skip
def test_one_that_does_not_cancel_is(formula):
    context = StageContext.of(rg.op(formula, formula, dict(x=rg.tensor("M", "N"))), "float32")
    assert context.oracle.truth(context.base).switches


def _rows(n):
    return torch.arange(n)[:, None]


@pytest.mark.parametrize(("decides", "formula"), [
    (False, lambda x: x.masked_fill(_rows(x.shape[0]) < torch.arange(x.shape[1]), 0.0).exp()),
    (False, lambda x: torch.where((_rows(x.shape[0]) // 2 == 1) & ~torch.ones(1, dtype=torch.bool), x, x * 2)),
    (False, lambda x: x.unfold(0, 3, 2).square().sum(-1)),
    (True, lambda x: torch.where(x > 0, x, 2 * x)),
    (True, lambda x: torch.where(x.long() == 0, x, 2 * x)),
    (True, lambda x: x.bool() * x * 2),
    (True, lambda x: x.nan_to_num(0.0).sort(-1).values),
])  # fmt: skip
def test_masks_of_rows_and_columns_decide_nothing(decides, formula):
    context = StageContext.of(rg.op(formula, formula, dict(x=rg.tensor("M", "N"))), "float32")
    assert bool(context.oracle.truth(context.base).switches) == decides
