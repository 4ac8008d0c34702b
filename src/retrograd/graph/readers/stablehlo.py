"""StableHLO text -> Graph, in a child process that has jaxlib (extra `jax`).

Its parser is C++ without guard: of 4,000 damaged modules two ended the process (SIGSEGV, SIGABRT; jaxlib 0.10.2). A
child costs 0.4 s a module and can neither end nor stop ours.
"""

from __future__ import annotations

import pickle
import re
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from retrograd.core import gc_pause, subprocesses
from retrograd.errors import GraphError, MissingExtraError
from retrograd.graph import brackets
from retrograd.graph.ir import Graph

_BRACKETS = re.compile(r"[(\[{]|[)\]}]|<(?!=)|(?<!-)>")
# Real modules nest about 20 deep; Python's own stack, which walks the regions, ends at some 300.
_DEEPEST = 200
_TIMEOUT_S = 120  # 45,000 operations take 4 s


def parse(text: str, source: str = "", first: int = 1) -> Graph:
    """One module of StableHLO text. Raises MissingExtraError without jaxlib, GraphError for a damaged text."""
    if find_spec("jaxlib") is None:
        raise MissingExtraError("jaxlib", "jax", "reading StableHLO")
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
        with gc_pause.paused():
            graph, message = pickle.loads(result.read_bytes())
    if graph is None:
        raise GraphError(message)
    return graph


def _check(text: str, source: str, first: int) -> None:
    """Refuses what a recursive parser would not survive."""
    depth = 0
    for bracket in _BRACKETS.finditer(text):
        depth += 1 if bracket[0] in "([{<" else -1
        if depth > _DEEPEST:
            line = text.count("\n", 0, bracket.start())
            raise brackets.error(source or "StableHLO text", first + line, f"brackets nest more than {_DEEPEST} deep")
