"""Instructions that touch global memory, told apart by kind, width and source line."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Access:
    """`count` equal instructions of one source line."""

    op: str  # "load", "store" or "atomic"
    bytes: int  # bytes that one thread moves; 0 where the instruction does not say (atomics)
    kind: str  # of a load "sync" or "async" (straight to shared memory), of an atomic "add.f32", "cas" and so on
    count: int  # number of instructions
    source: str  # "backward.py:210", the line of the innermost function; "" if unknown
    names: tuple[str, ...]  # the variables that make up the address on that line ("x_ptr", "cols"), () if unknown


def gather(instructions: Iterable[tuple[str, int, str, tuple[str, int] | None]]) -> tuple[Access, ...]:
    """Sum up (op, bytes, kind, (file, line) or None) instructions."""
    counts = Counter(instructions)
    accesses = [
        Access(op, width, kind, count, short(place), () if place is None else names_at(op, *place))
        for (op, width, kind, place), count in counts.items()
    ]
    return tuple(sorted(accesses, key=lambda a: (a.op, a.source, -a.bytes, a.kind)))


@cache
def names_at(op: str, file: str, line: int) -> tuple[str, ...]:
    """Variables in the address of the load, store or atomic that spans a line of a file.

    () if there is none or several that could be meant.
    """
    calls = [call for call in _calls(op, file) if call.lineno <= line <= (call.end_lineno or line)]
    if len(calls) != 1:
        return ()
    # Inline assembly has its address in a later argument.
    return _variables(calls[0].args[0]) or _variables(calls[0])


@cache
def _calls(op: str, file: str) -> tuple[ast.Call, ...]:
    """Calls of `tl.<op>...` and of inline assembly in a file."""
    path = _here(Path(file))
    if not path.is_file():
        return ()
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call) and node.args]
    return tuple(c for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr.startswith((op, "inline_asm")))


def _here(path: Path) -> Path:
    """The file itself, or the one it is now: Triton's cache keeps the path of whoever compiled first.

    Where that checkout is gone, a file of ours is looked up in this package, and any other among the modules that are
    loaded, by its name and its folder's.
    """
    package = Path(__file__).parents[1]
    if path.is_file():
        return path
    if package.name in path.parts:
        last = len(path.parts) - 1 - path.parts[::-1].index(package.name)
        ours = package.joinpath(*path.parts[last + 1 :])
        if ours.is_file():
            return ours
    files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    alike = [Path(file) for file in files if Path(file).parts[-2:] == path.parts[-2:]]
    return alike[0] if len(alike) == 1 else path


def _variables(node: ast.AST) -> tuple[str, ...]:
    """Names used in an expression, without the language's own."""
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return tuple(sorted(names - {"tl", "triton"}))


def short(place: tuple[str, int] | None) -> str:
    """ "backward.py:210", "" for no place."""
    return "" if place is None else f"{Path(place[0]).name}:{place[1]}"
