"""Computation graphs of training steps: read them, count them, compare them, and say in words why one changed.

Works on dumps (HLO of torch_xla and JAX, StableHLO, FX of torch.compile) without torch:

    from retrograd import graph

    graph.unique("step*.hlo")          # how many there really are, at four levels
    graph.diff("step1.hlo", "step2.hlo").causes[0].what
"""

# Names come when they are first used.
# pyright: reportUnsupportedDunderAll=false

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from retrograd.core.loading import names_at_first_use

if TYPE_CHECKING:
    from retrograd.graph.ir import Computation as Computation
    from retrograd.graph.ir import Graph as Graph
    from retrograd.graph.ir import Instruction as Instruction
    from retrograd.graph.keys import free_key as free_key
    from retrograd.graph.keys import strict_key as strict_key
    from retrograd.graph.readers import from_fx as from_fx
    from retrograd.graph.readers import parse as parse
    from retrograd.graph.readers import read as read
    from retrograd.graph.schema import Diff, Follow, Pairs, Unique
    from retrograd.graph.sources import Source
    from retrograd.graph.watching.gradients import check_gradients as check_gradients
    from retrograd.graph.watching.session import GraphChangedWarning as GraphChangedWarning
    from retrograd.graph.watching.watch import step as step
    from retrograd.graph.watching.watch import watch as watch

# Loaded when they are first used: a report of something else needs none of them, and readers take 50 ms.
_HOMES = {
    "Computation": "ir",
    "Graph": "ir",
    "Instruction": "ir",
    "free_key": "keys",
    "strict_key": "keys",
    "from_fx": "readers",
    "parse": "readers",
    "read": "readers",
    "GraphChangedWarning": "watching.session",
    "check_gradients": "watching.gradients",
    "step": "watching.watch",
    "watch": "watching.watch",
}

__all__ = [*sorted(_HOMES), "diff", "follow", "pairs", "unique"]

__getattr__, __dir__ = names_at_first_use(__name__, _HOMES, __all__)


def diff(a: Source, b: Source) -> Diff:
    """Compare two graphs and say why they differ.

    Args:
        a, b: each a `Graph`, a file with one graph (plain or gzip), or "FILE#3" for graph 3 of a file with several.

    Returns:
        Causes, first cause first, each with the instructions concerned, its source line and advice; notes on what
        differs without changing the computation. True if the two are the same. Of two stages of compilation of one
        program, as HLO before and after optimisation, `passes` says what was fused, removed and moved.

    Raises:
        GraphError: a file is damaged or no graph.
        UsageError: a file holds several graphs and none is named, or has no graph of that number.
    """
    from retrograd.graph.pairing import diff
    from retrograd.graph.sources import only_graph

    return diff(only_graph(a), only_graph(b))


def pairs(a: Source, b: Source) -> Pairs:
    """Compare all graphs of two folders, logs or files, each with the one of its name in the other.

    Args:
        a, b: each a folder (of xla_dump_to, jax_dump_ir_to, TORCH_TRACE or `watch --save`), or a file with several.

    Returns:
        A verdict for each name; true if all are the same.

    Raises:
        GraphError: a file is damaged or no graph.
    """
    from retrograd.graph.pairing import pairs_of

    return pairs_of(a, b)


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
    from retrograd.graph.ir import Graph
    from retrograd.graph.sources import load

    single = isinstance(sources, (str, Graph)) or hasattr(sources, "__fspath__")
    listed: list[Any] = [sources] if single else list(sources)  # type: ignore[arg-type]
    if not listed:
        raise UsageError("`sources` is empty; give at least one file or graph")
    return count([graph for source in listed for graph in load(source)])


def follow(source: Source, value: str, limit: int | None = 400) -> Follow:
    """Follow one parameter or instruction to every place that depends on it, or say that it is dead.

    Args:
        source: a `Graph`, a file with one graph, or "FILE#3".
        value: a name, with or without %, `computation/name` outside the entry; `p24` or `parameter 24`; `output 3` for
            what makes this output; with `[1]` behind it one element of a tuple.
        limit: how many steps to keep, the nearest first; None for all. Outputs and collectives are always complete.

    Raises:
        GraphError: the file is damaged or no graph.
        UsageError: there is no such value; the message names what is spelled nearly so.
    """
    from retrograd.graph.dataflow import follow as walk
    from retrograd.graph.sources import only_graph

    return walk(only_graph(source), value, limit)
