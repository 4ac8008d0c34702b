"""torch_xla's token chain, in the instructions as they are printed; `canonical` folds it away.

A collective's result 0 goes through `gather` into the next token, and every later collective gets `+ token`, where all
tokens are 0: whatever passes one collective would seem to reach all that follow.
"""

from __future__ import annotations

from retrograd.graph.ir import COLLECTIVES, Computation, Instruction


def tokens(computation: Computation) -> tuple[frozenset[int], frozenset[int]]:
    """The gathers that feed the chain of a computation, and the tokens themselves."""
    gathers: set[int] = set()
    chain: set[int] = set()
    instructions = computation.instructions
    for place, ins in enumerate(instructions):
        if ins.opcode != "multiply" or not ins.shape.endswith("[]") or len(ins.operands) != 2:
            continue
        gather = instructions[ins.operands[1]]
        if gather.opcode == "gather" and gather.operands and _from_collective(instructions, gather.operands[0]):
            gathers.add(ins.operands[1])
            chain.update((place, ins.operands[0]))
    return frozenset(gathers), frozenset(chain)


def _from_collective(instructions: list[Instruction], place: int) -> bool:
    source = instructions[place]
    while source.opcode in ("get-tuple-element", "opt-barrier") and source.operands:
        source = instructions[source.operands[0]]
    return source.opcode.removesuffix("-done") in COLLECTIVES


def adds_token(computation: Computation, tokens: frozenset[int], ins: Instruction, k: int) -> bool:
    """Is this `value + broadcast(token)`, which is the value?"""
    if ins.opcode != "add" or k != 0 or len(ins.operands) != 2:
        return False
    added = computation.instructions[ins.operands[1]]
    return (added.operands[0] if added.opcode == "broadcast" and added.operands else ins.operands[1]) in tokens
