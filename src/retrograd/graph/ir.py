"""Intermediate representation of a computation graph: instructions with ordered operands, in computations.

HLO of torch_xla and JAX, StableHLO and FX graphs are read into it (`readers`). Standard library only: a diff of two
dumps needs neither torch nor jaxlib. Instructions are not frozen, because a module has
tens of thousands of them and a frozen dataclass takes five times as long to make (2.1 against 0.4 us).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from retrograd.graph.source_lines import Frames, Place, place_of

# Collectives whose result k depends on operand k alone, so that one instruction with many operands says the same as
# many with one. all-to-all is not among them: with several operands each result mixes all of them.
PER_OPERAND = frozenset({"all-reduce", "all-gather", "reduce-scatter", "collective-permute"})
COLLECTIVES = PER_OPERAND | {"all-to-all", "collective-broadcast", "ragged-all-to-all"}

# Executed although nobody reads the result: HLO's, and FX's in compiled autograd, where gradients are stored by a call.
SIDE_EFFECTS = frozenset(
    {"outfeed", "infeed", "send", "send-done", "recv", "recv-done", "print"}
    | {f"torch__dynamo_external_utils_{name}" for name in ("call_accumulate_grad", "_exec_final_callbacks_stub")}
    | {
        f"torch__dynamo_external_utils_{name}"
        for name in ("call_hook", "call_hook_from_backward_state", "call_backward")
    }
    | {"operator.setitem", "aten.copy_.default", "aten.set_.source_Tensor", "inductor.accumulate_grad_.default"}
)


@dataclass(slots=True, eq=False, repr=False)
class Instruction:
    """One instruction.

    `shape` has neither layout nor blanks ("f32[8,16]", "(f32[8],f32[])"), "" if unknown. `operands` are places in the
    instructions of the same computation. `attrs` holds what belongs to what is computed, in sorted order: of a
    parameter its number, of a constant its literal, of a get-tuple-element its index; never names, layouts, ids or
    metadata. `called` names the computations it calls, each with the attribute that does. `metadata` is unparsed: ask
    `Graph.where`.
    """

    name: str
    opcode: str
    shape: str
    operands: tuple[int, ...]
    attrs: str = ""
    called: tuple[tuple[str, str], ...] = ()
    metadata: str = ""
    line: int = 0

    @property
    def has_effect(self) -> bool:
        """Is it executed although nobody reads its result?"""
        return self.opcode in SIDE_EFFECTS or (self.opcode == "custom-call" and "has_side_effect=true" in self.attrs)

    def __repr__(self) -> str:
        attrs = f", {self.attrs}" if self.attrs else ""
        return f"{self.name} = {self.shape} {self.opcode}({', '.join(map(str, self.operands))}){attrs}"


@dataclass(slots=True)
class Computation:
    """Instructions in an order in which each comes after its operands; `parameters` are places, by parameter number."""

    name: str
    instructions: list[Instruction]
    root: int
    parameters: list[int]
    line: int = 0

    def __len__(self) -> int:
        return len(self.instructions)


@dataclass(slots=True)
class Graph:
    """A module: computations by name, called ones before their callers, and which of them is the entry.

    `header` holds the module's own attributes as text (input_output_alias, buffer_donor, replica_count, ...), `key` the
    hash that the framework recorded with it, `format` "hlo", "stablehlo" or "fx", `source` the file, `ordinal` which
    graph of that file, `digest` a hash of the text.
    """

    name: str
    computations: dict[str, Computation]
    entry: str
    format: str
    header: dict[str, str] = field(default_factory=dict[str, str])
    key: str = ""
    source: str = ""
    ordinal: int = 0
    digest: str = ""
    frames: tuple[tuple[str, int], ...] = ()  # Python frames at the cut, as torch_xla's save-files list them
    block: str = ""  # what torch_xla was doing ("ScheduleSyncTensorsGraph")
    stack: dict[int, Frames] = field(default_factory=dict[int, Frames])

    @property
    def main(self) -> Computation:
        """The entry computation."""
        return self.computations[self.entry]

    @property
    def title(self) -> str:
        """The file, and which graph of it."""
        return f"{self.source}#{self.ordinal}" if self.ordinal else self.source or self.name

    def __len__(self) -> int:
        """Instructions over all computations."""
        return sum(len(c) for c in self.computations.values())

    def __iter__(self) -> Iterator[Computation]:
        return iter(self.computations.values())

    def where(self, instruction: Instruction) -> Place:
        """The source line of an instruction, from its metadata."""
        return place_of(instruction.metadata, self.stack)
