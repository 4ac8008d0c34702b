"""Names of values of a graph, as people write them: `add.7`, `body/add.7`, `p24`, `output 3`."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from retrograd.errors import UsageError
from retrograd.graph.form import elements
from retrograd.graph.ir import Computation, Graph, Instruction

_PART = re.compile(r"(.+?)\[(\d+(?:\.\d+)*)\]\Z", re.DOTALL)
_PARAMETER = re.compile(r"(?:p|param|parameter)[\s#]*(\d+)\Z", re.IGNORECASE)
_OUTPUT = re.compile(r"(?:out|output)[\s#]*(\d+)\Z", re.IGNORECASE)
_MAX_SUGGESTIONS = 4  # suggestions
_SEARCHED = 50_000  # names that are compared with a misspelled one: difflib takes 3 s for these


@dataclass(frozen=True)
class ValueRef:
    """A reference to an instruction, or to an element of its result."""

    computation: Computation
    place: int
    path: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def instruction(self) -> Instruction:
        """The instruction that gives the value, or a tuple with it."""
        return self.computation.instructions[self.place]

    @property
    def shape(self) -> str:
        """The shape of the value."""
        shape = self.instruction.shape
        for index in self.path:
            shape = elements(shape)[index]
        return shape


def name_of(graph: Graph, computation: Computation, instruction: Instruction) -> str:
    """`instruction` in the entry, `computation/instruction` elsewhere."""
    name = instruction.name
    return name if computation is graph.main else f"{computation.name}/{name}"


def find(graph: Graph, value: str) -> ValueRef:
    """The value that a text means.

    Raises:
        UsageError: there is none, or several in different computations; the message names the nearest.
    """
    text = value.strip().lstrip("%")
    target = _named(graph, text)
    if target is None and (part := _PART.match(text)):
        whole = _named(graph, part[1].rstrip())
        path = tuple(int(n) for n in part[2].split("."))
        target = whole and _element(whole, path, value)
    if target is None:
        raise UsageError(f"`value` is {value!r}, but {graph.title} has no such value; {_nearest(graph, text)}")
    return target


def _named(graph: Graph, text: str) -> ValueRef | None:
    """By name first: an instruction may well be called p24."""
    if target := _instruction(graph, text):
        return target
    if number := _PARAMETER.match(text):
        parameters = graph.main.parameters
        if int(number[1]) >= len(parameters):
            has = f"parameters 0 to {len(parameters) - 1}" if parameters else "no parameter"
            raise UsageError(f"`value` is parameter {number[1]}, but {graph.title} has {has}")
        return ValueRef(graph.main, parameters[int(number[1])])
    if number := _OUTPUT.match(text):
        return _output(graph, int(number[1]))
    return None


def _instruction(graph: Graph, text: str) -> ValueRef | None:
    name, _, inner = text.partition("/")
    if inner and name.lstrip("%") in graph.computations:
        computation = graph.computations[name.lstrip("%")]
        return _in(computation, inner.lstrip("%"))
    if target := _in(graph.main, text):
        return target
    elsewhere = [hit for c in graph if c is not graph.main and (hit := _in(c, text))]
    if len(elsewhere) > 1:
        names = [f"{hit.computation.name}/{text}" for hit in elsewhere]
        more = f" and {len(names) - _MAX_SUGGESTIONS} more" if len(names) > _MAX_SUGGESTIONS else ""
        raise UsageError(
            f"`value` is {text!r}, which stands for {', '.join(names[:_MAX_SUGGESTIONS])}{more}; name one of them"
        )
    return elsewhere[0] if elsewhere else None


def _in(computation: Computation, name: str) -> ValueRef | None:
    for place, ins in enumerate(computation.instructions):
        if ins.name == name:
            return ValueRef(computation, place)
    return None


def _element(whole: ValueRef, path: tuple[int, ...], value: str) -> ValueRef:
    shape = whole.instruction.shape
    for index in path:
        parts = elements(shape) if shape.startswith("(") else ()
        if index >= len(parts):
            has = f"elements 0 to {len(parts) - 1}" if parts else "no elements"
            raise UsageError(f"`value` is {value!r}, but {whole.instruction.name} is {shape}, which has {has}")
        shape = parts[index]
    return ValueRef(whole.computation, whole.place, path, whole.notes)


def _output(graph: Graph, index: int) -> ValueRef:
    """The instruction that makes an output: what the root's tuple takes, out of its packaging."""
    main = graph.main
    count = len(elements(main.instructions[main.root].shape))
    if index >= count:
        raise UsageError(f"`value` is output {index}, but {graph.title} has outputs 0 to {count - 1}")
    place, path = main.root, [index] if main.instructions[main.root].shape.startswith("(") else []
    passed: list[str] = []
    while True:
        ins = main.instructions[place]
        if ins.opcode == "tuple" and path:
            place = ins.operands[path.pop(0)]
        elif ins.opcode == "get-tuple-element" and ins.operands:
            path.insert(0, int(ins.attrs))
            place = ins.operands[0]
        elif ins.opcode == "opt-barrier" and len(ins.operands) == 1:
            place = ins.operands[0]
        else:
            break
        if place != main.root:
            passed.append(ins.name)
    way = f", through {', '.join(reversed(passed[1:]))}" if passed[1:] else ""
    return ValueRef(main, place, tuple(path), (f"output {index} is {main.instructions[place].name}{way}",))


def _nearest(graph: Graph, text: str) -> str:
    names: list[str] = []
    for computation in reversed(list(graph)):
        inner = computation is not graph.main and "/" in text
        names += [f"{computation.name}/{i.name}" if inner else i.name for i in computation.instructions]
    # Numbers behind names change from dump to dump: the same stem counts as near.
    stem = text.partition(".")[0]
    close = difflib.get_close_matches(text, list(dict.fromkeys(names))[:_SEARCHED], n=_MAX_SUGGESTIONS, cutoff=0.7)
    close += [n for n in names if n.partition(".")[0] == stem and n not in close][: _MAX_SUGGESTIONS - len(close)]
    if close:
        return f"did you mean {', '.join(close)}?"
    return "give the name of an instruction, `computation/name`, `parameter 24` or `output 3`"
