"""FX as text: `class GraphModule(torch.nn.Module):` with one Python statement a line, as print_readable writes it.

The lines are parsed by Python's own parser (never run), one at a time, so that a damaged line is known by its number.
Prefixes of TORCH_LOGS are taken off; graphs nested in graphs (torch.cond) become called computations.
"""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass, field
from typing import Any

from retrograd.errors import GraphError
from retrograd.graph import brackets
from retrograd.graph.ir import Computation, Graph
from retrograd.graph.readers.export_signature import exported, signature_of
from retrograd.graph.readers.fx_body import Body, Constructed, Ref, Sub, Text, metadata_of, opcode_of

_LOG = re.compile(r"[VIWEC][0-9]{4} [0-9:.]++ [^\]\n]*+\] (?:\[[^\]\n]*+\] ?)*+")
_CLASS = re.compile(r"(?:^|(?<=\s))class (\w++)\((?:[\w.]*\.)?Module\):[^\n]*$", re.MULTILINE)
_FORWARD = re.compile(r"\bdef forward\(")
_FILE = re.compile(r"File: (.*?):([0-9]{1,9}) in ")
_TAG = re.compile(r"\bac_graph_id: \d++ - (\w++)|\brecompute: (\w++)")
_SHAPE = re.compile(r"(?:\w+\()?([a-z]\w*\[[^\]]*\])")
_SYMBOL = re.compile(
    r"(?:[suz]f?[0-9]+|inf|nan|device|torch|dtype|NoneType|Ellipsis|int|float|bool|str|math|[A-Z]\w*)\Z"
)
# Python's syntax tree takes some 300 bytes a character at worst; the output line of 10,000 values has 0.3 MB.
_LONGEST = 1 << 20
# Functions of `operator` by the names of Python's syntax tree, where these are not the same in lower case.
_BINARY = {"Mult": "mul", "Div": "truediv", "BitAnd": "and_", "BitOr": "or_", "BitXor": "xor", "MatMult": "matmul"}
_OTHER = {"Eq": "eq", "NotEq": "ne", "Lt": "lt", "LtE": "le", "Gt": "gt", "GtE": "ge"} | {
    "USub": "neg",
    "UAdd": "pos",
    "Invert": "invert",
}


@dataclass
class _Class:
    """One class of the text: a graph, or a graph inside one. `name` tells nested ones apart by their path."""

    name: str
    indent: int
    line: int
    body: Body = field(default_factory=Body)
    children: set[str] = field(default_factory=set[str])
    leaves: bool = False  # its parameters are leaves of pytrees, as in a joint graph


def starts(text: str) -> list[int]:
    """Where the graphs of a text begin: at each class that is not inside another."""
    positions: list[int] = []
    outermost = None
    for match in _CLASS.finditer(text):
        start = text.rfind("\n", 0, match.start()) + 1
        indent = _indent(text[start : match.start()])
        if outermost is None or indent <= outermost:
            positions.append(start)
            outermost = indent
    if not positions:
        first = _FORWARD.search(text)
        positions = [text.rfind("\n", 0, first.start()) + 1] if first else []
    return positions


def _binary(op: ast.operator) -> str:
    name = type(op).__name__
    return _BINARY.get(name, name.lower())


def _indent(before: str) -> int:
    """Blanks before a class; a path of a file may stand there as well, in logs."""
    log = _LOG.match(before)
    rest = before[log.end() :] if log else before
    return 0 if rest.strip() else len(rest)


