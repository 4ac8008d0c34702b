"""Whole numbers as inputs: what a uniform draw seldom has."""

from __future__ import annotations

import pytest
import torch
from specimens import with_backward

import retrograd as rg
from retrograd.check.inputs import base_case, materialise

SEEDS = range(20)


def _drawn(high, *dims, draw=0, seed=0, low=0):
    spec = rg.op(torch.abs, None, dict(i=rg.tensor(*dims, dtype="int64", low=low, high=high)))
    return materialise(spec, base_case(spec, "float32").but(draw=draw), seed, "cpu")["i"]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_value_of_a_small_range_comes(seed):
    assert set(_drawn(16, 20, seed=seed).tolist()) == set(range(16))
    assert set(_drawn(16, 4, 4, seed=seed, low=-3).flatten().tolist()) <= set(range(-3, 16))
    assert set(_drawn(7, 7, seed=seed).tolist()) == set(range(7))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_large_range_has_both_ends_and_duplicates_in_no_order(seed):
    values = _drawn(1000, 12, seed=seed).tolist()
    assert {0, 999} <= set(values)
    assert len(set(values)) < 12
    assert values != sorted(values)


def test_further_draws_are_sorted_and_of_two_values():
    rows = _drawn(9, 5, 30, draw=1)
    assert torch.equal(rows, rows.sort(-1).values)
    assert len(_drawn(9, 5, 30, draw=2).unique()) <= 2
    assert not torch.equal(_drawn(9, 5, 30, draw=3), _drawn(9, 5, 30))


@pytest.mark.parametrize("dims", [(0,), (1,), (), (3, 0)])
@pytest.mark.parametrize("draw", range(3))
def test_degenerate_shapes(dims, draw):
    assert _drawn(1, *dims, draw=draw).shape == dims
    assert bool((_drawn(0, *dims, draw=draw) == 0).all())


def _embedding(table, index):
    return table[index]


@pytest.mark.parametrize("place", range(16))
def test_a_mistake_at_one_index_of_sixteen_is_found(place):
    def backward(dy, table, index):
        grad = torch.zeros_like(table).index_add(0, index, dy)
        grad[place] *= 1.01
        return grad, None

    inputs = dict(table=rg.tensor(16, "N"), index=rg.tensor(24, dtype="int64", high=16))
    wrong = rg.op(with_backward(_embedding, backward, once=True), _embedding, inputs)
    assert not rg.verify(wrong, level="quick", only=["oracle"])


def test_the_right_ones_are_left_alone():
    right = with_backward(
        _embedding, lambda dy, table, index: (torch.zeros_like(table).index_add(0, index, dy), None), once=True
    )
    inputs = dict(table=rg.tensor("V", "N"), index=rg.tensor("K", dtype="int64", high="V"))
    assert rg.verify(rg.op(right, _embedding, inputs, sizes=dict(V=(1, 100))), level="full")


@pytest.mark.parametrize("padding", [3, 77])
def test_a_value_that_a_parameter_names_is_drawn(padding):
    def looked_up(table, index, padding):
        return torch.nn.functional.embedding(index, table, padding)

    # It forgets that the padding has no gradient.
    forgetful = with_backward(
        _embedding, lambda dy, table, index: (torch.zeros_like(table).index_add(0, index, dy), None)
    )
    inputs = dict(table=rg.tensor(100, "N"), index=rg.tensor(12, dtype="int64", high=100))
    options = dict(params=dict(padding=[padding]))
    wrong = rg.op(lambda table, index, padding: forgetful(table, index), looked_up, inputs, **options)
    assert rg.verify(wrong, level="quick", only=["oracle"]).verdict == "finding"
    # What is looked up depends on the padding's row, which has no gradient by convention.
    assert rg.verify(rg.op(looked_up, looked_up, inputs, surrogate=True, **options), level="quick")


def test_values_that_cannot_be_drawn_are_not_named():
    spec = rg.op(
        torch.abs, None, dict(i=rg.tensor(12, dtype="int64", high=100)), params=dict(a=[-1], b=[100], c=[True])
    )
    drawn = materialise(spec, base_case(spec, "float32"), 0, "cpu")["i"]
    assert torch.equal(drawn, _drawn(100, 12))
