"""HLO text: everything that torch_xla 2.9 and current XLA print. `features.hlo.txt` is accepted by jaxlib 0.10.2."""

from __future__ import annotations

from pathlib import Path

import pytest

from retrograd.errors import GraphError
from retrograd.graph import diff
from retrograd.graph.ir import Graph, Instruction
from retrograd.graph.readers import parse, read

DATA = Path(__file__).parent / "data"

# Instructions over all computations and parameters of the entry, as counted when the graphs were recorded.
COUNTS = {
    "base_step0": (1913, None),
    "base_step1": (2068, None),
    "bucket_step1": (1936, None),
    "shared_step1": (1914, None),
    "tied_bucket_step0": (1958, 28),
    "tied_bucket_step1": (2071, 45),
    "tied_bucket_step2": (2270, 57),
    "tied_bucket_step4": (2320, 62),
}


@pytest.fixture(scope="module")
def features() -> Graph:
    return read(DATA / "features.hlo.txt")[0]


def _named(graph: Graph) -> dict[str, Instruction]:
    return {instruction.name: instruction for instruction in graph.main.instructions}


def _operands(graph: Graph, name: str) -> list[str]:
    return [graph.main.instructions[at].name for at in _named(graph)[name].operands]


@pytest.mark.parametrize("name", COUNTS)
def test_recorded_steps_have_as_many_instructions_as_were_recorded(name: str) -> None:
    [graph] = read(DATA / "xla" / f"{name}.hlo.txt.gz")
    instructions, parameters = COUNTS[name]
    assert len(graph) == instructions
    assert parameters is None or len(graph.main.parameters) == parameters
    assert graph.main.instructions[graph.main.root].opcode == "tuple"


def test_header(features: Graph) -> None:
    assert features.name == "jit_everything"
    assert features.header["input_output_alias"] == "{ {0}: (0, {}, may-alias), {1, 0}: (1, {}, must-alias) }"
    assert features.header["buffer_donor"] == "{ (2, {}) }"
    assert features.header["frontend_attributes"] == '{xla.sdy.meshes={mesh = #sdy.mesh<["d"=2]>},note="a}b"}'
    assert (features.header["replica_count"], features.header["num_partitions"]) == ("8", "2")


@pytest.mark.parametrize(
    ("name", "shape", "attrs"),
    [
        ("a", "f32[8,16]", "0"),
        ("b", "f32[<=8]", "1"),
        ("t", "token[]", "2"),
        ("small", "f8e4m3fn[8]", ""),
        ("nibble", "s4[8]", ""),
        ("matrix", "s32[2,2]", "{ { 1, 2 }, { 3, 4 } }"),
        ("elided", "f32[100,100]", "{...}"),
        ("one", "f32[]", "1e-06"),
        ("rows", "s32[4]", "iota_dimension=0"),
        ("lt", "pred[]", "direction=LT"),
        ("cut", "f32[4]", "slice={[0:4]}"),
        ("padded", "f32[194]", "padding=0_190"),
        ("dot", "f32[8,8]", "lhs_contracting_dims={1}, rhs_contracting_dims={1}"),
        (
            "gathered",
            "f32[16]",
            "channel, dimensions={0}, replica_groups={{0,2,4,6},{1,3,5,7}}, use_global_device_ids=true",
        ),
        ("summed", "f32[8]", "channel, replica_groups={{0,1},{2,3}}"),
        ("both", "(f32[4],f32[4])", "channel, dimensions={0}, replica_groups={}"),
        ("first", "f32[4]", "0"),
        ("start", "((f32[8],f32[8]),f32[8],s32[])", "channel, replica_groups={{0,1,2,3,4,5,6,7}}"),
        ("astart", "((f32[8]),f32[8],u32[])", ""),
        ("fusion", "f32[8]", ""),
        ("out", "(f32[8,16],(f32[8],token[]))", ""),
    ],
)
def test_shapes_and_attributes(features: Graph, name: str, shape: str, attrs: str) -> None:
    found = _named(features)[name]
    assert (found.shape, found.attrs) == (shape, attrs)


