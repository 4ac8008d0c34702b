"""Table of rows as markdown: one layout for norms, one for deformable attention, one for any op. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from retrograd.bench.benchmark import OURS, own
from retrograd.bench.ops import msda
from retrograd.bench.ratios import Ratio, paired
from retrograd.bench.registry import GROUPS
from retrograd.bench.rows import DIRECTIONS, Row, rate

# The text of a cell from the row, the rows of its case, and the direction.
Cell = Callable[[Row, Sequence[Row], str], str]


@dataclass(frozen=True)
class Layout:
    """How the rows of a group of ops are shown."""

    # Of the table that a row belongs to: a text before it, or "", and its first headings.
    heading: Callable[[Row], tuple[str, ...]]
    labels: Callable[[Row], tuple[str, ...]]  # the cells below those headings
    columns: Sequence[tuple[str, Cell]]  # heading, where {} is the direction, and cell; only where there is a time
    legend: Callable[[Sequence[Row]], str]  # from all rows that are in tables
    notes: bool = True  # whether a row's note stands behind its provider


def markdown(rows: Sequence[Row]) -> str:
    """A table an op (of deformable attention: a pair of dtypes), a line a shape and provider; host times apart."""
    parts: list[str] = []
    for group, layout in _LAYOUTS.items():
        members = [row for row in rows if row.group == group]
        parts += [_document(members, layout)] if members else []
    return "\n".join(parts)


def host_times(rows: Sequence[Row]) -> str:
    """A table of host times; "" without any."""
    timed = [row for row in rows if row.host_us is not None]
    head = "| host time | shape | provider | us per fwd + bwd |\n|---|---|---|---|"
    lines = [f"| {row.op} | {row.shape} | {row.provider} | {row.host_us:.1f} |" for row in timed]
    return "\n".join([head, *lines]) if timed else ""


def rounds_legend(rows: Sequence[Row]) -> str:
    """What parentheses behind a ratio are; "" where nobody took turns."""
    most = max((len(row.fwd_rounds) for row in rows), default=0)
    if most < 2:
        return ""
    return f"Times are medians of up to {most} rounds in which providers took turns; (a-b): quartiles of the ratios."


def best_peer(rows: Sequence[Row], direction: str) -> Row | None:
    """The fastest row that is not this project's, among rows of one case."""
    timed = [row for row in rows if not own(row.provider) and row.ms(direction)]
    return min(timed, key=lambda row: row.ms(direction) or 0.0, default=None)


def times_faster(row: Row | None, other: Row | None, direction: str) -> Ratio | None:
    """Time of `other` over that of `row`, with its spread if both were measured in rounds."""
    if not row or not other or not row.ms(direction) or not other.ms(direction):
        return None
    turns = paired(other.rounds(direction), row.rounds(direction))
    return turns or Ratio((other.ms(direction) or 0.0) / (row.ms(direction) or 1.0))


def machines(rows: Sequence[Row]) -> str:
    """One line for each machine and set of versions."""
    lines: list[str] = []
    for row in rows:
        named = {"gpu", "cpu"}
        facts = ", ".join(value if name in named else f"{name} {value}" for name, value in row.machine.items())
        copy = f"; copy {rate(row.copy_gb_per_s)} GB/s" if row.copy_gb_per_s else ""
        if facts + copy and facts + copy not in lines:
            lines.append(facts + copy)
    return "\n".join(lines)


def plain(text: str) -> str:
    """`text` within a cell of a table."""
    return text.replace("|", "/").replace("\n", " ")


def _document(rows: Sequence[Row], layout: Layout) -> str:
    ops = dict.fromkeys([*GROUPS["norm"], *(row.op for row in rows)])
    timed = [row for op in ops for row in rows if row.op == op and row.host_us is None]
    parts = [machines(rows)]
    for title, *first in dict.fromkeys(map(layout.heading, timed)):
        head = [*first, "provider", *(name.format(way) for way in DIRECTIONS for name, _ in layout.columns)]
        members = [row for row in timed if layout.heading(row) == (title, *first)]
        lines = [_line(head), "|" + "---|" * len(head)]
        for case in dict.fromkeys(row.case for row in members):
            group = [row for row in members if row.case == case]
            lines += [_line([*layout.labels(row), *_cells(row, group, layout)]) for row in group]
            lines += _earlier(group)
        parts += [title, "\n".join(lines)]
    parts += [host_times(rows), rounds_legend(rows), layout.legend(timed) if timed else ""]
    return "\n\n".join(part for part in parts if part) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cells(row: Row, group: Sequence[Row], layout: Layout) -> list[str]:
    """The provider and what was measured of it."""
    note = f" ({plain(row.note)})" if row.note and layout.notes else ""
    columns = len(layout.columns)
    if row.skipped:
        return [row.provider, plain(row.skipped) + note + " |" * (2 * columns - 1) + " "]
    cells = [row.provider + note]
    for direction in DIRECTIONS:
        if row.ms(direction) is None:
            cells += ["-", *[""] * (columns - 1)]
            continue
        first, *others = (cell(row, group, direction) for _, cell in layout.columns)
        how = row.how(direction)
        cells += [first + f" ({how})" * (how in ("events", "do_bench")), *others]
    return cells


