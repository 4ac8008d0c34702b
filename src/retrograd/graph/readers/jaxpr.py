"""Jaxprs as `print(jax.make_jaxpr(f)(x))` writes them -> Graph; with `pretty_print(source_info=True)` lines are known.

{ lambda ; a:f32[3]. let
    b:f32[3] = scan[jaxpr={ lambda ; ... } length=4] a    # train.py:7:4 (step)
  in (b,) }

What a jaxpr closes over is a constant whose numbers the text does not have. jit is a call; a jaxpr among the parameters
of another primitive is a computation that it calls.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from retrograd.errors import GraphError
from retrograd.graph import brackets
from retrograd.graph.ir import Computation, Graph, Instruction
from retrograd.graph.readers.fx_body import metadata_of

_QUOTED_OR_BRACKET = re.compile(r"'(?:[^'\\\n]|\\.)*+'|\"(?:[^\"\\\n]|\\.)*+\"|[(\[{]|[)\]}]")
_PLAIN = re.compile(r"[^\s(\[{)\]}'\"]++|'(?:[^'\\\n]|\\.)*+'|\"(?:[^\"\\\n]|\\.)*+\"|['\"]")
_BLANK = re.compile(r"\s*+")
_LINE = re.compile(r"[ \t]++# (.*?):([0-9]{1,9})(?::[0-9]++)? \((.*)\)[ \t]*+$", re.MULTILINE)
_LAMBDA = re.compile(r"\{\s*+lambda\b")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_BINDER = re.compile(r"([A-Za-z_]\w*+):(.+)", re.DOTALL)
_CALLS = {"jit": "call", "pjit": "call", "closed_call": "call", "core_call": "call", "while": "while_loop"}
_CLOSES = {"(": ")", "[": "]", "{": "}"}
_DEEPEST = 200


class _Token(NamedTuple):
    """A run without blanks outside of brackets, with the brackets in it."""

    text: str
    start: int
    end: int


@cache
def _pure() -> frozenset[str]:
    """Primitives of JAX that do nothing but compute; callbacks, references and collectives are not among them."""
    return frozenset(Path(__file__).with_name("pure_primitives.txt").read_text(encoding="utf-8").split())


def parse(text: str, source: str = "", first: int = 1) -> Graph:
    """The jaxpr of a text, with those that it names."""
    return _Reader(text, source, first).graph()


class _Body:
    """A computation in the making."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.instructions: list[Instruction] = []
        self.places: dict[str, int] = {}
        self.parameters: list[int] = []

    def add(self, instruction: Instruction) -> int:
        self.instructions.append(instruction)
        return len(self.instructions) - 1


