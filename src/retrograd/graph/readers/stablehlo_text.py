"""StableHLO text -> Graph without MLIR: the forms in which JAX prints the operations of a training step.

Line by line, each by a pattern that takes the whole line, with every operand defined before and of the type that the
line repeats. What has another form (sharding dialects, several reducers, locations, an attribute where none is
printed) is not read here: `parse` returns None, and jaxlib's parser reads the text. The reader behind both is one,
`mlir_module`, so that a program is the same graph by either way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from retrograd.errors import GraphError
from retrograd.graph import brackets
from retrograd.graph.ir import Graph
from retrograd.graph.readers.mlir_attributes import blobs_of
from retrograd.graph.readers.text_operations import TextModule, TextOperation, TextReader, TextRegion, TextValue

_T = r"tensor<(?:[0-9]+x)*(?:[a-z][a-z0-9A-Z]*|complex<f(?:32|64)>)>"
_V = r"%[\w$.\-]+(?:#[0-9]+)?"
_TYPE = re.compile(_T)
_TYPES = re.compile(rf"{_T}(?:, {_T})*+\Z")
_VALUE = re.compile(_V)
_RESULT = re.compile(r"(?:(%[\w$.\-]+)(?::([0-9]+))? = )?(?=([^ (]*))(.*)\Z", re.DOTALL)
_PLAIN = re.compile(rf"(stablehlo|chlo)\.(\w+) ({_V}(?:, {_V})*)((?:, \w+ = \[[0-9, \-]*\])*) : (.*)\Z")
_LISTS = re.compile(r", (\w+) = \[([0-9, \-]*)\]")
# A number as MLIR prints it: another spelling of an equal one would be another constant.
_NUMBER = (
    r"(?:-?[1-9]\.[0-9]{6}e[+-][0-9]{2}|-?0\.000000e\+00|0|-?[1-9][0-9]*|-?[0-9.]{9,}(?:E[+-][0-9]+)?"
    r"|0x[0-9A-F]+|true|false)(?=[\](), >])"
)
_CONSTANT = re.compile(rf"stablehlo\.constant (dense<(?:(?:[\[\](), ]++|{_NUMBER})*+|\"0x[0-9A-F]*+\")>) : ({_T})\Z")
_COMPARE = re.compile(rf"stablehlo\.compare ([A-Z]+), ({_V}), ({_V}), ([A-Z]+) : (.*)\Z")
_IOTA = re.compile(rf"stablehlo\.iota dim = ([0-9]+) : ({_T})\Z")
_SLICE = re.compile(rf"stablehlo\.slice ({_V}) \[([0-9:, ]*)\] : (.*)\Z")
_JOIN = re.compile(rf"stablehlo\.concatenate ({_V}(?:, {_V})*), dim = ([0-9]+) : (.*)\Z")
_DOT = re.compile(
    rf"stablehlo\.dot_general ({_V}, {_V})(?:, batching_dims = \[([0-9, ]*)\] x \[([0-9, ]*)\])?"
    r", contracting_dims = \[([0-9, ]*)\] x \[([0-9, ]*)\](?:, precision = \[(\w+), (\w+)\])? : (.*)\Z"
)
_REDUCE = re.compile(
    rf"stablehlo\.reduce\(({_V}) init: ({_V})\) applies (stablehlo\.\w+) across dimensions = \[([0-9, ]*)\] : (.*)\Z"
)
_CONVOLUTION = re.compile(
    rf"stablehlo\.convolution\(({_V}, {_V})\) dim_numbers = ([\[\]\w, >x\-]+), window = \{{stride = \[([0-9, ]*)\], "
    r"pad = \[([0-9, \-\[\]]*)\], lhs_dilate = \[([0-9, ]*)\], rhs_dilate = \[([0-9, ]*)\], "
    r"reverse = \[([a-z, ]*)\]\} \{(.*)\} : (.*)\Z"
)
_CALL = re.compile(rf"(?:func\.)?call @([\w.$\-]+)\(((?:{_V}(?:, {_V})*)?)\) : (.*)\Z")
_WHILE = re.compile(rf"stablehlo\.while\(({_V} = {_V}(?:, {_V} = {_V})*)\) : (.*)\Z")
_GENERIC = re.compile(rf'"((?:stablehlo|chlo)\.\w+)"\(((?:{_V}(?:, {_V})*)?)\)(?: <\{{(.*)\}}>)?(?: : (.*)| \(\{{)\Z')
_CLOSED = re.compile(r"\}\) : (.*)\Z")
_BLOCK = re.compile(rf"\^bb0\(({_V}: {_T}(?:, {_V}: {_T})*)\):\Z")
_RETURN = re.compile(rf"(?:(?:func|stablehlo)\.)?return(?: ({_V}(?:, {_V})*) : (.*))?\Z")
_FUNCTION = re.compile(r"func\.func (?:(public|private) )?@([A-Za-z_][\w.$]*)\(")
_AFTER = re.compile(r"\) (?:-> (.*) )?\{\Z")
_ARGUMENT = re.compile(rf"({_V}): ({_T})(?: \{{(.*)\}})?\Z")
_OUTPUT = re.compile(rf"({_T})(?: \{{(.*)\}})?\Z")
_MODULE = re.compile(r"module @([A-Za-z_][\w.$]*)(?: attributes \{(.*)\})? \{\Z")
# Values of attributes: strings, numbers, arrays, enumerations and dimension numbers of StableHLO.
_ENTRY = re.compile(
    r"([A-Za-z_][\w.$]*)(?: = (\"[^\"\\]*+\"|-?[0-9]+ : [su]?i(?:1|8|16|32|64)|true|false"
    r"|array<i64(?:: -?[0-9]+(?:, -?[0-9]+)*+)?>|array<i1: (?:true|false)(?:, (?:true|false))*+>"
    r"|dense<[\[\]0-9, \-]*+> : tensor<(?:[0-9]+x)*i64>|#stablehlo[.<][\w\[\]=, :>\-]*+"
    r"|#stablehlo\.\w+<[^<>]*+>|\[#stablehlo<precision \w+>(?:, #stablehlo<precision \w+>)*+\]))?\Z"
)
_SPLIT = re.compile(r'"(?:[^"\\]++|\\.)*+"|[(\[{<]|[)\]}]|(?<!-)>|,')
# Lists in a line, by the operation, and what the attributes are called.
_NAMED = {
    "broadcast_in_dim": {"dims": "broadcast_dimensions"},
    "transpose": {"dims": "permutation"},
    "reverse": {"dims": "dimensions"},
    "dynamic_slice": {"sizes": "slice_sizes"},
    "pad": {"low": "edge_padding_low", "high": "edge_padding_high", "interior": "interior_padding"},
}
# Operations without attributes: operands and types are all there is.
_BARE_NAMES = """
    abs add and atan2 bitcast_convert cbrt ceil clamp complex convert cosine count_leading_zeros divide
    dynamic_update_slice exponential exponential_minus_one floor imag is_finite log log_plus_one logistic maximum
    minimum multiply negate not optimization_barrier or popcnt power real remainder reshape round_nearest_afz
    round_nearest_even rsqrt select shift_left shift_right_arithmetic shift_right_logical sign sine sqrt subtract tan
    tanh xor acos acosh asin asinh atan atanh cosh digamma erf erf_inv erfc lgamma next_after sinh square zeta
