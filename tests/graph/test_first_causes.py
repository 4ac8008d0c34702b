"""One change, one cause: the planted cause of every pair first, what follows from it folded, and nothing else."""

from __future__ import annotations

import gzip
import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from retrograd import graph
from retrograd.graph.diffing.consequences import Placed, first_causes
from retrograd.graph.diffing.literals import shown
from retrograd.graph.schema import Cause, Diff

TRUST = Path(__file__).parent / "data" / "trust"
PAIRS = tomllib.loads((TRUST / "pairs.toml").read_text())["pair"]


def text_of(name: str) -> str:
    return gzip.decompress((TRUST / name).read_bytes()).decode()


def diff(a: str, b: str) -> Diff:
    return graph.diff(graph.parse(a, "A")[0], graph.parse(b, "B")[0])


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair["name"])
def test_the_planted_cause_comes_first_of_at_most_three(pair: dict) -> None:
    if "mlir" in pair["a"] and find_spec("jaxlib") is None:
        pytest.skip("StableHLO is read by jaxlib")
    a = text_of(pair["a"])
    result = diff(a, text_of(pair["b"]) if "b" in pair else a.replace(*pair["edit"]))
    causes = result.causes or result.unknown
    assert re.search(pair["cause"], causes[0].what), [cause.what for cause in causes]
    assert len(causes) <= 3


def test_what_does_not_follow_from_the_steps_of_a_scan_is_told_beside_it() -> None:
    a, b = text_of("tf.hlo.txt.gz"), text_of("tf_trip.hlo.txt.gz")
    (literal,) = set(re.findall(r"constant\((1e-0?6)\)", b))
    result = diff(a, b.replace(f"constant({literal})", "constant(0.37)"))
    assert [cause.kind for cause in result.causes] == ["loop_changed", "constant_changed"]
    assert "-> 0.37" in result.causes[1].what


def test_what_does_not_follow_from_remat_is_told_beside_it() -> None:
    a, b = text_of("tf.hlo.txt.gz"), text_of("tf_remat.hlo.txt.gz")
    old = re.search(r"constant\((-?0\.\d+)\)", b[b.index("ENTRY") :])
    assert old
    result = diff(a, b.replace(old[0], "constant(0.0625)"))
    assert result.causes[0].kind == "remat_changed"
    assert any("0.0625" in cause.what for cause in result.causes[1:])


def test_operations_that_the_other_graph_has_not_are_not_computed_again() -> None:
    a, b = text_of("tf.hlo.txt.gz"), text_of("tf_remat.hlo.txt.gz")
    loops, entry, rest = b.partition("ENTRY")
    assert "remat" in first(a, b)
    assert "remat" not in first(a, loops.replace(" multiply(", " atan2(", 14) + entry + rest)


@pytest.mark.parametrize(
    ("text", "within", "told"),
    [
        ("+ 4 x broadcast, get-tuple-element pred[3,4] x2 with false in B only", "the body of while w", False),
        ("+ 4 x broadcast, get-tuple-element pred[3,4] x2 with false in B only", "", False),
        ("+ 4 x broadcast, get-tuple-element, sine f32[3,4] in B only", "the body of while w", True),
        ("+ broadcast f32[3,4] with 2 in B only", "the body of while w", True),
        ("+ broadcast f32[3,4] with 2 in B only", "", False),
        ("+ broadcast f32[3,4] in B only", "the body of while w", False),
    ],
)
def test_what_is_only_spread_follows_from_what_changed_beside_it_or_in_a_loop(
    text: str, within: str, told: bool
) -> None:
    packed = Placed(Cause("instruction_inserted", text))
    inner = Placed(Cause("instruction_replaced", "tanh f32[4] replaced by sine f32[4]"), within)
    assert (packed in first_causes([packed, inner])[0]) is told


