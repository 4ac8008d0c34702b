"""Structure of the package, drawn from its imports: which room imports which, and circles of files.

    python tools/structure.py            # prints the picture
    python tools/structure.py --check    # exit 1 if DESIGN.md's picture differs, or files import each other in a circle
    python tools/structure.py --write    # puts the picture into DESIGN.md

Every import counts: those inside functions and those for type checkers too. Nothing of the package is run.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"
BEGIN, END = "<!-- rooms: python tools/structure.py --write -->\n```\n", "```\n<!-- /rooms -->\n"

Imports = dict[str, set[str]]  # module -> modules that it imports


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name, and the pytest plugin."""
    paths = {p: ".".join(p.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__") for p in SRC.rglob("*.py")}
    return {name: path for path, name in sorted(paths.items())}


def imports(files: dict[str, Path]) -> Imports:
    """What each module imports of the package: modules, or the package whose `__init__` has the name."""
    return {name: set(_imported(path, files)) - {name} for name, path in files.items()}


def _imported(path: Path, files: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
        elif isinstance(node, ast.ImportFrom) and node.module in files:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in files else node.module


def circles(graph: Imports) -> list[list[str]]:
    """Strongly connected components with more than one module (Tarjan 1972), each sorted."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for target in sorted(graph.get(module, ())):
            if target not in index:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in stack:
                low[module] = min(low[module], index[target])
        if low[module] == index[module]:
            component = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(component) > 1:
                components.append(sorted(component))

    sys.setrecursionlimit(10_000)  # one level a module, 400 of them
    for module in sorted(graph):
        if module not in index:
            visit(module)
    return components


def room(module: str) -> str:
    """The folder or file directly in the package that a module belongs to; "" for the package's own `__init__`."""
    parts = module.split(".")
    return parts[0] if parts[0] != "retrograd" else parts[1] if len(parts) > 1 else ""


def arrows(graph: Imports) -> dict[str, set[str]]:
    """Which room imports which."""
    rooms: dict[str, set[str]] = defaultdict(set)
    for module, targets in graph.items():
        rooms[room(module)].update(room(target) for target in targets)
    return {name: targets - {name, ""} for name, targets in rooms.items() if name not in ("", "__main__")}


def floors(rooms: dict[str, set[str]]) -> list[list[str]]:
    """Rooms from the top floor down: each room stands above every room that it imports."""
    height: dict[str, int] = {}

    def floor(name: str, path: tuple[str, ...] = ()) -> int:
        if name in path:
            raise SystemExit(f"rooms import each other: {' -> '.join([*path[path.index(name) :], name])}")
        if name not in height:
            height[name] = 1 + max((floor(target, (*path, name)) for target in sorted(rooms.get(name, ()))), default=0)
        return height[name]

    for name in rooms:
        floor(name)
    return [sorted(name for name in rooms if height[name] == level) for level in range(max(height.values()), 0, -1)]


def picture(rooms: dict[str, set[str]]) -> str:
    """One line a room, top floor first; arrows that follow from others (a -> b -> c) are left out of a -> c."""
    lines = []
    width = max(map(len, rooms)) + 1
    for level in floors(rooms):
        for name in level:
            direct = sorted(rooms[name] - set().union(*(_below(target, rooms) for target in rooms[name])))
            lines.append(f"{name:<{width}}-> {', '.join(direct)}".rstrip(" ->") if direct else name)
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def _below(name: str, rooms: dict[str, set[str]]) -> set[str]:
    targets = rooms.get(name, set())
    return targets.union(*(_below(target, rooms) for target in targets))


def faults(graph: Imports, drawn: str) -> Iterable[str]:
    """What CI refuses, a sentence each."""
    for circle in circles(graph):
        yield "files import each other in a circle: " + ", ".join(circle)
    text = (ROOT / "DESIGN.md").read_text(encoding="utf-8")
    if BEGIN + drawn + END not in text:
        yield "DESIGN.md shows other arrows than the code has; run: python tools/structure.py --write"


def main() -> int:
    """Print, check or write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit 1 if DESIGN.md differs or files form a circle")
    parser.add_argument("--write", action="store_true", help="put the picture into DESIGN.md")
    options = parser.parse_args()
    graph = imports(modules())
    drawn = picture(arrows(graph))
    if options.write:
        path = ROOT / "DESIGN.md"
        before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
        path.write_text(before + BEGIN + drawn + END + rest.partition(END)[2], encoding="utf-8")
    if not options.check:
        print(drawn, end="")
        return 0
    wrong = list(faults(graph, drawn))
    for sentence in wrong:
        print(sentence, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
