"""Rows as markdown tables. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from retrograd.bench.rows import OPS, OURS, OWN, Measured, Row

_HEAD = "| {op} | provider | fwd GB/s | of copy | fwd ratio | bwd GB/s | of copy | bwd ratio |\n|" + "---|" * 8


def markdown(rows: Sequence[Row]) -> str:
    """A table an op, a row a shape and provider; host times in a table of their own.

    The ratio is this project's bandwidth over that of the row's provider; on the row of this project it is the one
    over its best peer, in bold, beside that peer's name.
    """
    parts = [machines(rows)]
    for op in OPS:
        own = [row for row in rows if row.op == op and row.host_us is None]
        if own:
            parts.append("\n".join([_HEAD.format(op=op), *_lines(own)]))
    hosts = [row for row in rows if row.host_us is not None]
    if hosts:
        head = "| host time | shape | provider | us per fwd + bwd |\n|---|---|---|---|"
        lines = [f"| {row.op} | {row.m}x{row.n} | {row.provider} | {row.host_us:.1f} |" for row in hosts]
        parts.append("\n".join([head, *lines]))
    return "\n\n".join(part for part in parts if part) + "\n"


def best_peer(rows: Sequence[Row], direction: str) -> Row | None:
    """The fastest row that is not this project's, among rows of one op and shape."""
    timed = [row for row in rows if row.provider not in OWN and row.gb_per_s(direction)]
    return max(timed, key=lambda row: row.gb_per_s(direction) or 0.0, default=None)


def ratio(rows: Sequence[Row], direction: str) -> float | None:
    """Bandwidth of this project over its best peer, among rows of one op and shape."""
    ours = next((row.gb_per_s(direction) for row in rows if row.provider == OURS), None)
    peer = best_peer(rows, direction)
    return ours / (peer.gb_per_s(direction) or 1.0) if ours and peer else None


def grouped(rows: Sequence[Row]) -> dict[tuple[int, int, str], list[Row]]:
    """Rows of one op by (M, N, dtype), in the order in which the shapes first came."""
    groups: dict[tuple[int, int, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.m, row.n, row.dtype), []).append(row)
    return groups


def machines(rows: Sequence[Measured]) -> str:
    """One line for each machine and set of versions."""
    lines = []
    for row in rows:
        facts = ", ".join(f"{name} {value}" if name != "gpu" else value for name, value in row.machine.items())
        copy = f"; copy {row.copy_gb_per_s:.0f} GB/s" if row.copy_gb_per_s else ""
        if facts + copy and facts + copy not in lines:
            lines.append(facts + copy)
    return "\n".join(lines)


def plain(text: str) -> str:
    """`text` within a cell of a table."""
    return text.replace("|", "/").replace("\n", " ")


def _lines(rows: Sequence[Row]) -> list[str]:
    out = []
    for (m, n, dtype), group in grouped(rows).items():
        for row in group:
            shape = f"{m}x{n}" if dtype == "bfloat16" else f"{m}x{n} {dtype}"
            out.append(f"| {shape} | {row.provider} | {_cells(row, group)} |")
    return out


def _cells(row: Row, group: Sequence[Row]) -> str:
    if row.skipped:
        return f"{plain(row.skipped)} | | | | | "
    cells = []
    for direction, how in (("fwd", row.fwd_how), ("bwd", row.bwd_how)):
        speed = row.gb_per_s(direction)
        if speed is None:
            cells += ["-", "", ""]
            continue
        share = f"{speed / row.copy_gb_per_s:.0%}" if row.copy_gb_per_s else ""
        cells += [f"{speed:.0f}" + (" (events)" if how == "events" else ""), share, _ratio_cell(row, group, direction)]
    return " | ".join(cells)


def _ratio_cell(row: Row, group: Sequence[Row], direction: str) -> str:
    if row.provider == OURS:
        value, peer = ratio(group, direction), best_peer(group, direction)
        return f"**{value:.2f}** {peer.provider}" if value and peer else ""
    value = ratio([r for r in group if r is row or r.provider == OURS], direction)
    return f"{value:.2f}" if value else ""