def test_a_loop_with_one_operation_less_is_no_remat() -> None:
    a = text_of("tf.hlo.txt.gz")
    body = re.search(r"  (\S+) = (f32\[\S+) tanh\((\S+)\)", a)
    assert body
    result = diff(a, a.replace(body[0], f"  {body[1]} = {body[2]} copy({body[3]})", 1))
    assert result.causes
    assert {cause.kind for cause in result.causes}.isdisjoint({"remat_changed", "loop_changed"})


@pytest.mark.parametrize(
    ("shape", "literal", "text"),
    [("f32[]", "0.899999976", "0.9"), ("f32[]", "-1.000000e-03", "-0.001"), ("f32[]", "0.900000036", "0.90000004"),
     ("bf16[]", "0.898438", "0.9"), ("f64[]", "0.899999976", "0.899999976"), ("s32[]", "12", "12"),
     ("f32[]", "inf", "inf"), ("f32[]", "1e999", "inf"), ("f32[]", "30", "30"), ("f32[]", "0xFF800000", "-inf"),
     ("f16[]", "0x7C00", "inf"), ("s32[]", "0xFF800000", "0xFF800000"), ("f32[2]", "{0.899999976, 1}", "{0.899999976, 1}")],
)  # fmt: skip
def test_numbers_are_as_short_as_their_dtype_tells_them_apart(shape: str, literal: str, text: str) -> None:
    assert shown(shape, literal, 80) == text


# Causes in the user's words.

ARRAY = """HloModule m

ENTRY e {
  p = f32[2,2]{1,0} parameter(0)
  c = f32[2,2]{1,0} constant({ { 1, 2 }, { 3, 4 } })
  ROOT a = f32[2,2]{1,0} add(p, c)
}
"""
LAYERS = """HloModule m

ENTRY e {
  p__Block_0____w__ = f32[4,4]{1,0} parameter(0)
  x = f32[4,4]{1,0} parameter(1)
  d.0 = f32[4,4]{1,0} dot(x, p__Block_0____w__), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT t.0 = f32[4,4]{1,0} tanh(d.0)
}
"""


def first(a: str, b: str) -> str:
    return diff(a, b).causes[0].what


def test_an_array_is_told_where_it_differs() -> None:
    text = first(ARRAY, ARRAY.replace("3, 4", "3.5, 4"))
    assert text == "constant f32[2,2], 1 of 4 numbers, first at [1,0]: 3 -> 3.5"


def test_a_new_layer_has_its_name() -> None:
    more = LAYERS.replace("ROOT t.0", "t.0").replace(
        "x = f32[4,4]{1,0} parameter(1)",
        "p__Block_1____w__ = f32[4,4]{1,0} parameter(1)\n  x = f32[4,4]{1,0} parameter(2)",
    )
    more = more.replace(
        "tanh(d.0)\n",
        "tanh(d.0)\n  d.1 = f32[4,4]{1,0} dot(t.0, p__Block_1____w__), lhs_contracting_dims={1}, "
        "rhs_contracting_dims={0}\n  ROOT t.1 = f32[4,4]{1,0} tanh(d.1)\n",
    )
    result = diff(LAYERS, more)
    assert [cause.what.partition(" parameter")[0] for cause in result.causes] == ["+ layer Block_1: 1"]


@pytest.mark.parametrize(
    ("mangled", "path"),
    [
        ("params__params____Block_2____Dense_0____kernel__", "params['params']['Block_2']['Dense_0']['kernel']"),
        ("state_0__trace_2__layers_3__weight", "state[0].trace[2].layers[3].weight"),
        ("extra_0_", "extra[0]"),
        ("tokens", "tokens"),
    ],
)
def test_parameters_have_the_paths_of_the_program(mangled: str, path: str) -> None:
    text = ARRAY.replace("p = f32", f"{mangled}.1 = f32").replace("add(p,", f"add({mangled}.1,")
    assert f"parameter 0 {path} f32[2,2]" in first(
        text, text.replace("f32[2,2]", "f32[3,2]").replace("{ 1, 2 }", "{ 1, 2 }, { 0, 0 }")
    )


