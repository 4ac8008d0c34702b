"""Rows of deformable attention as markdown tables. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from retrograd.bench.msda import earlier
from retrograd.bench.msda.rows import BASE, OWN, Row
from retrograd.bench.rows import OURS
from retrograd.bench.table import machines, plain

_COLUMNS = ("us", "MB", "of copy", "x grid_sample", "x best peer", "extra MiB")
_DIRECTIONS = ("fwd", "bwd")
_LEGEND = f"""\
us: one call, inputs not in the cache. MB: the least that must move, and what of the copy's bandwidth that makes. \
x grid_sample: how many times faster than grid_sample in the same run; x best peer: than the fastest other library in \
the same run. extra: memory beyond inputs, results and gradients. (events): CUDA events around calls, else replays of \
a CUDA graph.
Lines marked † are {earlier.WHERE}: the fastest library of that run."""


def markdown(rows: Sequence[Row]) -> str:
    """A table a pair of dtypes, a line a shape and provider, and a marked line with the earlier run's times."""
    parts = [machines(rows)]
    for dtype, beside in dict.fromkeys((row.dtype, row.beside) for row in rows):
        title = dtype if dtype == beside else f"{dtype}, locations and weights {beside}"
        head = ["shape", "provider", *(f"{direction} {name}" for direction in _DIRECTIONS for name in _COLUMNS)]
        own = [row for row in rows if (row.dtype, row.beside) == (dtype, beside)]
        lines = [_line(head), "|" + "---|" * len(head)]
        for shape in dict.fromkeys(row.shape for row in own):
            group = [row for row in own if row.shape == shape]
            lines += [_line([shape, *_cells(row, group)]) for row in group]
            lines += [_line([shape, *cells]) for cells in _earlier(shape, dtype)]
        parts.append(f"{title}\n\n" + "\n".join(lines))
    return "\n\n".join([part for part in parts if part] + [_LEGEND]) + "\n"


def best_peer(rows: Sequence[Row], direction: str) -> Row | None:
    """The fastest row that is not this project's, among rows of one shape and dtype."""
    return min(
        (r for r in rows if r.provider not in OWN and r.ms(direction)), key=lambda r: _ms(r, direction), default=None
    )


def times_faster(row: Row, other: Row | None, direction: str) -> float | None:
    """Time of `other` over that of `row`."""
    return _ms(other, direction) / _ms(row, direction) if other and other.ms(direction) and row.ms(direction) else None


def _ms(row: Row, direction: str) -> float:
    return row.ms(direction) or 0.0


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cells(row: Row, group: Sequence[Row]) -> list[str]:
    note = f" ({plain(row.note)})" if row.note else ""
    if row.skipped:
        return [row.provider, plain(row.skipped) + note, *[""] * (2 * len(_COLUMNS) - 1)]
    return [row.provider + note, *(cell for direction in _DIRECTIONS for cell in _half(row, group, direction))]


def _half(row: Row, group: Sequence[Row], direction: str) -> list[str]:
    ms, how, extra = (
        (row.fwd_ms, row.fwd_how, row.fwd_extra_bytes)
        if direction == "fwd"
        else (row.bwd_ms, row.bwd_how, row.bwd_extra_bytes)
    )
    if ms is None:
        return ["-", *[""] * (len(_COLUMNS) - 1)]
    base = next((r for r in group if r.provider == BASE), None)
    peer = best_peer(group, direction)
    to_base, to_peer = times_faster(row, base, direction), times_faster(row, peer, direction)
    own = row.provider in OWN
    bold = "**" if row.provider == OURS else ""
    return [
        f"{1000 * ms:.1f}" + (" (events)" if how == "events" else ""),
        f"{row.useful_bytes(direction) / 1e6:.1f}",
        f"{(row.gb_per_s(direction) or 0.0) / row.copy_gb_per_s:.0%}" if row.copy_gb_per_s else "",
        f"{to_base:.2f}" if to_base and row is not base else "",
        f"{bold}{to_peer:.2f}{bold} {peer.provider}" if to_peer and peer and own else "",
        f"{extra / 2**20:.1f}" if extra is not None else "",
    ]


def _earlier(shape: str, dtype: str) -> Iterator[list[str]]:
    found = earlier.best(shape, dtype)
    if found:
        names = " / ".join(dict.fromkeys((found.fwd, found.bwd)))
        empty = [""] * (len(_COLUMNS) - 1)
        yield [f"† {names}", f"†{found.fwd_us:g}", *empty, f"†{found.bwd_us:g}", *empty]