"""
_BARE = frozenset(_BARE_NAMES.split())
# Operations of two scalars that a reduction may apply.
_APPLIED = frozenset(f"stablehlo.{name}" for name in ("add", "multiply", "maximum", "minimum", "and", "or", "xor"))


class _UnknownError(Exception):
    """A form that is not read here."""


def parse(text: str, source: str = "", first: int = 1) -> Graph | None:
    """One module, or None if a line of it has a form that is not read here."""
    try:
        return TextReader(_Parser(brackets.lines(text)).module(), source, first).graph(blobs_of(text))
    except (_UnknownError, KeyError, IndexError, GraphError, RecursionError):
        return None  # the other reader says what is wrong


class _Parser:
    def __init__(self, lines: list[str]) -> None:
        self.lines = [line.strip() for line in lines]
        self.at = 0
        self.values: dict[str, TextValue] = {}

    def next(self) -> str:
        """The next line; blank ones do not count."""
        while True:
            self.at += 1
            if line := self.lines[self.at - 1]:
                return line

    def module(self) -> TextModule:
        match = _whole(_MODULE, self.next())
        attributes = {"sym_name": f'"{match[1]}"'} | _entries(match[2] or "")
        functions: list[TextOperation] = []
        while (line := self.next()) != "}":
            functions.append(self.function(_whole(_FUNCTION, line)))
        if any(self.lines[self.at :]):
            raise _UnknownError
        return TextModule(dict(sorted(attributes.items())) if len(attributes) > 1 else attributes, functions)

    def function(self, match: re.Match[str]) -> TextOperation:
        line, self.values = self.at, {}
        end = brackets.closing(match.string, match.end() - 1)
        arguments = [_whole(_ARGUMENT, part) for part in _split(match.string[match.end() : end])]
        outputs = _whole(_AFTER, match.string[end:])[1] or "()"
        results = [_whole(_OUTPUT, part) for part in _split(_inner(outputs))]
        # Most have no notes, and of nothing `_entries` takes 2 us.
        notes = [_entries(a[3]) if a[3] else {} for a in arguments], [_entries(r[2]) if r[2] else {} for r in results]
        attributes: dict[str, Any] = {"sym_name": f'"{match[2]}"', "sym_visibility": f'"{match[1] or "public"}"'}
        for key, own in zip(("arg_attrs", "res_attrs"), notes, strict=True):
            attributes |= {key: own} if any(own) else {}
        operation = TextOperation("func.func", [], attributes, [], line)
        operation.regions.append(self.region([(a[1], a[2]) for a in arguments], "}", [r[1] for r in results]))
        return operation

    def region(self, arguments: list[tuple[str, str]], end: str, types: list[str] | None = None) -> TextRegion:
        """Operations up to the line that closes the region, the last of which returns values of these types."""
        outer, self.values = self.values, dict(self.values)
        region = TextRegion([self.define(name, type) for name, type in arguments], [])
        operations, generic, last = region.operations, end == "})", None
        while (line := self.next()) != end and not (generic and (line == "}, {" or _CLOSED.match(line))):
            if last is not None and last.name == "return":
                raise _UnknownError
            operations.append(last := self.operation(line))
        if last is None or last.name != "return" or (types is not None and types != [v.type for v in last.operands]):
            raise _UnknownError
        self.values = outer
        return region

    def define(self, name: str, type: str) -> TextValue:
        if name in self.values:
            raise _UnknownError
        value = self.values[name] = TextValue(name[1:], type)
        return value

    def used(self, names: str) -> list[TextValue]:
        return [self.values[name] for name in names.split(", ")] if names else []

    def operation(self, line: str) -> TextOperation:
        match = _RESULT.match(line)
        name, number, word, text = match.groups()  # type: ignore[union-attr]
        place = self.at
        pattern, read = _FORMS.get(word) or (_GENERIC_FORM if word.startswith('"') else _PLAIN_FORM)
        # What it is: name, operands, attributes, types of results, regions.
        kind, operands, attributes, types, regions = read(self, _whole(pattern, text))
        if (int(number) if number else 1 if name else 0) != len(types):
            raise _UnknownError
        if number:
            results = [self.define(f"{name}#{k}", type) for k, type in enumerate(types)]
        else:
            results = [self.define(name, types[0])] if name else []
        if len(attributes) > 1:
            attributes = dict(sorted(attributes.items()))
        return TextOperation(kind, operands, attributes, results, place, regions)

    def plain(self, match: re.Match[str]) -> Any:
        dialect, name, names, lists, signature = match.groups()
        operands = self.used(names)
        attributes: dict[str, Any] = {}
        if lists:
            known = _NAMED[name]
            attributes = {known[key]: _array(numbers) for key, numbers in _LISTS.findall(lists)}
            if len(attributes) != len(known):
                raise _UnknownError
        elif name not in _BARE:
            raise _UnknownError
        return f"{dialect}.{name}", operands, attributes, _results(operands, signature, name), []

    def constant(self, match: re.Match[str]) -> Any:
        if "0x" not in match[1] and ("." in match[1]) != ("f" in match[2]):
            raise _UnknownError  # false and true have neither, nor has tensor<i1>
        return "stablehlo.constant", [], {"value": f"{match[1]} : {match[2]}"}, [match[2]], []

    def compare(self, match: re.Match[str]) -> Any:
        operands = [self.values[match[2]], self.values[match[3]]]
        attributes = {"compare_type": match[4], "comparison_direction": match[1]}
        return "stablehlo.compare", operands, attributes, _results(operands, match[5]), []

    def iota(self, match: re.Match[str]) -> Any:
        return "stablehlo.iota", [], {"iota_dimension": match[1]}, [match[2]], []

    def slice(self, match: re.Match[str]) -> Any:
        operands = [self.values[match[1]]]
        ranges = [part.split(":") for part in match[2].split(", ")] if match[2] else []
        if any(len(own) not in (2, 3) for own in ranges):
            raise _UnknownError
        attributes = {
            "limit_indices": _array(", ".join(own[1] for own in ranges)),
            "start_indices": _array(", ".join(own[0] for own in ranges)),
            "strides": _array(", ".join(own[2] if len(own) == 3 else "1" for own in ranges)),
        }
        return "stablehlo.slice", operands, attributes, _results(operands, match[3]), []

    def concatenate(self, match: re.Match[str]) -> Any:
        operands = self.used(match[1])
        return "stablehlo.concatenate", operands, {"dimension": match[2]}, _results(operands, match[3]), []

    def dot(self, match: re.Match[str]) -> Any:
        operands = self.used(match[1])
        names = ("lhs_batching", "rhs_batching", "lhs_contracting", "rhs_contracting")
        sizes = [f"{n}_dimensions = [{match[k]}]" for k, n in enumerate(names, 2) if match[k]]
        attributes = {"dot_dimension_numbers": f"#stablehlo.dot<{', '.join(sizes)}>"}
        if match[6]:
            attributes["precision_config"] = f"[{match[6]}, {match[7]}]"
        return "stablehlo.dot_general", operands, attributes, _results(operands, match[8]), []

    def reduce(self, match: re.Match[str]) -> Any:
        operands = [self.values[match[1]], self.values[match[2]]]
        if match[3] not in _APPLIED:
            raise _UnknownError
        scalar = operands[1].type
        left, right, result = TextValue("lhs", scalar), TextValue("rhs", scalar), TextValue(match[3][10:], scalar)
        line = self.at
        applied = TextOperation(match[3], [left, right], {}, [result], line)
        region = TextRegion([left, right], [applied, TextOperation("return", [result], {}, [], line)])
        return "stablehlo.reduce", operands, {"dimensions": _array(match[4])}, _results(operands, match[5]), [region]

    def convolution(self, match: re.Match[str]) -> Any:
        operands = self.used(match[1])
        pads = set(match[4].replace("[", "").replace("]", "").split(", "))
        attributes = _entries(match[8]) | {
            "dimension_numbers": f"#stablehlo.conv<{match[2]}>",
            "lhs_dilation": _array(match[5]),
            "padding": pads.pop() if len(pads) == 1 else _array(match[4]).replace("[", "{").replace("]", "}"),
            "rhs_dilation": _array(match[6]),
            "window_reversal": _array(match[7]),
            "window_strides": _array(match[3]),
        }
        return "stablehlo.convolution", operands, attributes, _results(operands, match[9]), []

    def call(self, match: re.Match[str]) -> Any:
        operands = self.used(match[2])
        return "func.call", operands, {"callee": f"@{match[1]}"}, _results(operands, match[3], "call"), []

    def loop(self, match: re.Match[str]) -> Any:
        pairs = [part.split(" = ") for part in match[1].split(", ")]
        operands, types = [self.values[value] for _, value in pairs], match[2].split(", ")
        if types != [value.type for value in operands] or self.next() != "cond {":
            raise _UnknownError
        carried = [(name, type) for (name, _), type in zip(pairs, types, strict=True)]
        condition = self.region(carried, "} do {", ["tensor<i1>"])
        return "stablehlo.while", operands, {}, types, [condition, self.region(carried, "}", types)]

    def generic(self, match: re.Match[str]) -> Any:
        operands, attributes, signature = self.used(match[2]), _entries(match[3] or ""), match[4]
        regions: list[TextRegion] = []
        while signature is None:
            line = self.next()
            block = _BLOCK.match(line)
            if not block:
                self.at -= 1
            arguments = [tuple(part.split(": ")) for part in block[1].split(", ")] if block else []
            regions.append(self.region(arguments, "})"))  # type: ignore[arg-type]
            closed = _CLOSED.match(self.lines[self.at - 1])
            signature = closed[1] if closed else None
        return match[1], operands, attributes, _results(operands, signature, "call"), regions

    def returned(self, match: re.Match[str]) -> Any:
        operands = self.used(match[1] or "")
        if operands and ", ".join(value.type for value in operands) != match[2]:
            raise _UnknownError
        return "return", operands, {}, [], []


_PLAIN_FORM, _GENERIC_FORM = (_PLAIN, _Parser.plain), (_GENERIC, _Parser.generic)
_FORMS: dict[str, tuple[re.Pattern[str], Callable[[_Parser, re.Match[str]], Any]]] = {
    "stablehlo.constant": (_CONSTANT, _Parser.constant),
    "stablehlo.compare": (_COMPARE, _Parser.compare),
    "stablehlo.dot_general": (_DOT, _Parser.dot),
    "stablehlo.reduce": (_REDUCE, _Parser.reduce),
    "stablehlo.slice": (_SLICE, _Parser.slice),
    "stablehlo.convolution": (_CONVOLUTION, _Parser.convolution),
    "stablehlo.concatenate": (_JOIN, _Parser.concatenate),
    "stablehlo.iota": (_IOTA, _Parser.iota),
    "stablehlo.while": (_WHILE, _Parser.loop),
    "stablehlo.return": (_RETURN, _Parser.returned),
    "call": (_CALL, _Parser.call),
    "func.call": (_CALL, _Parser.call),
    "return": (_RETURN, _Parser.returned),
}


def _results(operands: list[TextValue], signature: str, name: str = "") -> list[str]:
    """The types of the results; each operand has to be of the type that the signature repeats."""
    own = [value.type for value in operands]
    types, after = _signature(signature)
    if after is not None:
        if types != own:
            raise _UnknownError
        return after
    if name == "optimization_barrier" or (name == "select" and len(types) == 2):
        expected = types if name == "optimization_barrier" else [types[0], types[1], types[1]]
        if own != expected:
            raise _UnknownError
        return types if name == "optimization_barrier" else types[1:]
    if name == "complex" and len(types) == 1:
        part = types[0].replace("complex<f32>", "f32").replace("complex<f64>", "f64")
        if own != [part, part]:
            raise _UnknownError
        return types
    if len(types) != 1 or own.count(types[0]) != len(own):
        raise _UnknownError
    return types


@lru_cache(1024)
def _signature(text: str) -> tuple[list[str], list[str] | None]:
    """The types of operands and of results, as written; None for the latter where they are not told apart."""
    before, arrow, after = text.rpartition(" -> ")
    return (_types(_inner(before)), _types(_inner(after))) if arrow else (_types(text), None)


def _inner(text: str) -> str:
    """What stands in the brackets, if there are any."""
    if text.startswith("(") != text.endswith(")"):
        raise _UnknownError
    return text[1:-1] if text.startswith("(") else text


def _types(text: str) -> list[str]:
    if text and not _TYPES.match(text):
        raise _UnknownError
    return _TYPE.findall(text)


def _array(numbers: str) -> str:
    return "{" + numbers.replace(" ", "") + "}"


def _whole(pattern: re.Pattern[str], text: str) -> re.Match[str]:
    match = pattern.match(text)
    if match is None:
        raise _UnknownError
    return match


def _entries(text: str) -> dict[str, Any]:
    """An attribute dictionary, as MLIR sorts it; an attribute without a value is a unit."""
    matches = [_whole(_ENTRY, part) for part in _split(text)]
    return {match[1]: match[2] or "unit" for match in sorted(matches, key=lambda match: match[1])}


def _split(text: str) -> list[str]:
    return [part for part in _parts(text) if part]


def _parts(text: str) -> Iterator[str]:
    """Between the commas outside of brackets, angle brackets among them."""
    depth = start = 0
    for token in _SPLIT.finditer(text):
        mark = token[0]
        if mark in "([{<":
            depth += 1
        elif mark in ")]}>":
            depth -= 1
        elif mark == "," and not depth:
            yield text[start : token.start()].strip()
            start = token.end()
    yield text[start:].strip()
