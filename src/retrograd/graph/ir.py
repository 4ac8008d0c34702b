"""Intermediate representation of a computation graph: instructions with ordered operands, in computations.

HLO of torch_xla and JAX, StableHLO and FX graphs are read into it (`readers`). Standard library only: a diff of two
dumps needs neither torch nor jaxlib. Instructions are not frozen, because a module has
tens of thousands of them and a frozen dataclass takes five times as long to make (2.1 against 0.4 us).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from retrograd.graph.source_lines import Frames, Place, place_of

# Collectives whose result k depends on operand k alone, so that one instruction with many operands says the same as
# many with one. all-to-all is not among them: with several operands each result mixes all of them.
PER_OPERAND = frozenset({"all-reduce", "all-gather", "reduce-scatter", "collective-permute"})
COLLECTIVES = PER_OPERAND | {"all-to-all", "collective-broadcast", "ragged-all-to-all"}

# Operations of HLO and StableHLO (in HLO's spelling) that do nothing but compute their result. What is not among them
# has an effect: it counts although nobody reads its result. A custom call says itself whether it has any.
PURE_NAMES = """
    abs acos acosh add add-dependency after-all all-gather all-gather-done all-gather-start all-reduce
    all-reduce-done all-reduce-start all-to-all and asin asinh async-done async-start async-update atan atan2
    atanh batch-norm-grad batch-norm-inference batch-norm-training bitcast bitcast-convert broadcast
    broadcast-in-dim call cbrt ceil cholesky clamp clz collective-broadcast collective-permute
    collective-permute-done collective-permute-start compare complex composite concatenate conditional constant
    convert convolution copy copy-done copy-start cosh cosine count-leading-zeros create-token custom-call
    digamma divide domain dot dot-general dynamic-broadcast-in-dim dynamic-conv dynamic-gather dynamic-iota
    dynamic-pad dynamic-reshape dynamic-slice dynamic-update-slice einsum erf erf-inv erfc exponential
    exponential-minus-one fft floor fusion gather get-dimension-size get-tuple-element imag iota is-finite
    lgamma log log-plus-one logistic manual-computation map maximum minimum multiply negate not opt-barrier or
    pad parameter partition-id polygamma popcnt power ragged-all-to-all ragged-dot real real-dynamic-slice
    reduce reduce-precision reduce-scatter reduce-window remainder replica-id reshape reshard reverse
    rng-bit-generator round-nearest-afz round-nearest-even rsqrt scaled-dot scatter select select-and-scatter
    set-dimension-size sharding-constraint shift-left shift-right-arithmetic shift-right-logical sign sine sinh
    slice sort sqrt square subtract tan tanh top-k topk torch-index-select transpose triangular-solve tuple
    uniform-dequantize uniform-quantize while xor zeta
"""
PURE = frozenset(PURE_NAMES.split())


@dataclass(slots=True, eq=False, repr=False)
class Instruction:
    """One instruction.

    `shape` has neither layout nor blanks ("f32[8,16]", "(f32[8],f32[])"), "" if unknown. `operands` are places in the
    instructions of the same computation. `attrs` holds what belongs to what is computed, in sorted order: of a
    parameter its number, of a constant its literal, of a get-tuple-element its index; never names, ids or metadata.
    `called` names the computations it calls, each with the attribute that does. `metadata` is unparsed: ask
    `Graph.where`. `placement` is what the compiled program depends on and the result does not (layouts, device,
    memory space, shardings), `after` places of instructions that have to run before it, `has_effect` whether it is
    executed although nobody reads its result.
    """

    name: str
    opcode: str
    shape: str
    operands: tuple[int, ...]
    attrs: str = ""
    called: tuple[tuple[str, str], ...] = ()
    metadata: str = ""
    line: int = 0
    placement: str = ""
    after: tuple[int, ...] = ()
    has_effect: bool = False

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


def effect_of(opcode: str, attrs: str, called: tuple[tuple[str, str], ...], effects: set[str]) -> bool:
    """Has an operation of HLO an effect? `effects` names the computations that have one."""
    if opcode not in PURE or (called and any(name in effects for _, name in called)):
        return True
    if opcode == "custom-call":
        return "has_side_effect=true" in attrs
    # With a channel, every device takes part in the schedule, whoever reads the result.
    return "channel" in attrs and opcode.removesuffix("-start") in COLLECTIVES


def share_channels(instructions: Iterable[tuple[Instruction, str]]) -> None:
    """Channel ids as what they mean: that there is one, and who shares it. The number itself is another at each trace.

    What is sent belongs to what is received on its channel; collectives of one module do not mix through theirs.
    """
    users: dict[str, list[Instruction]] = {}
    for instruction, channel in instructions:
        users.setdefault(channel, []).append(instruction)
    for number, sharing in enumerate(sharing for sharing in users.values() if len(sharing) > 1):
        for ins in sharing:
            if ins.opcode.removesuffix("-start") in COLLECTIVES:
                ins.placement = ", ".join(filter(None, [ins.placement, "shares its channel"]))
            else:
                ins.attrs += f" {number}"


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
