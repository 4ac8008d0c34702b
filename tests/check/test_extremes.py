"""The extremes stage: values far from ordinary, and where NaN and Inf go."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from corpus import files, load
from specimens import with_backward

import retrograd as rg
from retrograd.check import extreme_values
from retrograd.check import inputs as make
from retrograd.check.rounding import Float64
from retrograd.errors import SpecError

ONLY_HERE = dict(pointwise=["GX01", "GX02", "GX09"], rms_norm=["RX13", "R27"], layer_norm=["LX01"])


def _mutant(file, name):
    path = Path(__file__).resolve().parent.parent / "mutants" / f"{file}.py"
    module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(f"extremes_{file}", path))
    sys.modules[module.__name__] = module
    module.__spec__.loader.exec_module(module)
    return module.MUTANTS[name]


@pytest.mark.parametrize(("file", "name"), [(f, n) for f, names in ONLY_HERE.items() for n in names])
def test_mutant_is_found(file, name):
    spec = _mutant(file, name)
    assert rg.verify(spec, level="quick", only=["extremes"]).verdict == "finding"
    if name != "LX01":  # its variance is wrong by a little at two columns as well, which shapes may see
        assert rg.verify(spec, level="quick", skip=["extremes"])


def _op(fn, reference=None, **more):
    return rg.op(fn, reference or fn, dict(x=rg.tensor("M", "N")), **more)


flushed = with_backward(lambda x: x * x, lambda dy, x: (2 * x * dy).nan_to_num(0.0))


def test_finding_says_which_cell_and_which_rows():
    finding = rg.verify(_op(flushed, lambda x: x * x), level="quick", only=["extremes"]).findings[0]
    assert finding.kind == "vanished"
    assert (
        "nan in x[0, 0] vanishes from grad x[0, 0]: in float64 it reaches row 0 of grad x, here nothing" in finding.what
    )
    again = rg.verify(_op(flushed, lambda x: x * x), level="quick", only=["extremes"], case=finding.case.text())
    assert again.findings[0].what == finding.what


def test_minus_infinity_is_a_value_like_another():
    def unshifted(x):  # exp(-inf) is 0, but -inf - (-inf) is not: a masked place poisons its row
        return torch.exp(x - x.amin(-1, keepdim=True)) / torch.exp(x - x.amin(-1, keepdim=True)).sum(-1, keepdim=True)

    report = rg.verify(_op(unshifted, lambda x: torch.softmax(x, -1)), level="full", only=["extremes"])
    assert any(("x", "-inf") in f.case.values for f in report.findings)


@pytest.mark.parametrize(
    "fn", [F.relu, torch.tanh, F.softplus, lambda x: torch.softmax(x, -1), lambda x: F.layer_norm(x, x.shape[-1:]),
           lambda x: x / x.abs().amax(-1, keepdim=True).clamp_min(1e-6), lambda x: torch.log1p(x.abs()),
           lambda x: x.cumsum(0), lambda x: x @ x.mT],
)  # fmt: skip
def test_right_ops_are_left_alone(fn):
    report = rg.verify(_op(fn, dtypes=["float32", "bfloat16"]), level="full", only=["extremes"])
    assert report, [f.what for f in report.findings]


def test_other_right_formulas_are_left_alone():
    def softmax(x):
        e = torch.exp(x - x.detach().amax(-1, keepdim=True))
        return e / e.sum(-1, keepdim=True)

    def norm(x):
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    assert rg.verify(_op(softmax, lambda x: torch.softmax(x, -1)), level="full", only=["extremes"])
    assert rg.verify(_op(norm, lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-6)), level="full", only=["extremes"])


def test_inputs_with_a_range_are_left_in_it():
    seen = []

    def log(x):
        seen.append(x.detach())
        return torch.log(x)

    spec = rg.op(log, torch.log, dict(x=rg.tensor("N", low=0.1, high=1.0)))
    assert rg.verify(spec, level="quick", only=["extremes"]).stage("extremes").cases == len(extreme_values.EVERY_END)
    ranges = [(float(x.min()), float(x.max())) for x in seen if x.numel()]
    assert all(low >= 0.1 and high <= 1.0 for low, high in ranges)
    assert min(high for _, high in ranges) < 0.2
    assert max(low for low, _ in ranges) > 0.9
    unknown = rg.op(torch.exp, torch.exp, lambda seed, dtype, sizes: dict(x=torch.ones(3, dtype=dtype)))
    assert "extremes=" in rg.verify(unknown, level="quick", only=["extremes"]).stage("extremes").reason
    with pytest.raises(SpecError, match="extremes"):
        rg.op(torch.log, torch.log, dict(x=rg.tensor("N")), extremes=["y"])
    made = rg.op(torch.exp, torch.exp, lambda seed, dtype, sizes: dict(x=torch.ones(3, dtype=dtype)), extremes=["x"])
    assert rg.verify(made, level="quick", only=["extremes"]).stage("extremes").cases == 6


@pytest.mark.parametrize("name", extreme_values.NAMES)
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 0), (2, 3, 4)])
def test_values_keep_shape_and_dtype(name, shape):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        got = extreme_values.alter(torch.ones(shape, dtype=dtype), name)
        assert (got.shape, got.dtype) == (shape, dtype)
        assert bool(got.isfinite().all()) == (name not in extreme_values.CELLS or not got.numel())


def test_peak_counts_partial_sums():
    mode = Float64(track=True)
    with mode:
        torch.tensor([3e200, -3e200], dtype=torch.float64).sum()
    assert mode.peak == 6e200


def _normalised_sum(x, beside):
    s = x + beside
    centred = s - s.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-6)


def _cancelled_variance(dy, x, beside):
    """The variance as E[x^2] - E[x]^2, of which a mean of 1e4 leaves nothing."""
    s = x + beside
    mean = s.mean(-1, keepdim=True)
    rstd = torch.rsqrt((s.square().mean(-1, keepdim=True) - mean.square()).clamp_min(0) + 1e-6)
    xhat = (s - mean) * rstd
    grad = rstd * (dy - dy.mean(-1, keepdim=True) - xhat * (dy * xhat).mean(-1, keepdim=True))
    return grad, grad


_SUMMED = dict(x=rg.tensor("M", "N"), beside=rg.tensor("M", "N"))
_FILLED = dict(M=(1, 64), N=(2, 512))


def test_what_one_rounding_decides_is_not_judged():
    # x + beside is rounded to bfloat16, whose steps are 64 there: the right result of that sum has no variance at all.
    spec = rg.op(lambda *a: _normalised_sum(*a), lambda *a: _normalised_sum(*(t.float() for t in a)), _SUMMED,
                 sizes=_FILLED, dtypes=["bfloat16"])  # fmt: skip
    report = rg.verify(spec, level="quick", only=["extremes"])
    assert report, [f.what for f in report.findings]
    assert "not judged with mean in x in bfloat16: one rounding" in " ".join(report.stage("extremes").notes)


def test_a_cancelled_variance_is_found_where_right_results_keep_their_digits():
    spec = rg.op(with_backward(_normalised_sum, _cancelled_variance), _normalised_sum, _SUMMED, sizes=_FILLED)
    report = rg.verify(spec, level="quick", only=["extremes"])
    assert {f.tensor for f in report.findings} >= {"grad x"}
    assert report.findings[0].case.text().endswith("mean")


def _mean_of_kept(x, kept):
    rows = (kept != 0)[:, None].to(x.dtype)
    return (rows * x).sum(0) / rows.sum().clamp_min(1)


def _unguarded(dy, _x, kept):
    rows = (kept != 0)[:, None].to(dy.dtype)
    return rows * dy / rows.sum(), None


_KEPT = dict(
    mask=rg.tensor("M", dtype="bool"),
    whole=rg.tensor("M", dtype="int64", low=0, high=5),
    byte=rg.tensor("M", dtype="uint8", high=2),
)


@pytest.mark.parametrize("kind", _KEPT)
@pytest.mark.parametrize("level", ["quick", "full"])
def test_where_nothing_is_selected(kind, level):
    inputs = dict(x=rg.tensor("M", "N"), kept=_KEPT[kind])
    broken = rg.op(with_backward(_mean_of_kept, _unguarded), _mean_of_kept, inputs)
    found = rg.verify(broken, level=level, only=["extremes"]).findings
    assert [f.case.values for f in found] == [(("kept", "lowest"),)]
    again = rg.verify(broken, level=level, case=found[0].case.text())
    assert again.findings
    assert rg.verify(rg.op(_mean_of_kept, _mean_of_kept, inputs), level=level, only=["extremes"])


def test_what_the_reference_makes_nan_of_nothing_may_be_another_number():
    def undefined(x, target):
        return F.cross_entropy(x, target, ignore_index=0)

    def zero(x, target):
        kept = (target != 0).sum().clamp_min(1)
        return F.cross_entropy(x, target, ignore_index=0, reduction="sum") / kept

    inputs = dict(x=rg.tensor("M", "C"), target=rg.tensor("M", dtype="int64", low=0, high="C"))
    spec = rg.op(zero, undefined, inputs, sizes=dict(M=(1, 32), C=(2, 12)))
    assert rg.verify(spec, level="quick", only=["extremes"])


@pytest.mark.parametrize("far", [-torch.inf, torch.finfo(torch.float32).min])
def test_who_has_no_output_of_nothing_may_have_no_gradient(far):
    """Shares of nothing are NaN, and so is what a backward makes of them; even ones, of the least number, have one."""

    def shares(x, kept):
        return torch.where(kept, x, far).softmax(-1)

    def of_shares(dy, x, kept):
        p = shares(x, kept)
        nothing = torch.where(kept.any(-1, keepdim=True), 0.0, torch.nan)
        return p * (dy - (dy * p).sum(-1, keepdim=True)) + nothing, None

    inputs = dict(x=rg.tensor("M", "N"), kept=rg.tensor("M", "N", dtype="bool"))
    report = rg.verify(rg.op(with_backward(shares, of_shares), shares, inputs), level="quick", only=["extremes"])
    found = [(f.kind, f.tensor, f.case.values) for f in report.findings]
    assert found == ([] if far == -torch.inf else [("not-finite", "grad x", (("kept", "lowest"),))])


def test_ends_of_whole_numbers_are_those_of_their_range():
    spec = rg.op(torch.gather, torch.gather, dict(x=rg.tensor("M", "N"), dim=1,
                 index=rg.tensor("M", "K", dtype="int64", low=1, high="N")))  # fmt: skip
    case = make.base_case(spec, "float32")
    for end, want in (("lowest", 1), ("highest", case.size("N") - 1)):
        index = make.materialise(spec, case.but(values=(("index", end),)), 0, "cpu")["index"]
        assert index.unique().tolist() == [want]


def _below_zero(x, slope):
    return torch.where(x < 0, slope * x, 2.0 * x)


def test_what_is_wrong_at_an_end_of_a_range_alone_is_found():
    inputs, sizes = dict(x=rg.tensor("N", low=-1.0, high=40.0)), dict(N=(1, 8))
    broken = rg.op(lambda x: _below_zero(x, 2.5), lambda x: 2 * x, inputs, sizes=sizes)
    assert "x@lowest" in rg.verify(broken, level="quick", only=["extremes"]).findings[0].case.text()
    right = rg.op(lambda x: _below_zero(x, 2.0), lambda x: 2 * x, inputs, sizes=sizes)
    assert rg.verify(right, level="quick", only=["extremes"])


def test_all_far_below_zero_is_tried_as_all_far_above_it():
    def from_zero(x):
        e = (x - x.amax(-1, keepdim=True).clamp_min(0)).exp()
        return e / e.sum(-1, keepdim=True)

    def softmax(x):
        return torch.softmax(x, -1)

    spec = rg.op(from_zero, softmax, dict(x=rg.tensor("M", "N")))
    findings = rg.verify(spec, level="quick", only=["extremes"]).findings
    assert findings[0].case.text().endswith("x@-mean")


def _causal_sum(x):
    return x.cumsum(1)


def _by_matrix(x):
    return torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril() @ x


def _through_the_batch(x):
    return x.cumsum(1) + 0 * x.sum()


_STEPS = dict(x=rg.tensor("B", "T", "D"))


def test_nan_may_reach_earlier_steps_of_its_own_sequence():
    # As in torch: softmax of masked scores has exact zeros, and the product with them is NaN.
    report = rg.verify(rg.op(_by_matrix, _causal_sum, _STEPS), level="full", only=["extremes"])
    assert report, [f.what for f in report.findings]
    assert "along dimensions that float64 couples" in " ".join(report.stage("extremes").notes)


@pytest.mark.parametrize("fn", [_through_the_batch, lambda x: _by_matrix(x) + 0 * x.roll(1, 0)])
def test_nan_may_not_reach_another_sequence(fn):
    findings = rg.verify(rg.op(fn, _causal_sum, _STEPS), level="quick", only=["extremes"]).findings
    assert "spread" in {f.kind for f in findings}


def test_nan_that_is_masked_altogether_may_reach_nothing():
    # A key that a mask leaves out may be memory that nobody wrote.
    def left_out(k, v, kept):
        weight = torch.softmax(torch.where(kept, k, -torch.inf), -1)
        return weight @ torch.where(kept[:, None], v, 0)

    def by_zeros(k, v, kept):
        return torch.softmax(torch.where(kept, k, -torch.inf), -1) @ v

    inputs = dict(k=rg.tensor("M", "N"), v=rg.tensor("N", "D"), kept=torch.tensor([True, True, False, True]))
    sizes = dict(N=4, D=(1, 8))
    findings = rg.verify(rg.op(by_zeros, left_out, inputs, sizes=sizes), level="quick", only=["extremes"]).findings
    assert {(f.kind, f.tensor) for f in findings} >= {("spread", "out")}


def _weighed(x, key):
    e = torch.exp(key - key.detach().amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True) * x


def _without_maximum(x, key):
    e = torch.exp(key)
    return e / e.sum(-1, keepdim=True) * x


def _by_zeros(x, key):
    return _weighed(x, key) + 0 * x.sum()


def test_finite_extremes_alone_where_nan_may_go_anywhere():
    inputs, promised = dict(x=rg.tensor("M", "N"), key=rg.tensor("M", "N")), dict(x="finite", key="any")
    right = rg.op(_by_zeros, _weighed, inputs, extremes=promised)
    report = rg.verify(right, level="quick", only=["extremes"])
    assert report, [f.what for f in report.findings]
    assert not rg.verify(rg.op(_by_zeros, _weighed, inputs), level="quick", only=["extremes"])
    broken = rg.op(_without_maximum, _weighed, inputs, extremes=dict(key="finite"))
    assert rg.verify(broken, level="quick", only=["extremes"]).findings[0].case.text().endswith("key@mean")
    with pytest.raises(SpecError, match="expected 'any' or 'finite'"):
        rg.op(_weighed, _weighed, inputs, extremes=dict(x="huge"))


def _seen_through(alpha, colour):
    light, out = torch.ones_like(alpha[:, 0]), torch.zeros_like(alpha[:, 0])
    for a, c in zip(alpha.unbind(1), colour.unbind(1), strict=True):
        out, light = out + light * a * c, light * (1 - a)
    return out


def _dividing(dy, alpha, colour):
    light = torch.cat([torch.ones_like(alpha[:, :1]), (1 - alpha[:, :-1]).cumprod(1)], 1)
    weight = alpha * light
    behind = (weight * colour).flip(1).cumsum(1).flip(1) - weight * colour
    return dy[:, None] * (light * colour - behind / (1 - alpha + 1e-10)), dy[:, None] * weight


def test_an_element_exactly_at_the_end_of_its_range():
    inputs = dict(alpha=rg.tensor("M", "S", low=0, high=1), colour=rg.tensor("M", "S"))
    options = dict(sizes=dict(M=(1, 4), S=(2, 16)), algorithm_error=1000)
    broken = rg.op(with_backward(_seen_through, _dividing), _seen_through, inputs, **options)
    assert {f.case.values for f in rg.verify(broken, level="quick", only=["extremes"]).findings} == {
        (("alpha", "high"),)
    }
    assert rg.verify(rg.op(_seen_through, _seen_through, inputs, **options), level="quick", only=["extremes"])


def test_an_end_at_which_the_reference_is_not_finite_is_not_judged():
    spec = rg.op(lambda x: torch.log2(x + 1e-30), torch.log2, dict(x=rg.tensor("N", low=0, high=1)))
    report = rg.verify(spec, level="quick", only=["extremes"])
    assert report, [f.what for f in report.findings]
    assert "x exactly at its low end is not judged" in " ".join(report.stage("extremes").notes)


def _masked_slope(x):
    return torch.where(x >= 0, x.clamp_min(0), torch.sigmoid(x.clamp_max(0)))


def _slope(dy, x):
    s = torch.sigmoid(x)
    return dy * torch.where(x >= 0, 1, s * (1 - s))


def _slope_of_row(dy, x):
    return _slope(dy, x) + 0 * x.sum(-1, keepdim=True)


def test_nan_at_its_own_element_is_a_convention_in_a_gradient_too():
    inputs = dict(x=rg.tensor("M", "N"))
    report = rg.verify(
        rg.op(with_backward(_masked_slope, _slope), _masked_slope, inputs), level="quick", only=["extremes"]
    )
    assert report, [f.what for f in report.findings]
    assert "itself, where float64 has none: a convention" in " ".join(report.stage("extremes").notes)
    spread = rg.op(with_backward(_masked_slope, _slope_of_row), _masked_slope, inputs, sizes=dict(N=(2, 8)))
    assert {f.kind for f in rg.verify(spread, level="quick", only=["extremes"]).findings} == {"spread"}


def _routed(logits, weight):
    p, expert = torch.softmax(logits, -1).max(-1)  # NaN in the whole row: the first of them is the largest
    return p[:, None] * weight[expert]


def _routed_by_logits(logits, weight):
    expert = logits.argmax(-1)  # the NaN itself is the largest
    return torch.softmax(logits, -1).gather(-1, expert[:, None]) * weight[expert]


def _poisoned(logits, weight):
    return _routed_by_logits(logits, weight) + 0 * (logits.sum() * weight).sum()


def test_the_place_that_nan_takes_is_a_convention():
    inputs, sizes = dict(logits=rg.tensor("M", "E"), weight=rg.tensor("E", "N")), dict(E=(2, 6))
    report = rg.verify(rg.op(_routed_by_logits, _routed, inputs, sizes=sizes), level="full", only=["extremes"])
    assert report, [f.what for f in report.findings]
    assert "which place it takes is a convention" in " ".join(report.stage("extremes").notes)
    findings = rg.verify(rg.op(_poisoned, _routed, inputs, sizes=sizes), level="quick", only=["extremes"]).findings
    assert "spread" in {f.kind for f in findings}


def test_a_nan_that_moves_where_nobody_asks_for_a_place_is_found():
    moved = rg.op(lambda x: 2 * x.roll(1, 0) - x.roll(1, 0).detach() + x.detach() - x.detach(), torch.clone, _STEPS)
    assert rg.verify(moved, level="quick", only=["extremes"]).findings


def _clouds(x, y):
    return (x[:, None] - y).square().sum(-1)


def _expanded(x, y):
    return x.square().sum(-1)[:, None] + y.square().sum(-1) - 2 * x @ y.mT


def test_one_mean_in_all_inputs_at_once():
    inputs, options = dict(x=rg.tensor("M", 3), y=rg.tensor("N", 3)), dict(algorithm_error=16)
    findings = rg.verify(rg.op(_expanded, _clouds, inputs, **options), level="quick", only=["extremes"]).findings
    assert {f.case.values for f in findings} == {(("x", "mean"), ("y", "mean"))}
    again = rg.verify(
        rg.op(_expanded, _clouds, inputs, **options), level="quick", only=["extremes"], case=findings[0].case.text()
    )
    assert again.findings
    assert rg.verify(rg.op(_clouds, _clouds, inputs), level="quick", only=["extremes"])


def test_one_mean_in_all_inputs_is_not_judged_where_it_is_no_shift():
    # Scores of 1e8 leave one key: the gradient is exactly 0 in the reference's softmax, a difference of roundings here.
    spec = load(next(p for p in files("healthy_third") if p.stem == "attention"))["online_softmax"]
    report = rg.verify(spec, level="quick", only=["extremes"])
    assert report, [f.what for f in report.findings]


def _bounded_ratio(x, gain):
    ratio = torch.exp(x)
    return torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)


def _ratio_by_hand(dy, x, gain):
    ratio = torch.exp(x)
    stopped = ((gain > 0) & (ratio > 1.2)) | ((gain < 0) & (ratio < 0.8))
    inner = torch.where((gain > 0) & (ratio > 1.2), 1.2, torch.where((gain < 0) & (ratio < 0.8), 0.8, ratio))
    return torch.where(stopped, 0, dy * ratio * gain), dy * inner


def _flushed(dy, x, gain):
    dx, d_gain = _ratio_by_hand(dy, x, gain)
    return torch.where(dx.isfinite(), dx, 0), d_gain


@pytest.mark.parametrize(("backward", "right"), [(_ratio_by_hand, True), (_flushed, False)])
def test_an_infinity_may_leave_a_limit_where_the_reference_multiplies_it_by_zero(backward, right):
    inputs = dict(x=rg.tensor("M", "N"), gain=rg.tensor("M", "N", grad=False))
    op = with_backward(_bounded_ratio, lambda dy, x, gain: (backward(dy, x, gain)[0], None))
    report = rg.verify(rg.op(op, _bounded_ratio, inputs, extremes=["x"]), level="full", only=["extremes"])
    assert (report.verdict == "proved") == right, [f.what for f in report.findings]


def _largest_sums(a, b):
    return (a[:, :, None] + b).amax(1)


def _to_its_place(dy, a, b):
    place = (a[:, :, None] + b).argmax(1)
    rows, columns = torch.arange(len(a))[:, None].expand_as(place), torch.arange(b.shape[1]).expand_as(place)
    grads = torch.zeros_like(a), torch.zeros_like(b)
    return (grads[0].index_put((rows, place), dy, accumulate=True),
            grads[1].index_put((place, columns), dy, accumulate=True))  # fmt: skip


def _to_its_place_and_all(dy, a, b):
    da, db = _to_its_place(dy, a, b)
    return da + 0 * a.sum(), db


@pytest.mark.parametrize(("backward", "right"), [(_to_its_place, True), (_to_its_place_and_all, False)])
def test_a_largest_number_that_is_nan_belongs_to_one_place_or_to_all(backward, right):
    # NaN reaches what stands there: the first gives it no gradient that is NaN, the reference's 0 / 0 gives all one.
    inputs = dict(a=rg.tensor("M", "K"), b=rg.tensor("K", "N"))
    spec = rg.op(with_backward(_largest_sums, backward), _largest_sums, inputs, sizes=dict(K=(2, 9), M=(2, 9)))
    report = rg.verify(spec, level="quick", only=["extremes"])
    assert (report.verdict == "proved") == right, [f.what for f in report.findings]


def _nearest(x, y):
    return (x[:, None] - y).square().sum(-1).amin(0)


def _to_the_nearest(dy, x, y):
    place = (x[:, None] - y).square().sum(-1).argmin(0)
    part = 2 * dy[:, None] * (x[place] - y)
    return torch.zeros_like(x).index_add(0, place, part), -part


def _to_the_nearest_unless_far(dy, x, y):
    return tuple(torch.where(grad.isfinite(), grad, 0) for grad in _to_the_nearest(dy, x, y))


@pytest.mark.parametrize(("backward", "right"), [(_to_the_nearest, True), (_to_the_nearest_unless_far, False)])
def test_of_equal_infinities_one_may_have_the_gradient_that_the_reference_shares(backward, right):
    # From a point at infinity all others are as far: amin shares the gradient among them, a place has all of it.
    inputs = dict(x=rg.tensor("M", 3), y=rg.tensor("N", 3))
    spec = rg.op(with_backward(_nearest, backward), _nearest, inputs, sizes=dict(M=(2, 9), N=(2, 9)))
    report = rg.verify(spec, level="full", only=["extremes"])
    assert (report.verdict == "proved") == right, [f.what for f in report.findings]


def test_what_the_reference_gives_by_chance_is_not_judged():
    # Beside 1e38 the logarithm of 2 is nothing: of two edges between the same nodes float64 gives each a share of 1.
    spec = load(next(p for p in files("healthy_fourth") if p.stem == "structure"))["graph_attention_divided_once"]
    case = "V=2 N=3 P=4 M=1 E=2 right@max/4"
    report = rg.verify(spec, level="full", only=["extremes"], case=case)
    assert report, [f.what for f in report.findings]
    assert "not judged with max/4" in " ".join(report.stage("extremes").notes)
    half = rg.op(lambda *a: spec.fn(*a) / 2, spec.reference, spec.inputs, sizes=spec.sizes)
    assert rg.verify(half, level="full", only=["extremes"], case=case.replace("max/4", "1e4")).findings


def _bell(x):
    return torch.exp(-(x - 1).square().square())


def _bell_of_powers(x):
    y = x * x
    return torch.exp(-(y * y - 4 * x * y + 6 * y - 4 * x + 1))


def test_a_quarter_of_the_largest_number_may_overflow_elsewhere():
    inputs = dict(x=rg.tensor("M", "N"))
    options = dict(algorithm_error=100, extremes=dict(x="finite"))
    squares = rg.op(_bell_of_powers, _bell, inputs, **options)
    report = rg.verify(squares, level="full", only=["extremes"])
    assert report, [f.what for f in report.findings]
    apart = rg.op(lambda x: torch.exp(x) * torch.exp(-x) * _bell(x), _bell, inputs, **options)
    assert rg.verify(apart, level="full", only=["extremes"]).findings


_NODES = torch.tensor([0, 1, 1, 2])


def _of_nodes(score):
    own = _NODES[:, None] == torch.arange(3)
    return torch.exp(score - torch.logsumexp(torch.where(own, score[:, None], float("-inf")), 0)[_NODES])


def _of_nodes_scattered(score):
    top = torch.full((3,), float("-inf"), dtype=score.dtype).scatter_reduce(0, _NODES, score.detach(), "amax")
    e = torch.exp(score - top[_NODES])
    return e / torch.zeros(3, dtype=score.dtype).index_add(0, _NODES, e)[_NODES]


def test_an_infinity_less_itself_reaches_what_nan_in_its_place_reaches():
    report = rg.verify(rg.op(_of_nodes_scattered, _of_nodes, dict(score=rg.tensor(4))), level="full", only=["extremes"])
    assert report, [f.what for f in report.findings]


@pytest.mark.parametrize("divides", [False, True])
def test_nan_is_found_where_most_other_elements_have_no_digit(divides):
    def backward(dy, x):
        if divides:  # by the zeros of a row, too
            return (dy * x.cumprod(-1)).flip(-1).cumsum(-1).flip(-1) / x
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(x.cumprod(-1), x, dy)[0]

    cumprod = with_backward(lambda x: x.cumprod(-1), backward, once=True)
    report = rg.verify(
        rg.op(cumprod, lambda x: x.cumprod(-1), dict(x=rg.tensor(7, 40))), level="quick", only=["extremes"]
    )
    assert {f.kind for f in report.findings} == ({"not-finite"} if divides else set()), report


def _largest_number(x):
    return torch.where(x.isnan(), -torch.inf, x).amax(-1)


@pytest.mark.parametrize("seed", range(6))
def test_a_nan_is_found_to_be_lost_among_numbers_that_are_larger(seed):
    inputs, sizes = dict(x=rg.tensor("M", "N")), dict(N=48)
    lost = rg.op(_largest_number, lambda x: x.amax(-1), inputs, sizes=sizes)
    report = rg.verify(lost, level="quick", only=["extremes"], seed=seed)
    assert "vanished" in {f.kind for f in report.findings}
    assert rg.verify(rg.op(lambda x: x.amax(-1), lambda x: x.amax(-1), inputs, sizes=sizes), level="quick", seed=seed)
