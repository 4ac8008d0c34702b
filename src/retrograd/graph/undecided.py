"""Reasons why a text does not say what is computed: its writer left out numbers, or a module that it calls."""

from __future__ import annotations

import re
from collections.abc import Iterator

from retrograd.core.wording import count
from retrograd.graph.form import Form
from retrograd.graph.ir import Graph
from retrograd.graph.schema import Cause
from retrograd.graph.value_names import name_of

_ELIDED = ("{...}", "dense_resource<", "elided_large_const")
_LARGE = (
    "print them whole: XLA_FLAGS=--xla_dump_to=DIR --xla_dump_large_constants=true for dumps, "
    "HloPrintOptions.print_large_constants for as_text(); an .hlo.pb has them"
)
_ADVICE = {
    "constant": _LARGE,
    "get_attr": "make the tensor outside of the compiled function and pass it in",
    "call_module": "trace into the module (torch.compile or make_fx do), so that its operations are in the graph",
    "kernel": "the graph names a kernel by its place in a table of the process: compare the kernels by their source",
}
_WORDS = {
    "constant": ("constant", "whose numbers its writer left out (xla_dump_large_constants, print_large_constants)"),
    "get_attr": ("tensor", "of the module whose numbers are not in the text"),
    "call_module": ("module", "that is called and not in the text"),
    "kernel": ("Triton kernel", "that is not in the text"),
}


# Names that torch gives, by a number, to tensors that a function closes over, freezing to folded weights. A parameter
# or buffer has a name of the program, and the graph is a function of it.
_NUMBERED = re.compile(r"(?:constant|lifted_tensor|frozen_param|folded)_?\d*(?=[,\s]|\Z)|torch\.Tensor\(size=")


def elided(attrs: str) -> bool:
    """Did the writer of a constant leave out its numbers?"""
    return any(mark in attrs for mark in _ELIDED)


def _reason(opcode: str, attrs: str) -> str:
    if opcode == "constant" or "dense_resource<" in attrs:
        return "constant" if elided(attrs) else ""
    if opcode == "get_attr":
        return "get_attr" if _NUMBERED.search(attrs) else ""
    if opcode == "call_module":
        return "call_module"
    return "kernel" if "triton_kernel_wrapper" in opcode else ""


def causes(graph: Graph, forms: dict[str, Form], letter: str = "it") -> Iterator[Cause]:
    """What cannot be told of a graph, one cause a reason, with the flag that dumps it whole."""
    names: dict[str, list[str]] = {}
    shapes: dict[str, str] = {}
    for form in forms.values():
        reasons = {label: reason for label in set(form.labels) if (reason := _reason(label[0], label[2]))}
        for node, label in enumerate(form.labels) if reasons else ():
            if label in reasons and form.live[node]:
                names.setdefault(reasons[label], []).append(name_of(graph, form.home(node), form.origins[node]))
                shapes.setdefault(reasons[label], label[1])
    for reason, where in names.items():
        unique = tuple(dict.fromkeys(where))
        noun, rest = _WORDS[reason]
        text = " ".join(filter(None, [f"{letter} has {count(len(unique), noun)}", shapes[reason], rest]))
        sides = ((), unique) if letter == "B" else (unique, ())
        yield Cause("not_told", text, "", _ADVICE[reason], *sides, len(unique))
