"""Operations of StableHLO text: what `mlir_module` asks of those of the bindings."""

from __future__ import annotations

from typing import Any

from retrograd.graph.readers.mlir_module import ModuleReader


class Value:
    """A value with its name and type."""

    __slots__ = ("name", "type")

    def __init__(self, name: str, type: str) -> None:
        self.name, self.type = name, type


class Operation:
    """An operation; `location` is its line."""

    __slots__ = ("attributes", "location", "name", "operands", "regions", "results")

    def __init__(
        self, name: str, operands: list[Value], attributes: dict[str, Any], results: list[Value], line: int
    ) -> None:
        self.name, self.operands, self.attributes = name, operands, attributes
        self.results, self.location = results, line
        self.regions: list[Region] = []

    @property
    def operation(self) -> Operation:
        return self


class Region:
    """A region of one block."""

    __slots__ = ("arguments", "operations")

    def __init__(self, arguments: list[Value], operations: list[Operation]) -> None:
        self.arguments, self.operations = arguments, operations

    @property
    def blocks(self) -> list[Region]:
        return [self]


class Module:
    """A module: its attributes, and its functions as the operations of its body."""

    def __init__(self, attributes: dict[str, Any], operations: list[Operation]) -> None:
        self.operation = Operation("builtin.module", [], attributes, [], 1)
        self.body = Region([], operations)


class TextReader(ModuleReader):
    """Reader of these, without the ways of the bindings to say names and lines."""

    def where(self, location: int) -> tuple[str, int]:
        return "", self.first + location - 1

    def name(self, value: Value) -> str:
        return value.name
