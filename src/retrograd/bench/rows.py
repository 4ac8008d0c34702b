"""Row: one op, shape and provider as measured, and the JSON lines that rows are kept in. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from retrograd.bench import registry
from retrograd.core.notebook import Shown
from retrograd.core.schema import Record, decode
from retrograd.core.system_errors import as_usage_error
from retrograd.errors import UsageError

DIRECTIONS = ("fwd", "bwd")
OVER = "over --max-seconds"  # why a row was not begun
# Of every JSON line, behind those that its kind of op has.
_FIELDS = (
    *("fwd_ms", "bwd_ms", "fwd_how", "bwd_how", "fwd_rounds", "bwd_rounds", "copy_gb_per_s", "host_us"),
    *("skipped", "note", "machine"),
)


@dataclass(frozen=True)
class BenchResults(Record, Shown):
    """Rows that are shown together: tables, and a chart of bandwidth beside that of a copy."""

    _noun: ClassVar[str] = "results of bench"

    rows: tuple[Row, ...]
    schema: str = "retrograd.bench/1"


@dataclass(frozen=True)
class Row:
    """One op, shape, dtype and provider.

    Times in milliseconds; None: not measured, `skipped` or a note says why.
    """

    op: str
    shape: str  # as the op has it in words: "MxN" of a norm, a name or sizes of deformable attention, a case of any op
    dtype: str  # of floating inputs; of deformable attention: of value and out
    provider: str
    _: KW_ONLY
    beside: str = ""  # dtype of locations and weights; "" for other ops
    fwd_bytes: int = 0  # the least that a forward must move, where it was counted in the data
    bwd_bytes: int = 0
    fwd_extra_bytes: int | None = None  # the most memory held beyond inputs and output, what was saved included
    bwd_extra_bytes: int | None = None  # the same beyond what the forward had left and the gradients
    fwd_ms: float | None = None
    bwd_ms: float | None = None
    fwd_how: str = ""  # "graph" (replay of a CUDA graph, no host time), "events" (around every call), "do_bench"
    bwd_how: str = ""  # or "wall" (the clock around every call, on a CPU)
    fwd_rounds: tuple[float, ...] = ()  # the time of each round, where providers took turns; fwd_ms is their median
    bwd_rounds: tuple[float, ...] = ()
    copy_gb_per_s: float | None = None  # bandwidth of a copy on the device in the same run, read plus write
    host_us: float | None = None  # host time of one forward and backward, in microseconds
    skipped: str = ""
    note: str = ""
    machine: dict[str, str] = field(default_factory=dict[str, str])  # versions, and the GPU or the CPU and its threads

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes two rows measurements of the same thing."""
        # Of a norm by events and by graphs the last one counts; of other ops these are two measurements.
        how = "" if self.group == "norm" else self.fwd_how
        return self.device_name, *self.case, self.provider, how, self.host_us is not None

    @property
    def case(self) -> tuple[str, str, str]:
        """Op, shape and dtypes, in words."""
        same = self.beside in ("", self.dtype)
        return self.op, self.shape, self.dtype if same else f"{self.dtype}, {self.beside}"

    @property
    def group(self) -> str:
        """Of ops that are shown alike: "norm", "msda" or "ops"."""
        return registry.kind_of(self.op).group

    @property
    def m(self) -> int:
        """Rows of a norm."""
        return int(self.shape.partition("x")[0])

    @property
    def n(self) -> int:
        """Width of a norm."""
        return int(self.shape.partition("x")[2])

    @property
    def device_name(self) -> str:
        """The GPU or the CPU that it was measured on; "" if nobody wrote it down."""
        return device_of(self.machine)

    # Of "fwd" or "bwd".
    def ms(self, direction: str) -> float | None:
        return self.fwd_ms if direction == "fwd" else self.bwd_ms

    def how(self, direction: str) -> str:
        return self.fwd_how if direction == "fwd" else self.bwd_how

    def rounds(self, direction: str) -> tuple[float, ...]:
        return self.fwd_rounds if direction == "fwd" else self.bwd_rounds

    def bytes_moved(self, direction: str) -> int:
        """The least that "fwd" or "bwd" must move."""
        counted = self.fwd_bytes if direction == "fwd" else self.bwd_bytes
        known = registry.BENCHMARKS.get(self.op)
        return counted or (known.bytes_moved(direction, self.shape, self.dtype, self.beside) if known else 0)

    def gb_per_s(self, direction: str) -> float | None:
        """Useful bandwidth of "fwd" or "bwd"."""
        time = self.ms(direction)
        return self.bytes_moved(direction) / time / 1e6 if time else None


def in_words(ms: float) -> str:
    """A time in the unit that suits it: us below a millisecond, else ms."""
    return f"{1000 * ms:.1f} us" if ms < 1 else f"{ms:.1f} ms"


def rate(gb_per_s: float) -> str:
    """A bandwidth in GB/s, with a decimal where it is small."""
    return f"{gb_per_s:.0f}" if gb_per_s >= 100 else f"{gb_per_s:.1f}"


def device_of(machine: Mapping[str, str]) -> str:
    """The name of the GPU, or of the CPU, among the facts of a machine."""
    return machine.get("gpu") or machine.get("cpu", "")


def to_line(row: Row) -> str:
    """The row as one line of JSON."""
    return json.dumps({name: getattr(row, name) for name in (*registry.kind_of(row.op).fields, *_FIELDS)})


def load(paths: Iterable[str | os.PathLike[str]]) -> list[Row]:
    """Read JSON lines of any benchmark, else UsageError; of rows that measure the same thing the last one counts."""
    rows: dict[tuple[Any, ...], Row] = {}
    for path in map(Path, paths):
        with as_usage_error(f"cannot read {str(path)!r}"):
            lines = path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, 1):
            if line.strip():
                row = _from_line(line, f"{path}:{number}")
                rows.pop(row.key, None)
                rows[row.key] = row
    if not rows:
        raise UsageError("there are no results to show; write some with `retrograd bench OP --out FILE`")
    return list(rows.values())


def _from_line(line: str, where: str) -> Row:
    names = {f.name for f in fields(Row)}
    try:
        data = json.loads(line)
        if "m" in registry.kind_of(data["op"]).fields:
            data["shape"] = f"{data['m']:d}x{data['n']:d}"
        return decode(Row, {name: value for name, value in data.items() if name in names})
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise UsageError(f"{where} is not a result of `retrograd bench`: {error}") from None
