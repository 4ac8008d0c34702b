"""The search for a difference: each class of rarity on an op that differs there alone, and what is equivalent."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

import retrograd as rg
from retrograd.mutation.search import Search

MISTAKE = {"on": False}


@contextmanager
def corrected():
    MISTAKE["on"] = False
    yield
    MISTAKE["on"] = True


def op(mistake, params=None, dtypes=("float64",)):
    """x ** 2 / 2 with a gradient that is wrong where `mistake` says so, once MISTAKE is on."""

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y, scale):
            ctx.save_for_backward(x, y)
            ctx.scale = scale
            return (x * x / 2 + y) * scale

        @staticmethod
        def backward(ctx, g):
            x, _ = ctx.saved_tensors
            grad = x * g * ctx.scale
            ctx.grad_y = g * ctx.scale
            changed = mistake(ctx, x, grad) if MISTAKE["on"] else grad
            grads = changed if isinstance(changed, tuple) else (changed, ctx.grad_y)
            return *grads, None

    return rg.op(
        lambda x, y, scale: Square.apply(x, y, scale), lambda x, y, scale: (x * x / 2 + y) * scale,
        inputs={"x": rg.tensor("M", "N"), "y": rg.tensor("M", "N")}, params=params or {"scale": [1.0, 2.0]}, dtypes=list(dtypes),
    )  # fmt: skip


@pytest.fixture
def searched():
    def first(mistake, **options):
        search = Search(op(mistake, **options), 0)
        MISTAKE["on"] = True
        try:
            return next(search.differences(), None), search
        finally:
            MISTAKE["on"] = False

    return first


@pytest.mark.parametrize(
    ("rarity", "mistake"),
    [
        ("every input", lambda ctx, x, grad: grad * 1.01),
        ("some inputs", lambda ctx, x, grad: grad * (1 + 0.1 * (x[0, 0] > 0))),
        ("parameters", lambda ctx, x, grad: grad / ctx.scale),
        ("sizes", lambda ctx, x, grad: grad * (1 + (x.shape[1] % 64 == 1))),
        ("special values", lambda ctx, x, grad: torch.where(x.abs() > 50, 0.0, grad)),
        ("layouts", lambda ctx, x, grad: grad if x.is_contiguous() else grad * 2),
        ("subset of gradients", lambda ctx, x, grad: grad if ctx.needs_input_grad[1] else grad * 2),
    ],
)
def test_a_difference_has_the_class_where_it_shows(searched, rarity, mistake):
    difference, _ = searched(mistake)
    assert difference is not None
    assert difference.rarity == rarity


@pytest.mark.parametrize(
    "mistake",
    [lambda ctx, x, grad: grad.clone(), lambda ctx, x, grad: grad * (1 + 1e-15), lambda ctx, x, grad: grad + 0.0],
)
def test_what_computes_the_same_is_equivalent(searched, mistake):
    assert searched(mistake)[0] is None


def test_a_rounding_error_of_16_bits_is_none_and_a_wrong_factor_is(searched):
    assert searched(lambda ctx, x, grad: grad * (1 + 2**-9), dtypes=["bfloat16"])[0] is None
    assert searched(lambda ctx, x, grad: grad * 1.2, dtypes=["bfloat16"])[0] is not None


def test_what_rounding_of_the_largest_result_would_hide_at_special_values_is_none(searched):
    # Of x = 1e4 the result is 5e7, its last digit 7e-9, and the gradient of y about 1.
    def beside(error):
        return lambda ctx, x, grad: (
            grad,
            torch.where(x.isfinite() & (x.abs() > 5000), (1 + error) * ctx.grad_y, ctx.grad_y),
        )

    assert searched(beside(3e-8))[0] is None
    difference, _ = searched(beside(1e-5))
    assert difference.rarity == "special values"


class Softmax(torch.autograd.Function):
    """Sums in another order once MISTAKE is on, and adds what `excess` says where grad_out is constant."""

    excess = 0.0

    @staticmethod
    def forward(ctx, x):
        y = torch.softmax(x, -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        if not MISTAKE["on"]:
            return y * (g - (g * y).sum(-1, keepdim=True))
        constant = g.numel() and bool((g == g.flatten()[:1]).all())
        return y * g - y * (g * y).flip(-1).cumsum(-1)[..., -1:] + Softmax.excess * constant * y


@pytest.mark.parametrize(("excess", "rarity"), [(0.0, None), (1e-12, "layouts"), (1e-3, "layouts")])
def test_what_rounding_leaves_of_a_gradient_that_cancels_is_none(monkeypatch, excess, rarity):
    monkeypatch.setattr(Softmax, "excess", excess)
    spec = rg.op(
        Softmax.apply, lambda x: torch.softmax(x, -1), {"x": rg.tensor("M", "N")}, dtypes=["float64"],
        sizes={"N": (2, 300)},
    )  # fmt: skip
    search = Search(spec, 0)
    monkeypatch.setitem(MISTAKE, "on", True)
    difference = next(search.differences(), None)
    assert (difference and difference.rarity) == rarity


@pytest.mark.parametrize(
    ("elsewhere", "rarity"), [(0.0, "a NaN's own element"), (1e-3, "special values")], ids=["alone", "and elsewhere"]
)
def test_whether_a_nan_reaches_its_own_element_is_a_class_of_its_own(searched, elsewhere, rarity):
    difference, _ = searched(lambda ctx, x, grad: torch.where(x.isnan(), 0.0, grad + elsewhere * x.isnan().any()))
    assert difference.rarity == rarity


def test_an_exception_is_a_difference(searched):
    difference, _ = searched(lambda ctx, x, grad: grad.reshape(-1))
    assert difference is not None
    assert difference.raises
    assert difference.rarity == "every input"


def test_another_round_has_other_inputs_and_other_sizes():
    first, again, second = (Search(op(lambda ctx, x, grad: grad), 0, number) for number in (0, 0, 1))
    sizes = [{dict(t.case.sizes)["N"] for t in s.trials if t.rarity == "sizes"} for s in (first, again, second)]
    assert sizes[0] == sizes[1]
    assert len(sizes[2] - sizes[0]) >= 6
    inputs = [s.runner(s.trials[0]).inputs(s.trials[0].case)["x"] for s in (first, again, second)]
    assert torch.equal(inputs[0], inputs[1])
    assert not torch.equal(inputs[0], inputs[2])


def test_the_smallest_sizes_that_show_it(searched):
    difference, search = searched(lambda ctx, x, grad: grad * 1.5)
    MISTAKE["on"] = True
    search.original = corrected
    try:
        assert search.smaller(difference.trial).case.text().startswith("M=1 N=1")
    finally:
        MISTAKE["on"] = False
