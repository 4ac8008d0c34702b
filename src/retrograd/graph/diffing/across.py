"""Two stages of one program, as before and after optimisation: what was fused, removed, added, and what moved."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from retrograd.core.wording import count, some
from retrograd.graph.ir import COLLECTIVES, Computation, Graph, Instruction
from retrograd.graph.schema import PassRow
from retrograd.graph.source_lines import short

# They hand values on, or stand for what they call.
_PACKAGING = frozenset({
    "parameter", "tuple", "get-tuple-element", "constant", "call", "fusion", "while", "conditional", "opt-barrier",
    "while_loop", "scan", "cond", "remat2", "custom_jvp_call", "custom_vjp_call", "shard_map",
})  # fmt: skip
# What these call is their own arithmetic, as the sum of a reduce.
_OWN = frozenset({"reduce", "reduce-window", "scatter", "select-and-scatter", "sort", "map"}) | COLLECTIVES
# Primitives of JAX by the names of HLO, where these are not the same.
_HLO_NAMES = {
    "mul": "multiply", "sub": "subtract", "div": "divide", "neg": "negate", "max": "maximum", "min": "minimum",
    "exp": "exponential", "pow": "power", "rem": "remainder", "add_any": "add", "dot_general": "dot",
    "conv_general_dilated": "convolution", "convert_element_type": "convert", "broadcast_in_dim": "broadcast",
    "select_n": "select", "squeeze": "reshape", "reduce_sum": "reduce", "reduce_max": "reduce", "reduce_min": "reduce",
    "reduce_prod": "reduce", "argmax": "reduce", "psum": "all-reduce", "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter", "ppermute": "collective-permute", "all_to_all": "all-to-all",
}  # fmt: skip
_MOST = 6  # of a row: the largest fusions, the commonest operations
_MOST_COLLECTIVES = 12
_MOST_LINES = 12
_STAGE = re.compile(r"\[[^\]]*\] (traced|joint|post-grad|forward|backward|inference)")


@dataclass(frozen=True)
class _Operation:
    opcode: str
    name: str  # in the framework
    where: str
    fusion: str  # the fusion that holds it, "" outside of any
    loop: bool  # is it in the body of a loop?
    instruction: Instruction


def stages(a: Graph, b: Graph) -> tuple[str, str] | None:
    """Which stages of compilation two graphs are of, in words; None if nothing says that they are of different ones.

    Two stages are not compared operation by operation.
    """
    both = [match[1] if (match := _STAGE.match(graph.name)) else "" for graph in (a, b)]
    named = [f"the {stage} graph" if all(both) else _stage(graph) for stage, graph in zip(both, (a, b), strict=True)]
    return None if "" in named or named[0] == named[1] else (named[0], named[1])


def _stage(graph: Graph) -> str:
    opcodes = {ins.opcode for computation in graph for ins in computation.instructions}
    if graph.format == "hlo":
        optimised = graph.header.get("is_scheduled") == "true" or "fusion" in opcodes
        return f"HLO {'after' if optimised else 'before'} optimisation"
    if graph.format != "fx":
        return {"stablehlo": "StableHLO", "jaxpr": "a jaxpr"}[graph.format]
    if _is_aten(opcodes):
        return "a graph of aten operators"
    # A graph that calls nothing may be of either.
    return "a graph as Dynamo traced it" if any(o.startswith(("torch.", "method.")) for o in opcodes) else ""


def rows(a: Graph, b: Graph) -> tuple[PassRow, ...]:
    """The table of what became of A's operations in B, a few rows."""
    before, after = list(_operations(a, a.main)), list(_operations(b, b.main))
    counts_a, counts_b = (Counter(o.opcode for o in of) for of in (before, after))
    table = [
        _fused(after),
        _counted("removed", counts_a - counts_b, counts_a),
        _counted("added", counts_b - counts_a, counts_b),
        _counted("kept", counts_a & counts_b, counts_a),
    ]
    # Stages with other names of operations, as functions of torch and operators of aten, are told line by line.
    if _is_aten(counts_a) != _is_aten(counts_b) and (lines := _lines(before, after)):
        table = [_fused(after), *lines[:_MOST_LINES]]
        if len(lines) > _MOST_LINES:
            table.append(PassRow("rewritten", count(len(lines) - _MOST_LINES, "more line"), ""))
    moved = _collectives(before, after)
    hidden = len(moved) - _MOST_COLLECTIVES
    more = [PassRow("collective", count(hidden, "more collective"), "")] if hidden > 0 else []
    return (*filter(None, table), *moved[:_MOST_COLLECTIVES], *more)


def _is_aten(opcodes: Iterable[str]) -> bool:
    return any(opcode.startswith("aten.") for opcode in opcodes)


