"""Comparisons of torch.testing: the methods that see every pair of tensors or numbers. Loads no torch."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from retrograd.compat.registry import in_fresh_thread, part, works

MODULE = "torch.testing._comparison"


def watch_comparisons(note: Callable[[Any, Any, float, float, bool], None]) -> None:
    """Have `note` called with (actual, expected, rtol, atol, equal_nan) before each comparison, for good.

    One method sees every pair of tensors of assert_close, of TestCase.assertEqual and of containers of tensors.
    """
    if works(PART):
        _replace(sys.modules[MODULE], note)


def _replace(module: Any, note: Callable[[Any, Any, float, float, bool], None]) -> Callable[[], None]:
    close, compare = module.TensorLikePair._compare_regular_values_close, module.NumberPair.compare

    @functools.wraps(close)
    def noting_close(pair: Any, actual: Any, expected: Any, *, rtol: float, atol: float, **rest: Any) -> Any:
        note(actual, expected, rtol, atol, rest.get("equal_nan", False))
        return close(pair, actual, expected, rtol=rtol, atol=atol, **rest)

    @functools.wraps(compare)
    def noting_compare(pair: Any) -> Any:
        note(pair.actual, pair.expected, pair.rtol, pair.atol, pair.equal_nan)
        return compare(pair)

    def undo() -> None:
        module.TensorLikePair._compare_regular_values_close, module.NumberPair.compare = close, compare

    module.TensorLikePair._compare_regular_values_close, module.NumberPair.compare = noting_close, noting_compare
    return undo


@part(
    "torch.testing",
    "notes how near to its tolerance torch.testing.assert_close passes",
    "its comparisons have no margins; those of numpy.testing and retrograd have",
    names=(f"{MODULE}.TensorLikePair._compare_regular_values_close", f"{MODULE}.NumberPair.compare"),
)
@in_fresh_thread
def PART() -> str:
    torch, noted = sys.modules["torch"], list[Any]()
    undo = _replace(sys.modules[MODULE], lambda *facts: noted.append(facts))
    try:
        ones = torch.ones(1, device="cpu")
        torch.testing.assert_close(ones, ones.clone(), rtol=0.25, atol=0.5)
        torch.testing.assert_close(1.0, 1.0, rtol=0.25, atol=0.5)
    finally:
        undo()
    facts = [(float(a), float(b), *rest) for a, b, *rest in noted]
    return "" if facts == [(1.0, 1.0, 0.25, 0.5, False)] * 2 else f"assert_close compares {facts}"
