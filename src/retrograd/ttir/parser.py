"""Parser of TTIR as Triton prints it, with its locations: text in, the tree of `retrograd.ttir.ir` out."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

from retrograd.errors import RetrogradError
from retrograd.ttir.ir import Block, Function, Module, Operation, OperationRegion, SourcePlace, SsaValue, Type

_NAME = r"%[\w.$-]+"
_USE = re.compile(rf"({_NAME})(?:#(\d+))?")
_RESULTS = re.compile(rf"((?:{_NAME}(?::\d+)?)(?:, {_NAME}(?::\d+)?)*) = (.*)", re.S)
_OPERATION = re.compile(r'"?([\w.]+)"?(.*)', re.S)
_FUNCTION = re.compile(r'tt\.func (public |private )?@("[^"]*"|[\w.$-]+)\((.*)$', re.S)
_LABEL = re.compile(r"\^(\w+)(?:\((.*)\))?:")
_SUCCESSOR = re.compile(r"\^(\w+)(?:\(([^:)]*)[^)]*\))?")
_ARGUMENT = re.compile(rf"({_NAME}): ((?:[^<,{{]|<(?:[^<>]|<[^<>]*>)*>)+?)(?= \{{|,|$)")
_PAIR = re.compile(rf"({_NAME}) = ({_NAME}(?:#\d+)?)")
_ALIAS = re.compile(r"^#(loc\w*) = loc\((.*)\)$", re.M)
_LINE = re.compile(r'"([^"]*)":(\d+):\d+')
_NAMED = re.compile(r'"[^"]*"\((.*)\)$', re.S)
_CALL = re.compile(r"callsite\((.*) at (.*)\)$", re.S)
_TENSOR = re.compile(r"tensor<((?:\d+x)*)([^<>,]*(?:<[^>]*>)?)(?:,.*)?>$")
# An address space may follow, and in Triton 3.9 "constant" where the kernel says tl.const.
_POINTER = re.compile(r'!tt\.ptr<(.*?)(?:, (?:\d+|"\w+"))*>$')
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
# The type in a signature that is the result's, where there is no arrow: the last, but for these.
_FIRST_TYPE = frozenset({"tt.addptr", "tt.advance"})
_NO_RESULT = frozenset({"tt.store", "tt.print", "tt.assert"})


class _Scope:
    """Names that are visible in a region, and the counter of the function's registers."""

    def __init__(self, outer: _Scope | None) -> None:
        self.outer = outer
        self.names: dict[str, list[SsaValue]] = {}
        self.counter: list[int] = outer.counter if outer else [0]

    def define(self, name: str, types: list[Type]) -> list[SsaValue]:
        values = [SsaValue(name, type, self.counter[0] + i) for i, type in enumerate(types)]
        self.counter[0] += len(types)
        self.names[name] = values
        return values

    def value(self, name: str, index: str | None = None) -> SsaValue:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name][int(index or 0)]
            scope = scope.outer
        raise RetrogradError(f"TTIR uses {name}, which no operation before it defines")


def parse(text: str) -> Module:
    """Read a module of TTIR, printed with locations.

    Args:
        text: as `mod.str()` of Triton's bindings gives it.

    Raises:
        RetrogradError: a line is not understood; the message shows it.
    """
    return _Parser(text).module()


@functools.cache
def parse_type(text: str) -> Type:
    """Type of its text: "i32", "!tt.ptr<f32>", "tensor<16x!tt.ptr<bf16>>"."""
    text = text.strip()
    if tensor := _TENSOR.match(text):
        inner = parse_type(tensor[2])
        return Type(inner.element, tuple(int(n) for n in tensor[1].split("x")[:-1]), inner.pointee)
    if pointer := _POINTER.match(text):
        return Type("ptr", (), parse_type(pointer[1]))
    return Type(text)


class _Places:
    """Lines of the source by location as TTIR writes it; called with one."""

    def __init__(self, text: str) -> None:
        self._aliases = dict(_ALIAS.findall(text))
        self._places: dict[str, SourcePlace] = {}
        self._chains: dict[str, tuple[tuple[str, int], ...]] = {}

    def __call__(self, location: str) -> SourcePlace:
        if location not in self._places:
            (file, line), *callers = self._chain(location) or [("", 0)]
            self._places[location] = SourcePlace(file, line, tuple(callers))
        return self._places[location]

    def _chain(self, location: str) -> tuple[tuple[str, int], ...]:
        """Lines of a location, the innermost first; many have most of theirs in common."""
        if location not in self._chains:
            self._chains[location] = self._lines_of(location.strip())
        return self._chains[location]

    def _lines_of(self, location: str) -> tuple[tuple[str, int], ...]:
        if location.startswith("#"):
            return self._chain(self._aliases.get(location[1:], ""))
        if call := _CALL.match(location):
            return self._chain(call[1]) + self._chain(call[2])
        if line := _LINE.match(location):
            return ((line[1], int(line[2])),)
        named = _NAMED.match(location)
        return self._chain(named[1]) if named else ()


