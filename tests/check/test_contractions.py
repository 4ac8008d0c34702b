"""Which sums are products of matrices that are written by elements, forward and backward."""

from __future__ import annotations

import pytest
import torch

from retrograd.check.contractions import EinsumAsMatrices
from retrograd.check.rounding import Float64
from retrograd.check.rounding_errors import Tf32Factors


class _Counting(Float64):
    """How many sums were taken for products of matrices."""

    count = 0

    def _cut_factors(self, name, *args):
        self.count += name in ("sum", "mean")
        return super()._cut_factors(name, *args)


def _found(function, *shapes):
    """How many of a formula's forward and of its backward."""
    mode = _Counting(2.0**-24, 2.0**-24, products=2.0**-11)
    inputs = [torch.rand(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    with mode:
        out = function(*inputs)
        forward = mode.count
        torch.autograd.grad(out, inputs, torch.rand_like(out))
    return forward, mode.count - forward


def _scores(q, k):
    return (q[:, None] * k).sum(-1)


def _decayed_scores(q, k, g):
    total = g.cumsum(0)
    return (q[:, None] * k * (total[:, None] - total).exp()).sum(-1) * 0.25


def _transposed_scores(q, k):
    return (-(q.unsqueeze(1) * k.unsqueeze(0)) / 4).transpose(0, 2).mean(0)


def _outer_then_sum_of_one(q, k):
    return (q[:, None] * k).sum(0)


@pytest.mark.parametrize(
    ("function", "shapes", "found"),
    [
        (_scores, [(5, 8), (7, 8)], (1, 2)),
        (_scores, [(1, 8), (1, 8)], (1, 1)),  # of one step, where the gradient of q adds nothing up
        (_decayed_scores, [(5, 8), (5, 8), (5, 8)], (1, 4)),  # g is in both of a difference
        (_transposed_scores, [(5, 8), (7, 8)], (1, 2)),
    ],
)
def test_products_of_matrices_by_elements(function, shapes, found):
    assert _found(function, *shapes) == found


def _walk(k, v):
    """A state that each step reads with its key: two products a step, one a gradient of a matrix by a vector."""
    state = torch.zeros(k.shape[-1], v.shape[-1], dtype=k.dtype)
    for t in range(k.shape[0]):
        read = (state * k[t, :, None]).sum(0)
        state = state + k[t, :, None] * (v[t] - read)
    return state


def test_rows_of_a_walk_over_steps_are_those_of_a_matrix():
    forward, backward = _found(_walk, (3, 4), (3, 5))
    assert forward == 2  # what each step reads; the first one reads zeros, which have no factors
    assert backward >= 3


def _norms_of_steps(x, weight):
    return torch.stack([row * weight / (row * row * weight).mean().sqrt() for row in x.unbind()])


def _norm(x, weight):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight


def _shares(x, weight):
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True) * weight


def _weighted_mean(x, weight):
    return (x * weight).sum(-1)


@pytest.mark.parametrize("function", [_norm, _norms_of_steps, _shares, _weighted_mean, _outer_then_sum_of_one])
def test_other_sums_stay_as_exact_as_they_are(function):
    shapes = [(5, 8), (7, 8)] if function is _outer_then_sum_of_one else [(5, 8), (8,)]
    assert _found(function, *shapes)[0] == 0
    assert function is _outer_then_sum_of_one or _found(function, *shapes)[1] == 0


def test_the_run_in_the_ops_own_precision_cuts_their_terms():
    torch.manual_seed(0)
    q, k, w = torch.rand(5, 64), torch.rand(7, 64), torch.rand(64)
    with Tf32Factors(elementwise=False):
        got, plain = _scores(q, k), _weighted_mean(q, w)
    assert 1e-5 < float((got / _scores(q, k) - 1).abs().max()) < 2.0**-10
    assert torch.equal(plain, _weighted_mean(q, w))


def test_both_products_behind_a_convolution_have_factors_of_tf32():
    generator = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(shape, generator=generator) for shape in ((2, 3, 9, 9), (4, 3, 3, 3), (2, 4, 7, 7)))
    x, w = x.requires_grad_(), w.requires_grad_()
    with Tf32Factors(elementwise=False):
        of_tf32 = torch.autograd.grad(torch.nn.functional.conv2d(x, w), (x, w), g)
    cut = [(t.detach().view(torch.int32) & -(1 << 13)).view(torch.float32).requires_grad_() for t in (x, w, g)]
    expected = torch.autograd.grad(torch.nn.functional.conv2d(*cut[:2]), cut[:2], cut[2])
    ordinary = torch.autograd.grad(torch.nn.functional.conv2d(x, w), (x, w), g)
    for got, want, other in zip(of_tf32, expected, ordinary, strict=True):
        assert torch.equal(got, want)
        assert not torch.equal(want, other)


@pytest.mark.parametrize("keys", [1, 3])
def test_einsum_with_one_term_has_factors_of_tf32_too(keys):
    """An attention with one key gives v with 11 bits, where its formula multiplied by 1 exactly: "993 times"."""
    torch.manual_seed(0)
    p, v = torch.ones(2, 1, keys, requires_grad=True), torch.randn(keys, 1, 8, requires_grad=True)
    v_cut = (v.detach().view(torch.int32) & -(1 << 13)).view(torch.float32)
    with EinsumAsMatrices(), Tf32Factors(elementwise=False):
        out = torch.einsum("bqk,kqd->bd", p, v)
        (grad_v,) = torch.autograd.grad(out, v, 1 + torch.rand(2, 8))
        outer = torch.einsum("bd,bk->bdk", v[0], p[0])
    assert torch.allclose(out, v_cut.sum((0, 1)).expand(2, -1), rtol=1e-6, atol=0)
    assert bool((grad_v.view(torch.int32) & ((1 << 12) - 1) == 0).all())  # a sum of two numbers of 11 bits
    assert torch.equal(outer, v[0][:, :, None] * p[0][:, None])


@pytest.mark.parametrize("equation", ["ii,ij->j", "ij,jk", "i...,j...->ij", "ij,jk,kl->il", "ij,jk->ik", "ii->i"])
def test_einsum_gives_what_it_gives(equation):
    torch.manual_seed(0)
    operands = [torch.rand(1, 1, dtype=torch.float64) for _ in range(equation.count(",") + 1)]
    with EinsumAsMatrices():
        got = torch.einsum(equation, *operands), torch.einsum(equation, operands)
    assert torch.equal(got[0], torch.einsum(equation, *operands))
    assert torch.equal(*got)
