"""OpInfos as specs: what of a sample becomes an input, what a spec then proves or finds, what is left out and why."""

from __future__ import annotations

import random

import pytest
import torch
from specimens import square

import retrograd as rg
from retrograd import testing
from retrograd.errors import UsageError

FLOATS = (torch.float32, torch.float64, torch.bfloat16)


class Sample:
    def __init__(self, input, *args, **kwargs):
        self.input, self.args, self.kwargs = input, args, kwargs


class Info:
    """As small as an OpInfo may be."""

    def __init__(self, op, *makers, name="op", **more):
        self.op, self.makers, self.name, self.dtypes = op, makers, name, FLOATS
        self.__dict__ |= more

    def sample_inputs(self, device, dtype, requires_grad=False):
        for make in self.makers:
            yield make(lambda *shape: torch.randn(shape, device=device, dtype=dtype, requires_grad=requires_grad))


def verdicts(info, **options):
    return [rg.verify(spec, level="quick").verdict for spec in testing.specs(info, **options)]


def matrix(leaf):
    return Sample(leaf(3, 4))


# ----- split


def test_tensors_anywhere_become_inputs():
    x, y, z, w = (torch.randn(2, requires_grad=True) for _ in range(4))
    parts = testing.split(Sample([x, y], 3, {"deep": (z, "mode")}, weight=w, dim=0))
    assert list(parts.inputs) == ["input_0", "input_1", "arg1_0", "weight"]
    assert not any(t.requires_grad for t in parts.inputs.values())
    args, kwargs = parts.call(lambda *args, **kwargs: (args, kwargs), *parts.inputs.values())
    assert args[1:] == (3, {"deep": (parts.inputs["arg1_0"], "mode")})
    assert kwargs == {"weight": parts.inputs["weight"], "dim": 0}


def test_tensors_without_gradient_are_copied_and_follow_the_dtype():
    x, const, index = torch.randn(2, requires_grad=True), torch.randn(2), torch.tensor([1, 0])
    half = torch.randn(2, dtype=torch.float16)
    parts = testing.split(Sample(x, const, index, half))
    assert list(parts.inputs) == ["input"]

    def dtypes(*args):
        assert args[1] is not const
        return [t.dtype for t in args]

    assert parts.call(dtypes, x.detach()) == [torch.float32, torch.float32, torch.int64, torch.float16]
    assert parts.call(dtypes, x.detach().double()) == [torch.float64, torch.float64, torch.int64, torch.float16]


def test_an_op_that_writes_to_what_is_closed_over_gets_a_fresh_copy():
    def running(x, mean):
        return x * mean.add_(1.0)

    assert verdicts(Info(running, lambda leaf: Sample(leaf(3, 4), torch.zeros(4)))) == ["proved"]


def test_the_dtype_as_an_argument_follows():
    parts = testing.split(Sample(torch.randn(2, requires_grad=True), torch.float32, out_dtype=torch.float16))
    called = parts.call(lambda x, kind, *, out_dtype: (kind, out_dtype), torch.randn(2, dtype=torch.float64))
    assert called == (torch.float64, torch.float16)


def test_complex_constants_follow_too():
    x, const = torch.randn(2, requires_grad=True), torch.randn(2, dtype=torch.complex64)
    parts = testing.split(Sample(x, const))
    assert parts.call(lambda x, c: c.dtype, x.detach().double()) is torch.complex128


def test_a_complex_sample_follows_in_both_parts():
    x, real = torch.randn(2, dtype=torch.complex64, requires_grad=True), torch.randn(2)
    parts = testing.split(Sample(x, real, torch.complex64), "complex64")
    called = parts.call(lambda x, real, kind: (real.dtype, kind), x.detach().to(torch.complex128))
    assert called == (torch.float64, torch.complex128)


def test_names_that_meet_stay_apart():
    x, y = torch.randn(2, requires_grad=True), torch.randn(2, requires_grad=True)
    parts = testing.split(Sample(torch.ones(2), x, arg0=y))
    assert list(parts.inputs) == ["arg0", "arg0_"]


