"""Random rounding leaves alone what no precision rounds: whole numbers, as offsets by cumsum, and what is only chosen."""

from __future__ import annotations

import pytest
import torch
from specimens import with_backward

import retrograd as rg
from retrograd.check.rounding import Float64


def test_sums_of_whole_numbers_are_exact() -> None:
    with Float64(2.0**-24, 2.0**-24):
        counts = torch.tensor([3, 1, 4])
        assert counts.cumsum(0).tolist() == [3, 4, 8]
        assert int(counts.sum()) == 8
        assert int((counts > 2).sum()) == 2


def test_floats_that_are_whole_stay_so() -> None:
    with Float64(2.0**-24, 2.0**-24):
        where = torch.tensor([-0.25, 0.5, 2.75], dtype=torch.float64)
        low = torch.floor(where)
        assert (low + 1).long().tolist() == [0, 1, 3]
        assert (4 * low - 1).long().tolist() == [-5, -1, 7]
        assert (where + 1).tolist() != [0.75, 1.5, 3.75]


def test_remainders_powers_and_sums_of_whole_floats_are_whole() -> None:
    with Float64(2.0**-8, 2.0**-8):
        rows = torch.arange(6.0, dtype=torch.float64)
        assert (rows % 4).tolist() == torch.fmod(rows, 4).tolist() == [0, 1, 2, 3, 0, 1]
        assert (rows**2).tolist() == rows.square().tolist() == [0, 1, 4, 9, 16, 25]
        assert rows.sum(-1, keepdim=True).tolist() == [15]
        assert rows.cumsum(0).tolist() == [0, 1, 3, 6, 10, 15]
        assert (rows**5).tolist() != [n**5 for n in range(6)]  # 3125 has more than 8 bits
        assert (rows + 0.25).sum() != 16.5
        assert (rows + 0.25).square().tolist() != [(n + 0.25) ** 2 for n in range(6)]


def test_what_is_made_in_the_default_dtype_is_as_wide_as_the_rest() -> None:
    with Float64():
        spectrum = torch.zeros(4)
        spectrum[torch.tensor([1, 3])] = torch.tensor([0.1, 0.2], dtype=torch.float64)
        made = torch.ones(2), torch.full((2,), 0.1), torch.eye(2), torch.linspace(0, 1, 3), torch.arange(0.5, 3)
        assert {t.dtype for t in (spectrum, *made)} == {torch.float64}
        assert torch.arange(3).dtype == torch.int64
    assert spectrum.tolist() == [0, 0.1, 0, 0.2]


def test_whole_numbers_beyond_what_a_float_holds_are_rounded() -> None:
    with Float64(2.0**-11, 2.0**-11):
        many = torch.full((64,), 4097.0, dtype=torch.float64)
        assert (many + 2).unique().numel() > 1


def test_a_largest_or_smallest_number_is_itself_and_other_norms_are_rounded() -> None:
    x = torch.tensor([0.3, -2.1, 1.7], dtype=torch.float64)
    with Float64(2.0**-24, 2.0**-24):
        largest, smallest, count, length = (torch.linalg.vector_norm(x, p) for p in (torch.inf, -torch.inf, 0, 2))
    assert (largest, smallest, count) == (2.1, 0.3, 3)
    assert length != torch.linalg.vector_norm(x)


def test_counts_by_place_are_exact_and_sums_by_place_are_rounded() -> None:
    where, shares = torch.tensor([4, 0, 4]), torch.tensor([0.3, 0.3, 0.3], dtype=torch.float64)
    with Float64(2.0**-24, 2.0**-24):
        counts = torch.zeros(5, dtype=torch.float64).scatter_add(0, where, torch.ones(3, dtype=torch.float64))
        sums = torch.zeros(5, dtype=torch.float64).index_add(0, where, shares)
    assert counts.tolist() == [1, 0, 0, 0, 2]
    assert sums[4] != 0.6


def test_what_is_exact_is_so_in_place() -> None:
    x = torch.full((3,), 0.3, dtype=torch.float64)
    with Float64(2.0**-24, 2.0**-24):
        x.masked_fill_(torch.tensor([False, True, False]), 1)
        assert x.tolist() == [0.3, 1, 0.3]
        x.mul_(1)
    assert x.tolist() != [0.3, 1, 0.3]


@pytest.mark.parametrize(("reduce", "same"), [("amax", True), ("amin", True), ("sum", False), ("prod", False)])
def test_the_largest_by_place_is_one_of_the_numbers(reduce, same) -> None:
    x = torch.tensor([0.3, -2.1, 1.7], dtype=torch.float64)
    with Float64(2.0**-24, 2.0**-24):
        out = x.scatter_reduce(0, torch.tensor([0, 0, 2]), x, reduce)
    assert (float(out[2]) == 1.7) == same


_FIRST = torch.tensor([0, 0, 1])


def _means(x, values):
    """Rows 0 and 1 are means of values, the others of x stay."""
    return x.index_reduce(0, _FIRST, values, "mean", include_self=False)


def _spec(kept):
    def backward(dy, x, values):
        return dy.index_fill(0, _FIRST, 0) * kept, dy[_FIRST] / torch.tensor([2.0, 2.0, 1.0])[:, None]

    inputs = dict(x=rg.tensor(4, "N"), values=rg.tensor(3, "N"))
    return rg.op(with_backward(_means, backward), _means, inputs)


def test_where_nothing_is_counted_the_gradient_is_as_sharp_as_elsewhere() -> None:
    assert rg.verify(_spec(1.0), level="quick", only=["oracle"])
    assert rg.verify(_spec(1.001), level="quick", only=["oracle"]).verdict == "finding"


def _largest_distance(x, y):
    return torch.cdist(x, y, torch.inf)


def test_which_difference_is_the_largest_is_not_rounded_away() -> None:
    def spec(share):
        def backward(dy, x, y):
            with torch.enable_grad():
                x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
                first, second = torch.autograd.grad(_largest_distance(x, y), (x, y), dy)
            return share * first, second

        inputs = dict(x=rg.tensor(3, 5), y=rg.tensor(4, 5))
        return rg.op(with_backward(_largest_distance, backward), _largest_distance, inputs)

    assert rg.verify(spec(1.0), level="quick", only=["oracle"])
    assert rg.verify(spec(1.001), level="quick", only=["oracle"]).verdict == "finding"