class _Parser:
    def __init__(self, text: str) -> None:
        self._places = _Places(text)
        self._lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
        self._at = 0

    def module(self) -> Module:
        functions: dict[str, Function] = {}
        while self._at < len(self._lines):
            head = _FUNCTION.match(self._lines[self._at])
            if head is None:
                self._at += 1
                continue
            function = self._function(head[2].strip('"'), head[1] != "private ", head[3])
            functions[function.name] = function
        return Module(functions)

    def _function(self, name: str, public: bool, rest: str) -> Function:
        scope = _Scope(None)
        plain, _ = _without_locations(rest)
        arguments = plain[: _closing(plain)]
        entry = Block("", self._arguments(arguments, scope))
        self._at += 1
        body, _ = self._region(scope, entry)
        return Function(name, body, scope.counter[0], public)

    def _arguments(self, text: str, scope: _Scope) -> list[SsaValue]:
        return [scope.define(name, [parse_type(type)])[0] for name, type in _ARGUMENT.findall(text)]

    def _region(self, scope: _Scope, entry: Block) -> tuple[OperationRegion, str]:
        """Blocks up to the line that closes the region, and that line."""
        blocks = [entry]
        # A block's name can be used before it, and never a value of a block that does not dominate.
        while True:
            line = self._lines[self._at]
            self._at += 1
            if line.startswith("}"):
                return OperationRegion(
                    blocks if entry.operations or entry.arguments or len(blocks) == 1 else blocks[1:]
                ), line
            if line.startswith("^"):
                plain, _ = _without_locations(line)
                label = _LABEL.match(plain)
                if label is None:
                    raise RetrogradError(f"TTIR has a block that is not understood: {plain}")
                blocks.append(Block(label[1], self._arguments(label[2] or "", scope)))
                continue
            blocks[-1].operations.append(self._operation(line, scope))

    def _operation(self, line: str, scope: _Scope) -> Operation:
        plain, location = _without_locations(line)
        words = _words(plain)
        if words is None:
            raise RetrogradError(f"TTIR has a line that is not understood: {line}")
        name, text, signature = words.name, words.text, words.signature
        if plain.endswith("{"):
            return self._with_regions(name, words.results, text, scope)
        operation = Operation(name, (), (), text, location, self._places)
        if name in ("cf.br", "cf.cond_br"):
            flag, _, targets = text.partition("^")
            operation.operands = _values(_uses(flag), scope)
            matches = _SUCCESSOR.finditer("^" + targets + " : " + signature if signature else "^" + targets)
            operation.successors = [(m[1], _values(_uses(m[2] or ""), scope)) for m in matches]
            return operation
        operation.operands = _values(words.uses, scope)
        if words.results:
            operation.results = self._define(words.results, self._result_types(operation, signature), scope)
        return operation

    def _with_regions(self, name: str, names: Sequence[str], head: str, scope: _Scope) -> Operation:
        """An operation whose regions begin at the end of this line."""
        inner = _Scope(scope)
        operation = Operation(name, (), (), head, "", self._places)
        regions: list[OperationRegion] = []
        entry = Block("", [])
        types: list[Type] = []
        if name == "scf.for":
            arguments, kind = self._for_head(operation, head, scope)
            entry.arguments = [inner.define(n, [t])[0] for n, t in zip(arguments, kind, strict=True)]
            types = kind[1:]
        elif name == "scf.while":
            pairs = _PAIR.findall(head)
            operation.operands = [_values(_uses(value), scope)[0] for _, value in pairs]
            entry.arguments = [
                inner.define(n, [v.type])[0] for (n, _), v in zip(pairs, operation.operands, strict=True)
            ]
            types = _types_of(head.rpartition("->")[2].strip(" {"))
        else:
            operation.operands = _values(_uses(head), scope)
            types = _types_of(head.rpartition("->")[2].strip(" {")) if "->" in head else []
        while True:
            region, closing = self._region(inner, entry)
            regions.append(region)
            if not closing.endswith("{"):
                break
            inner, entry = _Scope(scope), Block("", [])
        plain, location = _without_locations(closing)
        operation.regions, operation.location = regions, location
        if "->" in plain:
            types = _types_of(plain.rpartition("->")[2])
        operation.text += plain.lstrip("}) ")
        operation.results = self._define(names, types, scope)
        return operation

    def _for_head(self, operation: Operation, head: str, scope: _Scope) -> tuple[list[str], list[Type]]:
        """Names and types of the body's arguments; the bounds and what is carried are the operands."""
        bounds, _, carried = head.partition("iter_args")
        names = _USE.findall(bounds)[:4]
        pairs = _PAIR.findall(carried)
        operation.operands = [scope.value(*use) for use in names[1:]] + [_values(_uses(v), scope)[0] for _, v in pairs]
        types = [value.type for value in operation.operands[3:]]
        return [names[0][0], *(name for name, _ in pairs)], [operation.operands[0].type, *types]

    def _define(self, names: Sequence[str], types: list[Type], scope: _Scope) -> list[SsaValue]:
        if len(names) == len(types) == 1 and ":" not in names[0]:  # nearly all
            return scope.define(names[0], types)
        counts = [(name.partition(":")[0], int(name.partition(":")[2] or 1)) for name in names]
        total = sum(count for _, count in counts)
        if len(types) == 1 and total > 1:
            types = types * total  # tt.split prints the type of both results once
        if total != len(types):
            raise RetrogradError(f"TTIR defines {', '.join(names)} with {len(types)} types")
        values: list[SsaValue] = []
        for name, count in counts:
            values += scope.define(name, types[len(values) : len(values) + count])
        return values

    def _result_types(self, operation: Operation, signature: str) -> list[Type]:
        name = operation.name
        for arrow in ("->", " to "):
            if arrow in signature:
                return _types_of(signature.rpartition(arrow)[2])
        if not signature and "->" in operation.text:  # without operands there is no colon
            return _types_of(operation.text.rpartition("->")[2])
        types = _types_of(signature)
        if operation.text.strip() in ("true", "false"):
            return [Type("i1")]
        if not types:
            raise RetrogradError(f"TTIR has no type for the result of {name} at {operation.place}")
        result = types[0] if name in _FIRST_TYPE else types[-1]
        if name in ("arith.cmpi", "arith.cmpf"):
            return [result.with_element("i1")]
        if name == "tt.load" and result.pointee is not None:
            return [result.with_element(result.pointee.element)]
        return [result]


