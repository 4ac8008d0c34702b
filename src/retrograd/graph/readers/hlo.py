"""HLO text -> Graph: as torch_xla 2.9 prints it (operands with shapes) and as current XLA and JAX do (names alone).

One compiled expression reads nearly every line; what it does not match goes through a scanner that knows quotes and
nested brackets. Shapes with their operation repeat, and so does all that follows the operands, so both are read once
for each distinct text: this took 45,000 instructions from 4 s to 0.2 s.
"""

from __future__ import annotations

import re
import sys

from retrograd.core import gc_pause
from retrograd.errors import GraphError
from retrograd.graph import brackets
from retrograd.graph.ir import COLLECTIVES, PURE, Computation, Graph, Instruction, effect_of, share_channels
from retrograd.graph.readers.hlo_attributes import NOISE, NONE, Attributes, attributes_of, shape_of

_NEST = brackets.balanced(4)
_SHAPE = rf"[a-z]\w*+\[[^\]]*+\](?:\{{[^{{}}]*+\}})?+|\({_NEST}\)"
_INSTRUCTION = re.compile(
    rf"\s*+(ROOT\s++)?+%?+([^\s=,(){{}}%]++)\s*+=\s*+((?:{_SHAPE})\s++[a-z][\w\-]*+)\(({_NEST})\)(.*+)",
    re.DOTALL,
)
# The expressions below take every character once, so that no text, however damaged, makes them quadratic.
_COMPUTATION = re.compile(r"\s*+(ENTRY\s++)?+%?+([^\s=,(){}%]++)\s*+")
_OPERANDS = re.compile(r"%([^,]++)").findall
_NAMED = re.compile(r"%([^\s,(){}]++)")
_NUMBER = re.compile(r"[0-9]{1,9}\Z")
_ROW = re.compile(r"([0-9]{1,9}) (.*)\Z")
_PAIR = re.compile(r"(?<!\w)(\w++)=([0-9]{1,9})(?![0-9])")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")

# Frames of one instruction: JAX records about 20; without a limit a damaged table would be read quadratically.
_MOST_FRAMES = 64


def parse(text: str, source: str = "", first: int = 1) -> Graph:
    """One HLO module. `source` and `first` (the line number of its first line) are for messages."""
    with gc_pause.paused(age=True):
        return _Reader(text, source, first).graph()


Head = tuple[str, str, str, bool, str]  # shape, layouts, operation, whether its effect is asked for, part of keys
Tail = tuple[Attributes, str]


