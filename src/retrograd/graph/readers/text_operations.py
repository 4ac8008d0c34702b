"""Operations of StableHLO text: what `mlir_module` asks of those of the bindings."""

from __future__ import annotations

from typing import Any

from retrograd.graph.readers.mlir_attributes import attributes_of
from retrograd.graph.readers.mlir_module import ModuleReader


class TextValue:
    """A value with its name and type."""

    __slots__ = ("name", "type")

    def __init__(self, name: str, type: str) -> None:
        self.name, self.type = name, type


class TextOperation:
    """An operation; `location` is its line."""

    __slots__ = ("attributes", "location", "name", "operands", "regions", "results")

    def __init__(
        self,
        name: str,
        operands: list[TextValue],
        attributes: dict[str, Any],
        results: list[TextValue],
        line: int,
        regions: list[TextRegion] | None = None,
    ) -> None:
        self.name, self.operands, self.attributes = name, operands, attributes
        self.results, self.location = results, line
        self.regions: list[TextRegion] = [] if regions is None else regions

    @property
    def operation(self) -> TextOperation:
        return self


class TextRegion:
    """A region of one block."""

    __slots__ = ("arguments", "operations")

    def __init__(self, arguments: list[TextValue], operations: list[TextOperation]) -> None:
        self.arguments, self.operations = arguments, operations

    @property
    def blocks(self) -> list[TextRegion]:
        return [self]


class TextModule:
    """A module: its attributes, and its functions as the operations of its body."""

    def __init__(self, attributes: dict[str, Any], operations: list[TextOperation]) -> None:
        self.operation = TextOperation("builtin.module", [], attributes, [], 1)
        self.body = TextRegion([], operations)


class TextReader(ModuleReader):
    """Reader of these, without the ways of the bindings to say names and lines; attributes are texts, which repeat."""

    def __init__(self, module: TextModule, source: str, first: int) -> None:
        super().__init__(module, source, first, None)
        self.known: dict[tuple[Any, ...], tuple[str, str]] = {}

    def where(self, location: int) -> tuple[str, int]:
        return "", self.first + location - 1

    def name(self, value: TextValue) -> str:
        return value.name

    def attributes(self, operation: TextOperation, opcode: str) -> tuple[dict[str, Any], str, str]:
        if not operation.attributes:
            return operation.attributes, "", ""
        key = opcode, *operation.attributes.items()
        known = self.known.get(key)
        if known is None:
            known = self.known[key] = attributes_of(operation.attributes, opcode)
        return operation.attributes, known[0], known[1]