class _Words(NamedTuple):
    """What a line says of an operation: the names of its results, its own, what stands before the types, and these.

    `uses` are the names among that text, each with the number of the result that is meant.
    """

    results: tuple[str, ...]
    name: str
    text: str
    signature: str
    uses: tuple[tuple[str, str], ...]


@functools.lru_cache(maxsize=1 << 14)  # specialisations of a kernel have half of their lines in common
def _words(line: str) -> _Words | None:
    """Of a line without locations; None where it is not understood. The text of one that opens regions has all."""
    results = _RESULTS.match(line)
    head = _OPERATION.match(results[2] if results else line)
    if head is None:
        return None
    text, signature = (head[2], "") if line.endswith("{") else _signature(head[2])
    return _Words(tuple(results[1].split(", ")) if results else (), head[1], text, signature, _uses(text))


def _uses(text: str) -> tuple[tuple[str, str], ...]:
    return tuple(_USE.findall(_STRING.sub("", text) if '"' in text else text))


def _values(uses: Sequence[tuple[str, str]], scope: _Scope) -> list[SsaValue]:
    return [scope.value(name, index) for name, index in uses]


@functools.lru_cache(maxsize=4096)
def _types_of(text: str) -> list[Type]:
    """Types of a list, which is not to be changed."""
    text = text.strip()
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    return [parse_type(part) for part in _split(text)]


def _without_locations(line: str) -> tuple[str, str]:
    """A line without its locations, and what the last one says."""
    if line.endswith(")"):
        # Nearly every line has one at its end, which is an alias.
        start = line.rfind(" loc(#")
        if start >= 0 and line.find(" loc(") == start and ")" not in line[start:-1]:
            return line[:start], line[start + 5 : -1]
    location, parts, at = "", [], 0
    while (start := line.find(" loc(", at)) >= 0:
        end = start + 5 + _closing(line[start + 5 :])
        parts.append(line[at:start])
        location = line[start + 5 : end]
        at = end + 1
    return "".join(parts) + line[at:], location


def _closing(text: str) -> int:
    """Index of the parenthesis that closes the one before the text."""
    depth = 1
    for index, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return index
    raise RetrogradError(f"TTIR has a parenthesis that is not closed: {text}")


def _signature(text: str) -> tuple[str, str]:
    """What stands before the types of an operation, and the types: after the last colon outside of braces."""
    before, colon, after = text.rpartition(" : ")
    if colon and not any(letter in after for letter in '{}[]"'):
        return before, after
    depth, quoted = 0, False
    for index in range(len(text) - 1, 0, -1):
        letter = text[index]
        if letter == '"' and text[index - 1] != "\\":
            quoted = not quoted
        elif not quoted:
            depth += (letter in "}]") - (letter in "{[")
            if letter == ":" and depth == 0 and text[index - 1] == " ":
                return text[: index - 1], text[index + 2 :]
    return text, ""


def _split(text: str) -> list[str]:
    """Types of a list, which have commas of their own."""
    parts, depth, start = [], 0, 0
    for index, letter in enumerate(text):
        depth += (letter in "<({[") - (letter in ">)}]") if text[max(index - 1, 0) : index + 1] != "->" else 0
        if letter == "," and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    last = text[start:].strip()
    return parts + [last] if last else parts
