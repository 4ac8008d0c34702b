"""Measured rows, useful bytes, and the JSON lines they are kept in. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from retrograd.errors import UsageError

R = TypeVar("R", bound="Measured")

OPS = ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm")
OURS = "retrograd"
# Providers of this project: never the peer a ratio is taken against.
OWN = (OURS, "retrograd-atomic")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the rows of all benchmarks have beside an `op`, a `provider` and a `key` that tells them apart.

    Times in milliseconds; None: not measured, `skipped` or a note says why.

    Attributes:
        fwd_how: "graph" (replay of a CUDA graph, no host time) or "events" (CUDA events around every call).
        copy_gb_per_s: bandwidth of a device copy in the same run, read plus write.
        machine: versions and the name of the GPU.
    """

    if TYPE_CHECKING:  # each kind of row puts these where they suit it

        @property
        def op(self) -> str: ...
        @property
        def provider(self) -> str: ...
        @property
        def key(self) -> tuple[Any, ...]: ...

    fwd_ms: float | None = None
    bwd_ms: float | None = None
    fwd_how: str = ""
    bwd_how: str = ""
    copy_gb_per_s: float | None = None
    skipped: str = ""
    note: str = ""
    machine: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Row(Measured):
    """One norm, shape and provider; `host_us`: host time of one forward and backward, in microseconds."""

    op: str
    m: int
    n: int
    dtype: str
    provider: str
    host_us: float | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes two rows measurements of the same thing."""
        host = self.host_us is not None
        return self.machine.get("gpu", ""), self.m, self.n, self.op, self.dtype, self.provider, host

    def gb_per_s(self, direction: str) -> float | None:
        """Useful bandwidth of "fwd" or "bwd"."""
        time = self.fwd_ms if direction == "fwd" else self.bwd_ms
        return useful_bytes(self.op, direction, self.m, self.n, self.dtype) / time / 1e6 if time else None


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
    return load_as(Row, "norm", paths)


def load_as(kind: type[R], noun: str, paths: Iterable[str | os.PathLike[str]]) -> list[R]:
    """`load` for the rows of any benchmark; `noun` is its name on the command line."""
    found: dict[tuple[Any, ...], R] = {}
    for path in map(Path, paths):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}") from None
        for number, line in enumerate(lines, 1):
            if line.strip():
                row = _row(kind, noun, line, f"{path}:{number}")
                found.pop(row.key, None)
                found[row.key] = row
    if not found:
        raise UsageError(f"there are no results to show; write some with `retrograd bench {noun} --out FILE`")
    return list(found.values())


def _row(kind: type[R], noun: str, line: str, where: str) -> R:
    known = {f.name for f in fields(kind)}
    try:
        data = json.loads(line)
        return kind(**{name: value for name, value in data.items() if name in known})
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"{where} is not a result of `retrograd bench {noun}`: {error}") from None
