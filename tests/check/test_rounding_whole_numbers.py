"""Random rounding leaves alone what no precision rounds: whole numbers, as offsets by cumsum, and what is only chosen."""

from __future__ import annotations

import torch

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
