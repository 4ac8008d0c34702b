"""One function in place of another: what is told of it, what follows from it, and what does not."""

from __future__ import annotations

import pytest

from retrograd import graph
from retrograd.graph.diffing.consequences import Placed, first_causes
from retrograd.graph.schema import Cause


def told(a: str, b: str) -> list[str]:
    return [cause.what for cause in graph.diff(graph.parse(a, "A")[0], graph.parse(b, "B")[0]).causes]


def hlo(body: str) -> str:
    lines = body.strip().replace("; ", "\n  ")
    return f"HloModule m\n\nENTRY e {{\n  x = f32[4]{{0}} parameter(0)\n  {lines}\n}}\n"


def fx(parameters: str, body: str) -> str:
    lines = body.strip().replace("; ", "\n        ")
    return f"class GraphModule(torch.nn.Module):\n    def forward(self, {parameters}):\n        {lines}\n"


ACTIVATED = hlo(
    "k = f32[] constant(2); t = f32[4]{0} broadcast(k), dimensions={}; n = f32[4]{0} negate(x); "
    "e = f32[4]{0} exponential(n); m = f32[4]{0} multiply(e, t); ROOT r = f32[4]{0} add(m, x)"
)
OTHER = ACTIVATED.replace("negate(x)", "cosine(x)").replace("exponential(n)", "logistic(n)")


def test_a_function_of_several_operations_is_one_replacement_by_all_of_them() -> None:
    assert told(ACTIVATED, OTHER) == ["negate, exponential f32[4] x2 replaced by cosine, logistic f32[4] x2"]
    # A single one leaves its neighbours alone.
    assert told(ACTIVATED, ACTIVATED.replace("negate(x)", "cosine(x)")) == ["negate f32[4] replaced by cosine f32[4]"]


def test_a_number_beside_what_is_replaced_is_another_one_and_beside_what_is_not_a_cause() -> None:
    assert told(ACTIVATED, OTHER.replace("constant(2)", "constant(7)")) == told(ACTIVATED, OTHER)
    assert told(ACTIVATED, ACTIVATED.replace("constant(2)", "constant(7)")) == ["constant f32[] 2 -> 7"]
    longer = ACTIVATED.replace("ROOT r = f32[4]{0} add(m, x)", "j = f32[] constant(3)\n  u = f32[4]{0} broadcast(j), "
                               "dimensions={}\n  ROOT r = f32[4]{0} add(m, u)")  # fmt: skip
    replaced = longer.replace("negate(x)", "cosine(x)").replace("exponential(n)", "logistic(n)")
    assert "constant f32[] 3 -> 5" in told(longer, replaced.replace("constant(3)", "constant(5)"))


@pytest.mark.parametrize(
    ("pairs", "kept"),
    [
        ([("2", "9"), ("4", "9")], 0),  # one number of two
        ([("2", "9"), ("2", "5")], 0),  # two of one
        ([("2", "9"), ("4", "5")], 2),
        ([("2", "9"), ("4", "18")], 2),
    ],
)
@pytest.mark.parametrize("beside", ["instruction_replaced", "output_added"])
def test_numbers_that_would_be_one_of_several_are_those_of_what_is_replaced(
    pairs: list[tuple[str, str]], kept: int, beside: str
) -> None:
    constants = [
        Placed(Cause("constant_changed", f"constant f32[] {x} -> {y}"), changes=((f"f32[] {x}", f"f32[] {y}"),))
        for x, y in pairs
    ]
    other = Placed(Cause(beside, "tanh f32[4] replaced by sine, cosine f32[4]"))  # type: ignore[arg-type]
    left = first_causes([*constants, other])[0]
    assert len(left) == 1 + (kept if beside == "instruction_replaced" else 2)


def test_no_rule_leaves_two_graphs_that_differ_without_a_cause() -> None:
    alone = [Placed(Cause("parameter_added", "+ 1 parameter f32[4]"), "the body of while w")]
    assert first_causes(alone)[0] == alone


