"""Traces in files: gzip'd lines of JSON, written as the run goes on and read back anywhere. No pickle, no torch.

Line 1 says what the file is. Then, each before its first use: `["s", text]` is string 0, 1, ...; `["t", ...]` a tensor
with its statistics; `["o", ...]` an operator that names both by number; `["conditions", {...}]` when they are known,
`["meta", {...}]` at the end. The last line is `["end", operators]`; without it the file was cut off. Numbers are
those of JSON; infinities and NaN are the strings "inf", "-inf", "nan".
"""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from retrograd.core.schema import decode
from retrograd.core.system_errors import as_usage_error
from retrograd.core.wording import shortened
from retrograd.errors import TraceError, UsageError
from retrograd.trace.schema import PHASES, SCHEMA, Exponents, Op, Stats, Trace

FORMAT = "retrograd.trace"
SUFFIXES = (".trace", ".jsonl.gz")
LIMIT = 4 << 30  # bytes of unpacked text: 30 million operators
_LONGEST = 64 << 20  # bytes of one line: a foreach operator over 100,000 tensors has 1 MB
_STATS = tuple(field.name for field in fields(Stats))
_EXPONENTS = tuple(field.name for field in fields(Exponents))
_FLOATS = ("low", "high", "rms")
_WORDS = ("dtype", "device", "name")
_TEXTS = ("phase", "name", "module", "node", "place", "code", "arguments", "inside", "owner")
_READ = (3, SCHEMA)  # in files of 3 operators have no owner


