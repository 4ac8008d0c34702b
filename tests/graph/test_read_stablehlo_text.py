"""StableHLO read without jaxlib, beside jaxlib's parser: the same graph, or None for what has another form."""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from retrograd.errors import GraphError
from retrograd.graph.ir import Graph
from retrograd.graph.readers import parse, stablehlo_text

DATA = Path(__file__).parent / "data"
DUMPS = sorted(DATA.glob("*/*.mlir.gz"))
pytestmark = pytest.mark.skipif(find_spec("jaxlib") is None, reason="jaxlib is what the reader is compared with")
MODULE = """module @m attributes {mhlo.num_partitions = 1 : i32} {
  func.func public @main(%arg0: tensor<3x2xf32>, %arg1: tensor<3x2xf32>) -> (tensor<3x2xf32> {jax.result_info = ""}) {
    %cst = stablehlo.constant dense<5.000000e-01> : tensor<f32>
    %0 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<3x2xf32>
    %1 = stablehlo.add %arg0, %0 : tensor<3x2xf32>
    %2 = stablehlo.transpose %1, dims = [1, 0] : (tensor<3x2xf32>) -> tensor<2x3xf32>
    %3 = stablehlo.reshape %2 : (tensor<2x3xf32>) -> tensor<3x2xf32>
    %4 = stablehlo.compare LT, %3, %arg1, FLOAT : (tensor<3x2xf32>, tensor<3x2xf32>) -> tensor<3x2xi1>
    %5 = stablehlo.select %4, %3, %arg1 : tensor<3x2xi1>, tensor<3x2xf32>
    return %5 : tensor<3x2xf32>
  }
}
"""


def by_mlir(text: str) -> Graph:
    from retrograd.graph.readers import mlir

    return mlir.parse(text)


def contents(graph: Graph) -> Any:
    """All of a graph but names of values, which MLIR may number anew."""
    computations = [
        (c.name, c.root, c.parameters, c.line)
        + tuple(
            (i.opcode, i.shape, i.operands, i.attrs, i.called, i.metadata, i.line, i.placement, i.after, i.has_effect)
            for i in c.instructions
        )
        for c in graph
    ]
    return graph.name, graph.entry, graph.header, computations


@pytest.mark.parametrize("path", DUMPS, ids=lambda path: path.name)
def test_both_readers_read_the_same_graph_or_one_says_that_it_cannot(path: Path) -> None:
    text = gzip.decompress(path.read_bytes()).decode()
    graph = stablehlo_text.parse(text)
    if graph is None:
        assert "#loc" in text or "sdy." in text
    else:
        assert contents(graph) == contents(by_mlir(text))


def test_small_forms_are_read_as_mlir_reads_them() -> None:
    graph = stablehlo_text.parse(MODULE)
    assert graph is not None
    assert contents(graph) == contents(by_mlir(MODULE))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("add %arg0, %0 : tensor<3x2xf32>", "add %arg0, %0 : tensor<3x3xf32>"),
        ("(tensor<3x2xf32>) -> tensor<2x3xf32>", "(tensor<2x2xf32>) -> tensor<2x3xf32>"),
        ("select %4, %3, %arg1 : tensor<3x2xi1>", "select %4, %3, %arg1 : tensor<3x3xi1>"),
        ("return %5 : tensor<3x2xf32>", "return %5 : tensor<3x3xf32>"),
        ("return %5", "return %6"),
        ("(tensor<2x3xf32>) -> tensor", "(tensor<2x3xf32>> -> tensor"),
        ('{jax.result_info = ""}) {', '{jax.result_info = ""}x {'),
        ('{jax.result_info = ""}', '{jax.result_info = 5"}'),
        ("1 : i32}", "1 : i0}"),
        ("@main", "@1ain"),
        ("dense<5.000000e-01>", "dense<1>"),
        ("%1 = stablehlo.add", "%0 = stablehlo.add"),
        ("%1 = stablehlo.add", "%1:2 = stablehlo.add"),
        ("return %5 : tensor<3x2xf32>\n  }\n}", "return %5 : tensor<3x2xf32>\n  }\n"),
    ],
)
def test_what_is_no_program_is_left_to_mlir_which_says_why(old: str, new: str) -> None:
    damaged = MODULE.replace(old, new)
    assert damaged != MODULE
    assert stablehlo_text.parse(damaged) is None
    with pytest.raises(GraphError):
        parse(damaged)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("add %arg0, %0 : tensor<3x2xf32>", "add %arg0, %0 {mhlo.note = 1 : i32} : tensor<3x2xf32>"),
        ("add %arg0, %0 : tensor<3x2xf32>", "add %arg0, %0 : tensor<3x2xf32> loc(unknown)"),
        ("stablehlo.constant dense<5.000000e-01>", "stablehlo.constant {mhlo.note = 1 : i32} dense<5.000000e-01>"),
        ("module @m", "module"),
        ("dense<5.000000e-01>", "dense<0.5>"),
    ],
)
def test_another_form_is_left_to_mlir(old: str, new: str) -> None:
    assert stablehlo_text.parse(MODULE.replace(old, new)) is None
    assert parse(MODULE.replace(old, new))
