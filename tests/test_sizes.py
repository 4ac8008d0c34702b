"""The size budget of the source: files that can be read in one sitting, functions on one screen."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parent.parent / "src"
FILE, FUNCTION, LAUNCHER = 400, 45, 120  # lines without the docstring; kernels and their launchers get more room
FILES = sorted(p.relative_to(SRC).as_posix() for p in SRC.rglob("*.py"))


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    doc = ast.get_docstring(node, clean=False)
    described = node.body[0].end_lineno - node.body[0].lineno + 1 if doc is not None else 0
    return node.end_lineno - node.lineno + 1 - described


@pytest.mark.parametrize("name", FILES)
def test_within_budget(name):
    text = (SRC / name).read_text()
    assert len(text.splitlines()) <= FILE
    most = LAUNCHER if "/triton/" in name or "/cuda/" in name else FUNCTION
    nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    assert {n.name: _length(n) for n in nodes if _length(n) > most} == {}
