"""What is folded into a cause, or worded as a person writes it: keys of a split, several loops, reductions, float32."""

from __future__ import annotations

import pytest

from retrograd import graph
from retrograd.graph.diffing.consequences import Placed, first_causes
from retrograd.graph.diffing.literals import reduction, rounded
from retrograd.graph.diffing.merging import merged
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


SPREAD = "broadcast f32[3]: operand 0 is convert f32[] (u) instead of constant f32[] (2)"
DIMS = "2 x broadcast f32[3,4] dimensions={} -> dimensions={1}"
AXES = "broadcast f32[3,4] dimensions={0} -> dimensions={1}"
ADDED = "add f32[3]: operand 0 is convert f32[3] (u) instead of constant f32[3] (2)"


@pytest.mark.parametrize(
    ("kind", "told", "expected"),
    [
        ("operand_changed", SPREAD, [DRAWN]),
        ("attribute_changed", DIMS, [DRAWN]),
        ("operand_changed", ADDED, [DRAWN, ADDED]),
        ("attribute_changed", AXES, [DRAWN, AXES]),
    ],
)
def test_which_scalar_is_spread_follows_from_what_comes_or_goes(kind: Kind, told: str, expected: list[str]) -> None:
    assert kept(cause("instruction_replaced", DRAWN), cause(kind, told)) == expected
    assert kept(cause(kind, told)) == [told]


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


LOOPS = """HloModule m

%body.1 (s: (s32[], f32[4])) -> (s32[], f32[4]) {
  %s = (s32[], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[4] get-tuple-element(%s), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %y = f32[4] tanh(%x)
  ROOT %t = (s32[], f32[4]) tuple(%next, %y)
}

%body.2 (s: (s32[], f32[4])) -> (s32[], f32[4]) {
  %s = (s32[], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[4] get-tuple-element(%s), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %y = f32[4] sine(%x)
  ROOT %t = (s32[], f32[4]) tuple(%next, %y)
}

%going (s: (s32[], f32[4])) -> pred[] {
  %s = (s32[], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %five = s32[] constant(5)
  ROOT %less = pred[] compare(%i, %five), direction=LT
}

ENTRY %main (a: f32[4], b: f32[4]) -> (f32[4], f32[4]) {
  %a = f32[4] parameter(0)
  %b = f32[4] parameter(1)
  %zero = s32[] constant(0)
  %start = (s32[], f32[4]) tuple(%zero, %a)
  %first = (s32[], f32[4]) while(%start), condition=%going, body=%body.1
  %between = f32[4] get-tuple-element(%first), index=1
  %then = (s32[], f32[4]) tuple(%zero, %between)
  %second = (s32[], f32[4]) while(%then), condition=%going, body=%body.2
  %out = f32[4] get-tuple-element(%second), index=1
  ROOT %r = (f32[4], f32[4]) tuple(%out, %between)
}
"""
FIRST = ("tanh(%x)", "negate(%x)")
SECOND = ("sine(%x)", "logistic(%x)")


def told(a: str, b: str) -> list[str]:
    return [c.what for c in graph.diff(graph.parse(a, "A")[0], graph.parse(b, "B")[0]).causes]


def test_what_a_loop_behind_another_computes_follows_from_that_one() -> None:
    both = LOOPS.replace(*FIRST).replace(*SECOND)
    assert told(LOOPS, both) == ["in the body of while first: tanh f32[4] replaced by negate f32[4]"]
    assert told(LOOPS, LOOPS.replace(*SECOND)) == [
        "in the body of while second: sine f32[4] replaced by logistic f32[4]"
    ]


def test_loops_that_do_not_read_each_other_are_both_told() -> None:
    apart = LOOPS.replace("tuple(%zero, %between)", "tuple(%zero, %b)")
    assert len(told(apart, apart.replace(*FIRST).replace(*SECOND))) == 2


def test_a_number_in_a_loop_behind_another_is_told() -> None:
    body = LOOPS.replace("%y = f32[4] sine(%x)", "%c = f32[4] constant({1,2,3,4})\n  %y = f32[4] add(%x, %c)")
    other = body.replace(*FIRST).replace("{1,2,3,4}", "{1,2,7,4}")
    assert sorted(cause.partition(": ")[2][:8] for cause in told(body, other)) == ["constant", "tanh f32"]


CARRIES = """HloModule m

%body (s: (s32[], f32[4], f32[4])) -> (s32[], f32[4], f32[4]) {
  %s = (s32[], f32[4], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[4] get-tuple-element(%s), index=1
  %u = f32[4] get-tuple-element(%s), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %z = f32[4] maximum(%x, %u)
  %y = f32[4] tanh(%z)
  ROOT %t = (s32[], f32[4], f32[4]) tuple(%next, %y, %u)
}

%going (s: (s32[], f32[4], f32[4])) -> pred[] {
  %s = (s32[], f32[4], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %five = s32[] constant(5)
  ROOT %less = pred[] compare(%i, %five), direction=LT
}

ENTRY %main (a: f32[8]) -> f32[4] {
  %a = f32[8] parameter(0)
  %zero = s32[] constant(0)
  %x = f32[4] slice(%a), slice={[0:4]}
  %u = f32[4] slice(%a), slice={[4:8]}
  %start = (s32[], f32[4], f32[4]) tuple(%zero, %x, %u)
  %loop = (s32[], f32[4], f32[4]) while(%start), condition=%going, body=%body
  ROOT %r = f32[4] get-tuple-element(%loop), index=1
}
"""