def parse(text: str, source: str = "", first: int = 1) -> Graph:
    """The graph of one class (`starts`)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's parser warns of `1if` and the like, which only damaged text has
        return _Reader(text, source, first).graph()


class _Reader:
    def __init__(self, text: str, source: str, first: int) -> None:
        self.lines = [line[log.end() :] if (log := _LOG.match(line)) else line for line in brackets.lines(text)]
        self.source = source
        self.first = first
        self.at = 0
        self.metadata = ""
        self.tag = ""  # of checkpoints: the partitioner computes again what has it
        self.classes: list[_Class] = []
        self.places: dict[str, Any] = {}
        self.unnamed: Ref | None = None
        self.header, self.written = signature_of(self.lines)

    def error(self, message: str, at: int) -> GraphError:
        shown = self.lines[at] if at < len(self.lines) else ""
        return brackets.error(self.source or "FX text", self.first + at, message, shown)

    def graph(self) -> Graph:
        self.find_classes()
        computations: dict[str, Computation] = {}
        ends = [cls.line for cls in self.classes[1:]] + [len(self.lines)]
        for cls, end in zip(self.classes, ends, strict=True):
            try:
                self.read(cls, end)
            except (RecursionError, MemoryError):
                raise self.error("brackets or operators nest too deep here", min(self.at, end)) from None
        for cls in reversed(self.classes):  # callers come first in the text, and last among computations
            computations[cls.name] = cls.body.computation(cls.name, self.first + cls.line)
        entry = self.classes[0].name
        return Graph(entry, computations, entry, "fx", self.header, source=self.source)

    def find_classes(self) -> None:
        """The classes and which is inside which, by indentation."""
        path: list[_Class] = []
        for at, line in enumerate(self.lines):
            if "class " not in line or not (match := _CLASS.search(line)):
                continue
            indent = _indent(line[: match.start()])
            while path and path[-1].indent >= indent:
                path.pop()
            name = ".".join([cls.name for cls in path[-1:] if len(path) > 1] + [match[1]])
            if any(cls.name == name for cls in self.classes):
                raise self.error(f"a second class is called {match[1]}", at)
            if path:
                path[-1].children.add(match[1])
            self.classes.append(_Class(name, indent, at))
            path.append(self.classes[-1])
        if not self.classes:
            self.classes.append(_Class("forward", 0, -1))

    def read(self, cls: _Class, end: int) -> None:
        self.at = cls.line + 1
        self.places, self.metadata, self.tag = {}, "", ""
        begun = False
        while self.at < end and cls.body.root < 0:
            line = self.lines[self.at].strip()
            if line.startswith("#"):
                self.comment(line)
            elif not begun and line.startswith("def forward("):
                begun = True
                at = self.at
                self.signature(cls.body, self.statement(end, "\n    pass"), at)
            elif begun and line:
                at, first = self.at, len(cls.body.instructions)
                for statement in self.statement(end):
                    self.assign(cls, statement, at)
                for instruction in cls.body.instructions[first:] if self.tag else ():
                    instruction.placement = ", ".join(filter(None, [instruction.placement, self.tag]))
            self.at += 1
        if cls.body.root < 0:
            problem = "is not complete (no `return`)" if begun else "has no `def forward(`"
            raise self.error(f"the graph {cls.name} {problem}; the file may be cut off", max(0, min(end, self.at) - 1))

    def statement(self, end: int, more: str = "") -> list[ast.stmt]:
        """The statements of the line at hand, with those after it while a bracket is open."""
        start = self.at
        parts = [self.lines[start].strip()]
        if parts[0][-1] in "([{,":
            depth = brackets.depth(parts[0])
            while depth > 0 and self.at + 1 < end:
                self.at += 1
                parts.append(self.lines[self.at].strip())
                depth += brackets.depth(parts[-1].partition("#")[0])
        text = "\n".join(parts) + more
        if len(text) > _LONGEST:
            raise self.error(f"a statement of {len(text):,} characters; at most {_LONGEST:,} are read", start)
        try:
            return ast.parse(text).body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            reason = getattr(error, "msg", None) or "it nests too deep"
            raise self.error(
                f"this is not a line of FX ({reason}); the file may be damaged or cut off", start
            ) from None

    def comment(self, line: str) -> None:
        at = line.find("File: ")
        tag = _TAG.search(line[: at if at >= 0 else None])
        self.tag = f"recompute={tag[1] or tag[2]}" if tag else ""
        match = _FILE.match(line, at) if at >= 0 else None
        if match:
            self.metadata = metadata_of(match[1], match[2], line[match.end() :].partition(", code: ")[2])
        elif "No stacktrace" in line:
            self.metadata = ""

    def signature(self, body: Body, statements: list[ast.stmt], at: int) -> None:
        function = statements[0]
        if not isinstance(function, ast.FunctionDef):
            raise self.error("this is not the signature of forward", at)
        arguments = function.args
        names = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        for argument in names[1:]:
            if argument is not None:
                self.define(
                    argument.arg, body.parameter(argument.arg, _shape(argument.annotation), self.first + at), at
                )

    def define(self, name: str, value: Any, at: int) -> None:
        if name in self.places:
            raise self.error(f"a second value is called {name}", at)
        self.places[name] = value

    def assign(self, cls: _Class, statement: ast.stmt, at: int) -> None:
        """One statement. `x = None` frees a value and says nothing about the graph."""
        body = cls.body
        if isinstance(statement, ast.Return):
            value = statement.value
            if isinstance(value, ast.Call) and _dotted(value.func).endswith("tree_unflatten") and value.args:
                value = value.args[0]
            values = self.value(value, at) if value is not None else ()
            body.output(exported(body, values, self.written) if cls is self.classes[0] else values, self.first + at)
        elif isinstance(statement, ast.AugAssign):
            args = [self.value(statement.target, at), self.value(statement.value, at)]
            self.inplace(body, f"operator.i{_binary(statement.op).rstrip('_')}", args, at)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
            value = statement.value
            if isinstance(value, ast.Constant) and value.value is None and isinstance(target, ast.Name):
                return
            if value is None and isinstance(statement, ast.AnnAssign) and isinstance(target, ast.Name):
                self.declare(cls, target.id, _shape(statement.annotation), at)
                return
            if isinstance(target, ast.Subscript) and value is not None:
                args = [self.value(target.value, at), self.value(target.slice, at), self.value(value, at)]
                self.inplace(body, "operator.setitem", args, at)
            elif isinstance(target, ast.Name) and value is not None:
                annotation = statement.annotation if isinstance(statement, ast.AnnAssign) else None
                self.define(target.id, self.expression(cls, target.id, value, _shape(annotation), at), at)
            elif not (
                isinstance(target, ast.Tuple) and isinstance(value, ast.Call) and "pytree" in _dotted(value.func)
            ):
                raise self.error("this assignment is none that FX writes", at)
        elif not isinstance(statement, ast.Pass):
            raise self.error("this statement is none that FX writes", at)

    def declare(self, cls: _Class, name: str, shape: str, at: int) -> None:
        """A line with a name and a shape: an argument (torch.export), or a leaf of the pytrees that are arguments."""
        if isinstance(known := self.places.get(name), Ref):
            cls.body.annotate(known.place, shape)
            return
        if not cls.leaves:
            if len(cls.body.instructions) != len(cls.body.parameters):
                raise self.error("an argument is declared behind the first operation", at)
            cls.leaves, cls.body, self.places = True, Body(), {}
        self.define(name, cls.body.parameter(name, shape, self.first + at), at)

    def inplace(self, body: Body, opcode: str, args: list[Any], at: int) -> None:
        """`x += y; name = x`: the second statement gives the name, see `expression`."""
        short = opcode.partition(".")[2]
        self.unnamed = body.call(short, opcode, args, {}, "", self.metadata, self.first + at)

    def expression(self, cls: _Class, name: str, node: ast.expr, shape: str, at: int) -> Any:
        """The value that an expression makes; another name of a value that is there already is no instruction."""
        if isinstance(node, ast.Name):
            value = self.value(node, at)
            last, self.unnamed = self.unnamed or value, None
            if isinstance(last, Ref):
                cls.body.instructions[last.place].name = name
                cls.body.annotate(last.place, shape)
            return last
        target = _member(node)
        if target is not None:
            if target in cls.children:
                return Sub(target if cls is self.classes[0] else f"{cls.name}.{target}")
            return cls.body.call(name, "get_attr", [], {"target": Text(target)}, shape, self.metadata, self.first + at)
        opcode, args, kwargs = self.called(cls, node, at)
        return cls.body.call(name, opcode, args, kwargs, shape, self.metadata, self.first + at)

    def called(self, cls: _Class, node: ast.expr, at: int) -> tuple[str, list[Any], dict[str, Any]]:
        """Operation, arguments and keyword arguments of an expression."""
        if isinstance(node, ast.Subscript):
            return "operator.getitem", [self.value(node.value, at), self.value(node.slice, at)], {}
        if isinstance(node, ast.Attribute):
            return "getattr", [self.value(node.value, at), node.attr], {}
        if isinstance(node, ast.BinOp):
            sides = [self.value(node.left, at), self.value(node.right, at)]
            return f"operator.{_binary(node.op)}", sides, {}
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]).__name__ in _OTHER:
            sides = [self.value(node.left, at), self.value(node.comparators[0], at)]
            return f"operator.{_OTHER[type(node.ops[0]).__name__]}", sides, {}
        if isinstance(node, ast.UnaryOp) and type(node.op).__name__ in _OTHER:
            return f"operator.{_OTHER[type(node.op).__name__]}", [self.value(node.operand, at)], {}
        if not isinstance(node, ast.Call):
            raise self.error("this expression is none that FX writes", at)
        args = [self.value(argument, at) for argument in node.args]
        kwargs = {cls.arg or "**": self.value(cls.value, at) for cls in node.keywords}
        target = _member(node.func)
        if target is not None:
            module = Sub(target if cls is self.classes[0] else f"{cls.name}.{target}")
            return ("call", [module, *args], kwargs) if target in cls.children else (
                "call_module", [Text(target), *args], kwargs
            )  # fmt: skip
        if isinstance(node.func, ast.Attribute) and isinstance(base := self.known(node.func.value), Ref):
            return f"method.{node.func.attr}", [base, *args], kwargs
        name = _dotted(node.func)
        if not name:
            raise self.error("this call is none that FX writes", at)
        return opcode_of(name), args, kwargs

    def known(self, node: ast.expr) -> Any:
        return self.places.get(node.id) if isinstance(node, ast.Name) else None

    def value(self, node: ast.expr, at: int) -> Any:
        """An argument: a value of the graph, or its text."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            known = self.places.get(node.id)
            if known is None and not _SYMBOL.match(node.id):
                raise self.error(f"the value {node.id} is not defined above", at)
            return Text(node.id) if known is None else known
        if isinstance(node, (ast.List, ast.Tuple)):
            values = [self.value(item, at) for item in node.elts]
            return values if isinstance(node, ast.List) else tuple(values)
        if isinstance(node, ast.Dict):
            keys = [key for key in node.keys if isinstance(key, ast.Constant)]
            if len(keys) == len(node.keys):
                return {key.value: self.value(item, at) for key, item in zip(keys, node.values, strict=True)}
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            number = node.operand.value
            return -number if isinstance(number, (int, float, complex)) else Text(ast.unparse(node))
        if isinstance(node, ast.Slice):
            ends = [None if item is None else self.value(item, at) for item in (node.lower, node.upper, node.step)]
            return slice(*ends)
        if isinstance(node, ast.Call) and (name := _dotted(node.func)):
            args = tuple(self.value(item, at) for item in node.args)
            if name == "slice" and len(args) == 3:
                return slice(*args)
            return Constructed(
                name, args, tuple((item.arg or "**", self.value(item.value, at)) for item in node.keywords)
            )
        return Text(ast.unparse(node))


