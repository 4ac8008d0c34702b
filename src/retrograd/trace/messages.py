"""Messages of `retrograd trace`: the first NaN, tables of operators, and their numbers over steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

from retrograd.core import document as doc
from retrograd.core.wording import count
from retrograd.trace.diffing.identity import base_name
from retrograd.trace.filters import Listing
from retrograd.trace.nan_provenance import Birth, Provenance
from retrograd.trace.nan_reasons import NORMAL
from retrograd.trace.schema import MODULE, Exponents, Op, Stats
from retrograd.trace.value_ranges import magnitudes, spread

_KINDS = {"nan": "NaN", "inf": "Inf", "": ""}
_TONES: dict[int, doc.Tone] = {0: "proved", 1: "finding"}
_MOST_TENSORS = 6  # of a foreach operator
_MOST_ROWS = 3000  # of a page; a browser takes seconds for more. The embedded record has what was listed.
_HEAD = ("#", "step", "phase", "operator", "module", "line", "result", "range", "magnitudes", "rms", "NaN", "Inf")
_MAGNITUDES = _HEAD.index("magnitudes")
_BAR_HEIGHT = 20
_LEAST_BARS = 16  # powers of two that are drawn at least, so that a bar does not fill the picture


def document(record: Provenance | Listing, everything: bool = True) -> doc.Document:
    """The record; nothing of it is left out."""
    return _listing(record) if isinstance(record, Listing) else _provenance(record)


# Provenance.


def _provenance(record: Provenance) -> doc.Document:
    head = verdict(record)
    tone = _TONES.get(record.exit_code, "undecided")
    bad = f"{record.bad} of {record.total} operators have NaN or Inf in a result \u00b7 level {record.level}"
    page: list[doc.PagePart] = [doc.Header(tone, head, (*filter(None, [record.reason]), bad))]
    if record.op is not None:
        named = [doc.Fact("operator", record.op.name, "mono"), doc.Fact("module", record.op.module, "mono")]
        card = doc.Card(facts=(*named, *(doc.Fact(label, text, "mono") for label, text in op_facts(record.op))))
        page.append(doc.Section("The operator", (card,)))
    if record.way:
        to = "NaN" if record.found == "nan" else "Inf"
        page.append(doc.Section(f"From there to the first {to}", (_operators(record.way),)))
    if record.notes:
        page.append(doc.Section("Notes", (doc.Paragraphs(record.notes, "points"),)))
    style = "bold red" if record.found else "bold green" if record.level != "names" else "bold yellow"
    facts = provenance_facts(record)
    notes = [("note", note) for note in record.notes]
    return doc.Document(
        title=f"retrograd trace: {head}",
        text=(doc.TextLine(head, style), *doc.labelled(facts, width=8), *doc.labelled(notes, width=8, style="dim")),
        page=tuple(page),
        brief=(
            doc.Header(tone, head, record.notes),
            *([doc.Card(facts=tuple(doc.Fact(*pair) for pair in facts))] * bool(facts)),
        ),
    )


def verdict(record: Provenance) -> str:
    op = record.op
    if op is None:
        if record.level == "names":
            return "cannot decide: the trace has no statistics"
        return f"no NaN and no Inf in {count(record.total, 'operator')} of {count(record.steps, 'step')}"
    of = f" on rank {record.rank}" if len(record.ranks) > 1 else ""
    value = f"{_bad_value(record)} in step {op.step}{of}"
    name = f"{op.name}{f' in {op.belonging}' if op.belonging else ''}"
    if record.origin == "made":
        return f"{value}, made in the {op.phase} by {name}" if op.phase != "other" else f"{value}, made by {name}"
    if record.origin == "received":
        of = "its trace is not among these" if len(record.ranks) > 1 else "give `trace nan` the traces of all ranks"
        return f"{value} came from another rank by {name}; {of}"
    if record.origin == "outside":
        return f"{value} came in from outside; the first to read it is {name}"
    return f"{value} from memory that no recorded operator filled; the first to read it is {name}"


def _bad_value(record: Provenance) -> str:
    """ "NaN", or "Inf that became NaN" where the first bad value was none."""
    tensor = record.tensor
    if record.found == "nan" and tensor is not None and tensor.inf and not tensor.nan:
        return "Inf that became NaN" if len(record.way) > 1 else "Inf and NaN"
    return _KINDS[record.found]


def provenance_facts(record: Provenance) -> list[tuple[str, str]]:
    if record.op is None:
        return [("made by", _birth(birth)) for birth in record.births]
    facts = [("why", record.reason or "not plain from the ranges of what it was given"), *op_facts(record.op)]
    if len(record.way) > 1:
        way = (op.name + (f" ({op.place})" if op.place else "") for op in record.way[1:])
        facts.append(("then", " -> ".join(way)))
    facts += [("made by", _birth(birth)) for birth in record.births]
    return [*facts, ("spread", f"{record.bad} of {count(record.total, 'operator')} have NaN or Inf in a result")]


def _birth(birth: Birth) -> str:
    op = birth.op
    where = f"{op.name}{f' in {op.belonging}' if op.belonging else ''}{f' ({op.place})' if op.place else ''}"
    often = f"{count(birth.count, 'time')} in {count(birth.steps, 'step')}, first in {op.step}"
    why = "GradScaler's own overflow" if birth.scaled else birth.reason
    return f"{where}: {often}{f'; {why}' if why else ''}"


def op_facts(op: Op) -> list[tuple[str, str]]:
    line = f"{op.place}  {op.code}" if op.place else ""
    facts = [("line", line), ("inside", op.inside), ("node", op.node), ("kernels", ", ".join(op.kernels))]
    facts.append(("with", op.arguments))
    facts += [("input", tensor_text(s)) for s in op.inputs[:_MOST_TENSORS]]
    facts += [("result", tensor_text(s)) for s in op.outputs[:_MOST_TENSORS]]
    return [(label, text) for label, text in facts if text]


def tensor_text(stats: Stats) -> str:
    """ "float32 [3, 4]  -1 to 2, rms 0.7, 12 NaN  head.weight"."""
    facts = [spread(stats)]
    facts += [f"rms {stats.rms:.4g}"] if stats.rms is not None else []
    facts += [f"magnitudes {magnitudes(stats)}"] if stats.exponents else []
    for number, name in ((stats.nan, "NaN"), (stats.inf, "Inf"), (stats.subnormal, "subnormal"), (stats.zero, "zero")):
        facts += [f"{number} {name}"] if number else []
    return "  ".join(filter(None, (f"{stats.dtype} {list(stats.shape)}", ", ".join(filter(None, facts)), stats.name)))


# Listing.


def _listing(record: Listing) -> doc.Document:
    some = f"{len(record.ops)} of " if len(record.ops) < record.matching else ""
    of = "" if record.matching == record.total else f" that fit, of {record.total}"
    numbers = f"{count(record.steps, 'step')}, level {record.level}, rank {record.rank}"
    head = f"{some}{count(record.matching, 'operator')}{of}; {numbers}"
    page: list[doc.PagePart] = [doc.Header("plain", head)]  # no verdict: the infinities of a mask are meant
    text: list[doc.TextLine | doc.Table] = [doc.TextLine(head, "bold")]
    text += [doc.TextLine(f"{name}: {value}", "dim") for name, value in record.meta.items()]
    if record.ops:
        page.append(doc.Section("Operators", (_operators(record.ops),)))
        text.append(table(record.ops))
    if record.meta:
        page.append(doc.Section("The run", (doc.Table((), tuple(record.meta.items())),)))
    return doc.Document(f"retrograd trace: {head}", tuple(text), tuple(page), brief=tuple(page[:2]))


def _operators(ops: Sequence[Op]) -> doc.Embedded:
    """The table of a page, with histograms of exponents in it."""
    drawn = ops[:_MOST_ROWS]
    results = [shown_result(op) for op in drawn]
    axis = exponent_axis(results)
    bars = [] if axis is None else [exponent_bars(stats, axis) for stats in results]
    rows = table(drawn)
    return doc.Embedded(
        "trace.html.j2",
        dict(table=rows, bars=bars, axis=axis, left_out=len(ops) - len(drawn), height=_BAR_HEIGHT),
    )


def shown_result(op: Op) -> Stats | None:
    """The result that a table shows: of several the first bad one, else the first."""
    return next((s for s in op.outputs if s.bad), op.outputs[0] if op.outputs else None)


def table(ops: Sequence[Op]) -> doc.Table:
    """A row for each operator; without the magnitudes where nobody counted them."""
    rows = [_row(op) for op in ops]
    head = _HEAD
    if not any(row[_MAGNITUDES] for row in rows):
        head, *rows = (row[:_MAGNITUDES] + row[_MAGNITUDES + 1 :] for row in (_HEAD, *rows))
    return doc.Table(head, tuple(rows), numbers=(-3, -2, -1), named=3)


def _row(op: Op) -> tuple[str, ...]:
    stats = shown_result(op)
    more = f" +{len(op.outputs) - 1}" if len(op.outputs) > 1 else ""
    numbers = ("",) * 6
    if stats is not None:
        shape = f"{stats.dtype}{list(stats.shape)}{more}"
        rms = "" if stats.rms is None else f"{stats.rms:.4g}"
        numbers = shape, spread(stats), magnitudes(stats), rms, str(stats.nan or ""), str(stats.inf or "")
    module = op.module or (f"({'root' if op.owner == MODULE else op.owner})" if op.owner else "")
    return str(op.index), str(op.step), op.phase, op.name, f"{module} {op.node}".strip(), op.place, *numbers


def exponent_axis(results: Sequence[Stats | None]) -> tuple[int, int] | None:
    """The least and greatest exponent of all that is shown, which share one axis; None where nothing was counted."""
    counted = [s.exponents for s in results if s is not None and s.exponents]
    if not counted:
        return None
    low, high = min(e.least for e in counted), max(e.greatest for e in counted)
    return low, max(high, low + _LEAST_BARS - 1)


def exponent_bars(stats: Stats | None, axis: tuple[int, int]) -> dict[str, Any] | None:
    """The histogram of a tensor: bars (position, height) inside of its dtype's range and near its ends.

    Heights are roots of shares, so that a thousandth is seen too. Near the ends are subnormal numbers, and those of the
    last power of two before overflow.
    """
    if stats is None or not stats.exponents:
        return None
    exponents = stats.exponents
    counts = [a + b for a, b in zip_longest(exponents.positive, exponents.negative, fillvalue=0)]
    normal = NORMAL.get(stats.dtype, (-(1 << 30), 1 << 30))
    bars: dict[str, list[tuple[int, str]]] = {"": [], "edge": []}
    for exponent, number in enumerate(counts, exponents.least):
        if number:
            height = f"{max(1.0, _BAR_HEIGHT * (number / max(counts)) ** 0.5):.3g}"
            bars["" if normal[0] <= exponent < normal[1] else "edge"].append((exponent - axis[0], height))
    return {"label": magnitudes(stats), "bars": bars}


def events(record: Listing, step: int = 0) -> doc.Events:
    """The first result of each operator, at the step it belongs to, counted from `step` on.

    Tags are `<phase>/<module>/<operator>/<what>`, the second call of an operator in a module `<operator>.1` and so on;
    scalars `rms`, `largest` (magnitude of the finite elements), `nan`, `inf`, `subnormal` and `zero` (shares of all
    elements). Histograms, where exponents were counted: `values`, in buckets from one power of two to the next, and
    `exponents`, of the magnitudes' powers of two. Results without statistics are left out.
    """
    return doc.Events(record.meta.get("start", ""), _values(record.ops, step), seconds=1.0)


def _values(ops: Sequence[Op], first: int) -> Iterator[doc.Scalar | doc.Histogram]:
    calls: Counter[tuple[int, str]] = Counter()
    for op in ops:
        name = f"{op.phase}/{f'{op.module}/' if op.module else ''}{base_name(op.name)}"
        number = calls[op.step, name]
        calls[op.step, name] += 1
        if op.outputs:
            step, tag = first + op.step, f"{name}{f'.{number}' if number else ''}"
            yield from (doc.Scalar(step, f"{tag}/{fact}", value) for fact, value in _numbers(op.outputs[0]))
            yield from _histograms(step, tag, op.outputs[0])


def _numbers(stats: Stats) -> Iterator[tuple[str, float]]:
    elements = math.prod(stats.shape)
    if stats.rms is not None and stats.low is not None and stats.high is not None:
        yield "rms", stats.rms
        yield "largest", max(abs(stats.low), abs(stats.high))
    for fact in ("nan", "inf", "subnormal", "zero"):
        number = getattr(stats, fact)
        if number is not None and elements:
            yield fact, number / elements


def _histograms(step: int, tag: str, stats: Stats) -> Iterator[doc.Histogram]:
    exponents = stats.exponents
    if exponents is None or stats.low is None or stats.high is None or stats.rms is None:
        return
    limits, counts = buckets(exponents, stats.zero or 0)
    # Their sum is not known: a trace has no mean. No view of TensorBoard shows it.
    squares = stats.rms**2 * sum(counts)
    yield doc.Histogram(step, f"{tag}/values", tuple(limits), tuple(counts), stats.low, stats.high, squares=squares)
    if exponents:
        pairs = zip(exponents.positive, exponents.negative, strict=True)
        both = [(k, a + b) for k, (a, b) in enumerate(pairs, exponents.least)]
        yield doc.Histogram(
            step,
            f"{tag}/exponents",
            tuple(k + 1.0 for k, _ in both),
            tuple(n for _, n in both),
            exponents.least,
            exponents.greatest + 1,
            total=sum(k * n for k, n in both),
            squares=sum(k * k * n for k, n in both),
        )


def buckets(exponents: Exponents, zero: int) -> tuple[list[float], list[int]]:
    """Upper limits, ascending, and counts: negative numbers, zeros, positive numbers."""
    below = _filled(exponents.negative, exponents.least)
    above = _filled(exponents.positive, exponents.least)
    rows = [(-_bucket_begin(k), n) for k, n in reversed(below)]
    if zero or (below and above):
        rows.append((_bucket_begin(above[0][0]) if above else 0.0, zero))
    rows += [(_bucket_begin(k + 1), n) for k, n in above]
    return [limit for limit, _ in rows], [n for _, n in rows]


def _filled(counts: tuple[int, ...], least: int) -> list[tuple[int, int]]:
    """Exponents with counts, from the first that is not 0 to the last."""
    at = [k for k, n in enumerate(counts) if n]
    return [(least + k, counts[k]) for k in range(at[0], at[-1] + 1)] if at else []


def _bucket_begin(exponent: int) -> float:
    """Where a bucket begins; the least is open, and what is in it is no zero."""
    return 2.0**exponent if exponent > -127 else 5e-324