def test_custom_calls_keep_their_target_and_configuration(features: Graph) -> None:
    attrs = _named(features)["mlir"].attrs
    assert 'custom_call_target="my[{(target"' in attrs
    assert 'backend_config={x = "a}b", y = [1, 2], z = {k = 1}}' in attrs


@pytest.mark.parametrize(
    ("name", "called"),
    [
        ("closed_call.1", ("to_apply", "closed_call.1")),
        ("summed", ("to_apply", "closed_call.1")),
        ("astart", ("calls", "wrapped")),
        ("fusion", ("calls", "fused")),
    ],
)
def test_called_computations(features: Graph, name: str, called: tuple[str, str]) -> None:
    assert _named(features)[name].called == (called,)


def test_operands_with_shapes_comments_and_without_percent(features: Graph) -> None:
    assert _operands(features, "dot") == ["a", "a"]
    assert _operands(features, "first") == ["both"]
    assert _operands(features, "out") == ["a", "barrier"]
    assert _operands(features, "adone") == ["aupdate"]


def test_root_may_stand_anywhere_and_parameters_in_any_order(features: Graph) -> None:
    fused = features.computations["fused"]
    assert fused.instructions[fused.root].name == "neg"
    assert [fused.instructions[at].name for at in fused.parameters] == ["p", "q"]
    assert features.main.instructions[features.main.root].name == "out"
    assert features.main.instructions[-1].name == "after"


def test_places_from_metadata_and_from_stack_frames(features: Graph) -> None:
    inner = features.where(_named(features)["small"])
    assert (inner.file, inner.line, inner.op) == ("/home/user/a b/c,d.py", 7, "convert")  # jax's own frame is skipped
    assert [line for _, line, _ in inner.frames] == [99, 7, 30]  # the printed parent is the true one plus 1
    quoted = features.where(features.computations["fused"].instructions[1])
    assert (quoted.op, quoted.line) == ('jit(f)/{a}, "x"=(1)', 3)
    assert str(features.where(_named(features)["mlir"])) == "t.py:5"
    assert str(features.where(_named(features)["text"])) == "s.py:12"


def test_line_numbers_are_those_of_the_file(features: Graph) -> None:
    lines = (DATA / "features.hlo.txt").read_text().split("\n")
    for computation in features:
        for instruction in computation.instructions:
            assert f"{instruction.name} = " in lines[instruction.line - 1]


def test_windows_line_ends_and_percent_signs_change_nothing() -> None:
    text = (DATA / "features.hlo.txt").read_text()
    plain = [repr(i) for c in parse(text)[0] for i in c.instructions]
    for other in (text.replace("\n", "\r\n"), text.replace("%", ""), text.replace("\n", "  \n")):
        assert [repr(i) for c in parse(other)[0] for i in c.instructions] == plain