def test_checkpoints_outside_of_loops_are_told_and_twice_the_same_value_is_none() -> None:
    saved = LAYERS.replace("ROOT t.0", "t.0").replace(
        "tanh(d.0)\n", "tanh(d.0)\n  ROOT m = f32[4,4]{1,0} multiply(t.0, t.0)\n"
    )
    again = saved.replace(
        "  ROOT m = f32[4,4]{1,0} multiply(t.0, t.0)",
        "  o = f32[4,4]{1,0} opt-barrier(x)\n"
        "  d.1 = f32[4,4]{1,0} dot(o, p__Block_0____w__), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
        "  t.1 = f32[4,4]{1,0} tanh(d.1)\n  ROOT m = f32[4,4]{1,0} multiply(t.0, t.1)",
    )
    assert first(saved, again).startswith("remat in B: 2 operations computed again for the backward")
    assert "remat" not in first(saved, again.replace("opt-barrier(x)", "copy(x)"))


def test_a_switch_has_another_number_of_branches() -> None:
    branches = "".join(
        f"b{k} {{\n  q.{k} = f32[2]{{0}} parameter(0)\n  ROOT r.{k} = f32[2]{{0}} {op}(q.{k})\n}}\n\n"
        for k, op in enumerate(("sine", "cosine", "tanh"))
    )
    entry = "ENTRY e {\n  k = s32[] parameter(0)\n  x = f32[2]{0} parameter(1)\n  ROOT c = f32[2]{0} conditional(k, x, x), branch_computations={b0, b1}\n}\n"
    two = f"HloModule m\n\n{branches}{entry}"
    assert (
        first(two, two.replace("(k, x, x)", "(k, x, x, x)").replace("{b0, b1}", "{b0, b1, b2}"))
        == "switch of 2 -> 3 branches"
    )


UPDATE = """HloModule m

ENTRY e {
  p = f32[4]{0} parameter(0)
  g = f32[4]{0} parameter(1)
  c = f32[] constant(0.125)
  cb = f32[4]{0} broadcast(c), dimensions={}
  m = f32[4]{0} multiply(g, cb)
  n = f32[] constant(8)
  nb = f32[4]{0} broadcast(n), dimensions={}
  d = f32[4]{0} divide(m, nb)
  ROOT s = f32[4]{0} subtract(p, d)
}
"""


def test_constants_that_change_in_proportion_are_one_cause() -> None:
    doubled = UPDATE.replace("constant(0.125)", "constant(0.25)")
    causes = diff(UPDATE, doubled.replace("constant(8)", "constant(4)")).causes
    assert [cause.what for cause in causes] == ["constant f32[] 0.125 -> 0.25; in proportion f32[] 8 -> 4"]
    causes = diff(UPDATE, doubled.replace("constant(8)", "constant(5)")).causes
    assert [cause.what for cause in causes] == ["constant f32[] 0.125 -> 0.25", "constant f32[] 8 -> 5"]


def test_what_one_side_has_is_told_with_its_numbers() -> None:
    clamped = UPDATE.replace("divide(m, nb)\n", "divide(m, nb)\n  k = f32[] constant(1.75)\n  kb = f32[4]{0} "
                             "broadcast(k), dimensions={}\n  e = f32[4]{0} maximum(d, kb)\n").replace(
        "subtract(p, d)", "subtract(p, e)")  # fmt: skip
    assert first(UPDATE, clamped) == "+ broadcast, maximum f32[4] x2 with 1.75 in B only"