def test_a_tensor_in_two_places_is_one_input():
    x = torch.randn(2, requires_grad=True)
    parts = testing.split(Sample(x, x))
    assert list(parts.inputs) == ["input"]
    assert verdicts(Info(torch.mul, lambda leaf: (lambda t: Sample(t, t))(leaf(3, 4)))) == ["proved"]
    assert torch.equal(parts.call(torch.mul, *parts.inputs.values()), (x * x).detach())


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        (Sample(torch.eye(2).to_sparse().requires_grad_()), "sparse tensors"),
        (Sample(torch.ones(2)), "no tensor of the sample requires a gradient"),
    ],
)
def test_what_verify_cannot_take_has_a_reason(sample, reason):
    assert testing.split(sample).unsupported == reason


# ----- specs


def test_a_healthy_op_is_proved_and_a_broken_one_found():
    assert verdicts(Info(torch.sin, matrix, lambda leaf: Sample(leaf(5)))) == ["proved", "proved"]
    assert verdicts(Info(square(2.002), matrix)) == ["finding"]


def test_a_backward_for_one_dtype_is_found_where_it_is_wrong():
    def wrong_in_float32(x):
        return square(2.002)(x) if x.dtype == torch.float32 else x * x

    info = Info(wrong_in_float32, matrix)
    assert verdicts(info) == ["finding"]
    assert verdicts(info, dtype=torch.float64) == ["proved"]


def test_lists_keywords_and_nested_results():
    def joined(tensors, *, scale):
        return {"sum": sum(tensors) * scale, "parts": [tensors[0].exp(), "no tensor"]}

    info = Info(joined, lambda leaf: Sample([leaf(3, 4), leaf(3, 4)], scale=leaf(4)))
    (spec,) = testing.specs(info)
    assert list(spec.inputs) == ["input_0", "input_1", "scale"]
    assert [t.shape for t in spec.fn(*spec.inputs.values())] == [(3, 4), (3, 4)]
    assert verdicts(info) == ["proved"]


def test_results_are_processed():
    sample = matrix(lambda *shape: torch.randn(shape, requires_grad=True))
    sample.output_process_fn_grad = lambda outs: outs[0]
    (spec,) = testing.specs(Info(lambda x: (x.sin(), x.cos()), lambda leaf: sample))
    x = torch.randn(3, 4)
    assert torch.equal(spec.fn(x), x.sin())


def test_an_op_on_special_matrices_has_them_from_its_wrapper():
    def positive(leaf):
        return Sample((lambda a: (a @ a.mT + torch.eye(4)).detach().requires_grad_())(leaf(4, 4)))

    def symmetrised(op, a, *args, **kwargs):
        return op((a + a.mT) / 2, *args, **kwargs)

    assert verdicts(Info(torch.linalg.cholesky, positive)) == ["finding"]
    assert verdicts(Info(torch.linalg.cholesky, positive, gradcheck_wrapper=symmetrised), samples=1) != ["finding"]


def test_promises_are_taken_over():
    (spec,) = testing.specs(Info(torch.sin, matrix, gradcheck_nondet_tol=1e-12, supports_gradgrad=True))
    assert (spec.deterministic, spec.double_backward) == (False, "right")
    (spec,) = testing.specs(Info(torch.sin, matrix, supports_gradgrad=True), dtype="bfloat16")
    assert spec.double_backward is None
    excused = type("Decorator", (), {"test_name": "test_fn_gradgrad"})
    (spec,) = testing.specs(Info(torch.sin, matrix, supports_gradgrad=True, decorators=(excused,)))
    assert spec.double_backward is None
    (spec,) = testing.specs(Info(torch.sin, matrix))
    assert (spec.deterministic, spec.double_backward) == (None, None)


def test_numbers_and_names():
    info = Info(torch.sin, *[matrix] * 5, name="sine", variant_test_name="wide")
    assert [s.name for s in testing.specs(info, samples=2)] == ["sine.wide#0", "sine.wide#1"]
    assert [s.name for s in testing.specs(info, samples=[3, 1])] == ["sine.wide#1", "sine.wide#3"]
    assert len(list(testing.specs(info))) == 5


