"""How large a graph is, and its key: what is said of it wherever it is named."""

from __future__ import annotations

from retrograd.graph.canonical import Form, forms
from retrograd.graph.ir import COLLECTIVES, Graph
from retrograd.graph.keys import strict_key
from retrograd.graph.names import elements
from retrograd.graph.record import Side


def side(graph: Graph, of: dict[str, Form] | None = None) -> Side:
    """Sizes over all computations; parameters and outputs of the entry; `key` is the strict one."""
    of = of or forms(graph)
    main = graph.main
    opcodes = (ins.opcode.removesuffix("-start") for computation in graph for ins in computation.instructions)
    return Side(
        graph.title,
        graph.name,
        graph.format,
        len(graph),
        len(main.parameters),
        len(elements(main.instructions[main.root].shape)),
        sum(opcode in COLLECTIVES for opcode in opcodes),
        sum(form.dead for form in of.values()),
        strict_key(graph, of),
    )
