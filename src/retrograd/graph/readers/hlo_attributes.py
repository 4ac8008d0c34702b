"""Shapes and attributes of HLO text, normalised: what belongs to what is computed, and what to how it is compiled."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from math import prod

from retrograd.graph import brackets

NOISE = re.compile(r"/\*(?:[^*]++|\*(?!/))*+(?:\*/)?+")
_LAYOUT = re.compile(r"\[([^\]]*+)\]\{([^{}]*+)\}")
_IOTA = re.compile(r"\[([\d,]++)\]<=\[([\d,]++)\](?:T\(([\d,]++)\))?\Z", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,9}\Z")

# Attributes that change neither what is computed nor what is compiled, each with the reason; all others are compared.
_HARMLESS = {
    "metadata": "names and source lines",
    "origin": "where a pass made it",
    "original_value": "names of values before optimisation",
    "statistics": "for a viewer",
    "async_group_id": "an id",
}
# Attributes that the compiled program depends on and the result does not: shardings, layouts, choices of the compiler.
_PLACEMENT = frozenset(
    {
        "sharding",
        "frontend_attributes",
        "operand_layout_constraints",
        "backend_config",
        "output_to_operand_aliasing",
        "async_execution_thread",
        "kind",
        "preserve_layout",
    }
)
# To a custom call these may be arguments, and its sharding may say which part of a whole a device takes.
_ARGUMENTS = frozenset({"backend_config", "frontend_attributes", "output_to_operand_aliasing"})
_PARTS = re.compile(r"custom_call_target=\"SPMD(?:FullToShard|ShardToFull)Shape\"")
_CALLS = {
    "": frozenset(
        {"to_apply", "calls", "condition", "body", "branch_computations", "true_computation", "false_computation"}
        | {"called_computations"}
    ),
    "select-and-scatter": frozenset({"select", "scatter"}),
}
# Keys of called computations say in which order they stand, not in which role.
_SECOND = frozenset({"body", "scatter", "false_computation"})
# Group lists longer than this stay as written: 64k ranks would be 400 kB of text.
_MOST_RANKS = 4096
_LONGEST_IOTA = 200  # a dozen axes; the product of a million sizes is a number of megabytes


def shape_of(raw: str) -> tuple[str, str]:
    """A shape without blanks and comments, and its layouts unless they are the usual ones.

    "(f32[8,16]{1,0:T(8,128)}, s32[])" -> "(f32[8,16],s32[])", "(f32[8,16]{1,0:T(8,128)},s32[])".
    """
    text = NOISE.sub("", raw).replace(" ", "") if raw[0] == "(" else raw
    if "{" not in text:
        return text, ""
    placed = _LAYOUT.sub(_unusual, text)
    return _LAYOUT.sub(r"[\1]", text), placed if "{" in placed else ""


def _unusual(match: re.Match[str]) -> str:
    """A layout that is not the usual one, of the last dimension first, is kept."""
    rank = match[1].count(",") + 1 if match[1] else 0
    return f"[{match[1]}]" if match[2] == ",".join(map(str, range(rank - 1, -1, -1))) else match[0]


@dataclass(frozen=True, slots=True)
class Attributes:
    """What follows the operands: sorted `name=value` that belong to what is computed, the rest apart.

    `noted`: there is such a rest.
    """

    attrs: str = ""
    called: tuple[tuple[str, str], ...] = ()
    placement: str = ""
    after: tuple[str, ...] = ()
    channel: str = ""
    noted: bool = False


NONE = Attributes()


def attributes_of(text: str, opcode: str) -> Attributes:
    kept: list[str] = []
    placed: list[str] = []
    called: list[tuple[str, str]] = []
    after: tuple[str, ...] = ()
    index = channel = ""
    arguments = frozenset[str]() if opcode != "custom-call" else _ARGUMENTS
    if arguments and _PARTS.search(text):
        arguments |= {"sharding"}
    for part in brackets.split(text):
        name, _, value = part.partition("=")
        name, value = name.strip(), value.strip()
        if name in _HARMLESS:
            continue
        if name == "control-predecessors":
            after = tuple(n.strip().lstrip("%") for n in value.strip("{}").split(",") if n.strip())
        elif value.startswith("%") or (name in _CALLS.get(opcode, _CALLS[""]) and not value.startswith('"')):
            called += [(name, n.strip().lstrip("%")) for n in value.strip("{}").split(",") if n.strip()]
        elif name in _PLACEMENT and name not in arguments:
            placed.append(f"{name}={value}")
        elif name == "channel_id":
            channel = value
            kept.append("channel")
        elif name == "index" and opcode == "get-tuple-element":
            index = value
        elif name == "replica_groups":
            kept.append(f"replica_groups={_groups(value)}")
        else:
            kept.append(f"{name}={value}" if value else name)
    called.sort(key=lambda pair: pair[0] in _SECOND)
    attrs = ", ".join([index] * bool(index) + sorted(kept))
    noted = bool(called or placed or after or channel)
    return Attributes(attrs, tuple(called), ", ".join(sorted(placed)), after, channel, noted)


def _groups(text: str) -> str:
    """Replica groups as lists of ranks: the iota form `[2,4]<=[4,2]T(1,0)` written out."""
    match = _IOTA.match(text) if len(text) < _LONGEST_IOTA else None
    if not match:
        return text.replace(" ", "")
    shape, grid, axes = ([int(n) for n in (match[i] or "").split(",") if _NUMBER.match(n)] for i in (1, 2, 3))
    axes = axes if match[3] else list(range(len(grid)))
    ranks = prod(grid)
    if not 0 < ranks == prod(shape) <= _MOST_RANKS or sorted(axes) != list(range(len(grid))) or len(shape) != 2:
        return text
    steps = [prod(grid[i + 1 :]) for i in range(len(grid))]
    order = [
        sum(i * steps[a] for i, a in zip(at, axes, strict=True)) for at in product(*(range(grid[a]) for a in axes))
    ]
    rows = [order[i : i + shape[1]] for i in range(0, ranks, shape[1])]
    return "{" + ",".join("{" + ",".join(map(str, row)) + "}" for row in rows) + "}"
