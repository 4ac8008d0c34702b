"""Revisions of git, and the Python files that differ from one."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

from retrograd.errors import UsageError


def git(revision: str, *words: str) -> str:
    """What git prints; UsageError that names `--since` if it fails."""
    try:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        reason = str(getattr(error, "stderr", "") or error).strip().splitlines()[-1:]
        raise UsageError(f"`--since` is {revision!r}, which git cannot compare with: {''.join(reason)}") from None


def changed_files(revision: str) -> set[Path]:
    """Files that differ from a revision, and new ones that git does not know."""
    root = Path(git(revision, "rev-parse", "--show-toplevel").strip())
    names = git(revision, "diff", "--name-only", "-z", revision).split("\0")
    new = git(revision, "ls-files", "--others", "--exclude-standard", "--full-name", "-z", str(root)).split("\0")
    return {(root / name).resolve() for name in filter(None, [*names, *new])}


def with_imports(file: Path, roots: tuple[Path, ...]) -> set[Path]:
    """A file and all files below the roots that it imports, and these in turn, by their statements."""
    reached: set[Path] = set()
    todo = [file.resolve()]
    while todo:
        path = todo.pop()
        if path not in reached:
            reached.add(path)
            todo += _imports(path, roots)
    return reached


def _imports(file: Path, roots: tuple[Path, ...]) -> Iterator[Path]:
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # whoever imports it says what is wrong with it
    for node in ast.walk(tree):
        level = 0
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            level, head = node.level, node.module or ""
            names = [head, *(f"{head}.{alias.name}".strip(".") for alias in node.names)]
        else:
            continue
        for base in (file.parents[level - 1],) if level else (file.parent, *roots):
            for name in names:
                yield from _files(base, name)


def _files(base: Path, name: str) -> Iterator[Path]:
    """Files that run when a module is imported: its own and those of the packages around it."""
    at = base
    for part in name.split("."):
        if (at / "__init__.py").is_file() and at != base:
            yield (at / "__init__.py").resolve()
        at = at / part if part else at
    for path in (at.with_suffix(".py"), at / "__init__.py"):
        if path.is_file():
            yield path.resolve()
