"""Remarks on the source of kernels: what Triton reads otherwise than its author wrote."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from retrograd.compat import triton_source


def source_remarks(kernels: Iterable[Any]) -> tuple[str, ...]:
    """A sentence for each line of these kernels, and of functions that they call, that counts in other steps.

    Triton takes `range` for its own and passes over its keywords, which Python's has none of: a loop over
    `range(0, n, step=BLOCK)` goes round n times.
    """
    functions = {id(f): f for kernel in kernels for f in triton_source.functions_of(kernel)}
    return tuple(dict.fromkeys(remark for f in functions.values() for remark in _remarks(f)))


def _remarks(function: Any) -> tuple[str, ...]:
    file, first, text = triton_source.source_of(function)
    return _of_text(file, first, text) if "range(" in text else ()


@cache
def _of_text(file: str, first: int, text: str) -> tuple[str, ...]:
    return tuple(_of_loops(file, first, text))


def _of_loops(file: str, first: int, text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(textwrap.dedent(text))):
        call = node.iter if isinstance(node, ast.For) else None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "range" and call.keywords:
            names = ", ".join(f"{keyword.arg}=" for keyword in call.keywords)
            yield (
                f"{Path(file).name}:{first + call.lineno - 1}: {ast.unparse(call)}: Triton passes over keywords of "
                f"range, here {names}; give it numbers in their places, or tl.range"
            )
