"""Calls with arguments -> instructions: what the reader of FX text and that of FX objects share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from retrograd.graph.ir import Computation, Instruction
from retrograd.graph.readers.fx_effects import Effects


@dataclass(frozen=True)
class Ref:
    """An argument that is a value of the graph: the place of its instruction."""

    place: int


@dataclass(frozen=True)
class Sub:
    """An argument that is a graph of its own, as the branches of torch.cond are."""

    name: str


@dataclass(frozen=True)
class Text:
    """An argument that is written down as it is: torch.float32."""

    text: str


@dataclass(frozen=True)
class Constructed:
    """An argument that a call makes: device(type='cpu')."""

    name: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]


class Body:
    """A computation in the making."""

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []
        self.parameters: list[int] = []
        self.constants: dict[str, int] = {}
        self.numbered: dict[str, dict[str, int]] = {}
        self.root = -1
        self.effects = Effects(self.instructions, lambda instruction: self.add(instruction).place)

    def add(self, instruction: Instruction) -> Ref:
        self.instructions.append(instruction)
        return Ref(len(self.instructions) - 1)

    def parameter(self, name: str, shape: str, line: int = 0) -> Ref:
        number = str(len(self.parameters))
        self.parameters.append(len(self.instructions))
        shape, _, placement = shape.partition(" ")
        return self.add(Instruction(name, "parameter", shape, (), number, line=line, placement=placement))

    def call(
        self, name: str, opcode: str, args: Any, kwargs: dict[str, Any], shape: str, metadata: str, line: int
    ) -> Ref:
        """One call. `args=` is among the attributes unless every argument is a value of the graph, in order."""
        operands: list[int] = []
        called: list[tuple[str, str]] = []
        if opcode == "get_attr":
            kwargs = {"target": Text(self.captured(kwargs["target"].text))}
        if opcode == "operator.getitem" and (index := self.element(args)) is not None:
            opcode, operands, attrs = "get-tuple-element", [args[0].place], [str(index)]
        else:
            shown = [render(value, operands, called) for value in args]
            attrs = [] if all(isinstance(value, Ref) for value in args) else [f"args=({', '.join(shown)})"]
            attrs += [f"{key}={render(kwargs[key], operands, called)}" for key in sorted(kwargs) if key not in _PLACES]
        placed = [f"{key}={render(kwargs[key], [], [])}" for key in _PLACES if key in kwargs]
        read = self.effects.read(operands)
        shape, _, placement = shape.partition(" ")
        placement = ", ".join(filter(None, [placement, *placed]))
        text = ", ".join(attrs)
        result = self.add(Instruction(name, opcode, shape, read, text, tuple(called), metadata, line, placement))
        first, out = references(args[:1]), references([kwargs.get("out")])
        self.effects.record(result.place, operands, first, out, inplace(opcode, args, kwargs))
        return result

    def captured(self, target: str) -> str:
        """The name of a tensor of the module; numbers that torch gives, in the order in which the graph reads them."""
        stem = target.rstrip("0123456789")
        if stem == target or not stem.endswith(_NUMBERED):
            return target
        own = self.numbered.setdefault(stem, {})
        return f"{stem}{own.setdefault(target, len(own))}"

    def annotate(self, place: int, shape: str) -> None:
        """Give a value the shape and placement of an annotation, if there is one."""
        if shape:
            ins = self.instructions[place]
            ins.shape, _, ins.placement = shape.partition(" ")

    def element(self, args: Any) -> int | None:
        """Which element of a tuple `value[index]` takes; None if the value is a tensor."""
        if len(args) != 2 or not isinstance(args[0], Ref) or type(args[1]) is not int:
            return None
        shape = self.instructions[cast(Ref, args[0]).place].shape
        return args[1] if not shape or shape.startswith("(") else None

    def output(self, value: Any, line: int = 0) -> None:
        """The root: a tuple of everything that is returned, constants among it."""
        flat = cast(Sequence[Any], value) if isinstance(value, (list, tuple)) else [value]
        nested = any(isinstance(item, (list, tuple, dict, slice, Constructed)) for item in flat) or isinstance(
            value, dict
        )
        attrs, leaves = "", list(flat)
        if nested:
            attrs = f"args={render(value, [], [])}"
            leaves = [Ref(place) for place in references(value)]
        operands = self.effects.read(
            item.place if isinstance(item, Ref) else self.constant(item, line) for item in leaves
        )
        shape = "(" + ",".join(self.instructions[place].shape for place in operands) + ")"
        self.root = self.add(Instruction("output", "tuple", shape, operands, attrs, line=line)).place

    def constant(self, value: Any, line: int) -> int:
        text = render(value, [], [])
        place = self.constants.get(text)
        if place is None:
            place = self.constants[text] = self.add(Instruction(text, "constant", "", (), text, line=line)).place
        return place

    def computation(self, name: str, line: int = 0) -> Computation:
        return Computation(name, self.instructions, self.root, self.parameters, line)


# Names that torch gives to tensors that a function closes over: which number is free depends on what was traced before.
_NUMBERED = ("constant", "constant_", "lifted_tensor_", "frozen_param", "folded_")
# Keyword arguments that say where a tensor is, not which numbers it has.
_PLACES = ("device", "pin_memory")


def references(value: Any) -> list[int]:
    """The places of all values of the graph in an argument."""
    places: list[int] = []
    render(value, places, [])
    return places


def inplace(opcode: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Does `inplace=True` stand among the arguments of a function of torch.nn? It comes last, of dropout fourth."""
    if not opcode.startswith("torch.nn.functional."):
        return False
    position = 3 if "dropout" in opcode else len(args) - 1
    return kwargs.get("inplace") is True or (0 < position < len(args) and args[position] is True)


def render(value: Any, operands: list[int], called: list[tuple[str, str]]) -> str:
    """An argument as text with % for each value of the graph, which goes to `operands`, and @ for each called graph."""

    def all_of(values: Any) -> str:
        return ", ".join([render(item, operands, called) for item in values])

    if isinstance(value, Ref):
        operands.append(value.place)
        return "%"
    if isinstance(value, Sub):
        called.append(("calls", value.name))
        return "@"
    if isinstance(value, Text):
        return value.text
    if isinstance(value, list):
        return f"[{all_of(value)}]"
    if isinstance(value, tuple):
        single = len(cast(tuple[Any, ...], value)) == 1
        return f"({all_of(value)},)" if single else f"({all_of(value)})"
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(
                f"{key!r}: {render(item, operands, called)}" for key, item in cast(dict[Any, Any], value).items()
            )
            + "}"
        )
    if isinstance(value, slice):
        cut = cast(Any, value)
        return f"slice({all_of((cut.start, cut.stop, cut.step))})"
    if isinstance(value, Constructed):
        pairs = [f"{key}={render(item, operands, called)}" for key, item in value.kwargs]
        return f"{value.name}({', '.join([render(item, operands, called) for item in value.args] + pairs)})"
    return repr(value)


def opcode_of(target: str) -> str:
    """The name of a called function: torch.ops.aten.mm.default -> aten.mm.default, operator_add -> operator.add."""
    for prefix, short in (("torch.ops.", ""), ("operator_", "operator."), ("_operator_", "operator.")):
        if target.startswith(prefix):
            return short + target[len(prefix) :]
    return target.removeprefix("builtins.")


def metadata_of(file: str, line: str, code: str) -> str:
    """A source line as HLO writes it, for `places.place`."""
    escaped = [text.replace("\\", "\\\\").replace('"', '\\"') for text in (code, file)]
    return f'{{op_name="{escaped[0]}" source_file="{escaped[1]}" source_line={line}}}'
