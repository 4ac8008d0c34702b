"""Atomics that a kernel asks for, from Triton's own intermediate code: the same on every GPU, with source lines."""

from __future__ import annotations

import re
from typing import Any

from retrograd.codegen.access import names_at, short
from retrograd.codegen.schema import Asked

_ATOMIC = re.compile(
    r"tt\.atomic_(?:rmw (?P<op>\w+)|(?P<cas>cas)),? (?P<order>\w+), (?P<scope>\w+),.*?!tt\.ptr<(?P<dtype>\w+)"
)
_REDUCE = re.compile(r"tt\.descriptor_reduce (?P<op>\w+),.*?x(?P<dtype>[a-z]+\d+\w*)[,>]")
_INLINE = re.compile(r"\b(?:red|atom)\.(?P<operation>[a-z][\w.:]+)")
_ONE_VALUE = re.compile(r"tt\.(?:load|store) [^:]*: !tt\.ptr<")
_PLACE = re.compile(r"loc\(#(\w+)\)\s*$")
_NAMED = re.compile(r'^#(\w+) = loc\("([^"]+)":(\d+):\d+\)', re.MULTILINE)
_ALIAS = re.compile(r'^#(\w+) = loc\((?:"[^"]*"\(#(\w+)\)|callsite\(#(\w+) at #\w+\))\)', re.MULTILINE)
_ORDERS = ("relaxed", "acquire", "release", "acq_rel")
_SCOPES = ("cta", "gpu", "sys", "cluster")
_SPACES = ("global", "shared", "async")

Place = tuple[str, int]


def read(text: str) -> dict[str, Any]:
    """asked, one_value and reduces, as `Facts` has them."""
    places = _places(text)
    asked: list[Asked] = []
    one_value: dict[str, None] = {}
    for line in text.splitlines():
        if "tt.atomic_" in line or "tt.descriptor_reduce" in line:
            asked += _atomic(line, _place(line, places))
        elif "inline_asm" in line:
            asked += [_inline(match["operation"], _place(line, places)) for match in _INLINE.finditer(line)]
        elif _ONE_VALUE.search(line) and (place := _place(line, places)):
            one_value[short(place)] = None
    return {
        "asked": tuple(asked),
        "one_value": tuple(one_value),
        "reduces": '"tt.reduce"' in text or "tt.dot" in text or '"tt.scan"' in text,
    }


def _atomic(line: str, place: Place | None) -> list[Asked]:
    match = _ATOMIC.search(line)
    if match is not None:
        # The types of numbers are in the name of the operation: fadd, umax.
        op = "cas" if match["cas"] else re.sub(r"^[fu](?=add|max|min)", "", match["op"])
        return [_asked(op, match["dtype"], match["order"], match["scope"], place)]
    match = _REDUCE.search(line)
    return [] if match is None else [_asked(match["op"], match["dtype"], "relaxed", "gpu", place)]


def _inline(operation: str, place: Place | None) -> Asked:
    """An atomic in inline assembly, `red.relaxed.gpu.global.add.v4.f32`."""
    words = re.split(r"[.:]+", operation)
    order = next((w for w in words if w in _ORDERS), "relaxed")
    scope = next((w for w in words if w in _SCOPES), "gpu")
    rest = [w for w in words if w not in (*_ORDERS, *_SCOPES, *_SPACES, "noftz") and not re.fullmatch(r"v\d", w)]
    return _asked(rest[0] if rest else "", rest[-1] if rest[1:] else "", order, scope, place)


def _asked(op: str, dtype: str, order: str, scope: str, place: Place | None) -> Asked:
    names = names_at("atomic", *place) if place else ()
    return Asked(op, dtype, order, scope, short(place), names)


def _places(text: str) -> dict[str, Place]:
    """Name of a location -> (file, line) of the innermost function."""
    places = {name: (file, int(line)) for name, file, line in _NAMED.findall(text)}
    aliases = {name: inner or called for name, inner, called in _ALIAS.findall(text)}
    for name in aliases:
        step, seen = name, {name}
        while step in aliases and aliases[step] not in seen:
            step = aliases[step]
            seen.add(step)
        if step in places:
            places[name] = places[step]
    return places


def _place(line: str, places: dict[str, Place]) -> Place | None:
    at = _PLACE.search(line)
    return places.get(at[1]) if at else None
