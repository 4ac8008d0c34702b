"""What comes and goes in order, what stands in circles, what a forward saves, what is trained, numbers that rounded."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from retrograd import graph
from retrograd.graph.canonical import forms
from retrograd.graph.diffing.downstream import _firsts_of_circles
from retrograd.graph.diffing.literals import changed
from retrograd.graph.diffing.matching import in_order

TRUST = Path(__file__).parent / "data" / "trust"


def told(a: str, b: str) -> list[str]:
    return [cause.what for cause in graph.diff(graph.parse(a, "A")[0], graph.parse(b, "B")[0]).causes]


def fx(parameters: str, body: str) -> str:
    lines = body.strip().replace("; ", "\n        ")
    return f"class GraphModule(torch.nn.Module):\n    def forward(self, {parameters}):\n        {lines}\n"


def taking(shapes: str) -> str:
    """A program of parameters of these shapes, whose names say nothing."""
    lines = [f"  p.{k} = f32[{shape}] parameter({k})" for k, shape in enumerate(shapes)]
    lines += [f"  n.{k} = f32[{shape}] negate(p.{k})" for k, shape in enumerate(shapes)]
    returned = ", ".join(f"n.{k}" for k in range(len(shapes)))
    types = ", ".join(f"f32[{shape}]" for shape in shapes)
    return "HloModule m\n\nENTRY e {\n" + "\n".join(lines) + f"\n  ROOT r = ({types}) tuple({returned})\n}}\n"


@pytest.mark.parametrize(
    ("before", "after", "pairs"),
    [
        ("25434", "2434", [(0, 0), (2, 1), (3, 2), (4, 3)]),  # one went
        ("2434", "25434", [(0, 0), (1, 2), (2, 3), (3, 4)]),  # one came
        ("23434", "2434", []),  # of several of one shape: nobody knows which
        ("2343", "2353", []),  # another shape: nobody knows
    ],
)
def test_parameters_of_which_some_come_or_go_keep_their_order(
    before: str, after: str, pairs: list[tuple[int, int]]
) -> None:
    a, b = (graph.parse(taking(shapes), shapes)[0] for shapes in (before, after))
    form_a, form_b = forms(a)[a.entry], forms(b)[b.entry]
    assert in_order(form_a, form_b) == pairs


def test_of_causes_before_each_other_the_first_in_the_program_is_told() -> None:
    sides = [[[7], [3], [9], [12]], [[3], [7], [], [12]]]
    assert _firsts_of_circles({0, 1}, {0: [1], 1: [0]}, sides) == {0}
    # What is behind the circle follows from it, and what is behind a cause that is told follows from that one.
    assert _firsts_of_circles({0, 1, 2}, {0: [1], 1: [0], 2: [1]}, sides) == {0}
    assert _firsts_of_circles({0, 1}, {0: [1], 1: [3]}, sides) == set()


FORWARD = (
    'mm: "f32[4, 4]" = torch.ops.aten.mm.default(primals_1, primals_2); '
    'tanh: "f32[4, 4]" = torch.ops.aten.tanh.default(mm); '
    'sin: "f32[4, 4]" = torch.ops.aten.sin.default(tanh); return (sin, {})'
)
PRIMALS = 'primals_1: "f32[4, 4]", primals_2: "f32[4, 4]"'


def test_a_forward_that_saves_arguments_and_not_what_is_made_of_them_is_one_of_remat() -> None:
    saved = fx(PRIMALS, FORWARD.format("mm, tanh"))
    assert told(saved, fx(PRIMALS, FORWARD.format("primals_1, primals_2"))) == [
        "remat in B: mm, tanh are not saved, to be computed again"
    ]
    # A frozen weight saves less and nothing more; another function saves other values.
    assert not told(saved, fx(PRIMALS, FORWARD.format("tanh")))[0].startswith("remat")
    other = FORWARD.replace("aten.sin.default", "aten.cos.default").format("primals_1, primals_2")
    assert not told(saved, fx(PRIMALS, other))[0].startswith("remat")


def test_a_buffer_that_became_a_parameter_is_not_the_same() -> None:
    def held(name: str) -> str:
        return fx(f'L_{name}_: "f32[4]"', f'sin: "f32[4]" = torch.sin(L_{name}_); return (sin,)')

    buffer = held("self_modules_leaky_buffers_beta")
    (what,) = told(buffer, held("self_modules_leaky_parameters_beta"))
    assert "is a buffer -> a parameter of its module" in what
    assert not told(buffer, held("self_modules_other_buffers_decay"))  # another name is nothing


@pytest.mark.parametrize(
    ("shape", "pair", "said"),
    [
        ("f32[]", ("0.0300000012", "0.0449999981"), ("0.03", "0.045")),
        ("f32[]", ("0.0300000012", "0.0299999993"), ("0.030000001", "0.03")),  # told apart as they are
        ("f32[]", ("0.333333343", "0.2"), ("0.33333334", "0.2")),  # of no few digits
        ("bf16[]", ("0.0300293", "0.5"), ("0.03", "0.5")),
        ("f32[]", ("inf", "nan"), ("inf", "nan")),
    ],
)
def test_a_number_that_arithmetic_rounded_is_told_as_people_write_it(
    shape: str, pair: tuple[str, str], said: tuple[str, str]
) -> None:
    assert changed(shape, *pair, 60) == said


def test_loops_with_an_operation_that_the_other_graph_has_not_compute_nothing_again() -> None:
    a, b = (gzip.decompress((TRUST / name).read_bytes()).decode() for name in ("tf.hlo.txt.gz", "tf_remat.hlo.txt.gz"))
    assert told(a, b)[0].startswith("remat")
    loops, entry, rest = a.partition("ENTRY")
    masked = loops.replace("s32[] add(", "s32[] atan2(", 1) + entry + rest
    assert masked != a
    assert not any(what.startswith("remat") for what in told(masked, b))
    # What is computed in another way beside the loops is told beside it.
    beside = loops + entry + rest.replace(" multiply(", " atan2(", 1)
    assert told(beside, b)[0].startswith("remat")


LOOP = """HloModule m

