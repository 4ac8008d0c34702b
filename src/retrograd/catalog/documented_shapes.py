"""Shapes of arguments as an op's own docstring and the comments of its signature give them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

# "of shape `[B, T, H, K]`", "shape (BT, V)", "(tensor of size (M, N))"; brackets alone, as "x: [B, T, D]"; "(M, N)".
_PLACES = (
    re.compile(r"\b(?:shapes?|sizes?)\b[^\[(\n]{0,12}[\[(]([^\[\]()\n]+)[\])]"),
    re.compile(r"(?<![\w\])])\[([^\[\]()\n]+)\]"),
    re.compile(r"(?<!\w)\(([^\[\]()\n]+,[^\[\]()\n]*)\)"),
)
_DIM = re.compile(r"[A-Za-z_]\w*(?:(?://|[-+*])\w+)?|\d+(?:\*[A-Za-z_]\w*)?")
_OTHER_WORDS = {"tensor", "optional", "int", "float", "bool", "str", "none", "list", "tuple", "default", "min", "max"}


def documented_shapes(values: Sequence[Any], names: Sequence[str]) -> dict[str, tuple[str | int, ...]]:
    """Dimensions by argument, for those of which a text says them.

    Args:
        values: a function, or a class and its method: their docstrings and signatures are read, in this order.
        names: of all arguments; what is said of one ends where the next begins.
    """
    shapes: dict[str, tuple[str | int, ...]] = {}
    for value in filter(None, values):
        for name, text in _entries(value.__doc__ or "", names):
            _note(shapes, name, text)
        for name, text in _comments(value, names):
            _note(shapes, name, text)
    return shapes


def _entries(text: str, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """What a docstring says of each argument: "name (type): words" or "name: words", to the next or a heading."""
    any_name = "|".join(map(re.escape, names))
    heads = list(re.finditer(rf"^[ \t]*(?:[-*] |:param )?[`*]*({any_name})[`*]*[ \t]*(?=[:(\[])", text, re.MULTILINE))
    for head, after in zip_longest(heads, heads[1:]):
        entry = text[head.end() : after.start() if after else None]
        yield head[1], re.split(r"^\s*(?:Returns?|Raises|Examples?)\b", entry, flags=re.MULTILINE)[0]


def _comments(value: Any, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Comments beside the arguments of a signature, as in "q,  # [B, T, H, K]"."""
    try:
        lines = inspect.getsource(value).splitlines()
    except (OSError, TypeError):
        return
    for line in lines:
        code, _, comment = line.partition("#")
        if (head := re.match(r"\s*(\w+)\b", code)) and head[1] in names and comment:
            yield head[1], comment
        if re.search(r"\)\s*(?:->.*)?:\s*$", code):
            return  # what follows is the body


def _note(shapes: dict[str, tuple[str | int, ...]], name: str, text: str) -> None:
    for match in (match for place in _PLACES for match in place.finditer(text)):
        if name not in shapes and (dims := _dims(match[1])):
            shapes[name] = dims


def _dims(text: str) -> tuple[str | int, ...]:
    """The dimensions that a text between brackets lists; none if it lists something else."""
    words = [re.sub(r"\s*(//|[-+*/])\s*", r"\1", word.strip()) for word in text.rstrip(", ").split(",")]
    first, *others = ["M..." if word in ("...", "*") else re.sub(r"(?<!/)/(?!/)", "//", word) for word in words]
    named = [word for word in (first, *others) if word != "M..."]
    if "M..." in others or not all(_DIM.fullmatch(w) and w.lower() not in _OTHER_WORDS for w in named) or "0" in named:
        return ()
    return tuple(int(word) if word.isdigit() else word for word in (first, *others))