def test_of_many_operations_the_rarest_and_the_most_frequent_are_named() -> None:
    names = ["multiply", "add", "multiply", "negate", "abs", "add", "floor", "ceil", "sqrt", "tanh", "sine"]
    chain, last = "", "d"
    for k, name in enumerate(names):
        operands = f"{last}, g" if name in ("multiply", "add") else last
        chain += f"  z.{k} = f32[4]{{0}} {name}({operands})\n"
        last = f"z.{k}"
    text = first(
        UPDATE, UPDATE.replace("  ROOT s", f"{chain}  ROOT s").replace("subtract(p, d)", f"subtract(p, {last})")
    )
    assert text.startswith("+ multiply, add, negate, abs, floor, ceil, sqrt, tanh, ... f32[4] x11")


def test_what_is_read_instead_of_what_was_removed_is_told_and_a_bypass_is_none() -> None:
    noisy = UPDATE.replace("divide(m, nb)\n", "divide(m, nb)\n  q = f32[4]{0} parameter(2)\n  z = f32[4]{0} sine(q)\n"
                           "  w = f32[4]{0} cosine(q)\n").replace("ROOT s = f32[4]{0} subtract(p, d)",
                           "v = f32[4]{0} subtract(z, d)\n  ROOT s = (f32[4]{0}, f32[4]{0}) tuple(v, q)")  # fmt: skip
    without = noisy.replace("  z = f32[4]{0} sine(q)\n", "")
    text = first(noisy, without.replace("subtract(z, d)", "subtract(p, d)"))
    assert text == "- sine f32[4] in A only: subtract f32[4] reads parameter f32[4] (p) in B"
    assert first(noisy, without.replace("subtract(z, d)", "subtract(q, d)")) == "- sine f32[4] in A only"


REDUCED = """HloModule m

k {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT r = f32[] add(a, b)
}

ENTRY e {
  p = f32[8]{0} parameter(0)
  i = f32[] constant(0)
  r.1 = f32[] reduce(p, i), dimensions={0}, to_apply=k
  ROOT o = f32[] multiply(r.1, i)
}
"""


def test_another_operation_comes_before_the_number_that_it_begins_with() -> None:
    other = REDUCED.replace("add(a, b)", "maximum(a, b)").replace("constant(0)", "constant(-inf)")
    assert "add f32[] replaced by maximum f32[]" in first(REDUCED, other)


def test_exchanged_operands_come_before_what_stands_behind_them() -> None:
    swapped = UPDATE.replace("multiply(g, cb)", "multiply(cb, g)").replace("constant(8)", "constant(5)")
    assert [cause.what for cause in diff(UPDATE, swapped).causes] == [
        "multiply f32[4]: operands 0 and 1 exchanged",
        "constant f32[] 8 -> 5",
    ]


ORDER = """HloModule m

ENTRY e {
  p = f32[4]{0} parameter(0)
  w = f32[4]{0} parameter(1)
  s = f32[4]{0} sine(p)
  c = f32[4]{0} cosine(w)
  ROOT r = (f32[4]{0}, f32[4]{0}) tuple(s, c)
}
"""


@pytest.mark.parametrize(("behind", "leads"), [("c", "cosine"), ("p", "sine")])
def test_what_lies_behind_another_cause_in_one_graph_alone_is_told_behind_it(behind: str, leads: str) -> None:
    other = ORDER.replace("  s = f32[4]{0} sine(p)\n", "").replace(
        "cosine(w)", f"tan(w)\n  n = f32[4]{{0}} negate({behind})\n  s = f32[4]{{0}} floor(n)"
    )
    assert first(ORDER, other).startswith(f"{leads} f32[4] replaced by")


SCALED = """HloModule m

ENTRY e {
  p = f32[] parameter(0)
  w = f32[] parameter(1)
  s = f32[] add(p, w)
  k = f32[] constant(1)
  ROOT r = f32[] maximum(s, k)
}
"""


