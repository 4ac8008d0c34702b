"""Ops whose arguments are not inputs in a row: modules, nested inputs, keywords, in place, random, refused layouts."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from specimens import with_backward
from torch import nn
from torch.utils.checkpoint import checkpoint

import retrograd as rg
from retrograd.check import stages
from retrograd.errors import SpecError

t = rg.tensor
MN = dict(x=t("M", "N"))


def _verify(fn, reference, inputs, level="quick", only=(), **more):
    return rg.verify(rg.op(fn, reference, inputs, **more), level=level, only=only)


def _tensors(report):
    return {f.tensor for f in report.findings}


# ----- modules


class Scaled(nn.Module):
    """A linear layer whose weight gradient is that of `backward`."""

    def __init__(self, backward):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(5, 12)), nn.Parameter(torch.zeros(5))
        self.linear = with_backward(lambda x, w, b: x @ w.T + b, backward, once=True)

    def forward(self, x):
        return self.linear(x, self.weight, self.bias)


def _right(dy, x, w, b):
    return dy @ w, dy.T @ x, dy.sum(0)


def _forgets_weight(dy, x, w, b):  # right for weights of ones, as they begin
    return dy.sum(-1, keepdim=True).expand(x.shape), dy.T @ x, dy.sum(0)


LINEAR = dict(x=t("M", 12))


def test_parameters_of_a_module_are_inputs_under_their_names():
    reference = nn.Linear(12, 5)
    assert _verify(Scaled(_right), reference, LINEAR)
    assert _tensors(_verify(Scaled(_forgets_weight), reference, LINEAR)) == {"grad x"}
    no_bias = lambda dy, x, w, b: (*_right(dy, x, w, b)[:2], torch.zeros_like(b))  # noqa: E731
    assert _tensors(_verify(Scaled(no_bias), reference, LINEAR)) == {"grad bias"}


def test_a_function_takes_the_parameters_of_the_module_as_keywords():
    assert _verify(Scaled(_right), lambda x, weight, bias: x @ weight.T + bias, LINEAR)

    def deep(x, **state):
        hidden = (x @ state["0.weight"].T + state["0.bias"]).tanh()
        return hidden @ state["2.weight"].T + state["2.bias"]

    mlp = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    assert _verify(mlp, deep, dict(x=t("M...", 4)))
    forgetful = lambda x, **state: deep(x, **{**state, "2.bias": 0})  # noqa: E731
    assert {"out", "grad 2.bias"} <= _tensors(_verify(mlp, forgetful, dict(x=t("M...", 4)), only=["oracle"]))


def test_the_module_itself_stays_as_it_is():
    module = nn.BatchNorm1d(6)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert _verify(module, nn.BatchNorm1d(6), dict(x=t("M", 6)), sizes=dict(M=(2, 300)))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())


class Norm(nn.BatchNorm1d):
    """Batch norm that keeps its statistics by itself."""

    def __init__(self, momentum=0.1, counts=True):
        super().__init__(6)
        self.mine, self.counts = momentum, counts

    def forward(self, x):
        with torch.no_grad():
            self.running_mean.lerp_(x.mean(0), self.mine)
            self.running_var.lerp_(x.var(0), 0.1)
            self.num_batches_tracked += self.counts
        return nn.functional.batch_norm(x, None, None, self.weight, self.bias, True)


@pytest.mark.parametrize(
    ("module", "wrong"),
    [
        (Norm(), set()),
        (Norm(momentum=0.11), {"running_mean after"}),
        (Norm(counts=False), {"num_batches_tracked after"}),
    ],
)
def test_buffers_that_a_module_changes_are_compared(module, wrong):
    report = _verify(module, nn.BatchNorm1d(6), dict(x=t("M", 6)), sizes=dict(M=(2, 300)), only=["contract", "oracle"])
    assert _tensors(report) == wrong
    assert report.verdict == ("finding" if wrong else "proved")


def test_a_buffer_may_be_described():
    inputs = dict(x=t("M", 6), running_mean=t(6), running_var=t(6, low=0.5, high=2.0))
    assert _verify(nn.BatchNorm1d(6).eval(), nn.BatchNorm1d(6).eval(), inputs)
    forgetful = lambda x, weight, bias, **rest: x * weight + bias  # noqa: E731
    assert not _verify(nn.BatchNorm1d(6).eval(), forgetful, inputs)


def test_frozen_parameters_get_no_gradient():
    module = Scaled(lambda dy, x, w, b: (dy @ w, None, dy.sum(0)))
    assert not _verify(module, nn.Linear(12, 5), LINEAR)
    module.weight.requires_grad_(False)
    assert _verify(module, nn.Linear(12, 5), LINEAR)


def test_what_is_no_reference_of_a_module_is_refused():
    with pytest.raises(SpecError, match=r"module with parameters and buffers \['weight'\], those of `fn` are"):
        rg.op(nn.Linear(12, 5), nn.Linear(12, 5, bias=False), LINEAR)
    with pytest.raises(SpecError, match="`inputs` is a callable, and `fn` a module"):
        rg.op(nn.Linear(12, 5), None, lambda seed, dtype, sizes: ())
    with pytest.raises(SpecError, match=r"3\.0 for a parameter or buffer, expected a tensor"):
        rg.op(nn.Linear(12, 5), None, dict(x=t("M", 12), bias=3.0))


# ----- nested inputs, keywords


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass
class State:
    h: Any
    c: Any
    steps: int = 2


NESTED = dict(
    xs=[t("M", "N"), t("M", "N")], opts=dict(w=t("N"), k=3), pair=Pair(t("N"), (t("N"),)), s=State(t("N"), t("M", 1))
)


def _nested(xs, opts, pair, s, *, scale):
    assert (opts["k"], s.steps) == (3, 2)
    return {"y": sum(x * opts["w"] for x in xs) * pair.a * pair.b[0] + s.h * s.c, "z": [scale * pair.a]}


def test_lists_tuples_dicts_and_dataclasses_of_tensors_are_inputs():
    inputs = {**NESTED, "scale": t("N")}
    spec = rg.op(_nested, _nested, inputs)
    names = ["xs.0", "xs.1", "opts.w", "pair.a", "pair.b.0", "s.h", "s.c", "scale"]
    assert list(spec.inputs) == names
    assert rg.verify(spec, level="quick")

    def wrong(xs, opts, pair, s, *, scale):
        return _nested([xs[0], 1.01 * xs[1] - 0.01 * xs[1].detach()], opts, pair, s, scale=scale)

    assert _tensors(_verify(wrong, _nested, inputs)) == {"grad xs.1"}


def test_concrete_tensors_may_be_nested_too():
    ones = torch.linspace(0.5, 2, 6)
    product = lambda pair, k: pair[0] * pair[1] * k  # noqa: E731
    assert list(rg.op(product, product, ([ones, ones + 1], 2)).inputs) == ["input0.0", "input0.1", "input1"]
    assert _verify(product, product, ([ones, ones + 1], 2))
    half = lambda pair, k: pair[0] * pair[1].detach() * k  # noqa: E731
    assert _tensors(_verify(half, product, ([ones, ones + 1], 2))) == {"grad input0.1"}


def test_parameters_may_be_tensors_and_sizes():
    fn = lambda x, *, mask, n, k: x * mask * n * k  # noqa: E731
    spec = rg.op(fn, fn, MN, params=dict(mask=t("N"), n=rg.size("N"), k=[1, 2]))
    assert list(spec.inputs) == ["x", "mask", "n"]
    assert list(spec.params) == ["k"]
    assert rg.verify(spec, level="quick")
    wrong = lambda x, *, mask, n, k: x * mask.detach() * n * k  # noqa: E731
    assert not rg.verify(rg.op(wrong, fn, MN, params=dict(mask=t("N"), n=rg.size("N"), k=[1, 2])), level="quick")


# ----- in place


class Exp(torch.autograd.Function):
    """In place; the backward needs what it has written."""

    @staticmethod
    def forward(ctx, x, keep):
        ctx.keep = keep
        before = x.clone()
        x.exp_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x if keep else before)
        return x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        return dy * ctx.saved_tensors[0], None


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("reference", [torch.exp, lambda x: x.exp_()])
def test_an_op_in_place_by_design(keep, reference):
    report = _verify(lambda x: Exp.apply(x, keep), reference, MN, mutates=("x",))
    assert report.verdict == ("proved" if keep else "finding")
    assert not _verify(lambda x: Exp.apply(x, True), torch.exp, MN)  # without the word it overwrites its input


def _step(p, g, lr):
    p.add_(g, alpha=-lr)
    return p.norm()


@pytest.mark.parametrize(
    ("reference", "wrong"),
    [
        (_step, set()),
        (lambda p, g, lr: ((p - lr * g).norm(), p - lr * g), set()),
        (lambda p, g, lr: ((p - lr * g).norm(), p - 1.01 * lr * g), {"p after", "grad g"}),
    ],
)
def test_what_is_written_is_an_output(reference, wrong):
    more = dict(params=dict(lr=0.5), mutates=("p",), only=["contract", "mutation", "oracle", "layouts"])
    assert _tensors(_verify(_step, reference, dict(p=t("M", "N"), g=t("M", "N")), **more)) == wrong


def test_what_is_said_to_be_written_and_is_not():
    silent = lambda p, g, lr: (p - lr * g).norm()  # noqa: E731
    more = dict(params=dict(lr=0.5), mutates=("p",), only=["contract", "oracle"])
    assert "p after" in _tensors(_verify(silent, _step, dict(p=t("M", "N"), g=t("M", "N")), **more))


def test_mutates_names_tensors():
    with pytest.raises(SpecError, match=r"`mutates` has \['y'\], expected names of inputs that are tensors: \['x'\]"):
        rg.op(torch.exp, torch.exp, MN, mutates=("y",))
    with pytest.raises(SpecError, match="`mutates` is 'x', expected a sequence"):
        rg.op(torch.exp, torch.exp, MN, mutates="x")


# ----- layouts refused by design


def _refusing(error):
    def fn(x):
        if not x.is_contiguous():
            raise error("rows must be contiguous")
        return x.sin()

    return fn


@pytest.mark.parametrize(
    "layouts", ["contiguous", dict.fromkeys(("transposed", "rows", "sliced", "expanded"), ValueError)]
)
def test_layouts_that_are_refused_by_design(layouts):
    assert not _verify(_refusing(ValueError), torch.sin, MN)
    report = _verify(_refusing(ValueError), torch.sin, MN, layouts=layouts)
    assert report.verdict == "proved"
    assert any("refused by design: x:transposed" in note for note in report.stage("layouts").notes)
    another = _verify(_refusing(KeyError), torch.sin, MN, layouts=layouts)
    assert another.verdict == ("proved" if layouts == "contiguous" else "finding")
    assert not _verify(lambda x: x.sin() if x.is_contiguous() else x.cos(), torch.sin, MN, layouts=layouts)


def test_a_layout_that_is_not_refused_after_all_is_a_note():
    report = _verify(torch.sin, torch.sin, MN, layouts=dict(transposed=ValueError))
    assert report
    assert "x:transposed is not refused" in " ".join(report.stage("layouts").notes)
    with pytest.raises(SpecError, match="`layouts` is 'strided', expected 'contiguous'"):
        rg.op(torch.sin, torch.sin, MN, layouts="strided")


# ----- random ops


def _drop(x, factor=1.0):
    keep = torch.rand(x.shape) < 0.7
    return torch.where(keep, factor * x / 0.7, 0.0)


def test_a_random_op_is_called_under_the_seed_of_its_reference():
    report = _verify(_drop, _drop, MN, random=True, dtypes=["float32", "bfloat16"])
    assert report.verdict == "proved"
    assert "drawn in the order of memory" in report.stage("layouts").reason
    assert _verify(lambda x: torch.dropout(x, 0.3, True), lambda x: torch.dropout(x, 0.3, True), MN, random=True)
    assert not _verify(lambda x: _drop(x, 1.01), _drop, MN, random=True)
    state = torch.get_rng_state()
    _verify(_drop, _drop, MN, random=True, only=["contract"])
    assert torch.equal(state, torch.get_rng_state())


def test_an_op_that_is_seen_to_draw_is_called_under_one_seed_with_a_note():
    for reference in (_drop, None):
        report = _verify(_drop, reference, MN)
        assert report.verdict == "proved"
        assert "random=True says that it is meant to" in " ".join(report.notes)
    assert not _verify(lambda x: _drop(x, 1.01), _drop, MN)
    assert not _verify(lambda x: x.sin() + 1e-3 * torch.rand_like(x), torch.sin, MN)  # noise is no other draw
    assert not any("torch's generators" in note for note in _verify(torch.sin, torch.sin, MN).notes)


@pytest.mark.parametrize("stage", [stage.id for stage in stages.load()])
def test_draws_are_seen_by_whatever_stage_is_the_first(stage):
    report = _verify(_drop, _drop, MN, only=[stage])
    assert not report.findings
    assert not report.stage(stage).runs or any("torch's generators" in note for note in report.notes)


def test_draws_are_a_finding_where_bits_or_no_draws_are_promised():
    report = _verify(_drop, None, MN, deterministic=True)
    assert {f.stage for f in report.findings} >= {"determinism"}
    assert "random=True calls it under one seed" in " ".join(report.notes)
    as_it_is = _verify(_drop, _drop, MN, random=False)
    assert as_it_is.verdict == "finding"
    assert not any("torch's generators" in note for note in as_it_is.notes)


def _other_generator(x, factor=1.0):
    keep = torch.rand(x.shape, generator=torch.Generator().manual_seed(int(torch.randint(1 << 30, ())))) < 0.7
    return torch.where(keep, factor * x / 0.7, 0.0)


def test_other_random_numbers_than_the_reference_draws_are_undecided():
    report = _verify(_other_generator, _drop, MN, random=True)
    assert report.verdict == "undecided"
    assert report.stage("oracle").reason.startswith(
        "random: under one seed the op draws other numbers than its reference"
    )
    assert report.stage("contract").status == "passed"


def test_what_is_wrong_on_average_is_found_whatever_it_draws():
    assert _verify(lambda x: _other_generator(x, 2.0), _drop, MN, random=True).verdict == "finding"


def test_draws_that_hang_on_the_precision_are_undecided():
    noisy = lambda x: x + torch.randn_like(x)  # noqa: E731
    report = _verify(noisy, noisy, MN, random=True, dtypes=["bfloat16"])
    assert report.verdict == "undecided"
    assert "draws other numbers in bfloat16 than in float64" in report.stage("oracle").reason


@pytest.mark.parametrize("random", [False, True])
def test_inputs_by_a_callable_keep_op_and_reference_apart(random):
    inputs = lambda seed, dtype, sizes: dict(x=torch.linspace(-1, 1, 9, dtype=dtype))  # noqa: E731
    wrong = rg.op(lambda x: 1.01 * torch.sin(x), torch.sin, inputs, random=random)
    assert not rg.verify(wrong, level="quick", only=["oracle"])
    assert rg.verify(rg.op(torch.sin, torch.sin, inputs, random=random), level="quick", only=["oracle"])


@pytest.mark.parametrize(
    "reference",
    [
        lambda x: (x.sin(), x.cos(), x.argmax(-1)),
        lambda x: [x.sin(), x.cos(), x.argmax(-1)],
        lambda x: {"at": x.argmax(-1), "cos": x.cos(), "sin": x.sin()},
    ],
)
def test_what_outputs_come_in_does_not_matter(reference):
    op = lambda x: {"sin": x.sin(), "cos": x.cos(), "at": x.argmax(-1), "note": "text"}  # noqa: E731
    more = dict(sizes=dict(N=(1, 64)))
    report = _verify(op, reference, MN, **more)
    assert report.verdict == "proved"
    assert "not compared: out.note (str)" in report.covers
    wrong = lambda x: {**op(x), "cos": 1.01 * x.cos()}  # noqa: E731
    assert {f.kind for f in _verify(wrong, reference, MN, only=["contract", "oracle"], **more).findings} == {
        "wrong-value"
    }


def test_a_tensor_and_a_number_beside_a_tensor():
    assert _verify(lambda x: (x.sin(), 3), torch.sin, MN)
    assert not _verify(lambda x: (x.cos(), 3), torch.sin, MN)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_inputs(dtype):
    fn = lambda x, q, scale: x * (q.to(x.dtype) * scale)  # noqa: E731
    inputs = dict(x=t("M", "N"), q=t("N", dtype=dtype), scale=t(1))
    assert _verify(fn, fn, inputs, dtypes=["float32", "bfloat16"])
    wrong = lambda x, q, scale: x * (q.to(x.dtype).abs() * scale)  # noqa: E731
    assert not _verify(wrong, fn, inputs)
    assert not _verify(wrong, fn, inputs | dict(q=t(torch.randn(48).to(getattr(torch, dtype)))), sizes=dict(N=48))
    with pytest.raises(SpecError, match="whose numbers have no gradient"):
        t("N", dtype=dtype, grad=True)
    report = _verify(lambda x: x.to(torch.float8_e5m2), lambda x: x.to(torch.float8_e5m2), MN)
    assert report.verdict == "undecided"
    assert "check the op followed by .float()" in report.stage("oracle").reason


@pytest.mark.parametrize("broken", [False, True])
def test_an_op_that_is_checkpointed_again_has_its_gradients_by_backward(broken):
    def inner(x, w):
        return torch.tanh(x) @ (w.detach() if broken and len(w) == 1 else w)

    def op(x, w):
        return checkpoint(inner, x, w, use_reentrant=True)  # refuses torch.autograd.grad

    inputs = dict(x=rg.tensor("M", "K"), w=rg.tensor("K", "N"))
    report = rg.verify(op, reference=lambda x, w: torch.tanh(x) @ w, inputs=inputs, level="quick")
    assert report.verdict == ("finding" if broken else "proved"), report
    assert {f.tensor for f in report.findings} <= {"grad w"}


@pytest.mark.parametrize("dropped", [False, True])
def test_parts_of_a_gradient_add_up_as_far_as_its_formula_goes(dropped):
    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            ctx.save_for_backward(y)
            return y.clone(), y.sin()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, first, second):
            (y,) = ctx.saved_tensors
            return first if dropped and first.any() else first + second * y.cos()

    def amplified(x):  # its gradient loses a thousand units of rounding
        return x * 1000.3 - x * 999.3

    def reference(x):
        return amplified(x), amplified(x).sin()

    report = _verify(lambda x: Both.apply(amplified(x)), reference, MN, only=["contract"])
    assert {f.kind for f in report.findings} == ({"output-subset"} if dropped else set()), report


@pytest.mark.parametrize(("back", "told"), [(0.0, "is 0 from out1 alone"), (2e-4, "")])
def test_what_comes_back_through_a_small_output_is_not_lost_in_16_bits(back, told):
    class Losses(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin(), 1e-4 * x.square()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, first, second):
            (x,) = ctx.saved_tensors
            return first * x.cos() + back * second * x

    spec = rg.op(Losses.apply, lambda x: (x.sin(), 1e-4 * x.square()), MN, dtypes=["bfloat16"])
    report = rg.verify(spec, level="quick", only=["contract", "oracle"])
    assert [(f.stage, told in f.what) for f in report.findings] == [("contract", True)] * bool(told), report
