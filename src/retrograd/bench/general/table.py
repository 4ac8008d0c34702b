"""Rows of any op as markdown tables. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from retrograd.bench.general.rows import Row
from retrograd.bench.rows import WAYS, rate
from retrograd.bench.table import host_times, machines, plain, rounds_legend, times_faster

_COLUMNS = ("us", "GB/s", "of copy", "ratio")


def markdown(rows: Sequence[Row]) -> str:
    """A table an op, a line a shape, dtype and provider.

    The ratio says how many times as fast as the row's provider the first one of its shape is.
    """
    parts = [machines(rows)]
    timed = [row for row in rows if row.host_us is None]
    for op in dict.fromkeys(row.op for row in timed):
        head = [op, "dtype", "provider", *(f"{way} {name}" for way in WAYS for name in _COLUMNS)]
        lines = [_line(head), "|" + "---|" * len(head)]
        same = [row for row in timed if row.op == op]
        for place in dict.fromkeys(row.place for row in same):
            group = [row for row in same if row.place == place]
            lines += [_line([place[1] or "-", place[2], *_cells(row, group[0])]) for row in group]
        parts.append("\n".join(lines))
    parts += [host_times(rows), _legend(timed), rounds_legend(rows)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _legend(rows: Sequence[Row]) -> str:
    firsts = dict.fromkeys(next(row.provider for row in rows if row.op == op) for op in {row.op for row in rows})
    return f"ratio: this provider's time over that of {' or '.join(sorted(firsts))}." if firsts else ""


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cells(row: Row, first: Row) -> list[str]:
    note = f" ({plain(row.note)})" if row.note else ""
    if row.skipped:
        return [row.provider, plain(row.skipped) + note, *[""] * (2 * len(_COLUMNS) - 1)]
    return [row.provider + note, *(cell for way in WAYS for cell in _half(row, first, way))]


def _half(row: Row, first: Row, way: str) -> list[str]:
    ms, speed = row.ms(way), row.gb_per_s(way)
    if ms is None:
        return ["-", *[""] * (len(_COLUMNS) - 1)]
    how = row.fwd_how if way == "fwd" else row.bwd_how
    return [
        f"{1000 * ms:.1f}" + (" (events)" if how == "events" else ""),
        rate(speed) if speed else "",
        f"{speed / row.copy_gb_per_s:.0%}" if speed and row.copy_gb_per_s else "",
        "" if row is first else str(times_faster(first, row, way) or ""),
    ]