class _Reader:
    def __init__(self, text: str, source: str, first: int) -> None:
        self.source, self.first = source, first
        self.starts = [0, *(match.end() for match in re.finditer("\n", text))]
        self.lines = {
            self.line(match.start()): metadata_of(match[1], match[2], match[3]) for match in _LINE.finditer(text)
        }
        self.text = _LINE.sub(lambda match: " " * len(match[0]), text)  # positions stay
        self.closes = self.brackets()
        self.computations: dict[str, Computation] = {}
        self.effects: set[str] = set()
        self.named: dict[str, str] = {}  # of `let f = {...} in`

    def line(self, at: int) -> int:
        return self.first + bisect_right(self.starts, at) - 1

    def error(self, message: str, at: int) -> GraphError:
        line = self.line(at)
        shown = self.text[at:].split("\n", 1)[0]
        return brackets.error(self.source or "the jaxpr", line, message, shown)

    def brackets(self) -> dict[int, int]:
        """Where each bracket closes."""
        closes: dict[int, int] = {}
        stack: list[int] = []
        for match in _QUOTED_OR_BRACKET.finditer(self.text):
            mark, at = match[0], match.start()
            if mark in _CLOSES:
                stack.append(at)
                if len(stack) > _DEEPEST:
                    raise self.error(f"brackets nest more than {_DEEPEST} deep", at)
            elif len(mark) == 1:
                if not stack or _CLOSES[self.text[stack[-1]]] != mark:
                    raise self.error("a bracket closes here that was not opened", at)
                closes[stack.pop()] = at
        if stack:
            raise self.error("this bracket is not closed; the file may be cut off", stack[-1])
        return closes

    def tokens(self, start: int, end: int) -> Iterator[_Token]:
        at = self.after_blanks(start, end)
        while at < end:
            begin = at
            while at < end and not self.text[at].isspace():
                plain = _PLAIN.match(self.text, at, end)
                if plain is None and at not in self.closes:
                    raise self.error("this is no jaxpr", at)
                at = plain.end() if plain else self.closes[at] + 1
            yield _Token(self.text[begin:at], begin, at)
            at = self.after_blanks(at, end)

    def after_blanks(self, at: int, end: int) -> int:
        blank = _BLANK.match(self.text, at, end)
        return blank.end() if blank else end  # None where `at` is behind the end, as a damaged text may have it

    def graph(self) -> Graph:
        tokens = list(self.tokens(0, len(self.text)))
        at = 0
        while at + 4 < len(tokens) and tokens[at].text == "let" and tokens[at + 2].text == "=":
            name = tokens[at + 1].text
            self.named[name] = self.computation(tokens[at + 3], name)
            at += 5
        if at >= len(tokens) or not _LAMBDA.match(tokens[at].text):
            raise self.error(
                "expected `{ lambda`; the file may be cut off", tokens[at].start if at < len(tokens) else 0
            )
        entry = self.computation(tokens[at], "main")
        return Graph(entry, self.computations, entry, "jaxpr", source=self.source)

    def computation(self, token: _Token, name: str) -> str:
        """The jaxpr in braces as a computation; callees come before their callers."""
        count = sum(own.partition(".")[0] == name for own in self.computations)
        body = _Body(f"{name}.{count}" if count else name)
        tokens = list(self.tokens(token.start + 1, token.end - 1))
        words = [t.text for t in tokens]
        if not _LAMBDA.match(token.text) or "let" not in words or "in" not in words:
            raise self.error("expected `{ lambda ; ... let ... in ... }`", token.start)
        let, last = words.index("let"), len(words) - 1 - words[::-1].index("in")
        closed = True
        for binder in tokens[1:let]:
            text = binder.text.rstrip(".;") if binder is tokens[let - 1] else binder.text.rstrip(";")
            if match := _BINDER.fullmatch(text):
                self.bind(body, match[1], match[2], closed, binder.start)
            closed = closed and not binder.text.endswith(";")
        for equation in self.equations(tokens[let + 1 : last]):
            self.equation(body, equation)
        outputs = self.tokens(tokens[last + 1].start + 1, tokens[last + 1].end - 1)
        places = [self.value(body, output.text.rstrip(","), output.start) for output in outputs]
        shape = "(" + ",".join(body.instructions[place].shape for place in places) + ")"
        root = body.add(Instruction("output", "tuple", shape, tuple(places), line=self.line(tokens[last].start)))
        # Registered late, so that what it calls comes first.
        while body.name in self.computations:
            body.name += "_"
        self.computations[body.name] = Computation(
            body.name, body.instructions, root, body.parameters, self.line(token.start)
        )
        return body.name

    def bind(self, body: _Body, name: str, shape: str, closed: bool, at: int) -> None:
        if closed:  # a value that the function closes over: its numbers are not in the text
            place = body.add(Instruction(name, "constant", shape, (), "{...}", line=self.line(at)))
        else:
            place = body.add(Instruction(name, "parameter", shape, (), str(len(body.parameters)), line=self.line(at)))
            body.parameters.append(place)
        body.places[name] = place

    def equations(self, tokens: list[_Token]) -> Iterator[list[_Token]]:
        """Equations begin in the column of the first one or behind a semicolon; wrapped lines are indented."""
        if not tokens:
            return
        column = self.column(tokens[0])
        equation: list[_Token] = []
        for token in tokens:
            if equation and (equation[-1].text.endswith(";") or (column and self.column(token) == column)):
                yield equation
                equation = []
            equation.append(token)
        yield equation

    def column(self, token: _Token) -> int:
        """The column of the first token of a line, 0 of another one."""
        begin = self.starts[bisect_right(self.starts, token.start) - 1]
        return 0 if self.text[begin : token.start].strip() else token.start - begin + 1

    def equation(self, body: _Body, tokens: list[_Token]) -> None:
        words = [token.text for token in tokens]
        equal = words.index("=") if "=" in words else -1
        if equal + 1 >= len(tokens):
            raise self.error("this equation has no primitive; the file may be damaged", tokens[0].start)
        outputs = [_BINDER.fullmatch(word) for word in words[: max(equal, 0)]]
        primitive = tokens[equal + 1]
        name, bracket, _ = primitive.text.partition("[")
        name = name.rstrip(";")
        called: list[tuple[str, str]] = []
        listed = self.parameters(primitive.start + len(name), called) if bracket else []
        # The name of a function that is called; of another primitive it may say what is computed.
        attrs = ", ".join(sorted(text for text in listed if name not in _CALLS or not text.startswith("name=")))
        operands = [self.value(body, token.text.rstrip(";"), token.start) for token in tokens[equal + 2 :]]
        bad = next((t for t, match in zip(tokens, outputs, strict=False) if match is None), None)
        if bad is not None:
            raise self.error("expected a variable and its type, as in `b:f32[3]`", bad.start)
        shapes = [match[2] for match in outputs if match]
        shape = shapes[0] if len(shapes) == 1 else f"({','.join(shapes)})"
        line = self.line(tokens[0].start)
        names = [match[1] for match in outputs if match]
        ins = Instruction(
            names[0] if names else name, _CALLS.get(name, name), shape, tuple(operands), attrs, tuple(called)
        )
        ins.metadata, ins.line = self.lines.get(line, ""), line
        if (name not in _pure() and name not in _CALLS) or any(callee in self.effects for _, callee in called):
            ins.has_effect = True
            self.effects.add(body.name)
        place = body.add(ins)
        for index, (own, part) in enumerate(zip(names, shapes, strict=True)):
            element = Instruction(own, "get-tuple-element", part, (place,), str(index), (), ins.metadata, line)
            body.places[own] = place if len(names) == 1 else body.add(element)

    def parameters(self, at: int, called: list[tuple[str, str]]) -> list[str]:
        """The parameters of a primitive; jaxprs among them are called."""
        values: list[str] = []
        for token in self.tokens(at + 1, self.closes[at]):
            if re.match(r"\w+=", token.text) or not values:
                key, _, value = token.text.partition("=")
                values.append(f"{key}={self.parameter(key, value, token.start + len(key) + 1, called)}")
            else:
                values[-1] += f" {token.text}"
        return [_ADDRESS.sub("", value) for value in values]

    def parameter(self, key: str, value: str, at: int, called: list[tuple[str, str]]) -> str:
        """A value, or @ for each jaxpr in it."""
        if "jaxpr" in key and value in self.named:
            called.append((key, self.named[value]))
            return "@"
        if not _LAMBDA.search(value):
            return " ".join(value.split())
        inner = [token for token in self.within(value, at) if _LAMBDA.match(token.text)]
        called += [(key, self.computation(token, "jaxpr")) for token in inner]
        return "@" * len(inner)

    def within(self, value: str, at: int) -> list[_Token]:
        if _LAMBDA.match(value):
            return [_Token(value, at, at + len(value))]
        return list(self.tokens(at + 1, at + len(value) - 1))

    def value(self, body: _Body, text: str, at: int) -> int:
        """The place of a variable, or of a literal with its type."""
        if text in body.places:
            return body.places[text]
        literal, colon, shape = text.partition(":")
        if not colon:
            raise self.error(f"the value {text} is not defined above", at)
        place = body.add(Instruction(literal, "constant", shape, (), literal, line=self.line(at)))
        body.places[text] = place
        return place
