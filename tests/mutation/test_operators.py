"""Edits of sources: what each operator makes, that it is Python, and where it stands."""

from __future__ import annotations

import ast
import inspect

import pytest
from norm_op import input_grad

from retrograd.mutation.edits import Edit, Source
from retrograd.mutation.operators import python_edits, triton_edits

SOURCES = {
    "factor dropped": ("def f(a, b):\n    return a * b\n", "return a\n"),
    "term dropped": ("def f(a, b):\n    return a + b\n", "return b\n"),
    "arithmetic": ("def f(a, b):\n    c = a - b\n    return c\n", "c = a + b"),
    "sign": ("def f(a):\n    return -a\n", "return a\n"),
    "constant": ("def f(a):\n    return a[1]\n", "return a[2]"),
    "comparison edge": ("def f(a):\n    return a < 3\n", "return a <= 3"),
    "mask dropped": ("def f(a, b):\n    return where(a, a, b)\n", "return b"),
    "keepdim= dropped": ("def f(a):\n    return a.mean(-1, keepdim=True)\n", "return a.mean(-1)"),
    "sum dropped": ("def f(a):\n    return a.sum(0)\n", "return a\n"),
    "call dropped": ("def f(a):\n    return a.contiguous()\n", "return a\n"),
    "function": ("def f(a):\n    return a.sum(0)\n", "return a.mean(0)"),
    "saved tensors swapped": ("def f(ctx):\n    a, b = ctx.saved_tensors\n", "b, a = ctx.saved_tensors"),
    "condition": ("def f(a):\n    if a:\n        g()\n", "if not (a):"),
    "gradient lost": ("def f(a, b):\n    return a, b\n", "return a, None"),
    "detached": ("def f(a):\n    return a\n", "return (a).detach()"),
    "needs_input_grad": ("def f(ctx):\n    if ctx.needs_input_grad[0]:\n        g()\n", "if True:"),
    "loop bound": ("def f(n):\n    for i in range(n):\n        g(i)\n", "in range((n) - 1):"),
    "overwritten": ("def f(a, b):\n    a += b\n", "a = b"),
}


@pytest.mark.parametrize("operator", SOURCES)
def test_each_operator_makes_its_mistake(operator):
    source, expected = SOURCES[operator]
    assert any(expected in e.applied(source) for e in python_edits(source) if e.operator == operator)


@pytest.mark.parametrize(
    ("source", "operator", "expected"),
    [
        ("def k(p, m):\n    tl.load(p, mask=m, other=0.0)\n", "mask= dropped", "tl.load(p)"),
        ("def k(p, v, m):\n    tl.store(p, v, m)\n", "mask= dropped", "tl.store(p, v)"),
        ("def k(p, v):\n    tl.atomic_add(p, v)\n", "store for atomic", "tl.store(p, v)"),
        ("def k():\n    i = tl.program_id(0)\n", "program", "(tl.program_id(0) + 1)"),
        ("def k(a_ptr, b_ptr):\n    tl.load(a_ptr)\n", "variable", "tl.load(b_ptr)"),
        ("def k(x):\n    x.to(tl.float32)\n", "accumulator", "x.to(tl.float16)"),
    ],
)
def test_operators_of_kernels(source, operator, expected):
    assert any(expected in e.applied(source) for e in triton_edits(source) if e.operator == operator)


def test_every_edit_is_another_function_that_parses():
    source = inspect.getsource(input_grad)
    mutated = [e.applied(source) for e in python_edits(source)]
    assert len(set(mutated)) == len(mutated) > 20
    assert source not in mutated
    assert all(ast.parse(text) for text in mutated)


def test_what_is_said_stays():
    source = 'def f(a):\n    """Twice 2."""\n    if a < 0:\n        raise ValueError("less than 0")\n    assert a, "1 or 2"\n'
    assert {e.operator for e in python_edits(source)} <= {"comparison edge", "comparison turned", "constant"}
    assert all(
        '"""Twice 2."""' in e.applied(source) and "less than 0" in e.applied(source) for e in python_edits(source)
    )


def test_a_diff_counts_lines_of_the_file():
    source = "def f(a, b):\n    c = a\n    return c * b\n"
    edit = Edit("factor dropped", source.index("c * b"), source.index("c * b") + 5, "c", 2)
    assert edit.diff(source, "op.py", 41).splitlines() == [
        "--- op.py", "+++ op.py", "@@ -41,3 +41,3 @@", " def f(a, b):", "     c = a", "-    return c * b", "+    return c",
    ]  # fmt: skip


def test_places_count_characters_where_python_counts_bytes():
    source = 'def f(a):\n    return {"\u03b1\u03b2": a * 2}\n'
    node = next(n for n in ast.walk(Source(source).tree) if isinstance(n, ast.BinOp))
    assert Source(source).of(node) == "a * 2"