class _Reader:
    """Reads one module line by line. Public names of the loop are locals where the loop is hot."""

    def __init__(self, text: str, source: str, first: int) -> None:
        self.lines = brackets.lines(text)
        self.source = source
        self.first = first
        self.heads: dict[str, Head] = {}
        self.tails: dict[str, Tail] = {}
        self.attributes: dict[str, Attributes] = {}
        self.effects: set[str] = set()
        self.channels: list[tuple[Instruction, str]] = []
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        self.at = 0
        self.began = 0  # the first line of an instruction over several

    def error(self, message: str, at: int | None = None) -> GraphError:
        at = self.at if at is None else at
        line = self.lines[at] if at < len(self.lines) else "the end of the file"
        return brackets.error(self.source or "HLO text", self.first + at, message, line)

    def graph(self) -> Graph:
        name, header = self.header()
        tables = self.tables()
        while self.at < len(self.lines):
            line = self.lines[self.at]
            if not line.strip() or line.lstrip().startswith("//"):
                self.at += 1
                continue
            self.computation()
        if not self.computations:
            raise self.error("the module has no computation; the file may be cut off")
        entry = self.entry or next(reversed(self.computations))
        self.called_exist()
        share_channels(self.channels)
        return Graph(name, self.computations, entry, "hlo", header, source=self.source, stack=tables)

    def header(self) -> tuple[str, dict[str, str]]:
        while self.at < len(self.lines) and not self.lines[self.at].strip():
            self.at += 1
        if self.at == len(self.lines) or not self.lines[self.at].lstrip().startswith("HloModule"):
            raise self.error("an HLO module begins with `HloModule NAME`, this does not")
        parts = brackets.split(self.lines[self.at].strip()[len("HloModule") :])
        if not parts or not parts[0]:
            raise self.error("the module has no name")
        self.at += 1
        pairs = (NOISE.sub("", part).partition("=") for part in parts[1:])
        return parts[0].lstrip("%"), {key.strip(): value.strip() for key, _, value in pairs}

    def tables(self) -> dict[int, tuple[tuple[str, int, str], ...]]:
        """The tables of source positions of new XLA after the header: stack frame id -> frames, innermost first."""
        rows: dict[str, dict[int, str]] = {}
        table = ""
        while self.at < len(self.lines):
            line = self.lines[self.at].strip()
            if line in _TABLES:
                table = line
                rows[table] = {}
            elif line:
                match = _ROW.match(line) if table else None
                if not match:
                    break
                rows[table][int(match[1])] = match[2].strip()
            self.at += 1
        return _frames(rows)

    def computation(self) -> None:
        start = self.at
        header = self.joined().rstrip()
        match = _COMPUTATION.match(header)
        rest = header[match.end() : -1].strip() if match and header.endswith("{") else "?"
        if not match or (rest and not (rest.startswith("(") and "->" in rest)):
            raise self.error("neither an instruction nor the beginning of a computation", start)
        name = match[2]
        if name in self.computations:
            raise self.error(f"a second computation is called {name!r}", start)
        if match[1]:
            if self.entry:
                raise self.error("a second ENTRY computation", start)
            self.entry = name
        self.computations[name] = self.body(name, start)

    def joined(self) -> str:
        """The line at hand with the lines that follow while a bracket (other than the last brace) is open."""
        text = self.lines[self.at]
        self.at += 1
        depth = brackets.depth(text) - text.rstrip().endswith("{")
        parts = [text]
        while depth > 0 and self.at < len(self.lines):
            line = self.lines[self.at]
            if _INSTRUCTION.match(line):
                break
            parts.append(line.strip())
            depth += brackets.depth(line)
            self.at += 1
            if line.rstrip().endswith("{") and depth == 1:
                break
        return " ".join(parts)

    def body(self, name: str, start: int) -> Computation:
        instructions: list[Instruction] = []
        places: dict[str, int] = {}
        parameters: dict[int, int] = {}
        root = -1
        lines, heads, tails, first = self.lines, self.heads, self.tails, self.first
        below, end, place, match_instruction = self.at, len(lines), 0, _INSTRUCTION.match
        while True:
            at = below
            match = match_instruction(lines[at]) if at < end else None
            fields = match.groups() if match is not None else self.unusual(name, at)
            if fields is None:
                break
            is_root, own, raw_head, raw_operands, raw_tail = fields
            at, below = (at, at + 1) if match is not None else (self.began, self.at)
            shape, placement, opcode, watched, key = heads.get(raw_head) or self.head(raw_head)
            known, metadata = tails.get(key + raw_tail) or self.tail(raw_tail, opcode, key, at)
            attrs = known.attrs
            operands: tuple[int, ...] = ()
            if opcode == "parameter" or opcode == "constant":
                value = " ".join(raw_operands.split())
                attrs = f"{value}, {attrs}" if attrs else value
                if opcode == "parameter":
                    parameters[self.number(value, parameters, at)] = place
            elif raw_operands:
                operands = self.operands(raw_operands, places, name, at)
            if is_root:
                root = place
            if places.setdefault(own, place) != place:
                raise self.error(f"a second instruction of {name} is called {own}", at)
            place += 1
            ins = Instruction(own, opcode, shape, operands, attrs, known.called, metadata, first + at, placement)
            instructions.append(ins)
            if watched or known.noted:
                self.notes(ins, known, places, name)
        if not instructions:
            raise self.error(f"the computation {name} is empty", start)
        numbered = self.numbered(parameters, name, start)
        return Computation(name, instructions, root if root >= 0 else place - 1, numbered, first + start)

    def notes(self, ins: Instruction, known: Attributes, places: dict[str, int], name: str) -> None:
        """What beside its value an instruction has: placement, predecessors, an effect, a channel."""
        if known.placement:
            ins.placement = f"{ins.placement}, {known.placement}" if ins.placement else known.placement
        if known.after:
            missing = next((o for o in known.after if o not in places), None)
            if missing is not None:
                at = ins.line - self.first
                raise self.error(f"the control predecessor {missing} is not defined above in {name}", at)
            ins.after = tuple([places[o] for o in known.after])
        if effect_of(ins.opcode, ins.attrs, ins.called, self.effects):
            ins.has_effect = True
            self.effects.add(name)
        if known.channel:
            self.channels.append((ins, known.channel))

    def head(self, raw: str) -> Head:
        """What stands before the operands: a shape and an operation."""
        opcode = raw.rsplit(None, 1)[1]
        shape, placement = shape_of(raw[: -len(opcode)].rstrip())
        watched = opcode not in PURE or opcode == "custom-call" or opcode.removesuffix("-start") in COLLECTIVES
        key = opcode if opcode in ("custom-call", "select-and-scatter") else ""
        head = self.heads[raw] = shape, placement, sys.intern(opcode), watched, key
        return head

    def operands(self, raw: str, places: dict[str, int], name: str, at: int) -> tuple[int, ...]:
        """Places of operands. Splitting is right for nearly all lines; a name that it gets wrong is read with care."""
        try:
            before, mark, after = raw.partition("%")
            if not mark:
                return tuple([places[part] for part in before.split(", ")])
            if "%" not in after and "," not in after:
                return (places[after],)
            return tuple(map(places.__getitem__, _OPERANDS(raw)))
        except KeyError:
            return self.described_operands(raw, places, name, at)

    def described_operands(self, raw: str, places: dict[str, int], name: str, at: int) -> tuple[int, ...]:
        """Operands with anything between their names: shapes, comments, blanks."""
        text = NOISE.sub("", raw)
        names = _NAMED.findall(text) if "%" in text else [part.split()[-1] for part in brackets.split(text) if part]
        try:
            return tuple([places[n] for n in names])
        except KeyError as missing:
            raise self.error(f"the operand {missing.args[0]} is not defined above in {name}", at) from None

    def number(self, text: str, parameters: dict[int, int], at: int) -> int:
        if not _NUMBER.match(text):
            raise self.error(f"a parameter has a number, this one has {brackets.shortened(text)!r}", at)
        if int(text) in parameters:
            raise self.error(f"parameter({text}) stands here a second time", at)
        return int(text)

    def numbered(self, parameters: dict[int, int], name: str, start: int) -> list[int]:
        count = len(parameters)
        missing = next((i for i in range(count) if i not in parameters), None)
        if missing is not None:
            raise self.error(f"the computation {name} has {count} parameters but no parameter({missing})", start)
        return [parameters[i] for i in range(count)]

    def unusual(self, computation: str, at: int) -> tuple[str | None, str, str, str, str] | None:
        """An instruction at or below a line that the expression does not match (several lines, brackets in quotes).

        None at the end.
        """
        self.at = at
        while self.at < len(self.lines):
            text = self.lines[self.at].strip()
            if text.startswith("}"):
                self.at += 1
                return None
            if text and not text.startswith("//"):
                break
            self.at += 1
        else:
            raise self.error(f"the computation {computation} is not closed; the file may be cut off")
        start = self.began = self.at
        text = self.joined().strip()
        if match := _INSTRUCTION.match(text):
            return match.groups()  # type: ignore[return-value]
        left, equals, right = text.partition(" = ")
        root = "ROOT" if left.startswith("ROOT ") else None
        name = left.removeprefix("ROOT ").strip().lstrip("%")
        if not equals or not name or any(c in name for c in " ,(){}"):
            raise self.error("this is no instruction (`name = shape opcode(operands)`); the file may be damaged", start)
        end = brackets.closing(right, 0) + 1 if right.startswith("(") else right.find(" ")
        shape, rest = right[:end].strip(), right[end:].lstrip()
        opened = rest.find("(")
        closed = brackets.closing(rest, opened) if opened > 0 else -1
        opcode = rest[:opened].strip()
        if end <= 0 or closed < 0 or rest[closed] != ")" or not shape or not re.fullmatch(r"[a-z][\w\-]*", opcode):
            raise self.error("this instruction is not complete; the file may be damaged or cut off", start)
        return root, name, f"{shape} {opcode}", rest[opened + 1 : closed], rest[closed + 1 :]

    def tail(self, whole: str, opcode: str, key: str, at: int) -> Tail:
        """Attributes and metadata from what follows the operands."""
        tail, metadata = self.apart(whole)
        known = self.attributes.get(key + tail) if tail else NONE
        if known is None:
            text = tail.strip()
            if text and not text.startswith(","):
                raise self.error("attributes begin with a comma", at)
            if brackets.depth(text):
                raise self.error("a bracket or quote of the attributes is not closed", at)
            known = self.attributes[key + tail] = attributes_of(text[1:], opcode)
        self.tails[key + whole] = known, metadata
        return known, metadata

    def apart(self, tail: str) -> tuple[str, str]:
        """What follows the operands without its metadata, and these."""
        head, mark, rest = tail.partition(", metadata={")
        metadata = ""
        if mark:
            # Metadata is the last attribute and has no brace of its own in nearly every line.
            if '"' not in head and rest.find("}") == len(rest) - 1:
                metadata, tail = "{" + rest, head
                if "preserve_layout=true" in rest:  # the only part of it that the compiler heeds
                    tail += ", preserve_layout=true"
            else:
                parts = brackets.split(tail[1:])
                metadata = next((part[9:] for part in parts if part.startswith("metadata={")), "")
                tail = "".join([", " + part for part in parts if not part.startswith("metadata={")])
        return tail, metadata

    def called_exist(self) -> None:
        """Every called computation is there, and none calls itself, even indirectly: callers come later in the text."""
        seen: set[str] = set()
        for name, computation in self.computations.items():
            for instruction in computation.instructions:
                for attribute, called in instruction.called:
                    if called in seen:
                        continue
                    at = instruction.line - self.first
                    if called not in self.computations:
                        raise self.error(f"{attribute} names the computation {called}, which is not in the module", at)
                    raise self.error(f"{attribute} names the computation {called}, which is not defined above", at)
            seen.add(name)


def _frames(rows: dict[str, dict[int, str]]) -> dict[int, tuple[tuple[str, int, str], ...]]:
    """Stack frames by id. The printed parent is the true one plus 1: a frame that names itself has no parent."""
    files = {i: text.strip('"') for i, text in rows.get("FileNames", {}).items()}
    functions = {i: text.strip('"') for i, text in rows.get("FunctionNames", {}).items()}
    spots = {i: _numbers(text) for i, text in rows.get("FileLocations", {}).items()}
    frames = {i: _numbers(text) for i, text in rows.get("StackFrames", {}).items()}
    stacks: dict[int, tuple[tuple[str, int, str], ...]] = {}
    for number, frame in frames.items():
        spot = spots.get(frame.get("file_location_id", 0), {})
        file, function = files.get(spot.get("file_name_id", 0), ""), spot.get("function_name_id", 0)
        outer = stacks.get(frame.get("parent_frame_id", 0) - 1, ())  # a parent is printed before its children
        stacks[number] = ((file, spot.get("line", 0), functions.get(function, "")), *outer[: _MOST_FRAMES - 1])
    return stacks


def _numbers(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in _PAIR.findall(text)}
