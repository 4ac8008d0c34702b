"""A few of the runs of soak.py, and that it would notice; a GPU's thousands are started by hand."""

from __future__ import annotations

import pytest
import soak
import torch
from msda_cases import DEVICE

IMPLS = ["torch", None] if DEVICE == "cpu" else [None, "triton"]
RUNS = 48 if DEVICE == "cpu" else 200


@pytest.mark.parametrize("impl", IMPLS)
def test_runs_are_right(impl: str | None) -> None:
    wrong = [line for number in range(RUNS) if (line := soak.check(number, impl)) is not None]
    assert not wrong


def test_runs_reach_everything() -> None:
    drawn = [soak.draw(number) for number in range(RUNS)]
    assert {d.kind for d in drawn} == set(soak.KINDS)
    assert {d.shape for d in drawn} == set(range(len(soak.SHAPES)))
    assert {d.dtype for d in drawn} == set(range(len(soak.DTYPES)))
    modes = {(d.options["padding_mode"], d.options["align_corners"], d.options["deterministic"]) for d in drawn}
    assert len(modes) == 8
    assert len({tuple(map(str, d[1:])) for d in drawn}) > RUNS * 0.9


def test_a_wrong_gradient_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One element of one gradient, off by three parts in a hundred."""
    stock = soak.run

    def wrong(*args, **options):
        got = stock(*args, **options)
        flat = got["sampling_locations"].view(-1)
        largest = flat.nan_to_num().abs().argmax()
        flat[largest] *= 1.03
        return got

    monkeypatch.setattr(soak, "run", wrong)
    numbers = [n for n in range(RUNS) if soak.DTYPES[soak.draw(n).dtype][0] is torch.float32]
    assert numbers
    assert all("sampling_locations" in (soak.check(number, "torch") or "") for number in numbers[:5])
