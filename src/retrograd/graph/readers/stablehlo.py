"""StableHLO text -> Graph: by `stablehlo_text`; what that does not read, in a child that has jaxlib (extra `jax`).

Its parser is C++ without guard: of 4,000 damaged modules two ended the process (SIGSEGV, SIGABRT; jaxlib 0.10.2). A
child costs 0.4 s a module and can neither end nor stop ours.
"""

from __future__ import annotations

import marshal
import re
import sys
import tempfile
from dataclasses import fields
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

from retrograd.core import gc_pause, subprocesses
from retrograd.errors import GraphError, MissingExtraError
from retrograd.graph import brackets
from retrograd.graph.ir import Computation, Graph, Instruction
from retrograd.graph.readers import stablehlo_text

_BRACKETS = re.compile(r"[(\[{]|[)\]}]|<(?!=)|(?<!-)>")
_STEPS = dict.fromkeys("([{<", 1) | dict.fromkeys(")]}>", -1)
_FIELDS = [field.name for field in fields(Instruction)]
# Real modules nest about 20 deep; Python's own stack, which walks the regions, ends at some 300.
_DEEPEST = 200
_TIMEOUT_S = 120  # 45,000 operations take 4 s


def parse(text: str, source: str = "", first: int = 1) -> Graph:
    """One module of StableHLO text. Raises MissingExtraError where it takes jaxlib, GraphError for a damaged text."""
    with gc_pause.paused(age=True):
        graph = stablehlo_text.parse(text, source, first)
    if graph is not None:
        return graph
    if find_spec("jaxlib") is None:
        raise MissingExtraError("jaxlib", "jax", "reading this StableHLO")
    _check(text, source, first)
    with tempfile.TemporaryDirectory(prefix="retrograd-") as folder:
        Path(folder, "module.mlir").write_text(text, encoding="utf-8", errors="replace", newline="")
        command = [sys.executable, "-m", "retrograd.graph.readers.mlir", folder, source, str(first)]
        with subprocesses.Child(command) as child:
            ended = child.wait(_TIMEOUT_S)
        if ended is None:
            raise brackets.error(source or "StableHLO text", first, f"jaxlib took more than {_TIMEOUT_S} s")
        result = Path(folder, "result")
        if child.process.returncode or not result.exists():
            text = f"jaxlib's parser did not survive this text ({ended})"
            raise brackets.error(source or "StableHLO text", first, text, child.output().rpartition("\n")[2])
        with gc_pause.paused(age=True):
            packed, message = marshal.loads(result.read_bytes())
            if packed is None:
                raise GraphError(message)
            return unpacked(packed)


def packed(graph: Graph) -> tuple[Any, ...]:
    """A graph as tuples, which `marshal` writes and reads in a fifth of the time that `pickle` takes for objects."""
    computations = [
        (c.name, c.root, c.parameters, c.line, [tuple(getattr(i, field) for field in _FIELDS) for i in c.instructions])
        for c in graph
    ]
    return graph.name, computations, graph.entry, graph.header, graph.source, graph.stack


def unpacked(parts: tuple[Any, ...]) -> Graph:
    """The graph of `packed`."""
    name, computations, entry, header, source, stack = parts
    bodies = {
        own: Computation(own, [Instruction(*fields) for fields in instructions], root, parameters, line)
        for own, root, parameters, line, instructions in computations
    }
    return Graph(name, bodies, entry, "stablehlo", header, source=source, stack=stack)


def _check(text: str, source: str, first: int) -> None:
    """Refuses what a recursive parser would not survive."""
    if max(accumulate(map(_STEPS.__getitem__, _BRACKETS.findall(text))), default=0) <= _DEEPEST:
        return
    depth = 0
    for bracket in _BRACKETS.finditer(text):
        depth += 1 if bracket[0] in "([{<" else -1
        if depth > _DEEPEST:
            line = text.count("\n", 0, bracket.start())
            raise brackets.error(source or "StableHLO text", first + line, f"brackets nest more than {_DEEPEST} deep")
