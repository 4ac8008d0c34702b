"""FX graphs in memory, by the attributes that nodes have (op, target, args, kwargs, meta): torch is not imported."""

# pyright: basic

from __future__ import annotations

import re
from enum import Enum
from typing import Any

from retrograd.errors import GraphError
from retrograd.graph.ir import Computation, Graph
from retrograd.graph.keys import text_key
from retrograd.graph.readers.fx_body import Body, Constructed, Sub, Text, metadata_of, opcode_of
from retrograd.graph.readers.fx_text import literal

_FRAME = re.compile(r'File "(.+)", line ([0-9]{1,9}), in (.+)\Z')
_DTYPES = {
    "bfloat16": "bf16",
    "bool": "b8",
    "float8_e4m3fn": "f8e4m3fn",
    "float8_e5m2": "f8e5m2",
    "float8_e4m3fnuz": "f8e4m3fnuz",
    "float8_e5m2fnuz": "f8e5m2fnuz",
}


def from_fx(module: Any) -> Graph:
    """The graph of a torch.fx GraphModule or Graph, equal to what `read` makes of its `print_readable()`.

    Args:
        module: a GraphModule, or a Graph; graphs of torch.cond's branches are found through the module that owns it.

    Raises:
        GraphError: the object has no FX graph.
    """
    graph = getattr(module, "graph", module)
    if not hasattr(graph, "nodes"):
        raise GraphError(f"from_fx takes a torch.fx GraphModule or Graph, given {type(module).__name__}")
    owner = module if graph is not module else getattr(graph, "owning_module", None)
    name = type(owner).__name__ if owner is not None else "GraphModule"
    computations: dict[str, Computation] = {}
    _Walk(owner, computations, "").read(graph, name)
    result = Graph(name, computations, name, "fx")
    text = "\n".join(f"{c.name} {i!r} {i.called} {i.metadata}" for c in result for i in c.instructions)
    result.digest = text_key(text)
    return result


class _Walk:
    def __init__(self, owner: Any, computations: dict[str, Computation], prefix: str) -> None:
        self.owner = owner
        self.computations = computations
        self.prefix = prefix
        self.body = Body()
        self.places: dict[Any, Any] = {}

    def read(self, graph: Any, name: str) -> None:
        # Text has every argument in its first line, whatever the order in memory.
        for node in sorted(graph.nodes, key=lambda node: node.op != "placeholder"):
            if node.op == "output":
                self.body.output(self.value(node.args[0]))
            else:
                self.places[node] = self.node(node)
        if self.body.root < 0:
            raise GraphError(f"the FX graph {name} has no output node; call graph.output(...) first")
        self.computations[name] = self.body.computation(name)

    def node(self, node: Any) -> Any:
        shape = _shape(node.meta)
        if node.op == "placeholder":
            return self.body.parameter(node.name, shape)
        args = [self.value(item) for item in node.args]
        kwargs = {key: self.value(item) for key, item in node.kwargs.items()}
        metadata = _metadata(getattr(node, "stack_trace", None) or node.meta.get("stack_trace"))
        opcode = str(node.target)
        if node.op == "get_attr":
            if (sub := self.sub(opcode)) is not None:
                return sub
            opcode, args, kwargs = "get_attr", [], {"target": Text(str(node.target))}
        elif node.op == "call_module":
            sub = self.sub(opcode)
            args = [Text(opcode) if sub is None else sub, *args]
            opcode = "call_module" if sub is None else "call"
        elif node.op == "call_method":
            opcode = f"method.{opcode}"
        else:
            opcode = opcode_of(_qualified(node, node.target))
        value = self.body.call(node.name, opcode, args, kwargs, shape, metadata, 0)
        if (policy := node.meta.get("recompute")) is not None:
            ins = self.body.instructions[value.place]
            ins.placement = ", ".join(filter(None, [ins.placement, f"recompute={policy.name}"]))
        return value

    def sub(self, target: str) -> Sub | None:
        """The graph that a member of the module is, read as a computation of its own; None if it is none."""
        member: Any = self.owner
        for part in target.split("."):
            member = getattr(member, part, None)
        if not hasattr(getattr(member, "graph", None), "nodes"):
            return None
        name = self.prefix + target
        if name not in self.computations:
            _Walk(member, self.computations, f"{name}.").read(member.graph, name)
        return Sub(name)

    def value(self, value: Any) -> Any:
        """An argument as FX text prints it."""
        if isinstance(value, (str, int, float, type(None), type(Ellipsis))) and not isinstance(value, Enum):
            return value if not isinstance(value, float) or value - value == 0 else Text(repr(value))
        if hasattr(value, "op") and hasattr(value, "target"):
            return self.places[value]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return Constructed(_global(_qualified(None, type(value))), tuple(self.value(item) for item in value), ())
        if isinstance(value, (list, tuple)):
            values = [self.value(item) for item in value]
            return values if isinstance(value, list) else tuple(values)
        if isinstance(value, dict):
            return {key: self.value(item) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(*[self.value(item) for item in (value.start, value.stop, value.step)])
        if isinstance(value, Enum):
            return Text(f"{type(value).__name__}.{value.name}")
        if hasattr(value, "dtype") and hasattr(value, "size"):
            return literal(f"torch.Tensor(size={list(value.size())}, dtype={str(value.dtype).rpartition('.')[2]})")
        if callable(value) and hasattr(value, "__name__"):
            return Text(_qualified(None, value))
        try:
            return literal(repr(value))
        except GraphError:
            return Text(repr(value))


def _qualified(node: Any, target: Any) -> str:
    """The name by which FX text calls a function. Torch's own rule is asked where the node offers it."""
    name = getattr(target, "__name__", type(target).__name__)
    module = str(getattr(target, "__module__", "") or "")
    if module == "_operator":
        return f"operator.{name}"
    if module.startswith("torch._ops"):
        return f"{module.replace('torch._ops', 'torch.ops')}.{name}"
    printed = getattr(node, "_pretty_print_target", None)
    full = printed(target) if printed is not None else f"{module}.{name}"
    return full if full.startswith("builtins.") else _global(full)


def _global(name: str) -> str:
    """FX text calls torch's functions by their whole name, all others (and dynamo's) with _ for each dot."""
    own = name.startswith("torch.") and not name.startswith(("torch._dynamo.", "torch._inductor."))
    return name if own else name.replace(".", "_")


def _metadata(trace: str | None) -> str:
    """The innermost frame of a stack trace, which is what FX text prints above a line."""
    lines = trace.strip().split("\n") if trace else []
    for at in range(len(lines) - 2, -1, -1):
        if frame := _FRAME.match(lines[at].strip()):
            return metadata_of(frame[1], frame[2], lines[at + 1].strip())
    return ""


def _shape(meta: Any) -> str:
    """The shape of a node's value: f32[8,32], Sym(s77), "" if there is none or it is a tuple."""
    value = meta.get("val", meta.get("tensor_meta", meta.get("example_value")))
    if type(value).__name__ in ("SymInt", "SymFloat", "SymBool"):
        return f"Sym({value!r})"
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        return ""
    name = str(value.dtype).rpartition(".")[2]
    short = getattr(value.dtype, "abbr", None) or _DTYPES.get(name)
    if not short:
        short = re.sub(r"^(u?)(\w)[a-z]*(\d+)", lambda m: f"{m[1] or m[2]}{m[3]}", name)
    return f"{short}[{','.join(str(size) for size in value.shape)}]"
