"""Rows of deformable attention as markdown tables. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from retrograd.bench.msda import earlier
from retrograd.bench.msda.rows import BASE, Row
from retrograd.bench.rows import OURS, own
from retrograd.bench.table import best_peer, bold, host_times, machines, plain, rounds_legend, times_faster

__all__ = ["best_peer", "markdown"]

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
    timed = [row for row in rows if row.host_us is None]
    for dtype, beside in dict.fromkeys((row.dtype, row.beside) for row in timed):
        title = dtype if dtype == beside else f"{dtype}, locations and weights {beside}"
        head = ["shape", "provider", *(f"{direction} {name}" for direction in _DIRECTIONS for name in _COLUMNS)]
        same = [row for row in timed if (row.dtype, row.beside) == (dtype, beside)]
        lines = [_line(head), "|" + "---|" * len(head)]
        for shape in dict.fromkeys(row.shape for row in same):
            group = [row for row in same if row.shape == shape]
            lines += [_line([shape, *_cells(row, group)]) for row in group]
            if not any("cpu" in row.machine for row in group):
                lines += [_line([shape, *cells]) for cells in _earlier(shape, dtype)]
        parts.append(f"{title}\n\n" + "\n".join(lines))
    parts += [host_times(rows), rounds_legend(rows), _legend(timed)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _legend(timed: Sequence[Row]) -> str:
    if not timed:
        return ""
    return _LEGEND.partition(" (events)")[0] if all("cpu" in row.machine for row in timed) else _LEGEND


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
    to_peer = times_faster(row, peer, direction) if own(row.provider) else None
    return [
        f"{1000 * ms:.1f}" + (" (events)" if how == "events" else ""),
        f"{row.useful_bytes(direction) / 1e6:.1f}",
        f"{(row.gb_per_s(direction) or 0.0) / row.copy_gb_per_s:.0%}" if row.copy_gb_per_s else "",
        str(times_faster(row, base, direction) or "") if row is not base else "",
        bold(to_peer, peer) if row.provider == OURS else f"{to_peer} {peer.provider}" if to_peer and peer else "",
        f"{extra / 2**20:.1f}" if extra is not None else "",
    ]


def _earlier(shape: str, dtype: str) -> Iterator[list[str]]:
    found = earlier.best(shape, dtype)
    if found:
        names = " / ".join(dict.fromkeys((found.fwd, found.bwd)))
        empty = [""] * (len(_COLUMNS) - 1)
        yield [f"† {names}", f"†{found.fwd_us:g}", *empty, f"†{found.bwd_us:g}", *empty]