def test_a_sample_of_a_number_is_the_same_however_many_are_drawn():
    info = Info(torch.sin, *[matrix] * 3)
    every, alone = list(testing.specs(info, seed=4)), next(testing.specs(info, samples=[2], seed=4))
    assert torch.equal(every[2].inputs["input"], alone.inputs["input"])
    assert not torch.equal(every[2].inputs["input"], next(testing.specs(info, samples=[2])).inputs["input"])


def test_generators_are_put_back():
    torch.manual_seed(3)
    random.seed(3)
    before = torch.get_rng_state(), random.getstate()
    dropout = Info(lambda x: torch.nn.functional.dropout(x, 0.5), matrix)
    (spec,) = testing.specs(dropout)
    rg.verify(spec, level="quick")
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


@pytest.mark.parametrize("samples", ["some", -1])
def test_samples_that_are_none(samples):
    with pytest.raises(UsageError, match="`samples`"):
        list(testing.specs(Info(torch.sin, matrix), samples=samples))


def test_a_dtype_that_is_none():
    with pytest.raises(UsageError, match="`dtype`"):
        list(testing.specs(Info(torch.sin, matrix), dtype="float31"))


# ----- what is left out


def test_an_op_without_autograd_or_without_the_dtype_has_no_spec():
    assert "autograd" in testing.unsupported(Info(torch.sin, matrix, supports_autograd=False))
    assert "float16" in testing.unsupported(Info(torch.sin, matrix), "float16")
    assert "backward" in testing.unsupported(Info(torch.sin, matrix, backward_dtypes=()), "float32")
    assert list(testing.specs(Info(torch.sin, matrix), dtype="float16")) == []


def test_samples_without_a_spec_have_a_number_and_a_reason():
    info = Info(torch.sin, lambda leaf: Sample(torch.ones(2)), matrix)
    first, second = testing.sample_specs(info)
    assert (first.number, first.spec) == (0, None)
    assert "requires a gradient" in first.reason
    assert (second.number, second.reason) == (1, "")


# ----- random ops


def test_dropout_draws_the_same_in_every_call():
    assert verdicts(Info(lambda x: torch.nn.functional.dropout(x, 0.5), lambda leaf: Sample(leaf(7, 9)))) == ["proved"]


def test_an_op_that_seeds_itself_draws_in_the_order_of_memory_too():
    def seeded(x):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return torch.nn.functional.dropout(x, 0.5)

    (spec,) = testing.specs(Info(seeded, matrix))
    plain, turned = torch.ones(3, 4), torch.ones(4, 3).T
    assert torch.equal(spec.fn(plain), spec.fn(turned))
    assert rg.verify(spec, level="quick", device="cpu", only=["layouts", "oracle"]).verdict == "proved"


def test_draws_that_depend_on_the_dtype_are_told():
    info = Info(lambda x: x * torch.rand_like(x), lambda leaf: Sample(leaf(7, 9)))
    ((number, spec, reason),) = ((s.number, s.spec, s.reason) for s in testing.sample_specs(info))
    assert (number, spec) == (0, None)
    assert reason.startswith("random: not comparable across dtypes")
    assert verdicts(info, dtype="float64") == ["proved"]


def test_a_wrong_random_op_is_found():
    def scaled(x):
        return torch.nn.functional.dropout(square(2.002)(x), 0.5)

    assert verdicts(Info(scaled, lambda leaf: Sample(leaf(7, 9)))) == ["finding"]


# ----- in place


def test_in_place_variants_beside_the_op():
    def broadcast(leaf):
        sample = Sample(leaf(1, 4), leaf(3, 4))
        sample.broadcasts_input = True
        return sample

    info = Info(torch.mul, lambda leaf: Sample(leaf(3, 4), leaf(3, 4)), broadcast, inplace_variant=torch.Tensor.mul_)
    assert verdicts(info, inplace=True) == ["proved"]
    assert [bool(s.reason) for s in testing.sample_specs(info, inplace=True)] == [False, True]
    wrong = Info(
        torch.mul, lambda leaf: Sample(leaf(3, 4), leaf(3, 4)), inplace_variant=lambda x, y: x.mul_(y.detach())
    )
    assert verdicts(wrong, inplace=True) == ["finding"]
    assert "in place" in testing.unsupported(Info(torch.sin, matrix), inplace=True)