body {{
  t = {carried} parameter(0)
  i = s32[] get-tuple-element(t), index=0
  k = s32[] constant(1)
  j = s32[] add(i, k)
{reads}
  d = f32[4] multiply(a, {factor})
  ROOT o = {carried} tuple(j, {results})
}}

test {{
  t = {carried} parameter(0)
  i = s32[] get-tuple-element(t), index=0
  n = s32[] constant(5)
  ROOT c = pred[] compare(i, n), direction=LT
}}

ENTRY e {{
  x = f32[4] parameter(0)
  y = f32[4] parameter(1)
  z = s32[] constant(0)
  s = {carried} tuple(z, {given})
  w = {carried} while(s), condition=test, body=body
  ROOT r = f32[4] get-tuple-element(w), index={index}
}}
"""


def loop(names: str, factor: str) -> str:
    carried = f"(s32[], {', '.join('f32[4]' for _ in names)})"
    reads = "\n".join(f"  {name} = f32[4] get-tuple-element(t), index={k}" for k, name in enumerate(names, 1))
    results = {"a": "d", "b": "b", "c": "u"}
    reads += "\n  u = f32[4] tanh(c)" if "c" in names else ""
    return LOOP.format(
        carried=carried, reads=reads, factor=factor, results=", ".join(results[n] for n in names),
        given=", ".join({"a": "x", "b": "y", "c": "x"}[n] for n in names), index=1 + names.index("a"),
    )  # fmt: skip


def test_which_of_the_values_that_another_loop_carries_fewer_of_is_read_is_no_cause() -> None:
    assert not any("instead of parameter" in what for what in told(loop("bca", "c"), loop("ac", "c")))
    assert any("instead of parameter" in what for what in told(loop("abc", "b"), loop("abc", "c")))
