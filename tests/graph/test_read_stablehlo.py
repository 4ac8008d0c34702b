"""StableHLO and, beside jaxlib's own parser, HLO. Needs jaxlib, which `pip install 'retrograd[jax]'` brings."""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path

import pytest

from retrograd.errors import GraphError, MissingExtraError
from retrograd.graph.ir import Graph
from retrograd.graph.readers import parse, read

DATA = Path(__file__).parent / "data"
MODULE = """module @m {
  func.func public @main(%arg0: tensor<3xf32> {tf.aliasing_output = 0 : i32}, %arg1: tensor<3xf32>) -> tensor<3xf32> {
    %0 = stablehlo.add %arg0, %arg1 : tensor<3xf32>
    return %0 : tensor<3xf32>
  }
}
"""
LOCATED = MODULE.replace("{tf.aliasing_output = 0 : i32}", "loc(unknown)")  # what only jaxlib reads
needs_jaxlib = pytest.mark.skipif(
    importlib.util.find_spec("jaxlib") is None, reason="jaxlib reads StableHLO; it comes with retrograd[jax]"
)


def test_without_jaxlib_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from retrograd.graph.readers import stablehlo

    monkeypatch.setattr(stablehlo, "find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'retrograd\[jax\]'"):
        parse(LOCATED)
    assert parse(MODULE)  # is read without


def _lines(graph: Graph) -> list[object]:
    return [(c.name, c.root, [(repr(i), i.called) for i in c.instructions]) for c in graph]


@needs_jaxlib
def test_the_same_step_lowered_again_is_the_same_and_permuted_arguments_move() -> None:
    base, again, dead, perm = (
        read(DATA / "jax" / f"{n}.stablehlo.mlir.gz")[0] for n in ("base", "again", "dead", "perm")
    )
    assert _lines(base) == _lines(again) == _lines(dead) != _lines(perm)
    shapes = [[g.main.instructions[at].shape for at in g.main.parameters] for g in (base, perm)]
    assert shapes[0] != shapes[1]
    assert sorted(shapes[0]) == sorted(shapes[1])
    assert sorted(i.opcode for i in base.main.instructions) == sorted(i.opcode for i in perm.main.instructions)


@needs_jaxlib
def test_complex_numbers_which_the_bindings_have_no_class_for() -> None:
    body = MODULE.replace("stablehlo.add %arg0, %arg1", "stablehlo.constant dense<(2.0,1.0)>").replace(
        "3xf32", "complex<f32>"
    )
    [graph] = parse(body.replace("{tf.aliasing_output = 0 : i32}", ""))
    assert graph.main.instructions[2].attrs == "(2.000000e+00,1.000000e+00)"


@needs_jaxlib
def test_regions_collectives_and_captured_values() -> None:
    [graph] = read(DATA / "jax" / "sharded.stablehlo.mlir.gz")
    opcodes = [i.opcode for c in graph for i in c.instructions]
    assert {"all-gather", "reduce-scatter", "while", "conditional", "call"} <= set(opcodes)
    body = next(c for c in graph if any(i.opcode == "while" for i in c.instructions))
    named = {i.opcode: i for i in body.instructions}
    assert [attribute for attribute, _ in named["while"].called] == ["condition", "body"]
    assert named["all-gather"].attrs == "all_gather_dim=0, replica_groups={{0,1}}, use_global_device_ids=unit, channel"
    branch = graph.computations[named["conditional"].called[0][1]]
    assert len(named["conditional"].operands) == 2  # which branch, and what both use from outside
    assert [i.opcode for i in branch.instructions] == ["parameter", "sine"]
    assert named["compare"].line == 21


@needs_jaxlib
def test_places_come_from_locations() -> None:
    [graph] = read(DATA / "fresh" / "block.loc.stablehlo.mlir.gz")
    places = {str(graph.where(i)) for c in graph for i in c.instructions}
    assert "dump_jax.py:25" in places
    assert any(graph.where(i).op.startswith("jit(train)/") for i in graph.main.instructions)
    assert graph.header["input_output_alias"].startswith("{ {0}: (0, {}, may-alias)")


@needs_jaxlib
@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (MODULE.replace("%arg1 :", "%arg7 :"), 3, "use of undeclared SSA value"),
        (MODULE.replace("stablehlo.add", "stablehlo.frob"), 3, "frob"),
        (MODULE[:-20], 4, "this is no StableHLO"),
        (MODULE + "(" * 100_000, 7, "brackets nest more than 200 deep"),
        ("module @m {\n}\n", 1, "no public function"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(text: str, line: int, words: str) -> None:
    with pytest.raises(GraphError, match=rf"^dump, line {line}: .*{words}"):
        parse(text, "dump")


@needs_jaxlib
def test_a_parser_that_dies_is_an_error_and_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    from retrograd.core import subprocesses

    real = subprocesses.Child
    program = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    monkeypatch.setattr(subprocesses, "Child", lambda command: real([command[0], "-c", program]))
    with pytest.raises(
        GraphError, match=r"^dump, line 1: jaxlib's parser did not survive this text .killed by SIGSEGV"
    ):
        parse(LOCATED, "dump")


@needs_jaxlib
@pytest.mark.parametrize(
    "path", sorted(DATA.glob("*/*.hlo.txt.gz")), ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_names_opcodes_and_operands_are_those_that_jaxlib_reads(path: Path) -> None:
    hlo = pytest.importorskip("jaxlib.xla_client", reason="jaxlib's own parser").hlo
    theirs = {c.name: c for c in hlo.hlo_module_from_text(gzip.decompress(path.read_bytes()).decode()).computations()}
    [graph] = read(path)
    assert set(theirs) == set(graph.computations)
    opcodes: dict[str, str] = {}
    for name, computation in theirs.items():
        ours = graph.computations[name].instructions
        by_name = {i.name: i for i in ours}
        instructions = list(computation.instructions())
        assert {i.name for i in instructions} == set(by_name)
        for their in instructions:
            own = by_name[their.name]
            assert [ours[at].name for at in own.operands] == [o.name for o in their.operands()]
            assert opcodes.setdefault(str(their.opcode), own.opcode) == own.opcode
    assert len(set(opcodes.values())) == len(opcodes)
