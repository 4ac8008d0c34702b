"""Rows as markdown tables. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from retrograd.bench.rows import OPS, OURS, Measured, R, Row, own, rate
from retrograd.bench.spread import Ratio, paired

_HEAD = "| {op} | provider | fwd GB/s | of copy | fwd ratio | bwd GB/s | of copy | bwd ratio |\n|" + "---|" * 8


def markdown(rows: Sequence[Row]) -> str:
    """A table an op, a row a shape and provider; host times in a table of their own.

    The ratio is this project's bandwidth over that of the row's provider; on the row of this project it is the one
    over its best peer, in bold, beside that peer's name.
    """
    parts = [machines(rows)]
    for op in OPS:
        timed = [row for row in rows if row.op == op and row.host_us is None]
        if timed:
            parts.append("\n".join([_HEAD.format(op=op), *_lines(timed)]))
    parts += [host_times(rows), rounds_legend(rows)]
    return "\n\n".join(part for part in parts if part) + "\n"


def host_times(rows: Sequence[Measured]) -> str:
    """A table of host times; "" without any."""
    timed = [row for row in rows if row.host_us is not None]
    head = "| host time | shape | provider | us per fwd + bwd |\n|---|---|---|---|"
    lines = [f"| {row.op} | {row.place[1]} | {row.provider} | {row.host_us:.1f} |" for row in timed]
    return "\n".join([head, *lines]) if timed else ""


def rounds_legend(rows: Sequence[Measured]) -> str:
    """What parentheses behind a ratio are; "" where nobody took turns."""
    most = max((len(row.fwd_rounds) for row in rows), default=0)
    if most < 2:
        return ""
    return f"Times are medians of up to {most} rounds in which providers took turns; (a-b): quartiles of the ratios."


def best_peer(rows: Sequence[R], direction: str) -> R | None:
    """The fastest row that is not this project's, among rows of one op, shape and dtype."""
    timed = [row for row in rows if not own(row.provider) and row.ms(direction)]
    return min(timed, key=lambda row: row.ms(direction) or 0.0, default=None)


def ratio(rows: Sequence[Row], direction: str) -> float | None:
    """Bandwidth of this project over its best peer, among rows of one op and shape."""
    ours = next((row for row in rows if row.provider == OURS), None)
    found = times_faster(ours, best_peer(rows, direction), direction)
    return found.median if found else None


def times_faster(row: Measured | None, other: Measured | None, direction: str) -> Ratio | None:
    """Time of `other` over that of `row`, with its spread if both were measured in rounds."""
    if not row or not other or not row.ms(direction) or not other.ms(direction):
        return None
    turns = paired(other.rounds(direction), row.rounds(direction))
    return turns or Ratio((other.ms(direction) or 0.0) / (row.ms(direction) or 1.0))


def grouped(rows: Sequence[Row]) -> dict[tuple[int, int, str], list[Row]]:
    """Rows of one op by (M, N, dtype), in the order in which the shapes first came."""
    groups: dict[tuple[int, int, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.m, row.n, row.dtype), []).append(row)
    return groups


def machines(rows: Sequence[Measured]) -> str:
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


def _lines(rows: Sequence[Row]) -> list[str]:
    out: list[str] = []
    for (m, n, dtype), group in grouped(rows).items():
        for row in group:
            shape = f"{m}x{n}" if dtype == "bfloat16" else f"{m}x{n} {dtype}"
            out.append(f"| {shape} | {row.provider} | {_cells(row, group)} |")
    return out


def _cells(row: Row, group: Sequence[Row]) -> str:
    if row.skipped:
        return f"{plain(row.skipped)} | | | | | "
    cells: list[str] = []
    for direction, how in (("fwd", row.fwd_how), ("bwd", row.bwd_how)):
        speed = row.gb_per_s(direction)
        if speed is None:
            cells += ["-", "", ""]
            continue
        share = f"{speed / row.copy_gb_per_s:.0%}" if row.copy_gb_per_s else ""
        cells += [rate(speed) + (" (events)" if how == "events" else ""), share, _ratio_cell(row, group, direction)]
    return " | ".join(cells)


def _ratio_cell(row: Row, group: Sequence[Row], direction: str) -> str:
    if row.provider == OURS:
        peer = best_peer(group, direction)
        return bold(times_faster(row, peer, direction), peer)
    if own(row.provider):
        return ""
    ours = next((r for r in group if r.provider == OURS), None)
    return str(times_faster(ours, row, direction) or "")


def bold(ratio: Ratio | None, peer: Measured | None) -> str:
    """The ratio over the best peer, with its name; "" without one."""
    if not ratio or not peer:
        return ""
    median, _, rest = str(ratio).partition(" ")
    return " ".join(filter(None, (f"**{median}**", rest, peer.provider)))