def _operations(
    graph: Graph, computation: Computation, fusion: str = "", loop: bool = False, depth: int = 0
) -> Iterator[_Operation]:
    """What is computed, once for each place that calls it."""
    for ins in computation.instructions:
        opcode = ins.opcode.removesuffix("-start").removesuffix(".default")
        opcode = _HLO_NAMES.get(opcode, opcode) if graph.format == "jaxpr" else opcode
        if opcode not in _PACKAGING and not opcode.endswith("-done"):
            place = graph.where(ins)
            yield _Operation(opcode, place.op, short((place.file, place.line)), fusion, loop, ins)
        if opcode in _OWN or depth > 50:
            continue
        for role, name in ins.called:
            inside = ins.name if opcode == "fusion" and not fusion else fusion
            yield from _operations(
                graph, graph.computations[name], inside, loop or role == "body" or opcode == "scan", depth + 1
            )


def _fused(after: list[_Operation]) -> PassRow | None:
    fusions: dict[str, list[_Operation]] = {}
    for operation in after:
        if operation.fusion:
            fusions.setdefault(operation.fusion, []).append(operation)
    if not fusions:
        return None
    held = sum(map(len, fusions.values()))
    largest = sorted(fusions.items(), key=lambda item: -len(item[1]))
    shown = [f"{name}: {_numbered(Counter(o.opcode for o in of))}{_at(of)}" for name, of in largest]
    text = f"{held} of {count(len(after), 'operation')}, in {count(len(fusions), 'fusion')}"
    more = [f"and {count(len(shown) - _MOST, 'smaller fusion')}"] if len(shown) > _MOST else []
    return PassRow("fused", text, "\n".join([*shown[:_MOST], *more]))


def _at(operations: list[_Operation]) -> str:
    lines = list(dict.fromkeys(o.where for o in operations if o.where))
    return f"  at {some(lines, 3)}" if lines else ""


def _counted(kind: str, part: Counter[str], of: Counter[str]) -> PassRow | None:
    if not part:
        return None
    total = f" of {of.total()}" if kind != "added" else ""
    return PassRow(kind, f"{part.total()}{total} operations", _numbered(part))


def _numbered(counts: Counter[str]) -> str:
    shown = [f"{number} x {name}" if number > 1 else name for name, number in counts.most_common(2 * _MOST)]
    rest = len(counts) - len(shown)
    return ", ".join([*shown, *([f"{count(rest, 'other kind')}"] if rest > 0 else [])])


def _lines(before: list[_Operation], after: list[_Operation]) -> list[PassRow]:
    """What became of each source line, where the two stages have other names for operations."""
    table: list[PassRow] = []
    for where in dict.fromkeys(o.where for o in before if o.where):
        shown = [_numbered(Counter(o.opcode for o in of if o.where == where)) for of in (before, after)]
        if shown[0] != shown[1]:
            table.append(PassRow("rewritten", where, f"{shown[0]} -> {shown[1] or 'nothing'}"))
    return table


def _collectives(before: list[_Operation], after: list[_Operation]) -> list[PassRow]:
    """Each collective with the one that it became: of its name in the framework, else the next of its kind."""
    old, new = ([o for o in of if _is_collective(o.opcode)] for of in (before, after))
    twins: dict[int, int] = {}
    free = dict(enumerate(new))
    for named in (True, False):
        for i, own in enumerate(old):
            fits = (j for j, o in free.items() if o.opcode == own.opcode and (not named or o.name == own.name))
            if i not in twins and (twin := next(fits, None)) is not None:
                twins[i] = twin
                del free[twin]
    combined = {new[j].opcode for i, j in twins.items() if _width(new[j]) > _width(old[i])}
    table: list[PassRow] = []
    for i, own in enumerate(old):
        if i in twins:
            text = f"{i + 1} of {len(old)} -> {twins[i] + 1} of {len(new)} in order{_changed(own, new[twins[i]])}"
        else:
            text = "combined with another" if own.opcode in combined else "removed"
        table.append(PassRow("collective", _titled(own), text))
    return table + [PassRow("collective", _titled(o), "added") for o in free.values()]


def _changed(own: _Operation, twin: _Operation) -> str:
    text = "" if own.loop == twin.loop else ", out of its loop" if own.loop else ", into a loop"
    if _width(own) != _width(twin):
        return f"{text}, {_width(own)} -> {count(_width(twin), 'operand')}"
    return text


def _width(operation: _Operation) -> int:
    return len(operation.instruction.operands)


def _is_collective(opcode: str) -> bool:
    return opcode in COLLECTIVES or (opcode.startswith("_c10d_functional.") and "wait_tensor" not in opcode)


def _titled(operation: _Operation) -> str:
    return f"{operation.opcode} {operation.instruction.shape}{f' at {operation.where}' if operation.where else ''}"
