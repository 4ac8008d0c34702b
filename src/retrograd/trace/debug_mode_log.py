"""Reader of what `torch.utils._debug_mode.DebugMode.save_logs` of torch 2.15 writes: calls as operators of a trace.

A log holds at most one number a tensor, an L1 norm or a hash (or both), which is the digest of the tensor here. What it
does not hold is left out: steps, owners and, without stack traces, phases and lines. No torch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any, cast

from retrograd.core import gc_pause
from retrograd.core.program_lines import is_library
from retrograd.core.system_errors import as_usage_error
from retrograd.core.wording import shortened
from retrograd.errors import TraceError
from retrograd.trace.schema import BACKWARD, OTHER, Op, Stats, Trace

FORMAT = "torch.utils._debug_mode.DebugMode.logs"
_FORMAT = re.compile(rb'"format"\s*:\s*"' + re.escape(FORMAT.encode()) + rb'"')
_VERSION = 1
_HEAD = 4096  # bytes in which the format stands
_NO_STEP = -1
NORM, HASH = "an L1 norm", "a hash"
_NUMBER = ", logged "  # before the number of a tensor in words
_WORDS = ("nan", "inf", "-inf")
_KINDS = {float: NORM, int: HASH}
# "t$3: f32[8, 4]", of a DTensor "dt: ...", of a fake tensor "ft: ..."; what `out=` names is written, not read.
_TENSOR = re.compile(r"(?<!out=)\b(?:t|dt|ft)(?:\$(\d+))?: ([a-z]+\d\w*)\[([^\]]*)\](?:\{[^{}]*\})?")
_LIST = re.compile(r"[\[(](?:'_'(?:, )?)+,?[\])]")  # of tensors, once these are left out
_OUT = re.compile(r"\bout=(?:t|dt|ft)[$\d]*: \w+\[[^\]]*\]")
_DTYPES = {"f": "float", "bf": "bfloat", "i": "int", "u": "uint", "b": "bool", "c": "complex"}
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)\n(?:    (.*)\n?)?', re.MULTILINE)
_ENGINE = "_engine_run_backward"  # behind it in a stack are the lines of a person's own backward
# A collective runs on while its tensors are hashed; only what waits for it gives its result.
_UNDER_WAY = ("c10d::", "_c10d_functional::")
_WAITS = "wait_tensor"


@dataclass
class LoggedRun:
    """A log.

    Attributes:
        trace: its calls, each with its position in the log as index; annotations are left out.
        texts: by index, inputs and outputs in words.
        kinds: what the numbers are: `NORM`, `HASH`, or another thing in words; none if no tensor was hashed.
        inputs: whether inputs were hashed as well.
        stacks: whether calls have stack traces.
        compiled: whether code that torch.compile made is among the callers or calls.
    """

    trace: Trace
    texts: dict[int, tuple[tuple[str, ...], tuple[str, ...]]] = field(default_factory=dict[int, Any])
    kinds: set[str] = field(default_factory=set[str])
    inputs: bool = False
    stacks: bool = False
    compiled: bool = False

    def bad(self, index: int) -> bool:
        """Whether NaN or an infinity was logged of a result of a call."""
        logged = (text.partition(_NUMBER)[2].split(", ") for text in self.texts[index][1])
        return any(word in numbers for numbers in logged for word in _WORDS)


def is_log(path: Path) -> bool:
    """Whether a file is such a log, by its beginning.

    Raises:
        UsageError: it cannot be read.
    """
    with as_usage_error(f"cannot read {str(path)!r}"), path.open("rb") as file:
        head = file.read(_HEAD).lstrip()
    return head.startswith(b"{") and _FORMAT.search(head) is not None


@gc_pause.paused()  # 100 000 calls are millions of objects, and no garbage: a fifth of the time
def load(path: Path) -> LoggedRun:
    """Read a log.

    Raises:
        TraceError: it is cut off, garbled or of another version; the message says where.
        UsageError: it cannot be read.
    """
    with as_usage_error(f"cannot read {str(path)!r}"):
        text = path.read_text(encoding="utf-8")
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        cut = error.pos >= len(text.rstrip()) - 1 or not text.rstrip().endswith("}")
        why = "was cut off" if cut else f"is not JSON: {error.msg}, line {error.lineno} column {error.colno}"
        raise TraceError(f"{str(path)!r} {why}; save the log again with DebugMode.save_logs") from None
    except RecursionError:
        raise TraceError(f"{str(path)!r} has lists within lists without end") from None
    content = cast(dict[str, Any], data) if isinstance(data, dict) else {}
    if (version := content.get("version")) != _VERSION:
        raise TraceError(f"{str(path)!r} is a DebugMode log of version {version!r}, expected {_VERSION} (torch 2.15)")
    calls = content.get("logs")
    if not isinstance(calls, list):
        raise TraceError(f"{str(path)!r} has {type(calls).__name__} as 'logs', expected a list of calls")
    reader = _Reader()
    for index, call in enumerate(cast(list[Any], calls)):
        try:
            reader.add(index, call)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{str(path)!r}, call {index}: {error or 'lists within lists without end'}") from None
    return reader.run


class _Garbled(ValueError):
    """What a call has, and what was expected."""


@dataclass(frozen=True)
class _Logged:
    """A tensor as a call's text names it, and its number."""

    identity: str
    dtype: str
    shape: tuple[int, ...]
    numbers: tuple[object, ...]

    @property
    def digest(self) -> int | None:
        if not self.numbers:
            return None
        return int.from_bytes(hashlib.blake2b(repr(self.numbers).encode(), digest_size=8).digest()) >> 1

    def __str__(self) -> str:
        number = ", ".join(f"{n:.17g}" if isinstance(n, float) else str(n) for n in self.numbers)
        return f"{self.dtype} {list(self.shape)}{_NUMBER * bool(number)}{number}"