def _earlier(group: Sequence[Row]) -> list[str]:
    """Of deformable attention on a GPU a marked line with the times of an earlier run."""
    row = group[0]
    if row.op != msda.OP or any("cpu" in row.machine for row in group):
        return []
    earlier = msda.earlier(row.shape, row.dtype)
    if not earlier:
        return []
    library, fwd_us, bwd_us = earlier
    empty = [""] * (len(_LAYOUTS["msda"].columns) - 1)
    return [_line([row.shape, f"† {library}", f"†{fwd_us:g}", *empty, f"†{bwd_us:g}", *empty])]


def _microseconds(row: Row, group: Sequence[Row], direction: str) -> str:
    return f"{1000 * (row.ms(direction) or 0.0):.1f}"


def _megabytes(row: Row, group: Sequence[Row], direction: str) -> str:
    return f"{row.bytes_moved(direction) / 1e6:.1f}"


def _speed(row: Row, group: Sequence[Row], direction: str) -> str:
    speed = row.gb_per_s(direction)
    return rate(speed) if speed else ""


def _share_of_copy(row: Row, group: Sequence[Row], direction: str) -> str:
    speed = row.gb_per_s(direction)
    return f"{speed / row.copy_gb_per_s:.0%}" if speed and row.copy_gb_per_s else ""


def _extra_mib(row: Row, group: Sequence[Row], direction: str) -> str:
    extra = row.fwd_extra_bytes if direction == "fwd" else row.bwd_extra_bytes
    return f"{extra / 2**20:.1f}" if extra is not None else ""


def _over_best_peer(row: Row, group: Sequence[Row], direction: str) -> str:
    """How many times as fast as its best peer this project is, in bold for what runs by default."""
    peer = best_peer(group, direction)
    ratio = times_faster(row, peer, direction)
    if not own(row.provider) or not ratio or not peer:
        return ""
    median, _, quartiles = str(ratio).partition(" ")
    shown = f"**{median}**" if row.provider == OURS else median
    return " ".join(filter(None, (shown, quartiles, peer.provider)))


def _norm_ratio(row: Row, group: Sequence[Row], direction: str) -> str:
    """This project's bandwidth over that of the row's provider, or over its best peer on its own row."""
    if row.provider == OURS:
        return _over_best_peer(row, group, direction)
    ours = next((r for r in group if r.provider == OURS), None)
    return "" if own(row.provider) else str(times_faster(ours, row, direction) or "")


def _over_base(row: Row, group: Sequence[Row], direction: str) -> str:
    base = next((r for r in group if r.provider == msda.BASE), None)
    return str(times_faster(row, base, direction) or "") if row is not base else ""


def _first_over_row(row: Row, group: Sequence[Row], direction: str) -> str:
    return "" if row is group[0] else str(times_faster(group[0], row, direction) or "")


def _msda_legend(rows: Sequence[Row]) -> str:
    legend = (
        "us: one call, inputs not in the cache. MB: the least that must move, and what of the copy's bandwidth that "
        "makes. x grid_sample: how many times faster than grid_sample in the same run; x best peer: than the fastest "
        "other library in the same run. extra: memory beyond inputs, results and gradients."
    )
    if all("cpu" in row.machine for row in rows):
        return legend
    return (
        f"{legend} (events), (do_bench): around eager calls, else replays of a CUDA graph.\n"
        f"Lines marked † are {msda.EARLIER}: the fastest library of that run."
    )


def _any_legend(rows: Sequence[Row]) -> str:
    firsts = {next(row.provider for row in rows if row.op == op) for op in {row.op for row in rows}}
    return f"ratio: this provider's time over that of {' or '.join(sorted(firsts))}."


_LAYOUTS = {
    "norm": Layout(
        heading=lambda row: ("", row.op),
        labels=lambda row: (row.shape if row.dtype == "bfloat16" else f"{row.shape} {row.dtype}",),
        columns=(("{} GB/s", _speed), ("of copy", _share_of_copy), ("{} ratio", _norm_ratio)),
        legend=lambda rows: "",
        notes=False,
    ),
    "msda": Layout(
        heading=lambda row: ("fused, " * (row.op == msda.FUSED) + row.case[2].replace(", ", ", beside "), "shape"),
        labels=lambda row: (row.shape,),
        columns=(
            *(("{} us", _microseconds), ("{} MB", _megabytes), ("{} of copy", _share_of_copy)),
            *(("{} x grid_sample", _over_base), ("{} x best peer", _over_best_peer), ("{} extra MiB", _extra_mib)),
        ),
        legend=_msda_legend,
    ),
    "ops": Layout(
        heading=lambda row: ("", row.op, "dtype"),
        labels=lambda row: (row.shape or "-", row.dtype),
        columns=(
            *(("{} us", _microseconds), ("{} GB/s", _speed)),
            *(("{} of copy", _share_of_copy), ("{} ratio", _first_over_row)),
        ),
        legend=_any_legend,
    ),
}