def _module(*lines: str) -> str:
    return "HloModule m\n\nadd {\n  a = f32[] parameter(0)\n}\n\nENTRY e {\n" + "\n".join(lines) + "\n}\n"


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("HloModule m", 2, "no computation"),
        ("HloModule m\n\nENTRY e {\n  a = f32[] parameter(0)", 5, "not closed"),
        (_module("  a = f32[] parameter(0)", "  b = f32[] add(a, c)"), 9, "operand c is not defined"),
        (_module("  a = f32[] parameter(0)", "  a = f32[] negate(a)"), 9, "second instruction"),
        (_module("  a = f32[] parameter(1)"), 7, "no parameter(0)"),
        (_module("  a = f32[] parameter(x)"), 8, "has a number"),
        (_module("  a = f32[] parameter(99999999999999999999)"), 8, "has a number"),
        (_module("  a = f32[] parameter(0)", "  b = f32[] parameter(0)"), 9, "second time"),
        (_module("  a = f32[] parameter(0)", "  b = f32[] call(a), to_apply=nowhere"), 9, "not in the module"),
        (_module("  a = f32[] parameter(0)", "  b = f32[] call(a), to_apply=e"), 9, "not defined above"),
        (_module("  a = f32[] parameter(0)", "  b = f32[] negate(a"), 9, "not complete"),
        (_module("  a = f32[] parameter(0)", '  b = f32[] negate(a), x="y'), 9, "not closed"),
        (_module("  a = f32[] parameter(0)", "  b = negate a"), 9, "not complete"),
        (_module("  a = f32[] parameter(0)", "  hello world"), 9, "no instruction"),
        (_module(), 7, "is empty"),
        (_module("  a = f32[] parameter(0)") + "trailing words\n", 10, "neither an instruction nor"),
        (_module("  a = f32[] parameter(0)") + "add {\n  a = f32[] parameter(0)\n}\n", 10, "a second computation"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(text: str, line: int, words: str) -> None:
    with pytest.raises(GraphError, match=rf"^dump, line {line}: .*{words.replace('(', '.').replace(')', '.')}"):
        parse(text, "dump")


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("[2,4]<=[8]", "{{0,1,2,3},{4,5,6,7}}"),
        ("[4,2]<=[2,4]T(1,0)", "{{0,4},{1,5},{2,6},{3,7}}"),
        ("[1,1]<=[1]", "{{0}}"),
        ("[0,0]<=[0]", "[0,0]<=[0]"),
        ("[2,2]<=[8]", "[2,2]<=[8]"),
        ("[256,256]<=[65536]", "[256,256]<=[65536]"),
    ],
)
def test_replica_groups_in_iota_form(written: str, groups: str) -> None:
    [graph] = parse(_module("  a = f32[] parameter(0)", f"  b = f32[] all-reduce(a), replica_groups={written}"))
    assert graph.main.instructions[1].attrs == f"replica_groups={groups}"


def test_computations_that_are_called_without_a_percent_sign_are_compared() -> None:
    pool = """HloModule m

pick {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = pred[] compare(a, b), direction=GE
}

sum {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}

ENTRY main {
  x = f32[8]{0} parameter(0)
  s = f32[4]{0} parameter(1)
  z = f32[] constant(0)
  ROOT r = f32[8]{0} select-and-scatter(x, s, z), window={size=2 stride=2}, select=pick, scatter=sum
}
"""
    [graph] = parse(pool, "A")
    assert [i.called for i in graph.main.instructions][-1] == (("select", "pick"), ("scatter", "sum"))
    other = parse(pool.replace("pick", "choose").replace("sum", "plus"), "B")[0]
    assert diff(graph, other)
    for edit in (("direction=GE", "direction=LE"), ("add(a", "subtract(a")):
        assert diff(graph, parse(pool.replace(*edit), "B")[0]).verdict == "different"


def test_attributes_of_one_text_are_read_by_what_they_belong_to() -> None:
    """Texts are read once: an attribute is an argument of a custom call, and to another operation how it is compiled."""
    same = 'frontend_attributes={k="1"}, metadata={op_name="f"}'
    text = "HloModule m\n\nENTRY e {\n  p = f32[4]{0} parameter(0)\n"
    lines = [
        f"  a = f32[4]{{0}} copy(p), {same}\n",
        f"  b = f32[4]{{0}} custom-call(p), {same}\n",
    ]
    for first, second in (lines, lines[::-1]):
        [graph] = parse(f"{text}{first}{second}  ROOT r = (f32[4]{{0}}, f32[4]{{0}}) tuple(a, b)\n}}\n", "A")
        by_name = {i.name: i for i in graph.main.instructions}
        assert (by_name["a"].attrs, by_name["a"].placement) == ("", 'frontend_attributes={k="1"}')
        assert (by_name["b"].attrs, by_name["b"].placement) == ('frontend_attributes={k="1"}', "")
