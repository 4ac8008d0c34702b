"""Computation graphs of training steps: read them, count them, compare them, and say in words why one changed.

Works on dumps (HLO of torch_xla and JAX, StableHLO, FX of torch.compile) without torch:

    from retrograd import graph

    graph.unique("step*.hlo")          # how many there really are, at four levels
    graph.diff("step1.hlo", "step2.hlo").causes[0].what
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from retrograd.graph.ir import Computation as Computation
from retrograd.graph.ir import Graph as Graph
from retrograd.graph.ir import Instruction as Instruction
from retrograd.graph.keys import free_key as free_key
from retrograd.graph.keys import strict_key as strict_key
from retrograd.graph.readers import from_fx as from_fx
from retrograd.graph.readers import parse as parse
from retrograd.graph.readers import read as read

if TYPE_CHECKING:
    from retrograd.graph.record import Diff, Unique
    from retrograd.graph.sources import Source


def diff(a: Source, b: Source) -> Diff:
    """Compare two graphs and say why they differ.

    Args:
        a, b: each a `Graph`, a file with one graph (plain or gzip), or "FILE#3" for graph 3 of a file with several.

    Returns:
        Causes, first cause first, each with the instructions concerned, its source line and advice; notes on what
        differs without changing the computation. True if the two are the same.

    Raises:
        GraphError: a file is damaged or no graph.
        UsageError: a file holds several graphs and none is named, or has no graph of that number.
    """
    from retrograd.graph.diffing.compare import compare
    from retrograd.graph.sources import one

    return compare(one(a), one(b))


def unique(sources: Source | Iterable[Source]) -> Unique:
    """How many graphs there are at four levels: by text, up to names, up to dead code, up to the order of parameters.

    Args:
        sources: a graph or file, or several of them; every graph of a file with several counts.

    Raises:
        GraphError: a file is damaged or no graph.
        UsageError: there is no graph of that number in a file, or no source at all.
    """
    from retrograd.errors import UsageError
    from retrograd.graph.counting import count
    from retrograd.graph.sources import load

    given: list[Source] = (
        [sources] if isinstance(sources, (str, Graph)) or hasattr(sources, "__fspath__") else [*sources]
    )  # type: ignore[list-item]
    if not given:
        raise UsageError("`sources` is empty; give at least one file or graph")
    return count([graph for source in given for graph in load(source)])