STRIDED = fx(
    'primals_2: "f32[8, 4, 3, 3]", relu: "f32[2, 8, 8, 8]", tangents_1: "f32[]"',
    'expand: "f32[2, 8, 8, 8]" = torch.ops.aten.expand.default(tangents_1, [2, 8, 8, 8]); '
    'threshold: "f32[2, 8, 8, 8]" = torch.ops.aten.threshold_backward.default(expand, relu, 0); '
    "conv = torch.ops.aten.convolution_backward.default(threshold, primals_2, primals_2, [0], [1, 1], [1, 1], "
    "[1, 1], False, [0, 0], 1, [True, True, False]); "
    'getitem: "f32[2, 4, 8, 8]" = conv[0]; return (getitem,)',
)


def test_in_a_backward_alone_an_argument_comes_before_the_shapes_of_what_is_saved() -> None:
    smaller = STRIDED.replace("2, 8, 8, 8", "2, 8, 4, 4")
    assert told(STRIDED, smaller)[0].startswith("parameter 1 relu f32[2,8,8,8] -> f32[2,8,4,4], saved for backward")
    (what,) = told(STRIDED, smaller.replace("[0], [1, 1], [1, 1]", "[0], [2, 2], [1, 1]"))
    assert what.startswith("aten.convolution_backward.default")
    assert "[2, 2]" in what


BODY = (
    'mul: "f32[4, 4]" = torch.ops.aten.mul.Tensor(tangents_1, tanh); '
    'mm_1: "f32[4, 4]" = torch.ops.aten.mm.default(mul, mm); '
    'add: "f32[4, 4]" = torch.ops.aten.add.Tensor(mm_1, primals_3); return (add,)'
)
SAVED = fx('primals_3: "f32[4, 4]", mm: "f32[4, 4]", tanh: "f32[4, 4]", tangents_1: "f32[4, 4]"', BODY)
AGAIN = fx(
    'primals_2: "f32[4, 4]", primals_3: "f32[4, 4]", mm: "f32[4, 4]", tangents_1: "f32[4, 4]"',
    'tanh: "f32[4, 4]" = torch.ops.aten.tanh.default(primals_2); ' + BODY,
)


def test_a_backward_that_takes_arguments_of_the_forward_to_compute_again_is_remat() -> None:
    assert told(SAVED, AGAIN)[0] == "remat in B: tanh is computed again, not saved"
    # Of another function the values are others.
    assert "remat" not in told(SAVED, AGAIN.replace("tanh: ", "sin: ").replace(", tanh)", ", sin)"))[0]


def test_a_none_that_is_returned_is_no_operation() -> None:
    two = fx('x: "f32[4]"', 'sin: "f32[4]" = torch.ops.aten.sin.default(x); return (sin,)')
    more = two.replace("sin.default", "cos.default").replace("return (sin,)", "return (None, sin)")
    assert not [what for what in told(two, more) if what.startswith("+ constant")]


CAST = hlo(
    "s = f32[4]{0} sine(x); c = f32[4]{0} cosine(s); k = f32[] constant(1e-05); "
    "e = f32[4]{0} broadcast(k), dimensions={}; a = f32[4]{0} add(c, e); ROOT r = f32[4]{0} tanh(a)"
)
HALF = CAST.replace(
    "c = f32[4]{0} cosine(s)", "h = bf16[4]{0} convert(s)\n  w = f32[4]{0} convert(h)\n  c = f32[4]{0} cosine(w)"
)


def test_what_is_rounded_where_a_conversion_begins_it_follows_and_another_number_does_not() -> None:
    rounded = HALF.replace("constant(1e-05)", "constant(1.001358e-05)")
    assert not [what for what in told(CAST, rounded) if what.startswith("constant")]
    assert "constant f32[] 1e-05 -> 0.5" in told(CAST, HALF.replace("constant(1e-05)", "constant(0.5)"))


