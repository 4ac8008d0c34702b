"""Ordinals of collectives in their graph: "reduce-scatter 3 of 4"."""

from __future__ import annotations

from collections import Counter

from retrograd.graph.canonical import forms
from retrograd.graph.ir import COLLECTIVES, Graph, Instruction


def numbered(graph: Graph) -> dict[int, tuple[int, int, int, int]]:
    """Of each collective, by the identity of its instruction: (ordinal, of all, nth, of its opcode), from 1.

    Those that no output needs are not counted, as in a comparison; they have the number 0.
    """
    live: list[tuple[Instruction, str]] = []
    dead: list[tuple[Instruction, str]] = []
    folded = forms(graph) if any(collective(ins) for c in graph for ins in c.instructions) else {}
    for name, form in folded.items():
        needed = {id(c.instruction) for c in form.collectives}
        for ins in graph.computations[name].instructions:
            if opcode := collective(ins):
                (live if id(ins) in needed else dead).append((ins, opcode))
    alike = Counter(opcode for _, opcode in live)
    ordinals = {id(ins): (0, len(live), 0, alike[opcode]) for ins, opcode in dead}
    seen: Counter[str] = Counter()
    for ordinal, (ins, opcode) in enumerate(live, 1):
        seen[opcode] += 1
        ordinals[id(ins)] = (ordinal, len(live), seen[opcode], alike[opcode])
    return ordinals


def collective(ins: Instruction) -> str:
    """The opcode of a collective, without the start of an asynchronous one; "" of anything else."""
    opcode = ins.opcode.removesuffix("-start")
    return opcode if opcode in COLLECTIVES else ""
