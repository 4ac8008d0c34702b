"""Sizes that follow others: expressions, relations, sizes as arguments; broken where they do not fit each other."""

from __future__ import annotations

import pytest
import torch
from specimens import with_backward

import retrograd as rg
from retrograd.check import sizes
from retrograd.check.inputs import base_case, param_cases, parse_case
from retrograd.check.shrink import shrink
from retrograd.check.stages import StageContext, shapes
from retrograd.errors import SpecError, UsageError


def _verify(spec, only=("contract", "poison", "oracle", "shapes"), **more):
    return rg.verify(spec, level="quick", only=only, **more)


def _glu(x):
    a, b = x.chunk(2, -1)
    return a * b.sigmoid()


def _glu_backward(dy, x):
    a, b = x.chunk(2, -1)
    s = b.sigmoid()
    return torch.cat([dy * s, dy * a * s * (1 - s)], -1)


def _wrong_from_33(dy, x):
    grad = _glu_backward(dy, x)
    grad[..., 64:] = 0  # a second block that nobody wrote, of rows longer than 64
    return grad


glu = with_backward(_glu, _glu_backward, once=True)
SPEC = rg.op(glu, torch.nn.functional.glu, dict(x=rg.tensor("M", "2*N")), name="glu")


def test_an_expression_is_a_dimension():
    assert _verify(SPEC)
    assert SPEC.size_names == ("M", "N")
    context = StageContext.of(SPEC, "float32")
    shapes_seen = {tuple(context.runner.inputs(case)["x"].shape) for case in shapes.cases(context)}
    assert all(columns % 2 == 0 for _, columns in shapes_seen)
    assert {0, 2, 2 * 1025} <= {columns for _, columns in shapes_seen}


def test_what_fails_from_a_size_on_is_shrunk_through_its_expression():
    spec = rg.op(with_backward(_glu, _wrong_from_33, once=True), torch.nn.functional.glu, SPEC.inputs, name="glu")
    report = _verify(spec)
    assert report.verdict == "finding"
    (finding,) = _verify(spec, only=["shapes"]).findings
    assert dict(finding.case.sizes)["N"] == 33