def test_of_parameters_the_one_used_first_leads() -> None:
    a = hlo("w = f32[6]{0} parameter(1); s = f32[4]{0} sine(x); ROOT r = (f32[4]{0}, f32[6]{0}) tuple(s, w)")
    a = a.replace("ROOT r = (f32[4]{0}, f32[6]{0}) tuple(s, w)", "d = f32[6]{0} cosine(w)\n  "
                  "ROOT r = (f32[4]{0}, f32[6]{0}) tuple(s, d)")  # fmt: skip
    b = a.replace("f32[6]", "f32[8]").replace("s = f32[4]{0} sine(x)", "q = f32[4]{0} parameter(2)\n  "
                  "v = f32[4]{0} multiply(x, q)\n  s = f32[4]{0} sine(v)")  # fmt: skip
    assert [what.partition(" f32")[0] for what in told(a, b)] == ["+ 1 parameter q", "parameter 1 w"]


def looped(body: str, entry: str, given: list[str]) -> str:
    """A loop of five steps over h, which carries values that are given, named w0, w1, ... in its body."""
    kinds = ", ".join(["s32[]", "f32[4]{0}", *(["f32[4]{0}"] * len(given))])
    taken = "\n".join(f"  w{k} = f32[4]{{0}} get-tuple-element(p), index={k + 2}" for k in range(len(given)))
    names = ", ".join(f"w{k}" for k in range(len(given)))
    return f"""HloModule m

b {{
  p = ({kinds}) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  h = f32[4]{{0}} get-tuple-element(p), index=1
{taken}
  one = s32[] constant(1)
  j = s32[] add(i, one)
{body}
  ROOT t = ({kinds}) tuple(j, g, {names})
}}

c {{
  p = ({kinds}) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  n = s32[] constant(5)
  ROOT l = pred[] compare(i, n), direction=LT
}}

ENTRY e {{
  x = f32[4]{{0}} parameter(0)
  v = f32[4]{{0}} parameter(1)
  z = s32[] constant(0)
{entry}
  a = ({kinds}) tuple(z, x, {", ".join(given)})
  q = ({kinds}) while(a), condition=c, body=b
  ROOT r = f32[4]{{0}} get-tuple-element(q), index=1
}}
"""


def test_work_that_moves_out_of_a_loop_is_no_remat() -> None:
    work = "  s{0} = f32[4]{{0}} sine({1})\n  u{0} = f32[4]{{0}} sine(s{0})\n"
    inside = looped(work.format("", "w0") + "  g = f32[4]{0} multiply(h, u)", "", ["v"])
    outside = looped("  g = f32[4]{0} multiply(h, w1)", work.format("", "v"), ["v", "u"])
    assert told(inside, outside)
    assert not [what for what in told(inside, outside) if "remat" in what]


READ = hlo(
    "y = f32[4]{0} parameter(1); b = f32[4]{0} cosine(y); s = f32[4]{0} sine(x); t = f32[4]{0} sine(b); "
    "a = f32[4]{0} add(s, b); m = f32[4]{0} multiply(t, x); ROOT r = (f32[4]{0}, f32[4]{0}, f32[4]{0}, f32[4]{0}) "
    "tuple(a, m, s, t)"
)


@pytest.mark.parametrize(("work", "kept"), [("b = f32[4]{0} cosine(y)", False), ("m = f32[4]{0} multiply(t, x)", True)])
def test_which_of_two_alike_values_is_read_is_told_where_nothing_differs_before_it(work: str, kept: bool) -> None:
    other = READ.replace("add(s, b)", "add(t, b)")
    assert [what for what in told(READ, other) if what.startswith("add f32[4]: operand 0 is sine")]
    name, _, operation = work.partition(" = f32[4]{0} ")
    more = other.replace(work, f"v{name} = f32[4]{{0}} {operation}\n  {name} = f32[4]{{0}} tanh(v{name})")
    assert any(what.startswith("add f32[4]: operand 0 is sine") for what in told(READ, more)) is kept