class _Reader:
    """Reads calls one after another."""

    def __init__(self) -> None:
        self.run = LoggedRun(Trace(level="fast"))
        self._modules: list[tuple[int, str]] = []  # depth and path of those that calls are in
        self._numbers: dict[object, int] = {}  # of values, by identity and version or by what was logged of them
        self._versions: dict[str, int] = {}

    def add(self, index: int, call: Any) -> None:
        if not isinstance(call, dict):
            raise _Garbled(f"expected an object, got {type(call).__name__}")
        call = cast(dict[str, Any], call)
        depth, kind = _get(call, "call_depth", int), _get(call, "type", str)
        stack, forward = (_get(call, name, str, "") for name in ("stack_trace", "fwd_stack_trace"))
        self.run.stacks |= bool(stack)
        self.run.compiled |= "torchinductor_" in stack or kind == "triton_kernel"
        read = {"op": _op, "triton_kernel": _kernel, "redistribute": _redistribution, "output_placement": _placement}
        if kind == "annotate":
            self._annotated(depth, _get(call, "header", str), _get(call, "tag", str))
            return
        if kind not in read:
            raise _Garbled(f"type {shortened(repr(kind), 60)}, expected annotate, {', '.join(sorted(read))}")
        name, arguments, inputs, outputs = read[kind](call)
        # A call on DTensors is as deep as its module, the calls of its shards are deeper.
        while self._modules and self._modules[-1][0] >= depth + ("dt: " in arguments or "dt$" in arguments):
            self._modules.pop()
        self.run.inputs |= any(t.numbers for t in inputs)
        for number in (n for t in (*inputs, *outputs) for n in t.numbers):
            self.run.kinds.add(
                _KINDS.get(type(number), NORM if number in ("nan", "inf", "-inf") else "a number of yours")
            )
        self.run.texts[index] = tuple(map(str, inputs)), tuple(map(str, outputs))
        place, code = _innermost(forward or stack)
        back = bool(forward) and forward != stack  # a compiled region's calls have one trace as both
        inside = ": ".join(filter(None, _innermost(stack.partition(f"in {_ENGINE}\n")[2]))) if back else ""
        read_from = self._stats(inputs)
        if outputs and (name.partition("::")[2].partition(".")[0].endswith("_") or "out=" in arguments):
            self._versions.update({t.identity: self._versions.get(t.identity, 0) + 1 for t in outputs if t.identity})
        self.run.trace.ops.append(
            Op(
                index, _NO_STEP, BACKWARD if back else OTHER, name, self._modules[-1][1] if self._modules else "", "",
                place, code, _plain(arguments), read_from, self._stats(outputs), inside=inside,
            )
        )  # fmt: skip

    def _annotated(self, depth: int, header: str, tag: str) -> None:
        self.run.compiled |= "region (compile)" in header
        while self._modules and self._modules[-1][0] >= depth:
            self._modules.pop()
        if header.startswith("nn.Mod"):
            self._modules.append((depth, tag))

    def _stats(self, tensors: Sequence[_Logged]) -> tuple[Stats, ...]:
        """Tensors, each with the number of its value: equal if it is the same tensor, or has the same logged number."""
        keys = [
            (t.identity, self._versions.get(t.identity, 0)) if t.identity
            else (t.dtype, t.shape, t.numbers) if t.numbers else object()
            for t in tensors
        ]  # fmt: skip
        numbers = [self._numbers.setdefault(key, len(self._numbers)) for key in keys]
        return tuple(
            Stats(number, t.shape, t.dtype, "", digest=t.digest) for number, t in zip(numbers, tensors, strict=True)
        )


_Call = tuple[str, str, list[_Logged], list[_Logged]]  # name, arguments as text, inputs and outputs


