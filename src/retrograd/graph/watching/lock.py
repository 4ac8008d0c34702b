"""Lock file: which graphs a program has, by name, with their texts, so that a change can be explained.

JSON with sorted names and short lines, so that versions of it can be compared by eye and merged.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from retrograd.core.schema import decode, parsed, plain
from retrograd.core.system_errors import as_usage_error
from retrograd.errors import GraphChangedError, UndecidedError, UsageError
from retrograd.graph.diffing.compare import compare
from retrograd.graph.ir import Graph
from retrograd.graph.schema import Cause
from retrograd.graph.watching.graph_text import known, of_file, packed, unpacked
from retrograd.graph.watching.schema import Changed, Check
from retrograd.graph.watching.session import WatchSession, sizes

LOCK_SCHEMA = "retrograd.graph.lock/2"
_BEFORE = "retrograd.graph.lock/1"  # its keys are blind to effects and placement; its texts are read again
_WIDTH = 100
_UNREAD = "equal texts that nobody can read, and none at all, prove nothing"


@dataclass(frozen=True)
class Locked:
    """A graph in a lock file: its key and of which level, its size, its text compressed ("" if left out)."""

    key: str
    level: str
    format: str
    instructions: int = 0
    parameters: int = 0
    outputs: int = 0
    collectives: int = 0
    text: str = ""


def of_text(text: str, format: str, name: str, keep: bool = True) -> Locked:
    """What the lock keeps of a graph; `keep` its text too."""
    reading = known(text, format, name)
    if reading.level != "strict":
        raise _undecided(name, next(iter(reading.unknown), Cause("not_told", reading.problem, advice=_UNREAD)))
    return _locked(reading.key, reading.level, format, text if keep else "", reading.graph)


def of_files(paths: Sequence[str | Path], keep: bool = True) -> dict[str, Locked]:
    """The graphs of files by name: the file's without its folder, "#2" for the second graph of a file.

    Raises:
        GraphError: a file is no graph.
        UndecidedError: a text does not say what is computed, as where the numbers of a constant are left out.
        UsageError: two files have the same name.
    """
    graphs: dict[str, Locked] = {}
    for path in paths:
        for name, text, graph in of_file(path):
            if name in graphs:
                raise UsageError(f"two of the files are called {name!r}, but a lock file tells graphs by this name")
            graphs[name] = of_text(text, graph.format, name, keep)
    return graphs


def of_session(session: WatchSession) -> dict[str, Locked]:
    """The graphs of a watched run by name: part and how many of this part came before ("forward 0")."""
    graphs: dict[str, Locked] = {}
    counts: Counter[str] = Counter()
    for entry in session.entries:
        own = entry.watched
        name = f"{own.role} {counts[own.role]}"
        if own.level != "strict":
            reasons = known(entry.text, own.format, name).unknown
            raise _undecided(name, reasons[0] if reasons else Cause("not_told", own.notes[0], advice=_UNREAD))
        graphs[name] = _locked(own.key, own.level, own.format, entry.text, entry.graph)
        counts[own.role] += 1
    return graphs


def _undecided(name: str, cause: Cause) -> UndecidedError:
    """A lock that would hold for graphs that differ is none."""
    return UndecidedError(f"{name} cannot be locked or checked: {cause.what}; {cause.advice}")


def _locked(key: str, level: str, format: str, text: str, graph: Graph | None) -> Locked:
    size = sizes(graph) if graph is not None else {}
    return Locked(key, level, format, **size, text=packed(text) if text else "")


def write(path: str | Path, graphs: Mapping[str, Locked]) -> None:
    """Write a lock file; UsageError if it cannot be written."""
    listed = {name: plain(graphs[name]) | {"text": _lines(graphs[name].text)} for name in sorted(graphs)}
    with as_usage_error(f"the lock file {str(path)!r} cannot be written"):
        Path(path).write_text(json.dumps({"schema": LOCK_SCHEMA, "graphs": listed}, indent=1) + "\n", encoding="utf-8")


def read(path: str | Path) -> dict[str, Locked]:
    """The graphs of a lock file; UsageError if it is none."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise UsageError(
            f"the lock file {str(path)!r} cannot be read: {reason}; `retrograd graph lock` writes one"
        ) from None
    before = f'"schema": "{_BEFORE}"' in text[:200]
    graphs = parsed(text, _BEFORE if before else LOCK_SCHEMA, "lock file of graphs", _decoded)
    return {name: _renewed(name, graph) for name, graph in graphs.items()} if before else graphs


def _renewed(name: str, locked: Locked) -> Locked:
    """A graph of an older lock file with the key of today; without its text it matches no graph."""
    try:
        return of_text(unpacked(locked.text), locked.format, name) if locked.text else replace(locked, level="older")
    except (ValueError, zlib.error) as error:
        raise _damaged(error) from None


def check(graphs: Mapping[str, Locked], locked: Mapping[str, Locked], title: str = "the lock file") -> Check:
    """Compare graphs with locked ones, name by name."""
    changes: list[Changed] = []
    for name in sorted({*graphs, *locked}):
        if name not in graphs:
            changes.append(Changed(name, "missing", note="the lock file has it, the program does not"))
        elif name not in locked:
            changes.append(Changed(name, "added", note="the lock file does not have it; if it is meant, lock again"))
        elif (graphs[name].level, graphs[name].key) == (locked[name].level, locked[name].key):
            changes.append(Changed(name, "same"))
        else:
            changes.append(_changed(name, locked[name], graphs[name]))
    return Check(title, tuple(changes))


def hold(path: str | Path, *sessions: WatchSession) -> None:
    """Write the lock file of a run if there is none, else raise GraphChangedError if the run is not as locked.

    Args:
        path: the lock file.
        sessions: of the run, one a framework; of several, the framework's name stands before the names of its graphs.
    """
    graphs: dict[str, Locked] = {}
    for session in sessions:
        head = f"{session.backends[0]} " if len(sessions) > 1 else ""
        graphs |= {head + name: locked for name, locked in of_session(session).items()}
    if not Path(path).exists():
        write(path, graphs)
        return
    checked = check(graphs, read(path), str(path))
    if not checked:
        raise GraphChangedError(checked.text())


def _changed(name: str, before: Locked, now: Locked) -> Changed:
    sides = [_graph(side, name) for side in (before, now)]
    if sides[0] is None or sides[1] is None:
        older = "the lock file is of an older version and has no text of it: lock again"
        why = older if before.level == "older" else "the key differs; without the texts of both it cannot be said why"
        return Changed(name, "changed", note=why)
    diff = compare(sides[0], sides[1], pictured=False)
    causes = diff.causes or diff.unknown
    return Changed(name, "changed", causes, "" if causes else "the key differs, the computation does not: lock again")


def _graph(locked: Locked, name: str) -> Graph | None:
    try:
        return known(unpacked(locked.text), locked.format, name).graph if locked.text else None
    except (ValueError, zlib.error) as error:
        raise _damaged(error) from None


def _damaged(error: Exception) -> UsageError:
    return UsageError(f"the lock file is damaged: the text of a graph cannot be read ({error}); lock again")


def _lines(text: str) -> list[str]:
    return [text[i : i + _WIDTH] for i in range(0, len(text), _WIDTH)]


def _decoded(data: dict[str, Any]) -> dict[str, Locked]:
    graphs: dict[str, dict[str, Any]] = data["graphs"]
    return decode(dict[str, Locked], {name: g | {"text": "".join(g["text"])} for name, g in graphs.items()})