@pytest.mark.parametrize(("factor", "leads"), [("2", "constant f32[] 1 -> 2"), ("3", "+ multiply f32[] with 3")])
def test_a_number_comes_before_the_operation_that_it_takes_away(factor: str, leads: str) -> None:
    other = SCALED.replace("add(p, w)", f"add(p, w)\n  f = f32[] constant({factor})\n  t = f32[] multiply(s, f)")
    assert first(SCALED, other.replace("maximum(s", "maximum(t").replace("constant(1)", "constant(2)")).startswith(
        leads
    )


ROBUST = """HloModule m

ENTRY e {
  p = f32[] parameter(0)
  w = f32[] parameter(1)
  d = f32[] constant(0.4)
  x = f32[] multiply(p, d)
  k = f32[] constant(-0.4)
  y = f32[] multiply(w, k)
  ROOT r = f32[] add(x, y)
}
"""


def test_a_number_explains_no_region_of_many_operations_that_one_replaces() -> None:
    other = ROBUST.replace("constant(-0.4)", "constant(1)").replace("multiply(p", "divide(p")
    many = ROBUST.replace("multiply(p, d)", "sqrt(n)").replace(
        "(0.4)", "(0.4)\n  a = f32[] abs(p)\n  m = f32[] minimum(a, d)\n  n = f32[] negate(m)"
    )
    assert first(many, other).startswith("abs, minimum, negate, sqrt f32[] x4 replaced by divide f32[]")
    # A number that only one of the graphs has is another matter.
    assert first(many, other.replace("(0.4)", "(2)")).startswith("constant f32[] -0.4 -> 1")
    # 0.4 times, then -1 times, which is a negation.
    negated = ROBUST.replace("multiply(p, d)", "negate(p)").replace("constant(-0.4)", "constant(1)")
    assert first(ROBUST, negated).startswith("constant f32[] -0.4 -> 1")


CALLED = (
    SCALED.replace("ENTRY e", "k")
    + """
ENTRY e {
  p = f32[4]{0} parameter(0)
  i = f32[] constant(0)
  ROOT r.1 = f32[] reduce(p, i), dimensions={0}, to_apply=k
}
"""
)


def test_causes_of_a_called_computation_keep_their_order() -> None:
    other = CALLED.replace("add(p, w)", "add(p, w)\n  f = f32[] constant(2)\n  t = f32[] multiply(s, f)")
    assert "constant f32[] 1 -> 2" in first(CALLED, other.replace("m(s", "m(t").replace("constant(1)", "constant(2)"))


STARTED = """HloModule m

ENTRY e {
  p = f32[] parameter(0)
  w = f32[] parameter(1)
  k = f32[] constant(4)
  s = f32[] subtract(p, k)
  f = f32[] floor(s)
  t = f32[] tanh(f)
  ROOT r = f32[] multiply(t, w)
}
"""


def test_a_computation_comes_before_the_number_that_it_begins_with() -> None:
    other = STARTED.replace("constant(4)", "constant(0.5)")
    several = other.replace(
        "tanh(f)", "tanh(f)\n  g = f32[] cosine(t)\n  h = f32[] exponential(g)\n  i = f32[] sqrt(h)"
    )
    assert first(STARTED, other) == "constant f32[] 4 -> 0.5"
    assert first(STARTED, several.replace("multiply(t", "multiply(i")).startswith("+ cosine, exponential, sqrt")
    # A number whose result is read elsewhere, too, is a cause of its own.
    shared = [text.replace("multiply(t, w)", "multiply(t, f)") for text in (STARTED, several)]
    assert first(shared[0], shared[1].replace("multiply(t", "multiply(i")) == "constant f32[] 4 -> 0.5"


NORMED = """class GraphModule(torch.nn.Module):
    def forward(self, L_x_: "f32[2, 4]", L_n_: "i64[]", L_m_: "f32[4]", L_v_: "f32[4]"):
        # File: /net.py:9 in forward, code: return F.batch_norm(x)
        add_: "i64[]" = L_n_.add_(1);  L_n_ = add_ = None
        y: "f32[2, 4]" = torch.nn.functional.batch_norm(L_x_, L_m_, L_v_, None, None, True, 0.1, 1e-05)
        return (y,)
"""


