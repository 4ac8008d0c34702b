"""Random rounding leaves whole numbers alone: a reference that computes offsets by cumsum is as good as another."""

from __future__ import annotations

import torch

from retrograd.check.rounding import Float64


def test_sums_of_whole_numbers_are_exact() -> None:
    with Float64(2.0**-24, 2.0**-24):
        counts = torch.tensor([3, 1, 4])
        assert counts.cumsum(0).tolist() == [3, 4, 8]
        assert int(counts.sum()) == 8
        assert int((counts > 2).sum()) == 2