def test_a_size_is_an_argument():
    def split(x, n):
        return x[..., :n] * x[..., n:]

    def backward(dy, x):
        n = x.shape[-1] // 2
        return torch.cat([dy * x[..., n:], dy * x[..., :n]], -1)

    spec = rg.op(split, split, dict(x=rg.tensor("M...", "2*N"), n=rg.size("N")))
    assert _verify(spec)
    right = lambda x, n: with_backward(lambda x: split(x, x.shape[-1] // 2), backward)(x)  # noqa: E731
    assert _verify(rg.op(right, split, spec.inputs))
    fixed = rg.op(lambda x, n: right(x[..., : 2 * min(n, 64)], n), split, spec.inputs)
    assert not _verify(fixed)
    assert rg.size("M...").at(base_case(spec, "float32")) == (7,)


@pytest.mark.parametrize(
    ("where", "sizes_of"),
    [
        ("Q <= K", {}),
        (("Q <= K", "K % 8 == 0"), {}),
        ("K == 3 * Q", {}),
        ("Q <= K", dict(Q=(3, 9), K=(1, 40))),
        ("Q + K <= 20 and Q > 2", {}),
    ],
)
def test_every_case_keeps_to_the_relations(where, sizes_of):
    inputs = dict(q=rg.tensor("Q", "D"), k=rg.tensor("K", "D"))
    spec = rg.op(lambda q, k: q @ k.mT, lambda q, k: q @ k.mT, inputs, where=where, sizes=sizes_of)
    context = StageContext.of(spec, "float32", level="full")
    cases = [base_case(spec, "float32"), *shapes.cases(context)]
    assert len(cases) > 10
    assert all(sizes.fits((), spec.where, case) for case in cases)
    _, tried = shrink(spec, cases[0], lambda case: True)
    assert all(sizes.fits((), spec.where, case) for case in tried)
    assert _verify(spec)


def test_a_relation_may_name_a_parameter():
    spec = rg.op(
        lambda x, k: x.topk(k).values, lambda x, k: x.sort(-1, descending=True).values[..., :k],
        dict(x=rg.tensor("M", "N")), params=dict(k=[1, 60]), where="k <= N",
    )  # fmt: skip
    assert _verify(spec)
    assert [dict(case.sizes)["N"] >= dict(case.params)["k"] for case in param_cases(spec, base_case(spec, "float32"))]
    assert spec.size_names == ("M", "N")


def test_sizes_may_be_expressions():
    inputs = dict(x=rg.tensor("M", "K"), b=rg.tensor("N"))
    fn = lambda x, b: x.unflatten(-1, (-1, 8)).sum(-1) + b  # noqa: E731
    spec = rg.op(fn, fn, inputs, sizes=dict(K="8*N", N=(1, 300)))
    assert spec.size_names == ("M", "N")
    assert _verify(spec)


@pytest.mark.parametrize("text", ["N=3 Q=4", "N=0"])
def test_a_case_that_does_not_fit_is_refused(text):
    inputs = dict(x=rg.tensor("Q", "N-1"))
    spec = rg.op(torch.sin, torch.sin, inputs, where="Q <= N")
    assert parse_case(spec, "float32", "N=3 Q=2")
    with pytest.raises(UsageError, match=r"which does not fit sin: Q <= N, N-1 >= 0"):
        parse_case(spec, "float32", text)


@pytest.mark.parametrize("dim", ["2**N", "N/2", "f(N)", "N.x", "N+1.5", "N<=K", "2 N M...", "True+N", "-"])
def test_what_is_no_dimension_is_refused(dim):
    with pytest.raises(SpecError, match="expected a size >= 0, a name such as 'N', an expression"):
        rg.tensor("K", dim)


def test_what_is_no_relation_is_refused():
    inputs = dict(x=rg.tensor("N"))
    with pytest.raises(SpecError, match=r"`where` has 'N\+1'; expected a comparison of sizes"):
        rg.op(torch.sin, torch.sin, inputs, where="N+1")
    with pytest.raises(SpecError, match="no sizes of sin fit `where`"):
        rg.verify(rg.op(torch.sin, torch.sin, inputs, where="N < 0"))
    with pytest.raises(SpecError, match="'N < 2'"):
        rg.op(torch.sin, torch.sin, inputs, sizes=dict(N="N < 2"))


def test_blanks_around_operators_part_nothing():
    assert rg.tensor("M 2 * N", "L + 1").dims == ("M", "2*N", "L+1")


def test_a_range_may_name_its_ordinary_size():
    spec = rg.op(glu, torch.nn.functional.glu, SPEC.inputs, sizes=dict(M=(0, 40, 13)), name="glu")
    assert base_case(spec, "float32").size("M") == 13
    context = StageContext.of(spec, "float32")
    seen = {case.size("M") for case in shapes.cases(context)}
    assert {0, 13, 40} <= seen
    assert max(seen) == 40
    for outside in ((0, 40, 41), (2, 40, 1), (0, 40, 13, 1)):
        with pytest.raises(SpecError, match="ordinary"):
            rg.op(glu, torch.nn.functional.glu, SPEC.inputs, sizes=dict(M=outside))


@pytest.mark.parametrize(("named", "ordinary"), [([7, 1], 7), ([1, 7], 7), ([3, 7, 1, 0], 7), ([1], 1), ([0, 1], 1)])
def test_an_ordinary_size_of_a_list_is_its_last_above_one(named, ordinary):
    """With one step of a sequence a rotation of it, or a stride, changes nothing."""
    spec = rg.op(torch.sin, torch.sin, dict(x=rg.tensor("S", 4)), sizes=dict(S=named))
    assert StageContext.of(spec, "float32").base.size("S") == ordinary


def test_a_narrow_range_is_tried_at_an_odd_size():
    def sizes_of(**more):
        spec = rg.op(glu, torch.nn.functional.glu, SPEC.inputs, name="glu", **more)
        return {case.size("M") for case in shapes.cases(StageContext.of(spec, "float32"))}

    assert 11 in sizes_of(sizes=dict(M=(8, 12)))
    assert not any(n % 2 for n in sizes_of(sizes=dict(M=(8, 12)), where="M % 2 == 0"))


@pytest.mark.parametrize("most", [64, 10**6])
def test_an_input_that_is_overwritten_at_some_sizes_alone_is_found(most):
    class Evens(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            y = x if x.shape[-1] > most else x.clone()  # another path for long rows
            y[..., ::2] *= 2
            return y.clone()

        @staticmethod
        def backward(_, grad):
            grad = grad.clone()
            grad[..., ::2] *= 2
            return grad

    twice = torch.tensor([2.0, 1.0])
    spec = rg.op(Evens.apply, lambda x: x * twice.to(x).repeat(x.shape[-1])[: x.shape[-1]], dict(x=rg.tensor("M", "N")))
    report = _verify(spec, only=["mutation", "shapes"])
    assert [(f.stage, f.tensor) for f in report.findings] == ([("shapes", "x")] if most == 64 else []), report
