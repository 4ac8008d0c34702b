"""A module of MLIR -> Graph: operations get the names that HLO gives them.

So collectives, tuples and barriers mean the same everywhere. Regions become called computations; what a region uses
from outside becomes further parameters of it and operands of the operation, as in HLO. An operation with several
results is one instruction and a get-tuple-element for each.
"""

# jaxlib ships MLIR's bindings without types.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportOptionalCall=false

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from retrograd.errors import GraphError
from retrograd.graph import brackets
from retrograd.graph.ir import Computation, Graph, Instruction, effect_of, share_channels
from retrograd.graph.readers.mlir_attributes import (
    RESOURCE,
    attributes_of,
    get_attribute,
    items_of,
    shape_of,
    string_of,
    symbols_of,
    value_of,
)

_AT = re.compile(r'"-":([0-9]{1,9}):[0-9]')
_NAMED = re.compile(r'loc\("((?:[^"\\]|\\.)*+)"\(')
_FRAME = re.compile(r'"((?:[^"\\]|\\.)*+)"\("((?:[^"\\]|\\.)*+)":([0-9]{1,9})')
_BARE = re.compile(r'"((?:[^"\\]|\\.)*+)":([0-9]{1,9}):[0-9]')
_CHANNEL = re.compile(r"handle = (\d+), type = (\d+)")
_OPCODES = {"optimization_barrier": "opt-barrier", "case": "conditional", "if": "conditional"}
_RETURNS = frozenset({"func.return", "stablehlo.return", "sdy.return", "mhlo.return", "return"})
# Names of arguments and results.
_HARMLESS = ("jax.arg_info", "jax.result_info", "jax.global_constant", "tf.aliasing_output", "jax.buffer_donor")


class _Body:
    """A computation in the making: instructions, and where each MLIR value is."""

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []
        self.values: dict[Any, int] = {}
        self.parameters: list[int] = []
        self.names: dict[str, int] = {}

    def add(self, instruction: Instruction) -> int:
        count = self.names.get(instruction.name, 0)
        self.names[instruction.name] = count + 1
        if count:
            instruction.name = f"{instruction.name}.{count}"
        self.instructions.append(instruction)
        return len(self.instructions) - 1

    def parameter(self, value: Any, name: str, shape: str, attrs: str = "") -> int:
        number = str(len(self.parameters))
        place = self.add(Instruction(name, "parameter", shape, (), f"{number}, {attrs}" if attrs else number))
        self.parameters.append(place)
        self.values[value] = place
        return place