def literal(text: str) -> Any:
    """What an argument means that is written like this, as in FX text; the text itself if that is not Python."""
    try:
        return _Reader("", "", 1).value(ast.parse(text, mode="eval").body, 0)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Text(text)


def shape_of(annotation: str) -> str:
    """Shape and, behind a blank, placement: "f32[8, 32][32, 1]cpu" -> "f32[8,32] [32,1]cpu", "Sym(s77)" as it is."""
    if annotation.startswith("Sym("):
        return annotation
    match = _SHAPE.match(annotation)
    if not match:
        return ""
    return f"{match[1]} {annotation[: match.start(1)]}{annotation[match.end(1) :]}".replace(", ", ",").strip()


def _shape(node: ast.expr | None) -> str:
    return shape_of(node.value) if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _dotted(node: ast.expr) -> str:
    """A name with dots; "" if the expression is anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _member(node: ast.expr) -> str | None:
    """The path of a member of the module: `getattr(self.layers, "0").weight` -> layers.0.weight; None if it is none."""
    parts: list[str] = []
    while True:
        if isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "getattr"
            and len(node.args) == 2
            and isinstance(name := node.args[1], ast.Constant)
        ):
            parts.append(str(name.value))
            node = node.args[0]
        else:
            break
    return ".".join(reversed(parts)) if parts and isinstance(node, ast.Name) and node.id == "self" else None
