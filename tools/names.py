"""Names, comments and size of the source, counted: what CI holds the package to.

python tools/names.py            # the table, a row a room
python tools/names.py --check    # exit 1 where a limit is broken, a sentence and a place each
python tools/names.py --list     # every vague name and every pair of equal lines with its place
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"

# Participles and pronouns say nothing of a tensor or a result. Fields of records are not counted: they are the JSON.
VAGUE = frozenset({"found", "given", "said", "made", "what", "one"})
PUBLIC = frozenset({"src/retrograd/fsdp/log_diff.py: one"})  # parameters of public functions, which people may name
# A docstring of a module says what the module is: a noun. These words begin a sentence about what it does.
NOT_A_NOUN = frozenset(
    {"What", "Which", "Whether", "How", "Where", "Who", "Why", "Being", "From", "Are", "Do", "Does", "Is"}
)
# Both may only fall; what is aimed at stands behind them.
LINES = 86_403  # what stood before ttir, mutation and what other rooms have learnt since: tools/like_for_like.py
EQUAL = 20  # pairs of places with six equal lines, parameter lists and public signatures
WINDOW = 6


@dataclass
class Counts:
    """What was counted of a room."""

    lines: int = 0
    code: int = 0
    comments: int = 0
    vague: list[str] = field(default_factory=list)
    docstrings: list[str] = field(default_factory=list)


def count(path: Path, counts: Counts) -> None:
    """Add one file to the counts of its room."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    place = path.relative_to(ROOT).as_posix()
    counts.lines += len(text.splitlines())
    counts.vague += [f"{place}:{line}: {name}" for line, name in _vague(tree) if f"{place}: {name}" not in PUBLIC]
    first = next(iter((ast.get_docstring(tree) or "").split()), "")
    if not first or first in NOT_A_NOUN:
        counts.docstrings.append(
            f"{place}: the docstring of a module begins with a noun, not with {first or 'nothing'!r}"
        )
    kinds = Counter(token.type for token in tokenize.generate_tokens(io.StringIO(text).readline))
    counts.code += kinds[tokenize.NEWLINE]  # logical lines
    counts.comments += kinds[tokenize.COMMENT]


def _vague(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Bindings of values: variables, parameters and functions, but not the annotated fields of classes."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    fields = {item.target for cls in classes for item in cls.body if isinstance(item, ast.AnnAssign)}
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in fields:
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.FunctionDef):
            name = node.name
        if name.lstrip("_") in VAGUE:
            yield node.lineno, name


def rooms() -> dict[str, Counts]:
    """Counts by room, the folder or file directly in the package."""
    result: dict[str, Counts] = defaultdict(Counts)
    for path in sorted(SRC.rglob("*.py")):
        parts = path.relative_to(SRC).parts
        count(path, result[parts[1].removesuffix(".py") if len(parts) > 1 else parts[0]])
    return dict(result)


def classes() -> dict[str, list[str]]:
    """Public classes at the top of a file, by name, where a name stands in several files."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(SRC.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path.relative_to(ROOT).as_posix()}:{node.lineno}")
    return {name: where for name, where in places.items() if len(where) > 1}


def equal_lines() -> list[str]:
    """Pairs of places that share six or more equal lines; blank lines, imports and lone brackets do not count."""
    sources: dict[str, list[tuple[int, str]]] = {}
    places: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for path in sorted(SRC.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        numbered = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        lines = [(number, line.strip()) for number, line in numbered if len(line.strip()) > 1]
        sources[name] = [item for item in lines if not item[1].startswith(("import ", "from "))]
        for start in range(len(sources[name]) - WINDOW + 1):
            places[tuple(line for _, line in sources[name][start : start + WINDOW])].append((name, start))
    shared = {(a, b) for where in places.values() for i, a in enumerate(where) for b in where[i + 1 :]}
    first = sorted(
        (a, b) for a, b in shared if ((a[0], a[1] - 1), (b[0], b[1] - 1)) not in shared and not _overlap(a, b)
    )
    by_files: dict[tuple[str, str], str] = {}
    for (name, start), (other, at) in first:
        text = f"{name}:{sources[name][start][0]} ~ {other}:{sources[other][at][0]}"
        by_files.setdefault((name, other), text)
    return list(by_files.values())


def _overlap(a: tuple[str, int], b: tuple[str, int]) -> bool:
    return a[0] == b[0] and abs(a[1] - b[1]) < WINDOW


def faults(counted: dict[str, Counts]) -> Iterable[str]:
    """What CI refuses, a sentence each."""
    total = sum(counts.lines for counts in counted.values())
    if total > LINES:
        yield f"src has {total} Python lines, at most {LINES} are wanted: delete something"
    for counts in counted.values():
        yield from (f"{entry} says nothing of the value; name it for what it is" for entry in counts.vague)
        yield from counts.docstrings
    for name, where in classes().items():
        yield f"class {name} stands in several files: {', '.join(where)}"
    equal = equal_lines()
    if len(equal) > EQUAL:
        yield f"{len(equal)} pairs of places share {WINDOW} equal lines, at most {EQUAL} are wanted (--list shows them)"


def table(counted: dict[str, Counts]) -> Iterator[str]:
    """The counts as aligned text, a row a room."""
    yield f"{'room':<18}{'lines':>8}{'comments/100':>14}{'vague names':>13}"
    every = Counts()
    for name, counts in counted.items():
        yield f"{name:<18}{counts.lines:>8}{100 * counts.comments / max(counts.code, 1):>14.1f}{len(counts.vague):>13}"
        every.lines += counts.lines
        every.code += counts.code
        every.comments += counts.comments
        every.vague += counts.vague
    yield f"{'all':<18}{every.lines:>8}{100 * every.comments / every.code:>14.1f}{len(every.vague):>13}"
    yield f"classes with one name in several files: {len(classes())}; pairs of equal lines: {len(equal_lines())}"


def main() -> int:
    """Print the table, or what breaks a limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit 1 where a limit is broken")
    parser.add_argument("--list", action="store_true", help="every vague name and pair of equal lines")
    options = parser.parse_args()
    counted = rooms()
    if options.check:
        wrong = list(faults(counted))
        print("\n".join(wrong), file=sys.stderr)
        return 1 if wrong else 0
    print("\n".join(table(counted)))
    if options.list:
        for counts in counted.values():
            print("\n".join([*counts.vague, *counts.docstrings]))
        print("\n".join([*equal_lines(), *(f"class {name}: {', '.join(where)}" for name, where in classes().items())]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