def test_a_batch_norm_that_is_evaluated_counts_no_batches() -> None:
    evaluated = re.sub(r".*add_.*\n", "", NORMED).replace(' L_n_: "i64[]",', "").replace("True", "False")
    (cause,) = diff(NORMED, evaluated).causes
    assert "True, 0.1" in cause.what
    assert "False, 0.1" in cause.what
    # A counter at another line is a cause of its own.
    apart = NORMED.replace("        y:", "        # File: /net.py:11 in forward, code: y\n        y:")
    evaluated = evaluated.replace("/net.py:9", "/net.py:11")
    assert [c.kind for c in diff(apart, evaluated).causes] == ["parameter_removed", "state_changed"]


BACKWARD = """class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[4]", mul: "f32[2, 4]", rsqrt: "f32[2, 1]", tangents_1: "f32[2, 4]"):
        # File: /net.py:9 in forward, code: return self.norm(x)
        back = torch.ops.aten.native_layer_norm_backward.default(tangents_1, mul, [4], rsqrt, rsqrt, primals_1, None, [True, True, False])
        x: "f32[2, 4]" = back[0]
        w: "f32[4]" = back[1]
        s: "f32[4]" = torch.ops.aten.sum.dim_IntList(tangents_1, [0])
        return (x, w, s)
"""


def test_gradients_that_are_asked_for_are_a_cause_where_nothing_else_is() -> None:
    fewer = BACKWARD.replace("[True, True, False]", "[False, True, False]")
    assert "[False, True, False]" in first(BACKWARD, fewer)
    (cause,) = diff(BACKWARD, fewer.replace("sum.dim_IntList", "mean.dim")).causes
    assert "mean" in cause.what


def test_what_a_backward_computes_is_told_beside_what_is_saved_for_it_at_its_line() -> None:
    saved = BACKWARD.replace(' rsqrt: "f32[2, 1]",', ' rsqrt: "f32[2, 1]", sin: "f32[2, 4]",').replace(
        "        s:", '        t: "f32[2, 4]" = torch.ops.aten.mul.Tensor(sin, sin)\n        s:'
    )
    other = BACKWARD.replace("return (x, w", "return (f, e").replace(
        "        s:",
        '        e: "f32[4]" = torch.ops.aten.exp.default(w)\n'
        '        f: "f32[2, 4]" = torch.ops.aten.exp.default(x)\n        s:',
    )
    text = " ".join(cause.what for cause in diff(saved.replace("List(tangents_1", "List(t"), other).causes)
    assert "aten.exp.default" in text


def test_an_input_more_that_needs_no_gradient_is_named() -> None:
    a, b = (BACKWARD.replace("return (x, w, s)", f"return (x, None, w, {more}s)") for more in ("", "None, "))
    (cause,) = diff(a, b).causes
    assert cause.what == "+ 1 output None in B only: gradients of inputs that need none"


def test_what_computes_nothing_is_a_cause_only_where_nothing_else_is() -> None:
    detached = BACKWARD.replace(
        "        s:", '        d: "f32[2, 4]" = torch.ops.aten.detach.default(tangents_1)\n        s:'
    ).replace("List(tangents_1", "List(d")
    assert first(BACKWARD, detached) == "+ aten.detach.default f32[2,4] in B only"
    (cause,) = diff(BACKWARD, detached.replace("sum.dim_IntList(d, [0])", "amax.default(d, [0])")).causes
    assert "amax" in cause.what


def test_numbers_of_operations_that_one_side_has_are_told_in_fx() -> None:
    masked = BACKWARD.replace(
        "        s:",
        '        c: "f32[2, 4]" = torch.ops.aten.cos.default(tangents_1)\n'
        '        d: "f32[2, 4]" = torch.ops.aten.mul.Tensor(c, 0.25)\n        s:',
    ).replace("List(tangents_1", "List(d")
    assert first(BACKWARD, masked) == "+ aten.cos.default, aten.mul.Tensor f32[2,4] x2 with 0.25 in B only"