class ModuleReader:
    """Reader of one module of the bindings, or of what has their attributes."""

    def __init__(self, module: Any, source: str, first: int, state: Any) -> None:
        self.state = state
        self.module = module
        self.source = source
        self.first = first
        self.computations: dict[str, Computation] = {}
        self.types: dict[Any, str] = {}
        self.stack: dict[int, tuple[tuple[str, int, str], ...]] = {}
        self.stacks: dict[tuple[tuple[str, int, str], ...], int] = {}
        self.functions: dict[str, Any] = {}
        self.open: list[str] = []
        self.count = 0  # of regions
        self.aliases: list[str] = []
        self.effects: set[str] = set()
        self.channels: list[tuple[Instruction, str]] = []

    def error(self, line: int, message: str) -> GraphError:
        return brackets.error(self.source or "StableHLO text", line or self.first, message)

    def graph(self, blobs: Mapping[str, str] | None = None) -> Graph:
        """The graph; `blobs` are texts of the resources that stand at the end of the module."""
        others: dict[str, str] = {}  # meshes and what else functions name
        for operation in self.module.body.operations:
            operation = operation.operation
            name = string_of(get_attribute(operation.attributes, "sym_name"))
            if operation.name == "func.func":
                self.functions[name] = operation
            else:
                kept = {key: value_of(value) for key, value in items_of(operation.attributes) if key != "sym_name"}
                others[f"{operation.name} {name}".strip()] = ", ".join(kept.values())
        public = [
            n for n, f in self.functions.items() if "private" not in str(get_attribute(f.attributes, "sym_visibility"))
        ]
        entry = "main" if "main" in self.functions else (public or [""])[0]
        if not entry:
            raise self.error(self.first, "the module has no public function")
        self.function(entry)
        for name in self.functions:
            self.function(name)
        share_channels(self.channels)
        resources = blobs or {}
        for instruction in (i for own in self.computations.values() for i in own.instructions if resources):
            instruction.attrs = RESOURCE.sub(lambda m: resources.get(m[1], m[0]), instruction.attrs)
        attributes = self.module.operation.attributes
        name = string_of(get_attribute(attributes, "sym_name")) or "module"
        header = others | {
            key.removeprefix("mhlo."): value_of(value) for key, value in items_of(attributes) if key != "sym_name"
        }
        if self.aliases:
            header["input_output_alias"] = "{ " + ", ".join(self.aliases) + " }"
        return Graph(name, self.computations, entry, "stablehlo", header, source=self.source, stack=self.stack)

    def function(self, name: str) -> None:
        """Reads a function, and those that it calls before it."""
        if name in self.computations:
            return
        operation = self.functions.get(name)
        if operation is None or name in self.open:
            raise self.error(self.first, f"{name} is called but {'calls itself' if operation else 'not defined'}")
        self.open.append(name)
        blocks = list(operation.regions[0].blocks) if len(operation.regions) else []
        line = self.where(operation.location)[1]
        if len(blocks) != 1:
            raise self.error(line, f"the function {name} has {len(blocks)} blocks; expected 1, as StableHLO is printed")
        body = _Body()
        arguments = get_attribute(operation.attributes, "arg_attrs")
        for number, value in enumerate(blocks[0].arguments):
            notes = dict(items_of(arguments[number])) if arguments is not None else {}
            self.donated(notes, number)
            placed = [f"{key}={value_of(note)}" for key, note in notes.items() if key not in _HARMLESS]
            place = body.parameter(value, self.name(value), self.shape(value))
            body.instructions[place].placement = ", ".join(placed)
        self.fill(body, blocks[0], name, line)
        self.results(body, operation)
        self.open.remove(name)

    def results(self, body: _Body, operation: Any) -> None:
        """Attributes of a function and of its results, beside their names."""
        notes = get_attribute(operation.attributes, "res_attrs")
        placed = [
            f"result {k}: {key}={value_of(value)}"
            for k, note in enumerate(notes if notes is not None else ())
            for key, value in items_of(note)
            if key not in _HARMLESS
        ]
        usual = ("sym_name", "function_type", "sym_visibility", "arg_attrs", "res_attrs")
        placed += [f"{key}={value_of(value)}" for key, value in items_of(operation.attributes) if key not in usual]
        root = self.computations[string_of(operation.attributes["sym_name"])].root
        body.instructions[root].placement = ", ".join(filter(None, [body.instructions[root].placement, *placed]))

    def donated(self, notes: dict[str, Any], number: int) -> None:
        if "tf.aliasing_output" in notes:
            output = value_of(notes["tf.aliasing_output"])
            self.aliases.append(f"{{{output}}}: ({number}, {{}}, may-alias)")
        elif "jax.buffer_donor" in notes:
            self.aliases.append(f"donor ({number}, {{}})")

    def fill(self, body: _Body, block: Any, name: str, line: int) -> None:
        """The operations of a block, up to the one that returns, as the computation `name`."""
        root: list[int] = []
        for operation in block.operations:
            operation = operation.operation
            if operation.name in _RETURNS:
                root = [self.place(body, value) for value in operation.operands]
                break
            self.operation(body, operation, name)
        if len(root) != 1:
            shape = "(" + ",".join(body.instructions[place].shape for place in root) + ")"
            root = [body.add(Instruction("results", "tuple", shape, tuple(root), line=line))]
        self.computations[name] = Computation(name, body.instructions, root[0], body.parameters, line)

    def operation(self, body: _Body, operation: Any, owner: str) -> None:
        metadata, line = self.where(operation.location)
        short, opcode = _opcode(operation.name)
        values, types = body.values, self.types
        operands = [values[o] if o in values else self.place(body, o) for o in operation.operands]
        attributes, attrs, placement = self.attributes(operation, opcode)
        called: list[tuple[str, str]] = []
        if len(operation.regions):
            called, outside = self.regions(body, operation, owner, line)
            operands += outside
        if attributes:  # not a loop over names that no operation of three has
            for attribute in [name for name in ("callee", "called_computations") if name in attributes]:
                for callee in symbols_of(attributes[attribute]):
                    self.function(callee)
                    called.append(("to_apply", callee))
        results = list(operation.results)
        shapes = [types.get(value.type) or self.shape(value) for value in results]
        name = self.name(results[0]).partition("#")[0] if results else short
        shape = shapes[0] if len(shapes) == 1 else f"({','.join(shapes)})"
        instruction = Instruction(name, opcode, shape, tuple(operands), attrs, tuple(called), metadata, line, placement)
        place = body.add(instruction)
        channel = "channel_handle" in attributes and _CHANNEL.search(str(attributes["channel_handle"]))
        if channel and channel[1] != "0":  # 0 stands for none
            kind = f" of type {channel[2]}" if opcode in ("send", "recv") else ""
            instruction.attrs = ", ".join(filter(None, [attrs, f"channel{kind}"]))
            self.channels.append((instruction, channel[1]))
        if effect_of(opcode, instruction.attrs, instruction.called, self.effects):
            instruction.has_effect = True
            self.effects.add(owner)
        if len(results) == 1:
            body.values[results[0]] = place
            return
        for index, value in enumerate(results):
            part = Instruction(
                f"{name}#{index}", "get-tuple-element", shapes[index], (place,), str(index), (), metadata, line
            )
            body.values[value] = body.add(part)

    def attributes(self, operation: Any, opcode: str) -> tuple[dict[str, Any], str, str]:
        """The attributes of an operation, and what `attributes_of` says of them."""
        attributes = dict(items_of(operation.attributes, operation))
        attrs, placement = attributes_of(attributes, opcode) if attributes else ("", "")
        return attributes, attrs, placement

    def regions(self, body: _Body, operation: Any, owner: str, line: int) -> tuple[list[tuple[str, str]], list[int]]:
        """The regions of an operation as called computations, and where the values are that they use from outside."""
        used = list(_captured(operation))
        called: list[tuple[str, str]] = []
        names = {"stablehlo.while": ("condition", "body")}.get(operation.name, ())
        for number, region in enumerate(operation.regions):
            blocks = list(region.blocks)
            if not blocks:
                continue
            inner = _Body()
            for value in (*blocks[0].arguments, *used):
                inner.parameter(value, self.name(value), self.shape(value))
            self.count += 1
            name = f"{owner.partition('.region_')[0]}.region_{self.count}"
            self.fill(inner, blocks[0], name, line)
            called.append((names[number] if names else "to_apply", name))
        return called, [self.place(body, value) for value in used]

    def place(self, body: _Body, value: Any) -> int:
        place = body.values.get(value)
        if place is None:
            raise self.error(0, f"the value {self.name(value)} is used before it is defined")
        return place

    def name(self, value: Any) -> str:
        shown = value.get_name(self.state) if self.state is not None else value.get_name()
        return shown.lstrip("%")

    def shape(self, value: Any) -> str:
        kind = value.type
        shape = self.types.get(kind)
        if shape is None:
            shape = self.types[kind] = shape_of(str(kind))
        return shape

    def where(self, location: Any) -> tuple[str, int]:
        """Metadata as HLO writes it, and the line of the text if the text has no positions of its own."""
        text = str(location)
        if match := _AT.search(text):
            return "", self.first + int(match[1]) - 1
        named = _NAMED.match(text)
        frames = [(file, int(line), function) for function, file, line in _FRAME.findall(text)]
        if not frames and (bare := _BARE.search(text)):
            frames = [(bare[1], int(bare[2]), "")]
        if not named and not frames:
            return "", 0
        if named and frames and frames[0][2] == named[1]:
            frames[0] = (*frames[0][:2], "")
        stack = tuple(frames)
        number = self.stacks.setdefault(stack, len(self.stacks) + 1)
        self.stack[number] = stack
        return f'{{op_name="{named[1] if named else ""}" stack_frame_id={number}}}', 0


@lru_cache(1024)
def _opcode(name: str) -> tuple[str, str]:
    """An operation without its dialect, and as HLO calls it."""
    short = name.partition(".")[2] or name
    return short, _OPCODES.get(short) or short.replace("_", "-")


def _captured(operation: Any) -> Iterator[Any]:
    """Values that the regions of an operation use and do not define, each once, in the order of first use."""
    defined: set[Any] = set()
    seen: set[Any] = set()

    def walk(inner: Any) -> Iterator[Any]:
        for region in inner.regions:
            for block in region.blocks:
                defined.update(block.arguments)
                for operation in block.operations:
                    operation = operation.operation
                    for value in operation.operands:
                        if value not in defined and value not in seen:
                            seen.add(value)
                            yield value
                    yield from walk(operation)
                    defined.update(operation.results)

    yield from walk(operation)
