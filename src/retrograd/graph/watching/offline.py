"""Offline watching: recorded graphs as the steps of a run, from files alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from retrograd.errors import UsageError
from retrograd.graph.ir import Graph
from retrograd.graph.watching.events import Compiled, Event, Executed
from retrograd.graph.watching.graph_text import known, of_file
from retrograd.graph.watching.schema import WatchReport
from retrograd.graph.watching.session import WatchSession


def replay(paths: Sequence[str | Path], session: WatchSession) -> WatchReport:
    """Give the graphs of files to a session, one a step, in the order given.

    A graph whose recorded hash (without one: whose key) was there before ran from the cache.

    Args:
        paths: dumps, or save-files of torch_xla with a graph for each cut.
        session: a fresh one.

    Raises:
        GraphError: a file is no graph.
        GraphChangedError: a graph is one too many and the session raises.
        UsageError: there is no file.
    """
    if not paths:
        raise UsageError("there is no file to read; expected dumps in the order of their steps")
    session.backends = ("files",)
    seen: set[str] = set()
    for path in paths:
        for name, text, graph in of_file(path):
            key = graph.key or known(text, graph.format, name).key
            events: list[Event] = [Executed(key)]
            if key not in seen:
                seen.add(key)
                role = role_of(graph)
                events.insert(0, Compiled(role, graph.format, text, name, role, key))
            session.step(events)
    return session.report()


def role_of(graph: Graph) -> str:
    """Which part of a step a graph is, as far as its own text tells."""
    if graph.format != "fx":
        return "step"
    main = graph.main
    names = [main.instructions[place].name for place in main.parameters]
    return "backward" if any(name.startswith("tangents") for name in names) else "forward"
