"""What `retrograd trace` says, for a terminal: who made the first NaN, and tables of operators."""

from __future__ import annotations

from collections.abc import Iterable
from io import StringIO
from typing import TypeAlias

from rich.console import Console

from retrograd.report.graph import print_line, print_rows
from retrograd.report.wording import count
from retrograd.trace.filters import Listing
from retrograd.trace.nan_provenance import Provenance
from retrograd.trace.nan_reasons import magnitudes, spread
from retrograd.trace.schema import Op, Stats

TraceRecord: TypeAlias = Provenance | Listing
_KINDS = {"nan": "NaN", "inf": "Inf", "": ""}
_MOST_TENSORS = 6  # of a foreach operator


def render(record: TraceRecord, console: Console) -> None:
    """Print a record."""
    for text, style in lines(record):
        print_line(console, text, style)
    if isinstance(record, Listing) and record.ops:
        print_rows(console, table(record.ops), numbers=3)


def to_text(record: TraceRecord, width: int = 200) -> str:
    """The record as plain text without colour."""
    out = StringIO()
    render(record, Console(file=out, width=width, color_system=None, force_terminal=False))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def lines(record: TraceRecord) -> Iterable[tuple[str, str]]:
    """Lines with their style; of a listing those above its table."""
    if isinstance(record, Listing):
        yield listing_head(record), "bold"
        for name, value in record.meta.items():
            yield f"{name}: {value}", "dim"
        return
    yield verdict(record), "bold red" if record.found else "bold green" if record.level != "names" else "bold yellow"
    for label, text in rows(record):
        yield f"  {label:<8}{text}", ""
    for note in record.notes:
        yield f"  {'note':<8}{note}", "dim"


def headline(record: TraceRecord) -> str:
    """The answer, or what is listed, in a line."""
    return listing_head(record) if isinstance(record, Listing) else verdict(record)


def verdict(record: Provenance) -> str:
    """The answer in a line."""
    op = record.op
    if op is None:
        if record.level == "names":
            return "cannot decide: the trace has no statistics"
        return f"no NaN and no Inf in {count(record.total, 'operator')} of {count(record.steps, 'step')}"
    made, name = f"{_kinds(record)} in step {op.step}", f"{op.name}{f' in module {op.module}' if op.module else ''}"
    if record.origin == "made":
        return f"{made}, made in the {op.phase} by {name}" if op.phase != "other" else f"{made}, made by {name}"
    if record.origin == "outside":
        return f"{made} came in from outside; the first to read it is {name}"
    return f"{made} from memory that no recorded operator filled; the first to read it is {name}"


def _kinds(record: Provenance) -> str:
    """ "NaN", or "Inf that became NaN" where the first bad value was none."""
    found = _KINDS[record.found]
    made = record.tensor
    if record.found == "nan" and made is not None and made.inf and not made.nan:
        return "Inf that became NaN" if len(record.way) > 1 else "Inf and NaN"
    return found


def rows(record: Provenance) -> list[tuple[str, str]]:
    """Facts with their labels."""
    op = record.op
    if op is None:
        return []
    found = [("why", record.reason or "not plain from the ranges of what it was given"), *op_rows(op)]
    if len(record.way) > 1:
        found.append(("then", " -> ".join(_way(step) for step in record.way[1:])))
    of = f"{record.bad} of {count(record.total, 'operator')} have NaN or Inf in a result"
    return [*found, ("spread", of)]


def op_rows(op: Op) -> list[tuple[str, str]]:
    """What is known of an operator."""
    line = f"{op.place}  {op.code}" if op.place else ""
    found = [("line", line), ("inside", op.inside), ("node", op.node), ("kernels", ", ".join(op.kernels))]
    found.append(("with", op.arguments))
    found += [("input", tensor(s)) for s in op.inputs[:_MOST_TENSORS]]
    found += [("result", tensor(s)) for s in op.outputs[:_MOST_TENSORS]]
    return [(label, text) for label, text in found if text]


def _way(op: Op) -> str:
    return op.name + (f" ({op.place})" if op.place else "")


def tensor(stats: Stats) -> str:
    """ "float32 [3, 4]  -1 to 2, rms 0.7, 12 NaN  head.weight"."""
    facts = [spread(stats)]
    facts += [f"rms {stats.rms:.4g}"] if stats.rms is not None else []
    facts += [f"magnitudes {magnitudes(stats)}"] if stats.exponents else []
    for number, name in ((stats.nan, "NaN"), (stats.inf, "Inf"), (stats.subnormal, "subnormal"), (stats.zero, "zero")):
        facts += [f"{number} {name}"] if number else []
    told = ", ".join(filter(None, facts))
    return "  ".join(filter(None, (f"{stats.dtype} {list(stats.shape)}", told, stats.name)))


def listing_head(record: Listing) -> str:
    """How much of what is listed."""
    some = f"{len(record.ops)} of " if len(record.ops) < record.matching else ""
    of = "" if record.matching == record.total else f" that fit, of {record.total}"
    return (
        f"{some}{count(record.matching, 'operator')}{of}; {count(record.steps, 'step')}, level {record.level}, "
        f"rank {record.rank}"
    )


HEAD = ("#", "step", "phase", "operator", "module", "line", "result", "range", "magnitudes", "rms", "NaN", "Inf")
MAGNITUDES = HEAD.index("magnitudes")


def shown(op: Op) -> Stats | None:
    """The result that a table shows: of several the first bad one, else the first."""
    return next((s for s in op.outputs if s.bad), op.outputs[0] if op.outputs else None)


def table(ops: Iterable[Op]) -> list[tuple[str, ...]]:
    """A heading and a row for each operator; without the magnitudes where nobody counted them."""
    found: list[tuple[str, ...]] = [HEAD]
    for op in ops:
        made = shown(op)
        what = "" if made is None else f"{made.dtype}{list(made.shape)}"
        more = f" +{len(op.outputs) - 1}" if len(op.outputs) > 1 else ""
        known = ("",) * 5
        if made is not None:
            known = spread(made), magnitudes(made), _number(made.rms), _count(made.nan), _count(made.inf)
        where = f"{op.module} {op.node}".strip()
        found.append((str(op.index), str(op.step), op.phase, op.name, where, op.place, f"{what}{more}", *known))
    if any(row[MAGNITUDES] for row in found[1:]):
        return found
    return [row[:MAGNITUDES] + row[MAGNITUDES + 1 :] for row in found]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _count(value: int | None) -> str:
    return str(value) if value else ""
