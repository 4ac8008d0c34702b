"""Inputs that a callable makes: drawn once for a case where they can be made fresh from what was drawn, else each time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import retrograd as rg
from retrograd.check.op_runner import OpRunner


class _Holder:
    """Something that an op may change and that nobody else can make anew."""


def _runner(more: Any) -> tuple[OpRunner, list[int]]:
    drawn: list[int] = []

    def inputs(seed: int, dtype: torch.dtype, sizes: dict[str, int]) -> dict[str, Any]:
        drawn.append(seed)
        return {"x": torch.randn(sizes["N"], generator=torch.Generator().manual_seed(seed)).to(dtype), "more": more()}

    spec = rg.op(lambda x, more: x * 2, lambda x, more: x * 2, inputs, sizes={"N": (1, 8)}, name="doubled")
    return OpRunner(spec, "float32", 0, "cpu"), drawn


@pytest.mark.parametrize(
    "more", [lambda: 3, lambda: [(1, 2), (3, 4)], lambda: {"a": [1.0]}, lambda: None, lambda: torch.float32]
)
def test_numbers_words_and_lists_of_them_are_drawn_once_and_fresh_each_time(more: Any) -> None:
    runner, drawn = _runner(more)
    first, second = runner.inputs(runner.base), runner.inputs(runner.base)
    assert len(drawn) == 1
    assert torch.equal(first["x"], second["x"])
    assert first["more"] == second["more"]
    first["x"].zero_()
    if isinstance(first["more"], (list, dict)):
        first["more"].clear()
    third = runner.inputs(runner.base)
    assert torch.equal(third["x"], second["x"])
    assert third["more"] == second["more"] == more()


@pytest.mark.parametrize("more", [_Holder, lambda: [torch.ones(2)], lambda: {"a": _Holder()}])
def test_what_an_op_may_change_is_made_anew_each_time(more: Any) -> None:
    runner, drawn = _runner(more)
    first, second = runner.inputs(runner.base), runner.inputs(runner.base)
    assert len(drawn) == 2
    assert first["more"] is not second["more"]


def _scaled(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    sizes.append(0)
    return x * len(sizes)


def test_an_op_that_adds_to_its_list_gets_the_same_list_in_each_run() -> None:
    spec = rg.op(
        _scaled, lambda x, sizes: x * (len(sizes) + 1), lambda seed, dtype, sizes: {"x": torch.ones(4), "sizes": [1]}
    )
    report = rg.verify(spec, level="quick", only=["oracle", "determinism"])
    assert report.verdict == "proved"