def save(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace.

    Args:
        trace: what to write.
        path: ends in .trace or .jsonl.gz.

    Raises:
        UsageError: the suffix is another one, or the file cannot be written.
    """
    writer = Writer(path, trace.level, trace.rank)
    try:
        writer.conditions(trace.conditions)
        for op in trace.ops:
            writer.add(op)
    finally:
        writer.close(trace.meta)


def load(path: str | os.PathLike[str], *, partial: bool = False, limit: int = LIMIT) -> Trace:
    """Read a trace.

    Args:
        path: a file that `save` or a recorder wrote.
        partial: Take what there is of a file that was cut off, as by a killed process.
        limit: bytes of unpacked text to read at most.

    Raises:
        TraceError: the file is no trace, cut off, garbled, of another version, or larger than `limit` when unpacked;
            the message says in which line.
        UsageError: it cannot be read.
    """
    name = os.fspath(path)
    with as_usage_error(f"cannot read {name!r}"), Path(path).open("rb") as raw:
        return _Reader(name, partial).read(_lines(raw, name, partial, limit))


class Writer:
    """A file that grows by operators, so that a run that dies leaves what it did.

    Args:
        path: ends in .trace or .jsonl.gz.
        level: of the trace.
        rank: of the process.

    Raises:
        UsageError: the suffix is another one, or the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], level: str = "fast", rank: int = 0) -> None:
        check_path(path)
        self.path = os.fspath(path)
        self.count = 0
        self._strings: dict[str, int] = {}
        self._tensors: dict[Stats, int] = {}
        with as_usage_error(f"cannot write {self.path!r}"):
            self._raw = Path(path).open("wb")  # noqa: SIM115 (open as long as the run)
        # No time and no name in the header: equal runs make equal files.
        self._zip = gzip.GzipFile(filename="", mode="wb", fileobj=self._raw, mtime=0, compresslevel=5)
        self._line({"format": FORMAT, "schema": SCHEMA, "level": level, "rank": rank})

    def add(self, op: Op) -> None:
        texts = [self._string(getattr(op, name)) for name in _TEXTS]
        inputs, outputs = ([self._tensor(s) for s in side] for side in (op.inputs, op.outputs))
        kernels = [self._string(kernel) for kernel in op.kernels]
        self._line(["o", op.index, op.step, *texts, inputs, outputs, int(op.random), kernels])
        self.count += 1

    def conditions(self, conditions: dict[str, dict[str, str]]) -> None:
        if conditions:
            self._line(["conditions", conditions])

    def flush(self) -> None:
        """Let what was added survive the process."""
        self._zip.flush()
        self._raw.flush()

    def abandon(self) -> None:
        """Write nothing more, in a process that was forked: the file is its parent's, and what waits in buffers too."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._raw.fileno())
        os.close(nowhere)

    def close(self, meta: dict[str, str]) -> None:
        self._line(["meta", meta])
        self._line(["end", self.count])
        self._zip.close()
        self._raw.close()

    def _line(self, value: Any) -> None:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        # Names of files may hold bytes that are no text; they are kept as such.
        self._zip.write(text.encode("utf-8", "surrogatepass") + b"\n")

    def _string(self, text: str) -> int:
        known = self._strings.get(text)
        if known is None:
            known = self._strings[text] = len(self._strings)
            self._line(["s", text])
        return known

    def _tensor(self, stats: Stats) -> int:
        known = self._tensors.get(stats)
        if known is None:
            row = [self._cell(name, getattr(stats, name)) for name in _STATS]
            known = self._tensors[stats] = len(self._tensors)
            self._line(["t", *row])
        return known

    def _cell(self, name: str, value: Any) -> Any:
        if name in _WORDS:
            return self._string(value)
        if isinstance(value, Exponents):
            return [value.least, value.positive, value.negative]
        return str(float(value)) if name in _FLOATS and value is not None and not math.isfinite(value) else value


def check_path(path: str | os.PathLike[str]) -> None:
    """Complain now about a path that a recorder would refuse after the run.

    Raises:
        UsageError: the suffix is neither .trace nor .jsonl.gz, or the folder does not exist.
    """
    name = os.fspath(path)
    if not name.endswith(SUFFIXES):
        raise UsageError(f"cannot write the trace {name!r}: the name must end in {' or '.join(SUFFIXES)}")
    if not Path(path).parent.is_dir():
        raise UsageError(f"cannot write the trace {name!r}: there is no folder {str(Path(path).parent)!r}")


def _lines(raw: io.BufferedReader, name: str, partial: bool, limit: int) -> Iterator[tuple[int, bytes]]:
    """Numbered lines; an error of the compression is a TraceError."""
    if raw.peek(2)[:2] != b"\x1f\x8b":
        raise TraceError(
            f"{name!r} is no trace: it is not compressed by gzip; expected what `retrograd trace record` wrote"
        )
    total = 0
    with gzip.GzipFile(fileobj=raw) as unpacked:
        for number in range(1, limit + 2):
            try:
                line = unpacked.readline(_LONGEST + 1)
            except EOFError:
                if partial:
                    return
                raise TraceError(f"{name!r} was cut off after line {number - 1}; {_PARTIAL}") from None
            except (OSError, zlib.error) as error:
                raise TraceError(f"{name!r} is damaged after line {number - 1}: {error}") from None
            total += len(line)
            if total > limit or len(line) > _LONGEST:
                raise TraceError(f"{name!r} is too large: more than {min(limit, _LONGEST)} bytes at line {number}")
            if not line:
                return
            yield number, line


_PARTIAL = "load(..., partial=True) or --partial takes what there is"


class _Reader:
    def __init__(self, name: str, partial: bool) -> None:
        self.name, self.partial = name, partial
        self.strings: list[str] = []
        self.tensors: list[Stats] = []
        self.schema, self.ended = SCHEMA, False

    def read(self, lines: Iterable[tuple[int, bytes]]) -> Trace:
        trace, number = None, 0
        for number, line in lines:
            if self.partial and not line.endswith(b"\n"):
                break
            try:
                value = json.loads(line.decode("utf-8", "surrogatepass"))
                if trace is None:
                    trace = self._begin(value)
                else:
                    self._take(trace, value)
            except TraceError:
                raise
            except (ValueError, TypeError, KeyError, IndexError, RecursionError, AttributeError) as error:
                raise TraceError(f"{self.name!r} is damaged in line {number}: {shortened(str(error), 80)}") from None
        if trace is None:
            raise TraceError(f"{self.name!r} is empty")
        if not self.ended and not self.partial:
            raise TraceError(f"{self.name!r} was cut off after line {number}; {_PARTIAL}")
        return trace

    def _begin(self, head: Any) -> Trace:
        if not isinstance(head, dict) or head.get("format") != FORMAT:
            raise TraceError(f"{self.name!r} is no trace: its first line does not say {FORMAT!r}")
        if head["schema"] not in _READ:
            raise TraceError(
                f"{self.name!r} has version {head['schema']!r}, this retrograd reads {SCHEMA}; record it again, or "
                "read it with the retrograd that wrote it"
            )
        self.schema = _number(head["schema"])
        return Trace(level=_text(head["level"]), rank=_number(head["rank"]))

    def _take(self, trace: Trace, value: Any) -> None:
        if self.ended:
            raise ValueError("something follows the end")
        kind, *rest = value
        if kind == "o":
            trace.ops.append(self._op(rest))
        elif kind == "t":
            self.tensors.append(self._stats(rest))
        elif kind == "s":
            self.strings.append(_text(*rest))
        elif kind == "meta":
            trace.meta = _texts(rest[0])
        elif kind == "conditions":
            trace.conditions = {_text(section): _texts(values) for section, values in rest[0].items()}
        elif kind == "end":
            if rest != [len(trace.ops)]:
                raise ValueError(f"{rest[0]} operators were written, {len(trace.ops)} are there")
            self.ended = True
        else:
            raise ValueError(f"a line of an unknown kind {kind!r}")

    def _op(self, row: list[Any]) -> Op:
        index, step, *texts, inputs, outputs, random, kernels = row
        fields = dict(zip(_TEXTS[: len(_TEXTS) - (self.schema < SCHEMA)], map(self._string, texts), strict=True))
        if fields["phase"] not in PHASES:
            raise ValueError(f"phase {fields['phase']!r}")
        stats = [tuple(self.tensors[_number(k)] for k in side) for side in (inputs, outputs)]
        return Op(
            _number(index), _number(step), inputs=stats[0], outputs=stats[1], random=bool(random),
            kernels=tuple(map(self._string, kernels)), **fields,
        )  # fmt: skip

    def _stats(self, row: list[Any]) -> Stats:
        cells = dict(zip(_STATS, row, strict=True))
        for name, cell in cells.items():
            if name in _WORDS:
                cells[name] = self._string(cell)
            elif name in _FLOATS:
                cells[name] = None if cell is None else float(cell)
            elif name == "shape":
                cells[name] = tuple(map(_number, cell))
            elif name == "exponents":
                cells[name] = None if cell is None else decode(Exponents, dict(zip(_EXPONENTS, cell, strict=True)))
            elif cell is not None:
                _number(cell, least=-1)  # the number of an unknown storage
        return Stats(**cells)

    def _string(self, number: Any) -> str:
        return self.strings[_number(number)]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{shortened(str(value), 80)} is no text")
    return value


def _texts(value: Any) -> dict[str, str]:
    return {_text(k): _text(v) for k, v in value.items()}


def _number(value: Any, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise TypeError(f"{shortened(str(value), 80)} is no number")
    return value
