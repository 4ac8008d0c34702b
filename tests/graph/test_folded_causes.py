"""What is folded into a cause, or worded as a person writes it: keys of a split, several loops, reductions, float32."""

from __future__ import annotations

import pytest

from retrograd import graph
from retrograd.graph.diffing.consequences import Placed, first_causes
from retrograd.graph.diffing.literals import reduction, rounded
from retrograd.graph.schema import Cause, Kind


def kept(*placed: Placed) -> list[str]:
    return [p.cause.what for p in first_causes(list(placed))[0]]


def cause(kind: Kind, what: str, *changes: tuple[str, str]) -> Placed:
    return Placed(Cause(kind, what, a=("a",), b=("b",)), changes=changes)


KEY = "slice u32[1,2] slice={[0:1], [0:2]} -> slice={[2:3], [0:2]}"
ROWS = "slice u32[1,3] slice={[0:1], [0:3]} -> slice={[2:3], [0:3]}"
DRAWN = "2 x xor, add u32[4] x8 replaced by add f32[4]"


@pytest.mark.parametrize(
    ("told", "beside", "expected"),
    [
        (KEY, DRAWN, [DRAWN]),  # a draw went, and the others have other keys
        (ROWS, DRAWN, [ROWS, DRAWN]),  # no keys
    ],
)
def test_which_key_is_drawn_from_follows_from_what_comes_or_goes(told: str, beside: str, expected: list[str]) -> None:
    assert kept(cause("attribute_changed", told), cause("instruction_replaced", beside)) == expected


def test_which_key_is_drawn_from_is_a_cause_where_nothing_comes_or_goes() -> None:
    number = cause("constant_changed", "constant f32[] 0.1 -> 0.2", ("f32[] 0.1", "f32[] 0.2"))
    assert KEY in kept(cause("attribute_changed", KEY), number)


SHAPE = cause("shape_changed", "parameters 0 x f32[4,7] -> f32[5,9]", ("f32[4,7]", "f32[5,9]"))


def test_loops_of_several_lengths_follow_from_the_size_of_what_is_given() -> None:
    loops = [cause("loop_changed", f"scan of {n} -> {n + 1} steps") for n in (3, 4)]
    assert kept(*loops, SHAPE) == [SHAPE.cause.what]


@pytest.mark.parametrize("steps", [[(4, 5)], [(4, 5), (3, 8)]])  # one loop is a cause; no size explains five steps more
def test_loops_that_no_size_explains_are_told(steps: list[tuple[int, int]]) -> None:
    loops = [cause("loop_changed", f"scan of {n} -> {m} steps") for n, m in steps]
    assert kept(*loops, SHAPE)[0] == "scan of 4 -> 5 steps"


@pytest.mark.parametrize(
    ("operation", "before", "after", "words"),
    [
        ("aten.smooth_l1_loss.default", "args=(%, %)", "args=(%, %, 2)", " (reduction mean -> sum)"),
        ("aten.mse_loss_backward.default", "args=(%, %, %, 1)", "args=(%, %, %, 0)", " (reduction mean -> none)"),
        ("aten.nll_loss_forward.default", "args=(%, %, None, 1, -100)", "args=(%, %, None, 1, 0)", ""),  # another label
        ("aten.sum.dim_IntList", "args=(%, 1)", "args=(%, 2)", ""),
    ],
)
def test_the_reduction_of_a_loss_is_told_in_words(operation: str, before: str, after: str, words: str) -> None:
    assert reduction(operation, before, after) == words


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("args=(%, 0.7999999970197678)", "args=(%, 0.8)"),  # 1 - 0.2, of which the 0.2 was a float32
        ("args=(%, 0.7071067811865476)", "args=(%, 0.707106781187)"),  # nobody wrote 0.7071
        ("args=(%, 0.0010000001)", "args=(%, 0.0010000001)"),  # not long: as it is
    ],
)
def test_numbers_that_were_rounded_to_float32_are_told_as_they_were_written(text: str, short: str) -> None:
    assert rounded(text) == short


def weighted(turn: str, number: float) -> str:
    """A program that turns a weight around early, if it does, and reads it in its last operation."""
    return (
        f"HloModule m\n\nENTRY e {{\n  x = f32[4] parameter(0)\n  w = f32[4] parameter(1)\n{turn}"
        f"  n = f32[4] negate(x)\n  k = f32[] constant({number})\n  b = f32[4] broadcast(k), dimensions={{}}\n"
        f"  c = f32[4] power(n, b)\n  s = f32[4] sine(c)\n"
        f"  ROOT d = f32[4] multiply(s, {'r' if turn else 'w'})\n}}\n"
    )


@pytest.mark.parametrize(
    ("turn", "first"),
    [
        ("  r = f32[4] reverse(w), dimensions={0}\n", "constant"),  # of a weight: at any time before its reader
        ("  r = f32[4] exponential(w)\n", "exponential"),  # computed there
    ],
)
def test_a_weight_that_is_turned_around_stands_where_it_is_read(turn: str, first: str) -> None:
    sides = weighted(turn, 3.0), weighted("", 5.0)
    told = [c.what for c in graph.diff(*(graph.parse(side, "x")[0] for side in sides)).causes]
    assert len(told) == 2
    assert first in told[0]
