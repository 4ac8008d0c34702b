"""Edits of the texts of graphs, one place at a time, by rules that know nothing of how they are read.

Each attribute, literal, operation, shape, layout, operand and called computation is changed, each instruction taken
out. A place is edited only if something returned or an effect needs it, which is followed through names alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

WORD = r"[\w.\-]+"


@dataclass(frozen=True)
class Edit:
    """A piece of a text and what stands in its place: of which kind, at which value (its name, "" for the module)."""

    kind: str
    name: str
    start: int
    end: int
    new: str

    def of(self, text: str) -> str:
        """The changed text."""
        return text[: self.start] + self.new + text[self.end :]

    def told(self, text: str) -> str:
        """The change in words."""
        line = text.count("\n", 0, self.start) + 1
        return f"{self.kind} of {self.name or 'the module'}, line {line}: {text[self.start : self.end]} -> {self.new}"


def edits_of(text: str, stablehlo: bool) -> Iterator[Edit]:
    """All edits of a text, in the order of its lines."""
    return _mlir(text) if stablehlo else _hlo(text) if text.startswith("HloModule") else _fx(text)


def _other(value: str) -> str:
    """Another value of the same form."""
    swaps = {"true": "false", "false": "true", "GT": "LT", "LT": "GT", "EQ": "NE", "NE": "EQ", "GE": "LE", "LE": "GE"}
    if word := re.search(r"\b(true|false|GT|LT|EQ|NE|GE|LE)\b", value):
        return value[: word.start()] + swaps[word[0]] + value[word.end() :]
    if number := re.search(r"(?<![\w.])\d+(?![\w.])", value):
        return value[: number.start()] + str(int(number[0]) + 1) + value[number.end() :]
    return value[:-1] + "x" + value[-1] if value[-1:] in '"}' else value + "x"


# HLO.

LINE = re.compile(rf"^\s+(ROOT )?%?({WORD}) = ", re.MULTILINE)
_HEAD = re.compile(rf"^(ENTRY )?%?({WORD})(?: \(.*)? ?\{{$", re.MULTILINE)
# Names, hashes and where a line comes from; a channel's number is another at each trace.
_SAYS_NOTHING = {"metadata", "origin", "original_value", "statistics", "async_group_id", "fingerprint_before_lhs",
                 "channel_id", "is_scheduled"}  # fmt: skip
_CALLS = ("to_apply", "calls", "body", "condition", "branch_computations", "true_computation", "false_computation")
_OPERATIONS = {
    "add": "subtract", "subtract": "add", "multiply": "divide", "divide": "multiply", "maximum": "minimum",
    "minimum": "maximum", "exponential": "tanh", "tanh": "cosine", "log": "sqrt", "negate": "abs", "sqrt": "rsqrt",
    "rsqrt": "sqrt", "and": "or", "or": "and",
}  # fmt: skip
# What may be the same value as its operand, or a part of it.
_PASSES = {"tuple", "get-tuple-element", "copy", "opt-barrier", "bitcast", "parameter", "call", "fusion", "while",
           "conditional", "copy-start", "copy-done"}  # fmt: skip
_BRACKET = re.compile(r'[(\[{]|[)\]}]|,|"(?:[^"\\]|\\.)*"')


@dataclass
class Instruction:
    """One line of HLO: where its pieces are in the text. `operands` and `attributes` by name."""

    computation: str
    root: bool
    name: str
    opcode: str
    shape: tuple[int, int]
    inside: tuple[int, int]
    operands: list[tuple[str, int, int]]
    attributes: list[tuple[str, int, int]]


def _parts(text: str, start: int) -> tuple[list[tuple[int, int]], int]:
    """Spans between the commas up to the bracket that closes, or the end of the line, and where that is."""
    spans, depth, begun = list[tuple[int, int]](), 0, start
    end = text.find("\n", start) if text.find("\n", start) >= 0 else len(text)
    for mark in _BRACKET.finditer(text, start, end):
        if mark[0] in "([{":
            depth += 1
        elif mark[0] in ")]}":
            if depth == 0:
                end = mark.start()
                break
            depth -= 1
        elif mark[0] == "," and depth == 0:
            spans.append((begun, mark.start()))
            begun = mark.end()
    return [*spans, (begun, end)] if text[begun:end].strip() else spans, end


def instructions(text: str) -> tuple[list[Instruction], str]:
    """All instructions, and the name of the entry."""
    heads = [(m.start(), m[2]) for m in _HEAD.finditer(text) if not m[0].startswith("HloModule")]
    entry = next(m[2] for m in _HEAD.finditer(text) if m[1])
    read: list[Instruction] = []
    for line in LINE.finditer(text):
        start = line.end()
        end = _parts(text, start + 1)[1] + 1 if text[start] == "(" else text.index(" ", start)
        opened = text.index("(", end)
        inner, closed = _parts(text, opened + 1)
        opcode = text[end:opened].strip()
        operands = [
            (word[1], a + word.start(1), a + word.end(1))
            for a, b in inner
            if opcode not in ("parameter", "constant") and (word := re.search(rf"%?({WORD})\s*\Z", text[a:b]))
        ]
        attributes = [(text[a:b].partition("=")[0].strip(), a, b) for a, b in _parts(text, closed + 1)[0]]
        owner = max(head for head in heads if head[0] < start)[1]
        spans = (start, end), (opened + 1, closed)
        read.append(Instruction(owner, bool(line[1]), line[2], opcode, *spans, operands, attributes))
    return read, entry


def _needed(text: str, read: list[Instruction], entry: str) -> list[Instruction]:
    """The instructions that the roots of computations that are called need."""
    by_name = {(i.computation, i.name): i for i in read}
    roots = {i.computation: i for i in read} | {i.computation: i for i in read if i.root}
    pending, needed = [roots[entry]], set[int]()
    while pending:
        ins = pending.pop()
        if ins.shape[0] in needed:
            continue
        needed.add(ins.shape[0])
        pending += [by_name[ins.computation, n] for n, _, _ in ins.operands if (ins.computation, n) in by_name]
        names = [
            n for key, a, b in ins.attributes if key in _CALLS for n in re.findall(WORD, text[a:b].partition("=")[2])
        ]
        pending += [roots[n] for n in names if n in roots]
    return [i for i in read if i.shape[0] in needed]


def _hlo(text: str) -> Iterator[Edit]:
    for a, b in _parts(text, text.index(",") + 1)[0] if "," in text.partition("\n")[0] else ():
        key, _, value = text[a:b].partition("=")
        if key.strip() not in _SAYS_NOTHING:
            yield Edit("header", "", b - len(value), b, _other(value))
    read, entry = instructions(text)
    kinds: dict[str, list[str]] = {}  # computations by name, in the order of the text
    owners: dict[str, dict[str, Instruction]] = {}
    for ins in read:
        kinds.setdefault(ins.computation, []).append(ins.opcode)
        owners.setdefault(ins.computation, {})[ins.name] = ins
    names = list(kinds)
    for ins in _needed(text, read, entry):
        known = owners[ins.computation]
        for key, a, b in ins.attributes:
            value = text[a:b].partition("=")[2]
            if key in _CALLS[:4]:
                own = value.strip("%")
                before = [n for n in names[: names.index(ins.computation)] if kinds[n] != kinds.get(own)]
                yield from (Edit("called", ins.name, b - len(own), b, n) for n in before[:1])
            elif key not in _SAYS_NOTHING and value:
                yield Edit(f"attribute {key}", ins.name, b - len(value), b, _other(value))
                yield Edit(f"without {key}", ins.name, a - 1, b, "")
        yield from _value_edits(text, ins)
        yield from _operand_edits(text, ins, known)


def _value_edits(text: str, ins: Instruction) -> Iterator[Edit]:
    """The instruction with another shape, dtype, layout, literal, operation or parameter number."""
    a, b = ins.shape
    patterns = {"shape": r"\[(\d+)", "dtype": r"(f32)(?=\[)", "layout": r"\{(\d+,\d+(?:,\d+)*)(?=[}:])"}
    for kind, pattern in patterns.items():
        for match in list(re.finditer(pattern, text[a:b]))[:1]:
            old = match[1]
            new = {"shape": lambda s: str(int(s) + 1), "dtype": lambda s: "bf16", "layout": _reversed}[kind](old)
            if new != old:
                yield Edit(kind, ins.name, a + match.start(1), a + match.end(1), new)
    c, d = ins.inside
    if ins.opcode == "constant" and (number := re.search(r"\d+|true|false", text[c:d])):
        new = {"true": "false", "false": "true"}.get(number[0]) or str(int(number[0]) + 3)
        yield Edit("constant", ins.name, c + number.start(), c + number.end(), new)
    if ins.opcode in _OPERATIONS:
        yield Edit("operation", ins.name, b + 1, c - 1, _OPERATIONS[ins.opcode])


def _reversed(layout: str) -> str:
    return ",".join(reversed(layout.split(",")))


def _operand_edits(text: str, ins: Instruction, known: dict[str, Instruction]) -> Iterator[Edit]:
    """The instruction with operands exchanged, with another operand, and taken out: its first operand in its place."""

    def shape(name: str) -> str:
        return re.sub(r"\{[^{}]*\}", "", text[slice(*known[name].shape)])

    names = [name for name, _, _ in ins.operands]
    kinds = {name: known[name].opcode for name in names if name in known}
    if len(kinds) < len(set(names)):
        return
    own = re.sub(r"\{[^{}]*\}", "", text[slice(*ins.shape)])
    if len(set(names)) > 1 and len({kinds[n] for n in names[:2]} - _PASSES) == 2:
        (x, a0, a1), (y, b0, b1) = ins.operands[:2]
        yield Edit("exchange", ins.name, a0, b1, y + text[a1:b0] + x)
    for k, (name, a, b) in enumerate(ins.operands):
        if kinds[name] in _PASSES:
            continue
        leaves = {kinds[name], *_PASSES, "constant", "broadcast", "iota"}
        above = ((n, i) for n, i in known.items() if i.shape[0] < ins.shape[0])
        others = [n for n, i in above if i.opcode not in leaves and n not in names and shape(n) == shape(name)]
        if others:
            yield Edit("operand", ins.name, a, b, others[k % len(others)])
    if ins.opcode not in _PASSES and len(names) in (1, 2) and names and shape(names[0]) == own:
        end = text.find("\n", ins.shape[1])
        yield Edit("removal", ins.name, ins.shape[1] + 1, end, f"copy({names[0]})")


# StableHLO.

_STABLE = re.compile(r"^ *%(\w+)(?::\d+)? = (?:\"?stablehlo\.)(\w+)\"?(.*)$", re.MULTILINE)


def _mlir(text: str) -> Iterator[Edit]:
    """Numbers and words of attributes, literals, operations and operands. Types are left: the parser refuses others."""
    for line in _STABLE.finditer(text):
        if text.count(f"%{line[1]}", line.end()) == 0:
            continue
        rest, start = line[3].partition(" : ")[0], line.start(3)
        for number in re.finditer(
            r"(?<![\w.%#@x<+\-])-?\d+(?:\.\d+)?(?:e[+-]\d+)?(?![\w.])|\b(?:GT|LT|EQ|NE|GE|LE|true|false)\b", rest
        ):
            a, b = start + number.start(), start + number.end()
            new = _other(number[0]) if "." not in number[0] else f"{float(number[0]) + 3:.6e}"
            kind = "constant" if line[2] == "constant" else "attribute"
            yield Edit(kind, line[1], a, b, new)
        if line[2] in _OPERATIONS:
            yield Edit("operation", line[1], *line.span(2), _OPERATIONS[line[2]])
        # Two constants (%c, %cst) may well be equal.
        operands = list(re.finditer(r"%(?!c)\w+(?:#\d+)?", rest))
        if len(operands) > 1 and operands[0][0] != operands[1][0] and line[2] not in ("while", "case"):
            x, y = operands[:2]
            new = y[0] + rest[x.end() : y.start()] + x[0]
            yield Edit("exchange", line[1], start + x.start(), start + y.end(), new)


# FX.

_STATEMENT = re.compile(r'^ +(?!def |class |return|#)(?:(\w+)(?:: "([^"]*)")? = )?([^\n=;#][^\n;#]*)', re.MULTILINE)
_WORDS = {"mul": "div", "add": "sub", "relu": "neg", "sum": "mean", "mm": "mv", "cos": "tan", "sin": "tan"}


def _fx(text: str) -> Iterator[Edit]:
    """Numbers, words, functions and arguments of calls; annotated shapes; statements left out."""
    needed = _needed_names(text)
    for line in _STATEMENT.finditer(text):
        name, annotation, right = line.groups()
        if right == "None" or (name not in needed and not _changes(line[0])):
            continue
        name, start = name or "", line.start(3)
        for number in re.finditer(r"(?<![\w.])-?\d+(?:\.\d*)?(?:e-?\d+)?(?![\w.])|\bTrue\b|\bFalse\b", right):
            new = {"True": "False", "False": "True"}.get(number[0]) or repr(float(number[0]) + 3)
            new = new if "." in number[0] or number[0][0] in "TF" else str(int(float(number[0])) + 3)
            yield Edit("argument", name, start + number.start(), start + number.end(), new)
        if word := re.search(rf"(?<![a-z])({'|'.join(_WORDS)})(?=_?[.(])", right):
            yield Edit("operation", name, start + word.start(1), start + word.end(1), _WORDS[word[1]])
        if annotation and (size := re.search(r"\[(\d+)", annotation)):
            a = line.start(2) + size.start(1)
            yield Edit("shape", name, a, a + len(size[1]), str(int(size[1]) + 1))
        exchange = re.search(r"\(([a-z]\w*), ([a-z]\w*)(?=[,)])|(?<=^)([a-z]\w*) [-+*/@] ([a-z]\w*)(?= *$)", right)
        words = [k for k in (1, 2, 3, 4) if exchange and exchange[k]]
        if exchange and exchange[words[0]] != exchange[words[1]]:
            (a0, a1), (b0, b1) = exchange.span(words[0]), exchange.span(words[1])
            yield Edit("exchange", name, start + a0, start + b1, right[b0:b1] + right[a1:b0] + right[a0:a1])
        if _changes(line[0]):
            yield Edit("removal", name, line.start(), line.end(), "        pass")


def _changes(statement: str) -> bool:
    """Does a statement change a tensor or a state, by its words?"""
    return bool(re.search(r"\w_(?:\.\w+)*\(|grad_enabled|autocast|accumulate|\] = |[-+*/]= ", statement))


def _needed_names(text: str) -> set[str]:
    """Values that a `return`, a changed tensor or a state needs, by names alone."""
    needed = {n for m in re.finditer(r"^ +return (.*)$", text, re.MULTILINE) for n in re.findall(r"\w+", m[1])}
    for line in reversed(list(_STATEMENT.finditer(text))):
        if line[1] in needed or _changes(line[0]):
            needed |= set(re.findall(r"\w+", line[0]))
    return needed