def _op(call: Mapping[str, Any]) -> _Call:
    name = _get(call, "op_name", str)
    arguments = _get(call, "args_str", str) + _get(call, "kwargs_str", str, "")
    log = dict(_pairs(_get(call, "log", dict, {}).get("items", [])))
    logged = {key: _numbers(log[key]) for key in ("input_hash", "hash") if log.get(key) is not None}
    under_way = name.startswith(_UNDER_WAY)
    wait = under_way and _WAITS in name
    inputs = _tensors(arguments, [] if under_way else logged.get("input_hash", []))
    hashes = [] if under_way and not wait else logged.get("hash", [])
    return name, arguments, inputs, _tensors(_get(call, "output_str", str, ""), hashes)


def _kernel(call: Mapping[str, Any]) -> _Call:
    arguments = _get(call, "kwargs_str", str)
    before, after = (_numbers(h) if (h := call.get(k)) else [] for k in ("pre_hashes", "post_hashes"))
    return (
        f"triton::{_get(call, 'kernel_name', str)}",
        arguments,
        _tensors(arguments, before),
        _tensors(arguments, after),
    )


def _redistribution(call: Mapping[str, Any]) -> _Call:
    placements = " -> ".join(_get(call, f"{end}_placement_str", str) for end in ("src", "dst"))
    return "redistribute_input", _get(call, "transform_info_str", str, "") or placements, [], []


def _placement(call: Mapping[str, Any]) -> _Call:
    return "output placement", _get(call, "placements_str", str), [], []


def _get(call: Mapping[str, Any], name: str, kind: type[Any], default: Any = None) -> Any:
    value = call.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _Garbled(f"{name!r} is {shortened(repr(value), 60)}, expected {kind.__name__}")
    return value


def _numbers(data: Any) -> list[object]:
    """The numbers in a logged value, in order; NaN and infinities stay words, so that NaN is NaN.

    Those of what an operator writes to (`out`) are left out.
    """
    kind = cast(dict[str, Any], data).get("type") if isinstance(data, dict) else None
    value = data.get("value") if kind in ("scalar", "nonfinite_float") else []
    if not isinstance(value, (list, dict)):
        return [] if value is None else [value]
    items = data.get("items") if kind in ("tuple", "list", "dict") else None
    if not isinstance(items, list):
        raise _Garbled(f"a logged value is {shortened(repr(data), 60)}, expected a scalar, tuple, list or dict")
    if kind == "dict":
        items = [item for key, item in _pairs(cast(list[Any], items)) if key != "out"]
    return [number for item in cast(list[Any], items) for number in _numbers(item)]


def _pairs(items: Any) -> list[tuple[Any, Any]]:
    fits = isinstance(items, list) and all(
        isinstance(pair, list) and len(cast(list[Any], pair)) == 2 and isinstance(pair[0], str) for pair in items
    )
    if not fits:
        raise _Garbled(f"a logged dict is {shortened(repr(items), 60)}, expected pairs")
    return cast(list[tuple[Any, Any]], items)


def _tensors(text: str, numbers: Sequence[object]) -> list[_Logged]:
    """The tensors that a text names, with as many numbers each; all numbers are the first one's if they do not fit."""
    matches = list(_TENSOR.finditer(text))
    each, rest = divmod(len(numbers), len(matches)) if matches else (0, 0)
    parts = [tuple(numbers[k * each : (k + 1) * each]) for k in range(len(matches))]
    if rest:
        parts = [tuple(numbers), *[()] * (len(matches) - 1)]
    return [
        _Logged(m[1] or "", _dtype(m[2]), tuple(_size(n) for n in filter(None, m[3].split(", "))), part)
        for m, part in zip(matches, parts, strict=True)
    ]


def _dtype(short: str) -> str:
    """ "f32" -> "float32", as in `torch.utils._dtype_abbrs`; "b8" is "bool"."""
    letters = short.rstrip("0123456789")
    return "bool" if short == "b8" else short.replace(letters, _DTYPES[letters], 1) if letters in _DTYPES else short


def _size(text: str) -> int:
    return int(text) if text.isdigit() else -1  # a symbol


def _plain(arguments: str) -> str:
    """Arguments that are no tensors."""
    parts = _LIST.sub("_", _TENSOR.sub("_", _OUT.sub("_", arguments))).split(", ")
    return ", ".join(part for part in parts if part not in ("", "_"))


@lru_cache(maxsize=65536)  # calls of one line have one stack
def _innermost(stack: str) -> tuple[str, str]:
    """ "folder/file.py:12" and its source, of the innermost line of a person in the text of a stack."""
    person = [m for m in _FRAME.finditer(stack) if not is_library(m[1]) and "torchinductor_" not in m[1]]
    if not person:
        return "", ""
    file, line, _, code = person[-1].groups()
    return f"{'/'.join(PurePath(file).parts[-2:]).lstrip('/')}:{line}", (code or "").strip()


def without_phases(run: LoggedRun) -> LoggedRun:
    """The run with operators of no phase, to be compared with a log that has no stack traces."""
    return replace(run, trace=replace(run.trace, ops=[replace(op, phase=OTHER) for op in run.trace.ops]))
