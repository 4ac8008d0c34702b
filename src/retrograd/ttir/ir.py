"""Intermediate code of Triton's first stage (TTIR) as a tree: modules, functions, blocks, operations, values, types."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Type:
    """Type of a value.

    Attributes:
        element: "f32", "bf16", "i1", "i32", "ptr", ...
        shape: extents; () for a scalar.
        pointee: what a pointer points to, a scalar type; None for others.
    """

    element: str
    shape: tuple[int, ...] = ()
    pointee: Type | None = None

    @functools.cached_property
    def elements(self) -> int:
        """How many a value has."""
        return math.prod(self.shape)

    def with_element(self, element: str) -> Type:
        return Type(element, self.shape)

    def __str__(self) -> str:
        element = f"!tt.ptr<{self.pointee}>" if self.pointee else self.element
        return f"tensor<{''.join(f'{n}x' for n in self.shape)}{element}>" if self.shape else element


@dataclass(frozen=True)
class SourcePlace:
    """Line of a person's source that an operation comes from; the kernel's own line where a helper was inlined.

    Attributes:
        file, line: innermost.
        callers: (file, line) of the calls that lead there, the innermost first.
    """

    file: str = ""
    line: int = 0
    callers: tuple[tuple[str, int], ...] = ()

    def outside_of(self, folder: str) -> tuple[str, int]:
        """The innermost line that is not in a folder, such as that of Triton's own library."""
        chain = ((self.file, self.line), *self.callers)
        return next(((file, line) for file, line in chain if file and not file.startswith(folder)), chain[0])

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"


@dataclass(eq=False, slots=True)
class SsaValue:
    """Result of an operation or argument of a block; `slot` is its place among the registers of a function."""

    name: str
    type: Type
    slot: int


@dataclass(eq=False, slots=True)
class Operation:
    """One operation.

    Attributes:
        name: "arith.addf", "tt.load".
        operands, results: values.
        text: what stands between the name and the types, where attributes and keywords are.
        regions: of control flow and reductions.
        successors: labels of blocks that a branch leads to, each with the values that go there.
        location: as TTIR writes it; `place_of` makes the line of the source of it, which most never ask for.
    """

    name: str
    operands: Sequence[SsaValue]
    results: Sequence[SsaValue]
    text: str
    location: str
    place_of: Callable[[str], SourcePlace]
    regions: Sequence[OperationRegion] = ()
    successors: Sequence[tuple[str, list[SsaValue]]] = ()

    @property
    def callee(self) -> str:
        """The name of the function that a tt.call calls."""
        return self.text.split("(")[0].strip().lstrip("@").strip('"')

    @property
    def place(self) -> SourcePlace:
        """Line of the source."""
        return self.place_of(self.location)


@dataclass(eq=False, slots=True)
class Block:
    label: str
    arguments: list[SsaValue]
    operations: list[Operation] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class OperationRegion:
    blocks: list[Block]

    @property
    def entry(self) -> Block:
        return self.blocks[0]


@dataclass(eq=False, slots=True)
class Function:
    """A function; its arguments are those of the first block."""

    name: str
    body: OperationRegion
    slots: int
    public: bool

    @property
    def arguments(self) -> list[SsaValue]:
        return self.body.entry.arguments


@dataclass(eq=False)
class Module:
    functions: dict[str, Function]

    @property
    def kernel(self) -> Function:
        """The function that is launched."""
        return next(function for function in self.functions.values() if function.public)
