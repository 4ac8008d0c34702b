"""Measured rows, useful bytes, and the JSON lines they are kept in. No torch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from retrograd.errors import UsageError

R = TypeVar("R", bound="Measured")

OPS = ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm")
OURS = "retrograd"
WAYS = ("fwd", "bwd")
OVER = "over --max-seconds"  # why a row was not begun


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the rows of all benchmarks have beside an `op`, a `provider` and a `key` that tells them apart.

    Times in milliseconds; None: not measured, `skipped` or a note says why.

    Attributes:
        fwd_how: "graph" (replay of a CUDA graph, no host time), "events" (CUDA events around every call) or "wall" (the
            clock around every call, on a CPU).
        fwd_rounds: the time of each round, where providers took turns; fwd_ms is their median.
        copy_gb_per_s: bandwidth of a copy on the device in the same run, read plus write.
        host_us: host time of one forward and backward, in microseconds.
        machine: versions and the name of the GPU, or of the CPU with the number of threads.
    """

    if TYPE_CHECKING:  # each kind of row puts these where they suit it

        @property
        def op(self) -> str: ...
        @property
        def provider(self) -> str: ...
        @property
        def key(self) -> tuple[Any, ...]: ...
        @property
        def place(self) -> tuple[str, str, str]: ...
        def useful_bytes(self, direction: str) -> int: ...

    fwd_ms: float | None = None
    bwd_ms: float | None = None
    fwd_how: str = ""
    bwd_how: str = ""
    fwd_rounds: tuple[float, ...] = ()
    bwd_rounds: tuple[float, ...] = ()
    copy_gb_per_s: float | None = None
    host_us: float | None = None
    skipped: str = ""
    note: str = ""
    machine: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def device_name(self) -> str:
        """The GPU or the CPU that it was measured on; "" if nobody wrote it down."""
        return device_of(self.machine)

    def ms(self, direction: str) -> float | None:
        """Time of "fwd" or "bwd"."""
        return self.fwd_ms if direction == "fwd" else self.bwd_ms

    def how(self, direction: str) -> str:
        """How "fwd" or "bwd" was timed."""
        return self.fwd_how if direction == "fwd" else self.bwd_how

    def rounds(self, direction: str) -> tuple[float, ...]:
        """Times of the rounds of "fwd" or "bwd"."""
        return self.fwd_rounds if direction == "fwd" else self.bwd_rounds

    def gb_per_s(self, direction: str) -> float | None:
        """Useful bandwidth of "fwd" or "bwd"."""
        time = self.ms(direction)
        return self.useful_bytes(direction) / time / 1e6 if time else None


@dataclass(frozen=True)
class Row(Measured):
    """One norm, shape and provider."""

    op: str  # pyright: ignore[reportIncompatibleMethodOverride]
    m: int
    n: int
    dtype: str
    provider: str  # pyright: ignore[reportIncompatibleMethodOverride]

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes two rows measurements of the same thing."""
        host = self.host_us is not None
        return self.device_name, self.m, self.n, self.op, self.dtype, self.provider, host

    @property
    def place(self) -> tuple[str, str, str]:
        """Op, shape and dtype, in words."""
        return self.op, f"{self.m}x{self.n}", self.dtype

    def useful_bytes(self, direction: str) -> int:
        """The least that must move."""
        return useful_bytes(self.op, direction, self.m, self.n, self.dtype)


def in_words(ms: float) -> str:
    """A time in the unit that suits it: us below a millisecond, else ms."""
    return f"{1000 * ms:.1f} us" if ms < 1 else f"{ms:.1f} ms"


def rate(gb_per_s: float) -> str:
    """A bandwidth in GB/s, with a decimal where it is small."""
    return f"{gb_per_s:.0f}" if gb_per_s >= 100 else f"{gb_per_s:.1f}"


def own(provider: str) -> bool:
    """Whether a provider is this project: never the peer that a ratio is taken against."""
    return provider == OURS or provider.startswith(f"{OURS}-")


def device_of(machine: Mapping[str, str]) -> str:
    """The name of the GPU, or of the CPU, among the facts of a machine."""
    return machine.get("gpu") or machine.get("cpu", "")


def shape_of(text: str) -> tuple[int, int]:
    """(M, N) of "32768x4096".

    Raises:
        UsageError: it is written otherwise.
    """
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", text):
        raise UsageError(f"`--shapes` has {text!r}, expected MxN such as 32768x4096")
    m, _, n = text.partition("x")
    return int(m), int(n)


def useful_bytes(op: str, direction: str, m: int, n: int, dtype: str) -> int:
    """The least a fused kernel must move: each [M, N] tensor once; vectors, statistics and partial sums not counted.

    Forward x, y; backward x, grad_out, grad_x. With an added residual also residual and s, respectively grad_s
    (grad_x and grad_residual are one tensor).
    """
    tensors = 2 if direction == "fwd" else 3
    if op.startswith("add_"):
        tensors += 2 if direction == "fwd" else 1
    return tensors * m * n * (4 if dtype == "float32" else 2)


def to_line(row: Measured) -> str:
    """The row as one line of JSON."""
    return json.dumps({f.name: getattr(row, f.name) for f in sorted(fields(row), key=lambda f: bool(f.kw_only))})


def load(paths: Iterable[str | os.PathLike[str]]) -> list[Row]:
    """Read JSON lines of `retrograd bench norm`; of rows that measure the same thing the last one counts.

    Raises:
        UsageError: a file cannot be read or is not such a file.
    """
    return load_as(lambda _: Row, "norm", paths)


def load_as(kind_of: Callable[[str], type[R]], noun: str, paths: Iterable[str | os.PathLike[str]]) -> list[R]:
    """`load` for the rows of any benchmark.

    Args:
        kind_of: the kind of row of an op's name.
        noun: the benchmark's name on the command line.
        paths: of JSON lines.
    """
    found: dict[tuple[Any, ...], R] = {}
    for path in map(Path, paths):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}") from None
        for number, line in enumerate(lines, 1):
            if line.strip():
                row = _row(kind_of, noun, line, f"{path}:{number}")
                found.pop(row.key, None)
                found[row.key] = row
    if not found:
        raise UsageError(f"there are no results to show; write some with `retrograd bench {noun} --out FILE`")
    return list(found.values())


def _row(kind_of: Callable[[str], type[R]], noun: str, line: str, where: str) -> R:
    try:
        data = json.loads(line)
        kind = kind_of(data["op"])
        known = {f.name for f in fields(kind)}
        given: dict[str, Any] = {name: value for name, value in data.items() if name in known}
        # JSON has no tuples.
        rounds: dict[str, Any] = {name: tuple(value) for name, value in given.items() if name.endswith("_rounds")}
        return kind(**given | rounds)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise UsageError(f"{where} is not a result of `retrograd bench {noun}`: {error}") from None
