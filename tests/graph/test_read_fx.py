"""FX text of torch.compile and compiled autograd, and FX objects: both give the same graph."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import torch

from retrograd.errors import GraphError
from retrograd.graph.ir import Graph
from retrograd.graph.readers import from_fx, parse, read

DATA = Path(__file__).parent / "data"


def _lines(graph: Graph) -> dict[str, list[object]]:
    """Everything about a graph but lines of its file."""
    names = {graph.entry: "entry"}
    return {
        names.get(c.name, c.name): [(repr(i), i.called, i.metadata) for i in c.instructions] + [c.root, c.parameters]
        for c in graph
    }


def _same(module: torch.fx.GraphModule) -> Graph:
    [text], made = parse(module.print_readable(print_output=False)), from_fx(module)
    assert _lines(text) == _lines(made)
    return made


def _opcodes(graph: Graph) -> set[str]:
    return {instruction.opcode for instruction in graph.main.instructions}


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(16, 32), torch.nn.Linear(32, 4)
        self.norm = torch.nn.LayerNorm(32)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> tuple[object, ...]:
        y = self.b(torch.relu(self.norm(self.a(x)))) * scale
        y = torch.cond(y.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), [y])
        z = y[0:2, :, None].clone()
        z += 1
        z[0] = 2
        return z, y.to(torch.float64) / float("inf"), x.view(-1, 4).size(0), torch.zeros(3, device="cpu"), -(y**2)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_torch_compile_forward_backward_and_dynamo(dynamic: bool) -> None:
    from torch._dynamo.backends.common import aot_autograd

    dynamo: list[Graph] = []
    aten: list[Graph] = []

    def keep(module, _):
        aten.append(_same(module))
        return module.forward

    def backend(module, inputs):
        dynamo.append(_same(module))
        return aot_autograd(fw_compiler=keep, bw_compiler=keep)(module, inputs)

    torch._dynamo.reset()
    x = torch.randn(8, 16)
    out = torch.compile(_Model(), backend=backend, dynamic=dynamic)(x)
    (out[0].sum() + out[1].sum()).backward()
    forward = next(graph for graph in aten if "aten.addmm.default" in _opcodes(graph))
    assert {"aten.native_layer_norm.default", "get-tuple-element", "higher_order.cond"} <= _opcodes(forward)
    assert any("operator.setitem" in _opcodes(graph) for graph in dynamo)
    assert any("threshold_backward" in opcode for graph in aten for opcode in _opcodes(graph))
    assert len(forward.computations) == 3
    [cond] = [i for i in forward.main.instructions if i.opcode == "higher_order.cond"]
    assert [attribute for attribute, _ in cond.called] == ["calls", "calls"]
    assert all("test_read_fx.py" in forward.where(i).file for i in forward.main.instructions if i.metadata)
    assert any(i.shape.startswith("Sym(") for i in forward.main.instructions) == dynamic


def test_export_and_symbolic_trace() -> None:
    exported = torch.export.export(_Model(), (torch.randn(8, 16),))
    _same(exported.graph_module)
    _same(exported.module())
    graph = _same(torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())))
    assert [i.opcode for i in graph.main.instructions] == ["parameter", "call_module", "call_module", "tuple"]
    assert graph.main.instructions[1].attrs == "args=(0, %)"


def test_arguments_that_are_no_values_keep_their_places() -> None:
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    out = graph.call_function(torch.ops.aten.add.Tensor, (x, y), {"alpha": -0.5})
    out = graph.call_function(torch.ops.aten.full.default, ([2, 3], float("inf")), {"dtype": torch.bfloat16})
    out = graph.call_function(torch.ops.aten.index.Tensor, (x, [None, y, out]), {})
    out = graph.call_method("view", (out, -1, (2,)), {})
    graph.output((out, None, 3, [x, {"k": y}]))
    made = _same(torch.fx.GraphModule(torch.nn.Module(), graph))
    assert [(i.operands, i.attrs) for i in made.main.instructions[2:6]] == [
        ((0, 1), "alpha=-0.5"),
        ((), "args=([2, 3], inf), dtype=torch.bfloat16"),
        ((0, 1, 3), "args=(%, [None, %, %])"),
        ((4,), "args=(%, -1, (2,))"),
    ]


def test_what_is_returned() -> None:
    [graph] = read(DATA / "fx" / "1_bw.txt.gz")
    root = graph.main.instructions[graph.main.root]
    assert (root.opcode, len(root.operands)) == ("tuple", 7)
    assert graph.main.instructions[root.operands[2]].attrs == "None"
    assert root.shape == "(f32[32,16],f32[32],,f32[32],f32[32],f32[4,32],f32[4])"


@pytest.mark.parametrize(
    ("name", "instructions", "parameters"),
    [("0_fw", 19, 7), ("1_bw", 33, 10), ("2_fw", 20, 8), ("3_bw", 34, 11)]
    + [("eager_ca_ca0", 440, 5), ("eager_ca_ca1", 417, 5), ("eager_ca_ca2", 432, 5)],
)
def test_recorded_graphs(name: str, instructions: int, parameters: int) -> None:
    [graph] = read(DATA / "fx" / f"{name}.txt.gz")
    assert (len(graph), len(graph.main.parameters)) == (instructions, parameters)


def test_compiled_autograd() -> None:
    [graph] = read(DATA / "fx" / "eager_ca_ca0.txt.gz")
    assert graph.name == "CompiledAutograd0"
    element = graph.main.instructions[7]
    assert (element.opcode, element.attrs, element.operands) == ("get-tuple-element", "2", (0,))
    stored = [i for i in graph.main.instructions if i.opcode.endswith("call_accumulate_grad")]
    assert stored
    assert stored[0].has_effect  # nothing is returned: without this the whole graph would be dead
    assert graph.where(stored[0]).op == "torch::autograd::AccumulateGrad (NodeCall 34)"


def test_logs_of_torch_with_several_graphs() -> None:
    texts = [gzip.decompress((DATA / "fx" / f"{name}.txt.gz").read_bytes()).decode() for name in ("0_fw", "1_bw")]
    prefix = "V1121 20:00:00.123000 4711 torch/_functorch/_aot_autograd/graph_capture.py:180] [0/0] [__aot_graphs] "
    log = "".join(
        "".join(f"{prefix}{line}\n" for line in f"TRACED GRAPH\n ===== graph {k} =====\n /a b/fx.py {text}".split("\n"))
        for k, text in enumerate(texts)
    )
    for made, text in zip(parse(log, "log"), texts, strict=True):
        assert _lines(made) == _lines(parse(text)[0])
        assert "def forward" in log.split("\n")[made.main.instructions[0].line - 1]


HEAD = "class GraphModule(torch.nn.Module):\n    def forward(self, x, y):\n"


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("class GraphModule(torch.nn.Module):\n", 2, "no `def forward"),
        (HEAD, 3, "no `return`"),
        (HEAD + "        z = x.foo(\n", 3, "not a line of FX .*was never closed"),
        (HEAD + "        z = torch.add(x, w)\n        return z", 3, "the value w is not defined"),
        (HEAD + "        z = x + y\n        z = x + y\n        return z", 4, "a second value is called z"),
        (HEAD + "        import os\n        return z", 3, "none that FX writes"),
        (HEAD + "        z = [i for i in x]\n        return z", 3, "none that FX writes"),
        (HEAD + "        z = (lambda: 1)()\n        return z", 3, "none that FX writes"),
        (
            "class GraphModule(torch.nn.Module):\n    def forward(self, x, x):\n        return x",
            2,
            "second value is called x",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_line(text: str, line: int, words: str) -> None:
    with pytest.raises(GraphError, match=rf"^dump, line {line}: .*{words}"):
        parse(text, "dump")


def test_objects_that_are_no_graph() -> None:
    with pytest.raises(GraphError, match=r"takes a torch\.fx GraphModule or Graph, given int"):
        from_fx(3)
    with pytest.raises(GraphError, match="no output node"):
        from_fx(torch.fx.Graph())