def test_what_is_only_chosen_for_a_loop_follows_from_what_is_done_with_it() -> None:
    plain = CARRIES.replace(", f32[4], f32[4])", ", f32[4])").replace("  %z = f32[4] maximum(%x, %u)\n", "")
    plain = "\n".join(line for line in plain.split("\n") if not line.startswith("  %u ")).replace(", %u)", ")")
    (cause,) = told(CARRIES, plain.replace("tanh(%z)", "tanh(%x)"))
    assert cause.startswith("in the body of while loop: - maximum f32[4]")


ADDED = cause("parameter_added", "+ 1 parameter f32[4], used by add")
ORDER = cause("parameter_moved", "3 of 9 parameters moved: the same ones in another order (shifts -1 x3)")
OTHER = cause("operand_changed", "broadcast f32[2,6]: operand 0 is parameter f32[] (p) instead of parameter f32[] (q)")
READS = cause("operand_changed", "broadcast f32[2,6]: operand 0 is parameter f32[] (p) instead of add f32[] (q)")


def test_another_order_of_parameters_follows_where_one_comes() -> None:
    assert kept(ADDED, ORDER, OTHER, READS) == [ADDED.cause.what, READS.cause.what]
    assert kept(ORDER, OTHER) == [ORDER.cause.what, OTHER.cause.what]


@pytest.mark.parametrize(
    ("gone", "told"),
    [
        ("- 2 parameters f32[16,16] x2, used by dot", []),  # f32[16,16] -> f32[32,16], as others did
        ("- 2 parameters f32[16,8] x2, used by dot", ["parameter_removed", "parameter_added"]),
    ],
)
def test_parameters_that_come_and_go_in_shapes_in_which_others_changed(gone: str, told: list[str]) -> None:
    reshaped = cause("shape_changed", "parameter 1 f32[16,16] -> f32[32,16]", ("f32[16,16] ", "f32[32,16] "))
    come = Placed(Cause("parameter_added", "+ 2 parameters f32[32,16] x2, used by dot", a=(), b=("b",), count=2))
    left = Placed(Cause("parameter_removed", gone, a=("a",), b=(), count=2))
    assert [p.cause.kind for p in first_causes([reshaped, left, come])[0]] == ["shape_changed", *told]


def test_a_number_that_changed_in_several_operations_is_one_cause() -> None:
    def argument(operation: str, before: str, after: str) -> Placed:
        what = f"{operation} f32[4] args=(%, {before}) -> args=(%, {after})"
        return cause("attribute_changed", what, (f"f32[4] args=(%, {before})", f"f32[4] args=(%, {after})"))

    alike = [argument("aten.lt.Scalar", "5", "6"), argument("aten.remainder.Scalar", "5", "6")]
    (both,) = merged(alike)
    assert both.what == f"{alike[0].cause.what}; and {alike[1].cause.what}"
    assert len(merged([alike[0], argument("aten.lt.Scalar", "5", "7")])) == 2


NUMBERS = """HloModule m

ENTRY e {{
  p = f32[4] parameter(0)
  one = f32[] constant({})
  two = f32[] constant({})
  a = f32[4] broadcast(one), dimensions={{}}
  b = f32[4] broadcast(two), dimensions={{}}
  m = f32[4] multiply(p, a)
  s = f32[4] add(p, b)
{}
  ROOT r = (f32[4], f32[4], f32[4]) tuple(m, s, w)
}}
"""
LONG = "  t = f32[4] tanh(p)\n  n = f32[4] negate(t)\n  w = f32[4] exponential(n)"


def test_numbers_that_both_graphs_have_are_no_cause_where_much_comes_or_goes() -> None:
    plain, changed = NUMBERS.format("3", "7", "  w = f32[4] sine(p)"), NUMBERS.format("7", "3", LONG)
    assert not any("constant" in what for what in told(plain, changed))
    assert any("3 -> 8" in what for what in told(plain, NUMBERS.format("8", "7", LONG)))
    assert any(
        "constant" in what or "operand" in what
        for what in told(plain, NUMBERS.format("7", "3", "  w = f32[4] sine(p)"))
    )


FORWARD = """class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[4, 4]", primals_2: "f32[4, 4]"):
        mm: "f32[4, 4]" = torch.ops.aten.mm.default(primals_1, primals_2)
        tanh: "f32[4, 4]" = torch.ops.aten.tanh.default(mm)
        sub: "f32[4, 4]" = torch.ops.aten.sub.Tensor(tanh, 3)
        return (sub, mm, tanh)
"""


def test_the_order_in_which_a_forward_saves_follows_from_what_it_computes() -> None:
    other = FORWARD.replace("(sub, mm, tanh)", "(sub, tanh, mm)")
    assert told(FORWARD, other)[0].endswith("in another order: now output 2, saved for backward")
    (cause,) = told(FORWARD, other.replace(", 3)", ", 4)"))
    assert "args=(%, 3) -> args=(%, 4)" in cause