def test_parameters_without_names_that_have_another_dtype_keep_their_places() -> None:
    a = UPDATE.replace("  p = ", "  Arg_0.1 = ").replace("(p,", "(Arg_0.1,")
    b = a.replace("Arg_0.1 = f32", "Arg_0.1 = bf16").replace(
        "  ROOT", "  w = f32[4]{0} convert(Arg_0.1)\n  ROOT"
    ).replace("subtract(Arg_0.1", "subtract(w")  # fmt: skip
    assert first(a, b) == "parameter 0 f32[4] -> bf16[4]"


def test_a_number_stands_where_the_operation_does_that_reads_another() -> None:
    early = REDUCED.replace(
        "  r.1 = f32[] reduce(p", "  b = f32[8]{0} broadcast(i), dimensions={}\n  m = f32[8]{0} maximum(p, b)\n"
        "  r.1 = f32[] reduce(m"
    ).replace("multiply(r.1, i)", "multiply(r.1, r.1)")  # fmt: skip
    other = early.replace("add(a, b)", "maximum(a, b)").replace(
        "  r.1 = f32[] reduce(m, i)", "  j = f32[] constant(-inf)\n  r.1 = f32[] reduce(m, j)"
    )
    assert "add f32[] replaced by maximum f32[]" in first(early, other)


def _stacked(size: int, order: tuple[str, str] = ("f32[6]", "f32[3,SIZE]"), work: str = "sine") -> str:
    """A loop that stacks slices of what it is given; `order` is that of what it carries beside its counter."""
    first, second = (f"{shape.replace('SIZE', str(size))}{{0}}".replace("]{0}", "]") for shape in order)
    state = f"(s32[], {first}, {second})"
    x, a = (1, 2) if order[0] == "f32[6]" else (2, 1)
    values = ("x", "new") if x == 1 else ("new", "x")
    start = ("p", "fill") if x == 1 else ("fill", "p")
    return f"""HloModule m

body {{
  t = {state} parameter(0)
  i = s32[] get-tuple-element(t), index=0
  x = f32[6] get-tuple-element(t), index={x}
  a = f32[3,{size}] get-tuple-element(t), index={a}
  cut = f32[{size}] slice(x), slice={{[0:{size}]}}
  y = f32[{size}] {work}(cut)
  row = f32[1,{size}] reshape(y)
  zero = s32[] constant(0)
  new = f32[3,{size}] dynamic-update-slice(a, row, i, zero)
  one = s32[] constant(1)
  next = s32[] add(i, one)
  ROOT r = {state} tuple(next, {values[0]}, {values[1]})
}}

condition {{
  t.1 = {state} parameter(0)
  i.1 = s32[] get-tuple-element(t.1), index=0
  last = s32[] constant(3)
  ROOT go = pred[] compare(i.1, last), direction=LT
}}

ENTRY e {{
  p = f32[6] parameter(0)
  z = f32[] constant(0)
  fill = f32[3,{size}] broadcast(z), dimensions={{}}
  s = s32[] constant(0)
  state = {state} tuple(s, {start[0]}, {start[1]})
  w = {state} while(state), condition=condition, body=body
  ROOT out = f32[3,{size}] get-tuple-element(w), index={a}
}}
"""


def test_a_size_that_begins_in_a_loop_is_told_there() -> None:
    assert "slice f32[2] slice={[0:2]} -> slice={[0:4]}" in first(_stacked(2), _stacked(4))


def test_what_a_loop_carries_in_another_order_hides_nothing_that_it_computes() -> None:
    swapped = ("f32[3,SIZE]", "f32[6]")
    assert first(_stacked(2), _stacked(2, swapped, "cosine")).endswith("sine f32[2] replaced by cosine f32[2]")
